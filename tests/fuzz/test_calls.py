"""Every public callable with any arguments, on one living workbench: an error of ours with value, rule and remedy, or a
result; never another exception, a minute of the processor, or a workbench that does not go on.

`make fuzz` runs more cases, drawn anew each time; the environment variable FUZZ_CASES says how many.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.fuzz.calls import INTERNAL, Call, calls
from tests.fuzz.damage import harmless
from tests.fuzz.values import VALUES, fits
from workbench.algorithms import ALGORITHMS
from workbench.data.examples import ExampleStream
from workbench.errors import WorkbenchError
from workbench.errors.plain_text import shown
from workbench.session.checkpoint.files import Checkpoint
from workbench.settings.roles import ROLES
from workbench.stages.group import WorkerGroup

CASES = int(os.environ.get("FUZZ_CASES") or 0)
LONGEST_S, LONGEST_MESSAGE = 60.0, 5000  # of processor time; the slowest takes a second
EACH = 100  # cases between two generations
# names of `wb` whose objects are in the table; those of settings are called in test_settings.py
IN_TABLE = {
    "Batch", "Algorithm", "Placement", "Workbench", "mapping", "script", "verifiers", "sandbox", "toolbox", "adapters",
}  # fmt: skip
FUNCTIONS = {
    "attach", "ls", "open", "restore", "stop", "protocol", "register", "batched", "Judge", "Tools", "runs", "dial",
    "diff", "sweep", "model_card", "replay",
}  # fmt: skip
SETTINGS = {
    "ChatFormat", "ClipCov", "Context", "Correction", "Generation", "KLCov", "Layout", "LoRA", "Model", "Precision",
    "Sampling", "Training",
}  # fmt: skip
VALUE = {"PROTOCOLS", "limits"}  # a dict; a decorator that checks by itself, as its process imports little
# there is nothing of that name, nothing has failed, the batch has no conversations, or the run is this one
REFUSED = {"wb.replay", "batch.turns", "lab.buffer.draw", "lab.release", "algo.insert", "algo.remove", "lab.last_error"}


def one(judgement: str) -> float:
    """What a judge scores, whatever it wrote."""
    return 1.0


class Table:
    """The calls, and the workbench that they are made on."""

    def __init__(self, lab: wb.Workbench, folder: Path) -> None:
        self.lab = lab
        self.batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2, seed=1)
        self.algorithm = wb.PPO(lab, prompts=2, sampling=wb.Sampling(max_new_tokens=4))
        self.calls = calls(lab, self.batch, self.algorithm, folder)
        self.made, self.refused, self.seconds = 0, 0, 0.0

    def iteration(self, saved: Checkpoint) -> dict[str, float]:
        """The metrics of an iteration from a checkpoint on; afterwards all is as the checkpoint has it."""
        self.lab.recover(saved.folder)
        metrics = wb.PPO(self.lab, prompts=2, sampling=wb.Sampling(max_new_tokens=4)).iterate()
        self.lab.recover(saved.folder)
        return metrics

    def goes_on(self) -> None:
        """The same seed gives the same tokens as before all cases."""
        prompts = self.batch.select("prompt_ids", "prompt_uid")
        again = self.lab.actor.generate_sequences(prompts, max_new_tokens=2, seed=1)
        assert again.df(["response_ids"]).equals(self.batch.df(["response_ids"]))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    folder = tmp_path_factory.mktemp("fuzz")
    before = Path.cwd()
    os.chdir(folder)  # a text that is drawn may be a path
    judge = wb.Judge(TINY, rubric="{response}", parse=one, sampling=wb.Sampling(max_new_tokens=2))
    models = {**dict.fromkeys(ROLES, TINY), "reward": vowels, "cost": judge}
    with tiny_lab("calls", folder / "runs", backend="inline", models=models) as lab:
        yield Table(lab, folder)
    os.chdir(before)


def test_the_table_is_complete(table: Table) -> None:
    known = IN_TABLE | FUNCTIONS | SETTINGS | VALUE | set(ALGORITHMS)
    assert known == set(wb.__all__), "a public name is not fuzzed: put it into tests/fuzz/calls.py"
    named = {call.name for call in table.calls}
    assert {call.name.partition(".")[0] for call in table.calls} >= set(ROLES)
    for function in FUNCTIONS:
        assert f"wb.{function}" in named
    for kind in (ExampleStream, WorkerGroup, wb.Layout, wb.Model, wb.Generation):
        members = {name for name in dir(kind) if not name.startswith("_")}
        gone = set(INTERNAL[kind.__name__].split()) - members
        assert not gone, f"{kind.__name__} has no {gone}: take it out of INTERNAL"
    missing = {call.name: call.without_values for call in table.calls if call.without_values}
    assert not missing, f"parameters without a value in right_values: {missing}"


def test_what_is_right_is_taken(table: Table) -> None:
    """So that cases are refused for what is wrong in them."""
    for call in table.calls:
        if not call.slow and call.name not in REFUSED:
            args, kwargs = arguments_of(call, {name: values[0] for name, values in call.right.items()})
            use(call.function(*args, **kwargs))


def test_any_arguments(table: Table) -> None:
    saved = table.lab.save("before", models=False)
    expected = table.iteration(saved)

    @settings(max_examples=CASES or 300, derandomize=not CASES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        attempt(table, data.draw(cases(table.calls)))

    tried()
    rate = table.made / table.seconds * 60  # of processor time
    print(f"\n{table.made} cases, {table.refused} refused, {rate:,.0f} a minute")
    table.goes_on()
    assert table.iteration(saved) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@dataclass(frozen=True)
class Case:
    """One call with its arguments."""

    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        given = [shown(value) for value in self.args] + [f"{name}={shown(v)}" for name, v in self.kwargs.items()]
        return f"{self.call.name}({', '.join(given)})"


def _is_wrong(hint: Any, value: Any) -> bool:
    """Whether it is refused for an annotation: numbers of numpy are taken for Python's."""
    return not fits(value, hint) and not isinstance(value, np.generic)


