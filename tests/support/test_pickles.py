"""Pickled code keeps its file and lines, whether cloudpickle writes the name of the file (3.1.2) or not (3.1.3)."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import pytest

import workbench as wb
from tests.cases import TINY
from workbench.backends import registry
from workbench.config.description import Description
from workbench.session.checkpoint.files import write_manifest
from workbench.support import pickles
from workbench.support.calls.pickling import by_value

CELL = "\ndef score(prompt, response, **row):\n    rows = lambda: [1.0 for _ in response]\n    return sum(rows())\n"
FILE = "<cell 7>"


@pytest.fixture(params=[True, False], ids=["cloudpickle forgets", "cloudpickle keeps"])
def score(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """A user's function of a cell, which is pickled by either kind of cloudpickle."""
    known = cloudpickle.Pickler._dispatch_table[CodeType]

    def reduce(code: CodeType) -> Any:
        make, given = known(code.replace(co_filename=FILE))
        name = "<dynamic-code>" if request.param else code.co_filename
        return make, tuple(name if one in (FILE, "<dynamic-code>") else one for one in given)

    monkeypatch.setitem(cloudpickle.Pickler._dispatch_table, CodeType, reduce)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, FILE, "exec"), cell)
    plain = pickle.loads(cloudpickle.dumps(cell["score"])).__code__.co_filename
    assert plain == ("<dynamic-code>" if request.param else FILE)  # so the test shows what our own Pickler does
    return cell["score"]


def places(function: Any) -> list[tuple[str, int]]:
    """The file and first line of a function's code and of all code inside it."""

    def inside(code: CodeType) -> list[CodeType]:
        return [code, *(one for part in code.co_consts if isinstance(part, CodeType) for one in inside(part))]

    return [(code.co_filename, code.co_firstlineno) for code in inside(function.__code__)]


@pytest.mark.parametrize("dumps", [pickles.dumps, by_value])
def test_a_function_that_is_sent_keeps_its_place(score: Callable[..., float], dumps: Callable[[Any], bytes]) -> None:
    there = pickle.loads(dumps(score))
    assert places(there) == places(score) and {file for file, _ in places(there)} == {FILE}
    assert there("?", "abc") == 3.0
    assert dumps(there) == dumps(pickle.loads(dumps(there)))  # the same code has the same bytes: it is reused by them


def test_a_function_has_its_place_after_attach_and_restore(
    score: Callable[..., float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    opened = Description.of(
        "pickled", models={"actor": TINY, "reward": score}, placement=None, prompts=None,
        training=wb.Training(engine="torch"), generation=wb.Generation(engine="transformers"), dtype="float32",
        backend="inline", device="cpu", devices=1, seed=0, address=None,
    )  # fmt: skip
    record = registry.Record(
        id=opened.id, name="pickled", digests=opened.digests, run_folder="runs", address=None, hosts={}
    )
    attached = registry.description(registry.write(record, opened))
    restored, _ = write_manifest(tmp_path, {"roles": {}}, opened, {}).controller()
    for there in (attached, restored):
        assert places(there.models["reward"].function) == places(score)
        assert there.digest == opened.digest


def test_a_module_that_one_may_edit_goes_by_value_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_edit.py").write_text("def doubled(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # imported anew, it is another module of the same name
        module = importlib.import_module("mine_to_edit")
        for _ in range(2):
            there = pickle.loads(by_value((module.doubled, json.dumps)))
            assert there[0](4) == 8 and there[0] is not module.doubled and there[1] is json.dumps
        del sys.modules["mine_to_edit"]
