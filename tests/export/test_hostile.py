"""Notebooks of strangers: neither their export nor the import of their script runs anything of theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from tests.export.test_adversarial import page
from workbench.export.cells import read_notebook
from workbench.export.exporting import script_of

# What an attacker wants to run. `{RUN}` is an expression, `{DO}` a statement.
EXPRESSIONS = {
    "a file": "open('owned', 'w')",
    "a process": "__import__('subprocess').run(['touch', 'owned'])",
    "a shell": "__import__('os').system('touch owned')",
    "a socket": "__import__('socket').create_server(('127.0.0.1', 0))",
    "a hidden file": "getattr(__import__('pathlib').Path('owned'), 'touch')()",
}
# Cells; `thing` is used by the cell after them, so that it is not left out of the script.
PLACES = {
    "a default": "def thing(x={RUN}):\n    return x",
    "a keyword's default": "def thing(*, x={RUN}):\n    return x",
    "a lambda's default": "def thing(f=lambda x={RUN}: x):\n    return f",
    "an annotation": "def thing(x: {RUN} = 1):\n    return x",
    "the annotation of a result": "def thing() -> {RUN}:\n    return 1",
    "a class body": "class thing:\n    x = {RUN}",
    "a bare call in a class body": "class thing:\n    {RUN}",
    "a loop in a class body": "class thing:\n    for x in [{RUN}]:\n        pass",
    "an assertion in a class body": "class thing:\n    assert {RUN}",
    "cache as a decorator": "from functools import cache\n@cache\ndef thing(x={RUN}):\n    return x",
    "an annotation in a class body": "class thing:\n    x: {RUN} = 1",
    "a class in a class": "class thing:\n    class inner:\n        x = {RUN}",
    "a decorator with a call": "def d(x):\n    return lambda f: f\n@d({RUN})\ndef thing():\n    pass",
    "a decorator": "def d(f):\n    {RUN}\n    return f\n@d\ndef thing():\n    pass",
    "a decorator of a class": "def d(f):\n    {RUN}\n    return f\n@d\nclass thing:\n    pass",
    "a metaclass": "class M(type):\n    def __new__(c, *a):\n        {RUN}\n        return type.__new__(c, *a)\n"
    "class thing(metaclass=M):\n    pass",
    "a hook for subclasses": "class B:\n    def __init_subclass__(c):\n        {RUN}\nclass thing(B):\n    pass",
    "a hook for items": "class B:\n    def __class_getitem__(c, x):\n        {RUN}\ndef thing(x: B[1] = 1):\n    pass",
    "a hook that is assigned": "class B:\n    __class_getitem__ = lambda x: {RUN}\ndef thing(x: B[1] = 1):\n    pass",
    "an enumeration": "from enum import Enum\nclass thing(Enum):\n    A = 1\n    def __init__(self, x):\n        {RUN}",
    "a base": "class thing({RUN} or object):\n    pass",
    "a formatted text": 'def thing(x=f"{{{RUN}}}"):\n    return x',
    "a comprehension": "def thing(x=[1 for _ in [0] if {RUN}]):\n    return x",
    "an operator": "def thing(x=1 + ({RUN} or 1)):\n    return x",
    "a name that was taken over": "def field(*a, **k):\n    {RUN}\nclass thing:\n    x = field(default=1)",
    "an argument of a maker": "from functools import partial\ndef thing(x=partial(print, {RUN})):\n    return x",
    "an import of the same name": "import types as functools\n"
    "def thing(x=functools.new_class('a', (), {{}}, lambda d: {RUN})):\n    return x",
    "a schedule that is tried": "import workbench as wb\ndef fast(step):\n    {RUN}\n    return 1.0\n"
    "def thing(x=wb.Training(schedule=fast)):\n    return x",
    "a decorator of the class body": "class thing:\n    def staticmethod(f):\n        {RUN}\n        return f\n"
    "    @staticmethod\n    def g(): pass",
    "the second target of an assignment": "class B:\n    a = __init_subclass__ = lambda: {RUN}\nclass thing(B):\n"
    "    pass",
    "an item that is not there": "import os\ndef thing(x=os.environ['NO_SUCH']):\n    {RUN}",
    "a text that is an annotation": "import workbench as wb\nclass thing(wb.Worker):\n"
    "    @wb.register('3D_PROTO', reads=('responses',))\n    def score(self, shard: \"{RUN}\"):\n        pass",
    "a text within an annotation": "import workbench as wb\nclass thing(wb.Worker):\n"
    "    @wb.register('3D_PROTO', reads=('responses',))\n    def score(self, shard: list[\"{RUN}\"]):\n        pass",
    "a comment after a lone return": "# hm\r{RUN}\rthing = 1",
    "a star import": "from {PACKAGE}.inner import *\nthing = 1",
}
TEXTS = [
    "Title\r{RUN}\r",
    "Some text\r\n{RUN}",
    'A title"""\r{RUN}\r"""',
    "ends in a backslash\\",
    "\x0c{RUN}",
    "a\u2028{RUN}",
]

IMPORTER = """
import json, runpy, sys
import workbench, workbench.mapping, functools, enum, types, pathlib, subprocess, socket, typing, os
from pathlib import Path
workbench.open, workbench.Sampling, workbench.script  # what they import is trusted
EVENTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "socket.bind", "socket.connect")
def watch(event, arguments):
    writes = event == "open" and arguments[1] is not None and set(str(arguments[1])) & set("wax+")
    if watching and (writes or event in EVENTS):
        raise SystemExit(f"{event} {arguments[:1]}")
