"""Edited modules of one process: what runs again, what stays the same object, and the way back."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edited import Files, edited_files
from workbench.errors import BadInput
from workbench.workers.reload.patching import Patch, Patched, check_syntax
from workbench.workers.reload.sources import imported, loaded

OLD = """
    import functools
    from dataclasses import dataclass
    from enum import Enum

    SCALE = 2.0
    DOUBLE = SCALE * 2
    registry = {"made": "at import"}

    def times(x):
        return x * SCALE

    @functools.cache
    def cached(x):
        return x + 1

    class Colour(Enum):
        RED = 1

    BEST = Colour.RED

    @dataclass(frozen=True)
    class Point:
        x: int = 1

        def far(self):
            return self.x

    ORIGIN = Point(0)

    class Base:
        count = 0

        def hello(self):
            return "old"

        def dropped(self):
            return "there"

    class Sub(Base):
        def hello(self):
            return "sub " + super().hello()

        @property
        def loud(self):
            return self.hello().upper()
"""
USER = """
    from {prefix}_maker import BEST, SCALE, Base, Point, cached, times

    TRIPLE = SCALE * 3
    held = []

    class Mine(Base):
        def hello(self):
            return "mine " + super().hello()

    def use(x):
        return times(x) + SCALE
"""
NEW = """
    import functools
    from dataclasses import dataclass
    from enum import Enum

    # all lines below are further down now
    SCALE = 5.0
    DOUBLE = SCALE * 2
    registry = {"made": "at import"}

    def times(x, more=1):
        return x * SCALE + more

    @functools.cache
    def cached(x):
        return x + 2

    class Colour(Enum):
        RED = 1
        BLUE = 2

    BEST = Colour.BLUE

    @dataclass(frozen=True)
    class Point:
        x: int = 1
        y: int = 7

        def far(self):
            return self.x + self.y

    ORIGIN = Point(0)

    class Base:
        count = 0

        def hello(self):
            return "new"

        def added(self):
            return "here"

    class Sub(Base):
        def hello(self):
            return "sub " + super().hello()

        @property
        def loud(self):
            return self.hello().upper()

    def fresh():
        return Point(1)
