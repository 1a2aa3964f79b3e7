"""Notebooks that are hard to make a script of: the script does what the notebook does, or an error names the cell."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.export.cells import Cell, read_notebook
from workbench.export.exporting import script_of


def page(*texts: Any) -> list[Cell]:
    """Code cells; ("text", "tag") is a cell with a tag, "# ..." in a tuple of one is markdown."""
    cells = []
    for number, text in enumerate(texts, 1):
        if isinstance(text, tuple) and len(text) == 1:
            cells.append(Cell(number, text[0], code=False))
        elif isinstance(text, tuple):
            cells.append(Cell(number, text[0], tags=frozenset(text[1:])))
        else:
            cells.append(Cell(number, text))
    return cells


def output(script: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """What a script prints, run as a program is."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["script.py", *options])
    module = {"__name__": "__main__", "__doc__": None}
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        exec(compile(script, "script.py", "exec"), module)
    assert ended.value.code == 0
    return said.getvalue()


# The script has to print what the notebook's cells print, run by IPython.
CELLS: dict[str, list[str]] = {
    "async cells": ["import asyncio", "async def f():\n    return 4", "x = await f()\nprint(x)"],
    "a redefinition": ["def f():\n    return 1", "a = f()", "def f():\n    return 2", "b = f()\nprint(a, b)"],
    "closures over a loop's variable": ["fs = []\nfor i in range(3):\n    fs.append(lambda: i)",
        "print([f() for f in fs])"],
    "a star import": ["from math import *", "print(floor(pi))"],
    "classes": ["SIZE = 3", "class A:\n    size = SIZE\n    def twice(self):\n        return 2 * self.size * scale",
        "scale = 5", "print(A().twice())"],
    "nested functions and global": ["count = 0",
        "def outer():\n    def inner():\n        global count\n        count += 1\n    inner()\n    inner()",
        "outer()\nouter()\nprint(count)"],
    "a class that changes a variable of the function around it": [
        "def counter():\n    n = 1\n    class C:\n        def m(self):\n            nonlocal n\n            n += 1\n"
        "            return n\n    return C()", "print(counter().m())"],
    "a global in a class": ["n = 1", "class C:\n    def m(self):\n        global n\n        n = n + 1",
        "C().m()\nprint(n)"],
    "non-ASCII": ["größe = 'π ≈ 3' # ü", "print(größe, '✓')"],
    "several statements on a line": ["a = 1; b = 2; print(a + b) # sum"],
    "strings of several lines": ['text = """a\n  b\n"""',
        "def f():\n    return '''\nx\n  y'''\nprint(repr(text), repr(f()))"],
    "a name of the script's own": ["main = 3\nscript = 4\nwb = 5", "print(main, script, wb)"],
    "an import that is a variable later": ["from math import pi", "print(round(pi))\npi = 4\nprint(pi)"],
    "a default that reads a variable": ["rate = 2", "def f(x=rate):\n    return x", "rate = 3", "print(f())"],
    "deleted names": ["a = 1\nprint(a)", "del a", "a = 2\nprint(a)"],
    "try and with": [
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    print(error)\nfinally:\n    print('end')"],
    "annotations": ["x: int = 3\ny: list[int]", "y = [x]\nprint(y)"],
    "match and f-strings": ['match 3:\n    case int(n):\n        print(f"{n:>{n}} {\'q\'}")'],
    "a lambda that calls itself": ["f = lambda n: 1 if n < 2 else n * f(n - 1)", "print(f(4))"],
    "what a function reads when it is called": ["scale = 5", "def f():\n    return scale", "print(f())", "scale = 6",
        "print(f())"],
    "a function that was redefined to do something": ["seen = []\ndef show(x):\n    print(x)", "show(1)",
        "def show(x):\n    seen.append(x)", "show(2)\nprint(seen)"],
    "a base class that registers": [
        "class Base:\n    known = []\n    def __init_subclass__(cls):\n        Base.known.append(cls.__name__)",
        "class One(Base):\n    pass", "print(Base.known)"],
    "a class body that draws": ["import random\nrandom.seed(3)", "class W:\n    w = random.random()",
        "print(W.w, random.random())"],
    "a list that is made anew": ["LOG = []\ndef f(x):\n    LOG.append(x)", "f(1)", "LOG = []", "f(2)\nprint(LOG)"],
    "a parameter that has a value before": ["n = 1", "print(n)", "n = 5", "print(n)"],
    "a chain over several lines": ["(\n    'a b'\n    .upper()\n    .split()\n)\nprint('x')"],
    "a lambda with a default": ["i = 1\nf = lambda x=i: x\ni = 2", "print(f())"],
    "a generator that is used up": ["g = (x for x in range(3))\nnext(g)", "print(list(g))"],
    "a class that takes over a function": ["def f():\n    return 3", "class A:\n    f = staticmethod(f)",
        "print(A.f())"],
    "a star import that brings a module again": ["import sys", "from shlex import *",
        "print(quote('a b'), sys.maxsize)"],
    "a builtin's name for something else": ["seen = []\nmax = seen.append", "max(3)", "print(seen)"],
    "a default that a cell puts into a module": ["import math\nmath.limit = 3", "def f(x=math.limit):\n    return x",
        "print(f())\ndel math.limit"],
    "an import that makes a part of another": ["import importlib as parts\nfrom importlib import resources",
        "print(parts.resources.__name__)"],
}  # fmt: skip
# What a notebook shows beside what it prints: the script prints this.
SHOWN: dict[str, tuple[list[str], str]] = {
    "magics that only set up": (["%matplotlib inline\n%load_ext autoreload\n%autoreload 2\nprint(1)"], "1"),
    "environment": (["%env WORKBENCH_TEST=7\nimport os\nprint(os.environ['WORKBENCH_TEST'])"], "7"),
    "a timed cell": (["%%time\nprint(2)"], "2"),
    "a timed line": (["%time print(3)"], "3"),
    "a captured cell beside a star import": (["from math import *", "%%capture\nfloor(3)", "print(9)"], "9"),
    "help and display": (["import os\nos?\n?os.path", "display(os)\nprint(6)", "os.environ"], "6"),
    "a display in a function": (
        ["from IPython.display import display", "def f(x):\n    display(x)\n    return x + 1", "print(f(6))"], "7",
    ),
    "a display alone in a block": (
        ["for x in (1, 2):\n    if x == 1:\n        display(x)\n    else:\n        print(x)"], "2",
    ),
    "plots": (
        ["import matplotlib.pyplot as plt", "fig, ax = plt.subplots()\nax.plot([1, 2])\nplt.show()", "print(8)"], "8",
    ),
}  # fmt: skip


def ran(texts: list[str]) -> str:
    """What the cells print, run by IPython."""
    from IPython.core.interactiveshell import InteractiveShell

    shell, said = InteractiveShell(), io.StringIO()
    with contextlib.redirect_stdout(said):
        for text in texts:
            assert shell.run_cell(text, silent=True).success
    return said.getvalue()


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.thorough)])
def test_the_script_prints_what_the_cells_print(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests, step: int
) -> None:
    for name in list(CELLS)[::step]:
        with subtests.test(name=name):
            expected = ran(CELLS[name])
            script = script_of(page(*CELLS[name])).text
            assert expected and output(script, monkeypatch) == expected
            assert script == script_of(page(*CELLS[name])).text  # the same every time
            assert output(script_of(page(*CELLS[name]), loops=True).text, monkeypatch) == expected
    for name, (texts, expected) in SHOWN.items():
        with subtests.test(name=name):
            script = script_of(page(*texts)).text
            assert output(script, monkeypatch).strip("\n") == expected
            assert "get_ipython" not in script and "display" not in script


REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "a shell line": (["x = 1", "!make data"], "cell 2: !make data", "subprocess"),
    "a shell line whose output is kept": (["files = !ls"], "cell 1: !ls", "subprocess"),
    "a cell of another language": (["%%bash\nls"], "cell 1: %%bash", "skip-export"),
    "a magic without a meaning": (["%store x"], "cell 1: %store x", "skip-export"),
    "an install": (["%pip install trl"], "cell 1: %pip install trl", "installed"),
    "a syntax error": (["x = 1", "def f(:\n  pass"], "cell 2, line 1", "fix"),
    "input": (["name = input('who? ')", "print(name)"], "cell 1: input('who? ')", "parameter"),
    "a deleted cell": (["print(model)"], "cell 1 needs 'model'", "was deleted"),
    "what a cell captured": (["%%capture said\nprint(1)", "print(said)"], "cell 2 needs 'said'", "cell 1"),
    "what a cell captured beside a star import": (["from math import *", "%%capture --no-stderr said\nprint(1)",
        "print(said)"], "cell 3 needs 'said'", "cell 2"),
    "a name made further down": (["print(model)", "model = 3"], "cell 1 needs 'model'", "further down"),
    "what was shown last": (["1 + 1", "print(_)"], "cell 2 needs '_'", "name"),
    "In and Out": (["1 + 1", "print(Out[1])"], "cell 2 needs 'Out'", "name"),
    "the notebook itself": (["shell = get_ipython()\nshell.foo()"], "cell 1: get_ipython()", "notebook"),
    "variables by name": (["a = 1", "print(globals()['a'])"], "cell 2: globals()", "main"),
    "nothing at all": ([], "without code", "needs code"),
    "blank cells": (["", "  \n"], "without code", "needs code"),
    "only skipped cells": ([("print(1)", "skip-export")], "without code", "skip-export"),
    "a builtin that is a variable later": (["print(len('ab'))", "len = 3\nos.putenv('A', str(len))"],
        "cell 1 reads the builtin 'len'", "rename"),
    "a class body that reads and binds a name": (["x = 4", "class A:\n    x = x", "print(A.x)"],
        "cell 2: 'x' in a class body", "rename"),
    "a global around which a function has its own": (["n = 1",
        "def f():\n    n = 5\n    def g():\n        global n\n        n = 7\n    g()", "f()\nprint(n)"],
        "cell 2: global n", "rename"),
    "a star import over a variable": (["quote = 3\nprint(quote)", "from shlex import *", "print(quote('a b'))"],
        "cell 2: from shlex import *", "it may import a name"),
    "a function that reads what no cell makes": (["def f():\n    return lab", "f()"], "cell 1 needs 'lab'", "deleted"),
}  # fmt: skip