watching = False
sys.addaudithook(watch)
ran = {}
for file in sorted(Path(".").glob("*.script")):
    watching = True
    try:
        runpy.run_path(str(file), run_name="imported")
    except BaseException as error:
        ran[file.name] = f"{type(error).__name__}: {error}"
    watching = False
print(json.dumps(ran))
"""


def hostile(package: str, each: int) -> dict[str, list[str | tuple[str, ...]]]:
    """Notebooks by name. each: how many expressions are tried in each place, others in the next one."""
    drawn = cycle(EXPRESSIONS.items())
    use = "import workbench as wb\nlab = wb.open('x', models={'actor': 'tiny-llama'}, prompts=[str(thing)])"
    found: dict[str, list[str | tuple[str, ...]]] = {}
    for (place, cell), (what, run) in ((one, next(drawn)) for one in PLACES.items() for _ in range(each)):
        found[f"{what} in {place}"] = [cell.format(RUN=run, PACKAGE=package), use]
    for number, (text, (_, run)) in enumerate((one, next(drawn)) for one in TEXTS for _ in range(each)):
        found[f"text {number}"] = [(text.format(RUN=run),), "thing = 1", use]
    return found


@pytest.mark.parametrize("each", [1, pytest.param(len(EXPRESSIONS), marks=pytest.mark.thorough)])
def test_nothing_of_a_strangers_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    package = tmp_path / "hostile_package"
    package.mkdir()
    (package / "__init__.py").write_text("open('owned', 'w')")
    (package / "inner.py").write_text("thing = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    books = hostile(package.name, each)
    assert len(books) == each * (len(PLACES) + len(TEXTS)) > 40 * each
    for number, (name, texts) in enumerate(books.items()):
        kinds = ["markdown" if isinstance(text, tuple) else "code" for text in texts]
        cells = [
            {"cell_type": kind, "metadata": {}, "source": "".join(text)}
            for kind, text in zip(kinds, texts, strict=True)
        ]
        (tmp_path / "book.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
        script = script_of(read_notebook(tmp_path / "book.ipynb").cells).text
        assert not (tmp_path / "owned").exists(), name
        if "star import" not in name:  # a script has the imports of its notebook
            (scripts / f"{number:03d}.script").write_text(f"# {name}\n{script}", newline="")
    done = subprocess.run([sys.executable, "-c", IMPORTER], cwd=scripts, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ran = {
        (scripts / name).read_text().splitlines()[0]: why
        for name, why in json.loads(done.stdout.splitlines()[-1]).items()
    }
    assert not ran
    assert not (scripts / "owned").exists()


def test_what_is_plain_stands_at_the_top() -> None:
    cell = '''
import functools
from dataclasses import dataclass, field
from collections.abc import Callable
import torch

LIMIT = 3

class Net(torch.nn.Module):
    """A class."""
    size: int = LIMIT

    def __init__(self, x: "int | None" = None) -> None: ...

class Counting(wb.Worker):
    @wb.register("DP_PROTO", reads=("responses",))
    def count(self, shard: wb.Batch, names: list[str] = ()) -> None: ...

def thing(x: tuple[int, ...] = (1, -2), *, f: Callable[[str], float] | None = None, dtype=torch.float32): return Net

@dataclass(frozen=True)
class Settings:
    names: list[str] = field(default_factory=list)

@torch.no_grad()
def decorated(x): return x

def called(sampling=wb.Sampling(max_new_tokens=4)): return Counting

class Kind(ValueError):
    parts = [Settings()]
'''
    use = "str((thing(), called(), Kind, decorated))"
    script = script_of(page("import workbench as wb", cell, f"lab = wb.open('x', prompts=[{use}])")).text
    top, main = script.split("def main(")
    for line in ("LIMIT = 3", "class Net", "class Counting", "def thing("):
        assert line in top, line
    for line in ("class Settings", "def decorated", "def called(", "class Kind"):
        assert f"    {line}" in main, line
