"""Edited modules of one process: which objects get the new code, what stays, and the way back."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edited import Files, edited_files
from workbench.support.sources import imports_of, loaded
from workbench.workers.patching import Patch, Patched

OLD = """
    import functools
    from contextlib import contextmanager
    from dataclasses import dataclass
    from enum import Enum

    SCALE = 2.0
    registry = {"made": "at import"}

    def times(x):
        return x * SCALE

    @functools.cache
    def cached(x):
        return x + 1

    @contextmanager
    def opened():
        yield "old"

    class Colour(Enum):
        RED = 1

    @dataclass(frozen=True)
    class Point:
        x: int = 1

        def far(self):
            return self.x

    class Base:
        def hello(self):
            return "old"

        def dropped(self):
            return "there"

    class Sub(Base):
        def hello(self):
            return "sub " + super().hello()

    def unused():
        return 0
"""
NEW = """
    import functools
    from contextlib import contextmanager
    from dataclasses import dataclass
    from enum import Enum
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from collections.abc import Iterator

    # all lines below are further down now
    SCALE = 2.0
    MORE: float = 1.0
    registry = {"made": "at import"}

    def times(x, more=MORE):
        return x * SCALE + more

    @functools.cache
    def cached(x):
        return x + 2

    @contextmanager
    def opened():
        yield "new"

    class Colour(Enum):
        RED = 1
        BLUE = 2

    @dataclass(frozen=True)
    class Point:
        x: int = 1
        y: int = 7

        def far(self):
            return self.x + self.y

    class Base:
        def hello(self):
            return "new"

        def added(self):
            return "here"

    class Sub(Base):
        def hello(self):
            return "sub " + super().hello()

    def fresh():
        return Point(1)

    if __name__ == "__main__":
        print(fresh())
"""
USER = """
    from {prefix}_maker import Base, Colour, Point, cached, opened, times

    held = []

    class Mine(Base):
        def hello(self):
            return "mine " + super().hello()

    def use(x):
        return times(x)