def test_what_cannot_be_in_a_script_is_refused_by_cell(subtests: pytest.Subtests) -> None:
    for name in REFUSED:
        with subtests.test(name=name):
            texts, value, word = REFUSED[name]
            with pytest.raises(BadInput) as error:
                script_of(page(*texts))
            assert str(error.value).startswith(value) or value in str(error.value)
            assert word in str(error.value)


def test_files_that_are_no_notebooks(tmp_path: Path) -> None:
    def refused(text: str, name: str = "x.ipynb") -> str:
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput) as error:
            read_notebook(tmp_path / name)
        return str(error.value)

    assert "JSON" in refused("not json")
    assert "cells" in refused("{}")
    assert "written in R" in refused(json.dumps({"cells": [], "metadata": {"kernelspec": {"language": "R"}}}))
    with expect_error(BadInput, remedy="exists"):
        read_notebook(tmp_path / "none.ipynb")


LINES: list[tuple[str, str]] = [
    ("x = 1\nreturn", "'return' outside function"),
    ("if True:\n    return 5", "'return' outside function"),
    ("yield 5", "'yield' outside function"),
    ("for x in ():\n    pass\nelse:\n    break", "'break' outside loop"),
    ("continue", "'continue' not properly in loop"),
    ("nonlocal x", "nonlocal declaration not allowed at module level"),
    ("await f()\nreturn", "'return' outside function"),
]


def test_a_line_that_would_end_the_script_is_refused(subtests: pytest.Subtests) -> None:
    for text, said in LINES:
        with subtests.test(text=text, said=said):
            with pytest.raises(BadInput, match=rf"cell.* 2.*, line \d: .*{said}.*cells are Python.*skip-export"):
                script_of(page("first = 1", text, "print('after')"))
            assert "after" in script_of(page("first = 1", (text, "skip-export"), "print('after')")).text


def test_a_return_inside_a_function_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(
        page(
            "def f():\n    for x in (1, 2):\n        if x == 1:\n            continue\n        return x",
            "print(f())",
        )
    )
    assert output(script.text, monkeypatch).split() == ["2"]
