"""Notebooks that Jupyter would not write: a script, or an error of ours; never another exception."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.damage import STEP, cut_and_flipped, harmless, profile
from workbench.errors import BadInput, WorkbenchError
from workbench.export import export_notebook
from workbench.export.cells import Cell, read_notebook
from workbench.export.exporting import script_of

NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "metadata": {}, "source": ["# A title\n", "and text"], "id": "a"},
        {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": "N = 1",
         "execution_count": 1, "outputs": []},
        {"cell_type": "code", "metadata": {}, "source": "print(N)", "execution_count": None, "outputs": []},
    ],
    "metadata": {"kernelspec": {"name": "python3", "language": "python"}, "workbench": {"check": {"N": 2}}},
    "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800") | st.just("a\0b"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)  # fmt: skip


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where values are in a tree of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, item in inner for place in places(item, (*here, key)))]


def with_value(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value in one place."""
    if not place:
        return value
    copy = tree.copy()
    copy[place[0]] = with_value(tree[place[0]], place[1:], value)
    return copy


def exported(path: Path) -> None:
    """A program comes of it, or an error of ours."""
    try:
        text = export_notebook(path, runs=[]).text
    except WorkbenchError as error:
        text = ""
        assert harmless(str(error))  # noqa: PT017
    ast.parse(text)


def test_any_value_in_any_place(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    tried = 0

    @profile(25, 2000)
    @given(st.sampled_from(places(NOTEBOOK)), ANY)
    def replaced(place: tuple[Any, ...], value: Any) -> None:
        nonlocal tried
        tried += 1
        path.write_text(json.dumps(with_value(NOTEBOOK, place, value)))
        exported(path)

    replaced()
    assert tried >= 15


def test_cut_and_flipped(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    for data in cut_and_flipped(json.dumps(NOTEBOOK).encode(), STEP):
        path.write_bytes(data)
        try:
            read_notebook(path)
        except BadInput as error:
            assert str(path) in str(error) or "format 4" in str(error)  # noqa: PT017


NO_CODE: list[tuple[str, str]] = [
    ("break", "'break' outside loop"),
    ("x = " + "+".join(["1"] * 20_000), "nested too deeply|recursion depth"),
    ("x = " + "(" * 300 + ")" * 300, "cell 1|nested too deeply|SyntaxError"),
    ("x = '\0'", "null"),
    ("x = '\ud800'", "surrogates"),
]


def test_code_that_is_none(subtests: pytest.Subtests) -> None:
    for code, message in NO_CODE:
        with subtests.test(code=code, message=message), pytest.raises(BadInput, match=message):
            script_of([Cell(1, code)])


TITLES: list[str] = ["ends in \\", "a\\\\\\", 'quotes """ and "', "null \0 here", "half \ud800", "\x1b[31mred", "a\rb"]


def test_titles() -> None:
    for title in TITLES:
        script = script_of(
            [Cell(1, title, code=False), Cell(2, "x = 1"), Cell(3, title, code=False), Cell(4, "print(x)")]
        )
        script.text.encode()
        assert ast.get_docstring(ast.parse(script.text))
        assert not set("\0\x1b\ud800") & set(script.text)
