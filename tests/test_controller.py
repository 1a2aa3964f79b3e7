"""The Workbench as a facade: made of parts, with nothing inherited."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.errors import BadInput


def test_it_has_no_base_class_and_owns_little() -> None:
    assert wb.Workbench.__bases__ == (object,)
    text = Path(inspect.getfile(wb.Workbench)).read_text()
    (made,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    lines = set(range(made.lineno, (made.end_lineno or 0) + 1))
    for node in ast.walk(made):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    written = text.splitlines()
    code = [n for n in lines if written[n - 1].strip() and not written[n - 1].lstrip().startswith("#")]
    assert len(code) <= 240


def test_what_a_part_carries_out_is_shown_as_the_workbenchs_own() -> None:
    methods = {n: m for n, m in vars(wb.Workbench).items() if inspect.isfunction(m) and not n.startswith("_")}
    assert {"timeline", "move", "put", "check"} <= set(methods)
    for name, method in methods.items():
        assert (method.__module__, method.__qualname__) == ("workbench.controller", f"Workbench.{name}")
        assert next(iter(inspect.signature(method).parameters)) == "self"
        assert method.__doc__


def test_help_shows_the_options_of_examples_and_the_arguments_of_advantages(plain: wb.Workbench) -> None:
    assert {"source", "max_tokens", "held_out", "seed"} <= set(inspect.signature(plain.demonstrations).parameters)
    assert plain.demonstrations([{"prompt": "a", "response": "b"}], seed=None).examples.seed == plain.seed
    shell = InteractiveShell()
    shell.push({"lab": plain})
    found = shell.object_inspect("lab.compute_advantages")
    assert "estimator:" in found["definition"] and found["docstring"] == plain.compute_advantages.__doc__


def test_roles_are_attributes_and_complete_with_tab(tmp_path: Path) -> None:
    with tiny_lab("facade", tmp_path, backend="inline", models={"actor": TINY, "critic": TINY}) as lab:
        assert lab.actor is lab.groups["actor"]
        assert {"actor", "critic", "move", "topology"} <= set(dir(lab))
        assert not {"take_edits", "submit"} & set(dir(lab))  # only the package calls them
        lab.drop("critic")
        assert "critic" not in dir(lab)
        assert not hasattr(lab, "critic")


NOT_ASSIGNED: list[tuple[str, Any, str]] = [
    ("prompts", ["a"], r"lab\.prompts = \['a'\].*wb\.open\(\.\.\., prompts=source\).*lab\.evaluate"),
    ("training", 5, r"lab\.training = 5.*lab\.actor\.training"),
    ("foo", 5, r"lab\.foo = 5.*no stage would read it.*in variables"),
    ("promts", ["a"], r"lab\.promts = .*prompts"),
    ("actor", 5, r"lab\.actor = 5.*models="),
    ("move", 5, r"lab\.move = 5"),
    ("iteration", 5, r"lab\.iteration = 5"),
]


def test_what_no_stage_would_read_cannot_be_assigned(plain: wb.Workbench, subtests: pytest.Subtests) -> None:
    for name, value, says in NOT_ASSIGNED:
        with subtests.test(name=name, value=value):
            before = getattr(plain, name, None)
            with pytest.raises(BadInput, match=says):
                setattr(plain, name, value)
            assert getattr(plain, name, None) == before


def test_what_has_a_setter_can_be_assigned(plain: wb.Workbench) -> None:
    plain.algorithm = None
    plain._mine = 5  # type: ignore[attr-defined]
    plain.prompts.order = None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("plain", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY}) as lab:
        yield lab
