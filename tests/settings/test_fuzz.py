"""Any value for any field of settings and algorithms: an object whose fields have the annotated types, or an error that
names the field; no other exception."""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.algorithms import ALGORITHMS
from workbench.data.example_stream import ExampleStream
from workbench.errors import WorkbenchError

SCORER = wb.Model(TINY, training=wb.Training(engine="torch"))


class Unprintable:
    """Its `repr` raises, as that of a half-made object does."""

    def __repr__(self) -> str:
        raise RuntimeError("half made")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyTraining(wb.Training):
    """Settings that a user derived with a plain dataclass."""

    note: str = ""


SETTINGS: dict[Any, dict[str, Any]] = {
    wb.Training: {}, MyTraining: {}, wb.Generation: {}, wb.Sampling: {}, wb.LoRA: {}, wb.Correction: {},
    wb.Layout: {}, wb.Model: {"name": "tiny-llama"},
}  # fmt: skip
FIXED = (
    None, True, False, math.nan, math.inf, -math.inf, 10**30, -(10**30), 10**400, 10**5000, -(10**5000), 1j,
    Fraction(1, 2), Fraction(10**400), Decimal("0.5"), np.True_, np.float32(0.5), np.float64("nan"), np.longdouble(0.5),
    np.array([1.0, 2.0]), np.array([]), torch.tensor(1.0), torch.tensor([1, 2]), lambda: None, vowels, object(), int,
    Unprintable, Unprintable(), [Unprintable()], (0.5, 0.9), {0.1, 0.9}, [0.5, 10**5000], (1, "x"), {1: 0.5},
    {"a": Unprintable()}, range(3), Path("x"), wb.Sampling(), wb.Correction(), wb.LoRA(), wb.Training(), "k1",
    "constant", "torch", "ppo", "grpo", "float32", "",
)  # fmt: skip
SCALARS = (
    st.sampled_from(FIXED) | st.integers() | st.integers(-2, 20) | st.floats() | st.floats(0, 1) | st.text(max_size=5)
    | st.binary(max_size=5) | st.integers(-100, 100).map(np.int64) | st.integers(0, 100).map(np.uint8)
)  # fmt: skip
# fields -> what an operation that is given their value calls it in its error
PASSED_ON = {"reward": "function=", "cost": "function=", "pretrain": "column"}
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.lists(SCALARS, max_size=3).map(tuple)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": SCORER, "cost": SCORER, "cost_critic": TINY}
    with tiny_lab("fuzz", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


@pytest.fixture(scope="module")
def streams(lab: wb.Workbench) -> dict[str, ExampleStream]:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 64
    return {
        "pairs": lab.pairs(pairs),
        "demonstrations": lab.demonstrations([{"prompt": "a", "response": "b"}] * 64),
    }


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, whatever its constraints."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or getattr(hint, "_is_protocol", False):
        return True
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin is tuple and type(value) is tuple:
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is Callable:
        return callable(value)
    if origin is Mapping and isinstance(value, Mapping):
        return all(fits(key, args[0]) and fits(item, args[1]) for key, item in value.items())
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, kind) for kind in args)
    return type(value) is hint if hint in (bool, int, float) else isinstance(value, origin or hint)


def check(kind: Any, field: str, value: Any, others: dict[str, Any]) -> None:
    """Make one, with a value for a field: either it has the annotated types, or the error names the field."""
    try:
        made, said = kind(**{**others, field: value}), ""
    except WorkbenchError as error:
        made, said = None, str(error)
    if made is None:
        assert any(name in said for name in (field, PASSED_ON.get(field, field))), (field, said)
        assert len(said) < 600
        return
    for name, hint in typing.get_type_hints(type(made)).items():
        if name in {known.name for known in dataclasses.fields(made)}:
            assert fits(getattr(made, name), hint), (name, getattr(made, name))


def try_values(kind: Any, others: dict[str, Any]) -> None:
    """Give each field every value of `FIXED`, and hypothesis' values to any field. others: fields that it needs."""
    fields = [field.name for field in dataclasses.fields(kind) if field.init and field.name != "lab"]
    for field in fields:
        for value in FIXED:
            check(kind, field, value, others)

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(fields), VALUES)
    def tried(field: str, value: Any) -> None:
        check(kind, field, value, others)

    tried()


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_settings(kind: Any) -> None:
    try_values(kind, SETTINGS[kind])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms(name: str, lab: wb.Workbench, streams: dict[str, ExampleStream]) -> None:
    kind = getattr(wb, name)
    needed = {field: stream for field, stream in streams.items() if field in inspect.signature(kind).parameters}
    try_values(kind, {"lab": lab, **needed})