"""


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Files]:
    with edited_files(tmp_path, f"p{abs(hash(request.node.name)) % 10**6}") as files:
        files.write("maker", OLD)
        files.write("user", USER)
        files.module("user")
        loaded.note()
        yield files


def patch(files: Files, *names: str, strict: bool = True) -> tuple[Patch, Patched]:
    texts = {name: s for name, s in loaded.stale().items() if name.startswith(files.prefix)}
    assert sorted(texts) == [f"{files.prefix}_{name}" for name in names]
    made = Patch()
    return made, made.apply(texts, {}, {}, strict=strict)


def behaviour(maker: Any, user: Any, things: dict[str, Any]) -> dict[str, Any]:
    """What all of it does, seen from everywhere."""
    with user.opened() as opened:
        return {
            "functions": (maker.times(1), user.times(1), user.use(1), things["times"](1), user.cached(1), opened),
            "hello": (things["mine"].hello(), things["sub"].hello(), things["bound"]()),
            "members": (hasattr(things["mine"], "dropped"), hasattr(things["mine"], "added")),
            "module": (hasattr(maker, "fresh"), hasattr(maker, "unused"), len(user.Colour)),
            "point": (things["point"].far(), repr(maker.Point(3)), isinstance(maker.Point(3), user.Point)),
            "state": (maker.registry, user.held, things["mine"].kept),
        }


def test_functions_and_classes_get_the_new_code_and_state_stays(files: Files) -> None:
    maker: Any = files.module("maker")
    user: Any = files.module("user")
    mine, sub = user.Mine(), maker.Sub()
    mine.kept = "in the instance"
    maker.registry["later"] = user.held.append(1) or 1
    things = {"mine": mine, "sub": sub, "bound": mine.hello, "times": maker.times, "point": maker.Point(2)}
    identities = [maker.times, maker.opened, maker.Base, maker.Point, maker.Sub, user.Mine, maker.registry]
    before = behaviour(maker, user, things)

    files.write("maker", NEW)
    made, report = patch(files, "maker")
    assert (report.error, report.not_run) == ("", ())
    assert report.modules == (f"{files.prefix}_maker",)
    names = ["MORE", "times", "cached", "opened", "Colour", "Point", "Base", "fresh"]
    assert report.changed == tuple(f"{files.prefix}_maker.{name}" for name in names)
    assert behaviour(maker, user, things) == {
        "functions": (3.0, 3.0, 3.0, 3.0, 3, "new"),
        "hello": ("mine new", "sub new", "mine new"),
        "members": (False, True),
        "module": (True, False, 2),
        "point": (9, "Point(x=3, y=7)", True),
        "state": ({"made": "at import", "later": 1}, [1], "in the instance"),
    }
    now = [maker.times, maker.opened, maker.Base, maker.Point, maker.Sub, user.Mine, maker.registry]
    assert all(a is b for a, b in zip(identities, now, strict=True))
    made.undo()
    assert behaviour(maker, user, things) == before


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("SCALE = 2.0", "SCALE = 5.0", "line 7: SCALE = 5.0"),
        ('registry = {"made": "at import"}\n', "", "line 8: without registry = {'made': 'at import'}"),
        ("SCALE = 2.0", "SCALE = 2.0\nprint(SCALE)", "line 8: print(SCALE)"),
        ("SCALE = 2.0", "SCALE = 2.0\nregistry = dict(x=1)\nregistry['x'] = 2", "line 8: registry = dict(x=1)"),
    ],
)
def test_other_lines_are_run_by_new_processes_alone(files: Files, old: str, new: str, line: str) -> None:
    maker: Any = files.module("maker")
    files.edit("maker", "return x * SCALE", "return -1")
    files.edit("maker", old, new)
    _, report = patch(files, "maker")
    assert report.error == f"only a new process can run {files.path('maker')}, {line}"
    assert (maker.times(1), maker.SCALE) == (2.0, 2.0)
    # where other processes have run them, the functions are taken
    _, report = patch(files, "maker", strict=False)
    assert report.error == ""
    assert report.not_run[0] == f"{files.path('maker')}, {line}"
    assert (maker.times(1), maker.SCALE) == (-1, 2.0)


def test_what_cannot_be_imported_changes_nothing(files: Files) -> None:
    maker: Any = files.module("maker")
    user: Any = files.module("user")
    mine = user.Mine()
    files.write("maker", NEW)
    files.edit("user", "cached, opened", "cached, fresh, opened")  # which the other file gets first
    files.edit("user", "return times(x)", "return -fresh().x")
    files.edit("user", "def use(x)", "def use(x, more=1 / 0)")
    _, report = patch(files, "maker", "user")
    assert report.error.startswith("ZeroDivisionError: division by zero")
    assert f"{files.path('user')}, line 10" in report.error
    assert "more=1 / 0" in report.traceback
    assert (user.use(1), mine.hello(), hasattr(maker, "fresh")) == (2.0, "mine old", False)
    files.edit("user", "more=1 / 0", "more=0")
    _, report = patch(files, "maker", "user")
    assert (report.error, user.use(1), mine.hello()) == ("", -1, "mine new")


def test_a_class_edited_twice_keeps_super_and_its_lines(files: Files) -> None:
    user: Any = files.module("user")
    mine = user.Mine()
    files.edit("user", 'return "mine " + super().hello()', "return type(self).__name__ + __class__.__name__")
    made, _ = patch(files, "user")
    assert mine.hello() == "MineMine"
    made.keep()
    files.edit("user", "return type(self).__name__ + __class__.__name__", 'return "again " + super().hello()')
    files.edit("user", "return times(x)", "raise LookupError(x)")
    made, _ = patch(files, "user")
    made.keep()
    assert mine.hello() == "again old"
    assert "again" in inspect.getsource(user.Mine.hello)
    with pytest.raises(LookupError) as caught:
        user.use(1)
    assert "raise LookupError(x)" in "".join(traceback.format_exception(caught.value))


def test_edits_are_known_by_what_imports_them(files: Files) -> None:
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


def test_a_touched_file_is_no_edit_and_packages_are_not_looked_at(files: Files) -> None:
    files.path("maker").write_text(files.path("maker").read_text())
    assert f"{files.prefix}_maker" not in loaded.stale()
    tops = {name.partition(".")[0] for name in loaded.texts}
    assert not tops & {"workbench", "torch", "numpy", "pytest", "json", "asyncio"}
    assert tops <= {name.partition(".")[0] for name in sys.modules}


def test_imports_are_read_from_the_text() -> None:
    text = "import a.b as c, d\ndef f():\n    from e import (\n        g,\n        h as i,\n    )\nfrom .x import y"
    assert imports_of(text, "pack.module") == {"a.b", "d", "e", "e.g", "e.h", "pack.x", "pack.x.y"}
    assert imports_of("def broken(", "pack.module") == set()
