"""Any value for any field of settings and algorithms: an object whose fields have the annotated types, or an error that
names the field; no other exception."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.calculator import Calculator
from tests.cases import TINY, tiny_lab
from tests.fuzz.damage import cases, profile
from tests.fuzz.values import FIXED, VALUES, fits
from workbench.algorithms import ALGORITHMS
from workbench.data.examples import ExampleStream
from workbench.errors import WorkbenchError

SCORER = wb.Model(TINY, training=wb.Training(engine="torch"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyTraining(wb.Training):
    """Settings that a user derived with a plain dataclass."""

    note: str = ""


SETTINGS: dict[Any, dict[str, Any]] = {
    wb.Training: {}, MyTraining: {}, wb.Generation: {}, wb.Sampling: {}, wb.LoRA: {}, wb.Correction: {},
    wb.KLCov: {}, wb.ClipCov: {}, wb.Context: {"max_tokens": 640}, wb.Precision: {}, wb.Layout: {},
    wb.ChatFormat: {},
    wb.Model: {"name": "tiny-llama"},
}  # fmt: skip
# fields -> what an operation that is given their value calls it in its error
PASSED_ON = {"reward": "function=", "cost": "function=", "pretrain": "column"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": SCORER, "cost": SCORER, "cost_critic": TINY,
              "teacher": TINY}  # fmt: skip
    with tiny_lab("fuzz", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


@pytest.fixture(scope="module")
def streams(lab: wb.Workbench) -> dict[str, ExampleStream]:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 64
    return {
        "pairs": lab.pairs(pairs),
        "feedback": lab.feedback([{"prompt": "a", "response": "b", "label": True}] * 64),
        "demonstrations": lab.demonstrations([{"prompt": "a", "response": "b"}] * 64),
    }


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
    """Give each field values of `FIXED` (under `make fuzz` all, else other ones than to the field before), and
    hypothesis' values to any field. others: fields that it needs."""
    fields = [field.name for field in dataclasses.fields(kind) if field.init and field.name != "lab"]
    apart = 1 if cases(0) else 6
    for number, field in enumerate(fields):
        for value in FIXED[number % apart :: apart]:
            check(kind, field, value, others)

    @profile(15, most=80)
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
    talks = {"sampling": wb.Sampling(environment=Calculator)} if name == "ArCHer" else {}
    try_values(kind, {"lab": lab, **needed, **talks})
