"""The Workbench as a facade: made of parts, with nothing inherited."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import workbench as wb
from tests.cases import TINY, tiny_lab


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
    assert len(code) <= 300


def test_roles_are_attributes_and_complete_with_tab(tmp_path: Path) -> None:
    with tiny_lab("facade", tmp_path, backend="inline", models={"actor": TINY, "critic": TINY}) as lab:
        assert lab.actor is lab.groups["actor"]
        assert {"actor", "critic", "move", "topology"} <= set(dir(lab))
        lab.drop("critic")
        assert "critic" not in dir(lab)
        assert not hasattr(lab, "critic")
