"""Arguments of operations are checked against their annotations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

import workbench as wb
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.messages.calls import Output
from workbench.messages.operation import Operation, checked_arguments, operations


class Mine:
    @wb.register("ONE_TO_ALL")
    def scale(self, *, by: Annotated[float, Field(gt=0)] = 1.0, how: Literal["a", "b"] | None = None) -> Output:
        return Output()


@pytest.fixture
def operation() -> Operation:
    return operations(Mine)["scale"]


def test_arguments_are_filled_in(operation: Operation) -> None:
    assert checked_arguments(operation, "actor", (), {"by": 2}) == {"by": 2, "how": None}


@pytest.mark.parametrize(
    ("given", "value", "rule"),
    [
        ({"by": 0}, "by=0", "must be more than 0"),
        ({"by": "2"}, "by='2'", "must be a number"),
        ({"how": "c"}, "how='c'", "must be one of 'a', 'b', or None"),
    ],
)
def test_a_wrong_argument_is_refused(operation: Operation, given: dict[str, Any], value: str, rule: str) -> None:
    with pytest.raises(BadInput) as caught:
        checked_arguments(operation, "actor", (), given)
    assert (caught.value.value, caught.value.rule) == (value, rule)


def test_an_unknown_argument_names_the_nearest(operation: Operation) -> None:
    with pytest.raises(BadInput) as caught:
        checked_arguments(operation, "actor", (), {"bye": 1})
    assert caught.value.remedy == "write by= (the nearest)"


class Peculiar:
    """Annotations that cannot be evaluated, or that pydantic does not know, beside one that is checked."""

    @wb.register("ONE_TO_ALL")
    def scale(
        self,
        *,
        unknown: Missing | None = None,  # type: ignore[name-defined] # noqa: F821
        absent: Annotated[np.nothing, Field(ge=1)] = 0,  # type: ignore[name-defined]
        broken: "1 +" = 0,  # type: ignore[valid-type] # noqa: F722
        noted: Annotated[int, {"a": 1}] = 0,
        forward: Annotated["torch.Tensor", "doc"] | None = None,  # type: ignore[name-defined] # noqa: F821, UP037
        sizes: Annotated[tuple[int, ...], Field(min_length=1), {"unit": "rows"}] = (1,),
        by: Annotated[int, Field(ge=1)] = 1,
    ) -> Output:
        return Output()


def test_annotations_that_are_not_checked_leave_the_others() -> None:
    peculiar = operations(Peculiar)["scale"]
    given = {"unknown": 3, "absent": "x", "broken": "x", "noted": 5, "forward": 3}
    assert checked_arguments(peculiar, "actor", (), given) == {**given, "sizes": (1,), "by": 1}
    with pytest.raises(BadInput) as caught:
        checked_arguments(peculiar, "actor", (), {**given, "by": 0})
    assert (caught.value.value, caught.value.rule) == ("by=0", "must be at least 1")
    with expect_error(BadInput, value="noted='x'", rule="must be a whole number"):
        checked_arguments(peculiar, "actor", (), {**given, "noted": "x"})


def test_a_list_is_taken_for_a_tuple_and_numbers_of_numpy_for_python_s() -> None:
    peculiar = operations(Peculiar)["scale"]
    kept = checked_arguments(peculiar, "actor", (), {"sizes": [1, np.int64(2)], "by": np.int64(3)})
    assert (kept["sizes"], kept["by"]) == ((1, 2), 3)
    assert {type(kept["by"]), *map(type, kept["sizes"])} == {int}
    for sizes, value, rule in (
        (5, "sizes=5", "must be a tuple or a list"),
        ([], "sizes=[]", "must have at least 1 item"),
        ([1, "x"], "sizes[1]='x'", "must be a whole number"),
    ):
        with pytest.raises(BadInput) as caught:
            checked_arguments(peculiar, "actor", (), {"sizes": sizes})
        assert (caught.value.value, caught.value.rule) == (value, rule)