"""


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Files]:
    with edited_files(tmp_path, f"p{abs(hash(request.node.name)) % 10**6}") as files:
        files.write("maker", OLD)
        files.write("user", USER)
        yield files


def patch(files: Files, *names: str) -> tuple[Patch, Patched]:
    texts = {name: s for name, s in loaded.stale().items() if name.startswith(files.prefix)}
    assert sorted(texts) == [f"{files.prefix}_{name}" for name in names]
    made = Patch()
    return made, made.apply(texts, {}, {})


def behaviour(maker: Any, user: Any, things: dict[str, Any]) -> dict[str, Any]:
    """What all of it does, seen from everywhere."""
    return {
        "values": (maker.SCALE, maker.DOUBLE, user.SCALE, user.TRIPLE, user.BEST.name),
        "functions": (maker.times(1), user.times(1), user.use(1), things["times"](1), user.cached(1)),
        "hello": (things["mine"].hello(), things["sub"].hello(), things["bound"](), things["sub"].loud),
        "members": (hasattr(things["mine"], "dropped"), hasattr(things["mine"], "added"), hasattr(maker, "fresh")),
        "point": (things["point"].far(), repr(maker.Point(3)), isinstance(maker.Point(3), user.Point)),
        "state": (maker.registry, user.held, maker.Base.count, things["mine"].kept),
    }


def test_functions_and_classes_get_the_new_code_and_state_stays(files: Files) -> None:
    maker: Any = files.module("maker")
    user: Any = files.module("user")
    loaded.note()
    mine, sub = user.Mine(), maker.Sub()
    mine.kept = "in the instance"
    maker.registry["later"] = user.held.append(1) or 1
    maker.Base.count = 3
    things = {"mine": mine, "sub": sub, "bound": mine.hello, "times": maker.times, "point": maker.Point(2)}
    identities = [maker.times, maker.Base, maker.Point, maker.Sub, user.Mine, maker.registry, maker.ORIGIN]
    before = behaviour(maker, user, things)
    gc.collect()

    files.write("maker", NEW)
    made, report = patch(files, "maker")
    assert report.error == ""
    assert report.modules == (f"{files.prefix}_maker", f"{files.prefix}_user")  # which reads SCALE
    names = ["SCALE", "times", "cached", "Colour", "BEST", "Point", "Base", "fresh"]
    assert report.changed == tuple(f"{files.prefix}_maker.{name}" for name in names)
    assert report.instances >= 4  # mine, sub, point and ORIGIN
    after = behaviour(maker, user, things)
    assert after == {
        "values": (5.0, 10.0, 5.0, 15.0, "BLUE"),
        "functions": (6.0, 6.0, 11.0, 6.0, 3),
        "hello": ("mine new", "sub new", "mine new", "SUB NEW"),
        "members": (False, True, True),
        "point": (9, "Point(x=3, y=7)", True),
        "state": ({"made": "at import", "later": 1}, [1], 0, "in the instance"),  # a class runs as a whole
    }
    now = [maker.times, maker.Base, maker.Point, maker.Sub, user.Mine, maker.registry, maker.ORIGIN]
    assert all(a is b for a, b in zip(identities, now, strict=True))
    # what was not edited, too, knows its lines in the new text
    text = files.path("maker").read_text().splitlines()
    assert "return self.hello().upper()" in text[maker.Sub.loud.fget.__code__.co_firstlineno + 1]

    made.undo()
    assert behaviour(maker, user, things) == {**before, "state": (*after["state"][:2], 3, "in the instance")}


def test_what_cannot_be_imported_changes_nothing(files: Files) -> None:
    maker: Any = files.module("maker")
    user: Any = files.module("user")
    loaded.note()
    mine = user.Mine()
    files.write("maker", NEW)
    files.edit("user", "return times(x) + SCALE", "return -1")
    files.edit("user", "held = []", "held = []\n1 / 0  # on line 6")
    _, report = patch(files, "maker", "user")
    assert report.error.startswith("ZeroDivisionError: division by zero")
    assert f"{files.path('user')}, line 6" in report.error
    assert "1 / 0  # on line 6" in report.traceback
    assert (maker.SCALE, user.use(1), mine.hello(), hasattr(maker, "fresh")) == (2.0, 4.0, "mine old", False)
    files.edit("user", "1 / 0  # on line 6", "")
    _, report = patch(files, "maker", "user")
    assert (report.error, user.use(1), mine.hello()) == ("", -1, "mine new")


def test_an_edit_of_another_module_of_a_class_keeps_super(files: Files) -> None:
    files.module("maker")
    user: Any = files.module("user")
    loaded.note()
    mine = user.Mine()
    files.edit("user", 'return "mine " + super().hello()', "return type(self).__name__ + __class__.__name__")
    made, report = patch(files, "user")
    assert report.changed == (f"{files.prefix}_user.Mine",)
    assert mine.hello() == "MineMine"
    made.keep()
    files.edit("user", "return type(self).__name__ + __class__.__name__", 'return "again " + super().hello()')
    assert patch(files, "user")[1].error == ""
    assert mine.hello() == "again old"
    assert "again" in inspect.getsource(user.Mine.hello)


def test_a_traceback_shows_the_new_lines(files: Files) -> None:
    maker: Any = files.module("maker")
    loaded.note()
    files.edit("maker", "return x * SCALE", "raise LookupError(x)")
    made, _ = patch(files, "maker")
    made.keep()
    with pytest.raises(LookupError) as caught:
        maker.times(1)
    assert "raise LookupError(x)" in "".join(traceback.format_exception(caught.value))


def test_what_is_gone_from_the_text_is_gone(files: Files) -> None:
    maker: Any = files.module("maker")
    loaded.note()
    files.edit("maker", "registry = {", "renamed = {")
    made, _ = patch(files, "maker")
    assert not hasattr(maker, "registry")
    assert maker.renamed == {"made": "at import"}
    made.undo()
    assert maker.registry == {"made": "at import"}
    assert not hasattr(maker, "renamed")


def test_edits_are_known_by_what_imports_them(files: Files) -> None:
    files.module("user")
    loaded.note()
    names = {name: f"{files.prefix}_{name}" for name in ("maker", "user", "rewards")}
    assert loaded.edits_behind([names["user"]]) == ""
    files.edit("maker", "return x * SCALE", "return x + SCALE")
    made, _ = patch(files, "maker")
    assert loaded.edits_behind([names["user"]]) == ""  # nothing counts until it is kept
    made.keep()
    assert loaded.stale().keys() & set(names.values()) == set()
    assert loaded.edits_behind([names["user"]]) == loaded.edits_behind([names["maker"]]) != ""
    assert loaded.edits_behind([names["rewards"]]) == ""
    files.edit("maker", "return x + SCALE", "return x * SCALE")
    patch(files, "maker")[0].keep()
    assert loaded.edits_behind([names["user"]]) == ""  # as it was in the beginning


def test_a_touched_file_is_no_edit_and_installed_packages_are_not_looked_at(files: Files) -> None:
    files.module("maker")
    loaded.note()
    files.path("maker").write_text(files.path("maker").read_text())
    assert f"{files.prefix}_maker" not in loaded.stale()
    tops = {name.partition(".")[0] for name in loaded.texts}
    assert "workbench" in tops
    assert not tops & {"torch", "numpy", "pytest", "json", "asyncio"}
    assert tops <= {name.partition(".")[0] for name in sys.modules}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a.b as c, d", {"a.b", "d"}),
        ("from a import b, c as d", {"a", "a.b", "a.c"}),
        ("def f():\n    from a.b import (\n        c,\n        d as e,\n    )", {"a.b", "a.b.c", "a.b.d"}),
        ("from . import near\nfrom .x import y", {"pack", "pack.near", "pack.x", "pack.x.y"}),
        ("x = 'import nothing'", set()),
    ],
)
def test_imports_are_read_from_the_text(text: str, found: set[str]) -> None:
    assert imported(text, "pack.module") == found


def test_a_syntax_error_names_file_and_line(files: Files) -> None:
    files.module("maker")
    loaded.note()
    files.edit("maker", "return x * SCALE", "return x *")
    texts = {name: source for name, source in loaded.stale().items() if name.startswith(files.prefix)}
    with pytest.raises(BadInput, match=rf"{files.path('maker')}, line 11: SyntaxError: invalid syntax"):
        check_syntax(texts)
