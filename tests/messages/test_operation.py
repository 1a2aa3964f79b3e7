"""Arguments of operations are checked against their annotations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import workbench as wb
from workbench.errors import BadInput
from workbench.messages.operation import Operation, checked_arguments, operations
from workbench.messages.replies import Output


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