@st.composite
def cases(draw: st.DrawFn, calls: list[Call]) -> Case:
    """Right arguments and any others; in a slow call, one that is not of its type, or one too many."""
    call = draw(st.sampled_from(calls))
    values: dict[str, Any] = {}
    hints, parameters = call.hints, call.parameters
    typed = [name for name in parameters if name in hints and hints[name] is not Any]
    wrong = draw(st.sampled_from([*typed, ""])) if call.slow else None
    for name, parameter in parameters.items():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name == wrong:
            value = draw(VALUES.filter(partial(_is_wrong, hints[name])))
            values[name] = {"x": value} if parameter.kind is parameter.VAR_KEYWORD else value
        elif name in call.right and draw(st.integers(0, 3)):
            values[name] = draw(st.sampled_from(call.right[name]))
        elif not several and (parameter.default is parameter.empty or not draw(st.integers(0, 3))):
            values[name] = draw(VALUES)
    args, kwargs = arguments_of(call, values)
    if wrong == "" or not draw(st.integers(0, 19)):
        kwargs["not_a_parameter"] = 1
    return Case(call, args, kwargs)


def arguments_of(call: Call, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by place and by name."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in call.parameters.items():
        if name not in values:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= values[name] if isinstance(values[name], dict) else {}
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            args.append(values[name])
        else:
            kwargs[name] = values[name]
    if any(p.kind is p.VAR_POSITIONAL for p in call.parameters.values()):  # what is before them goes by place
        before = [n for n, p in call.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD and n in kwargs]
        args = [*(kwargs.pop(name) for name in before), *args]
    return tuple(args), kwargs


def use(made: Any) -> None:
    """Enter a context, take the first of an iterator, wait for a run."""
    if isinstance(made, types.GeneratorType):
        next(made, None)
    elif isinstance(made, contextlib.AbstractContextManager) and not isinstance(made, (wb.Workbench, Path)):
        with made:
            pass


def attempt(table: Table, case: Case) -> None:
    """Call it, and hold what comes to the promise."""
    table.made += 1
    said: WorkbenchError | None = None
    began_s = time.process_time()  # others may use the machine meanwhile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            use(case.call.function(*case.args, **case.kwargs))
        except WorkbenchError as error:
            table.refused += 1
            said = error
        finally:
            took_s = time.process_time() - began_s
            table.seconds += took_s
    if said is not None:
        text = str(said)
        assert said.value
        assert said.rule, f"{case}: {text}"
        assert len(text) < LONGEST_MESSAGE
        assert harmless(text), repr(text)
    assert took_s < LONGEST_S, f"{case} took {took_s:.1f} s"
    if table.made % EACH == 0:
        table.goes_on()
