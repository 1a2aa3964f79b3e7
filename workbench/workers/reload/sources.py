"""The source files that this process runs, each with the text that it has of it: so that an edit is found, and what the
edit reaches.

Installed packages are not among them, but for this one where it is installed in place.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import decode_source, resolve_name
from pathlib import Path

from workbench.errors import BadInput
from workbench.support.editable import editable

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<of>[.\w]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#;]+)"
    r"|import[ \t]+(?P<modules>[^\n#;]+))",
    re.M,
)

Stamp = tuple[int, int]  # when a file was last written, in nanoseconds, and its bytes


@dataclass(frozen=True)
class SourceFile:
    """A module's file and the text in it."""

    path: str
    text: str


class Sources:
    """Of one process. Modules count from when `note` first sees them: it is called wherever new ones may have come."""

    def __init__(self) -> None:
        self.texts: dict[str, SourceFile] = {}  # what the process runs
        self._stamps: dict[str, Stamp] = {}
        self._modules: dict[str, int] = {}
        self._newest: tuple[int, str] | None = None
        self._known: set[str] = set()
        self._first: dict[str, str] = {}  # what it ran when it was loaded: a short text for each
        self._edits: dict[str, str] = {}
        self._imports: dict[str, frozenset[str]] = {}

    def note(self) -> None:
        """Take in the modules that have been imported since it was last called."""
        newest = len(sys.modules), next(reversed(sys.modules))
        if newest == self._newest:
            return
        self._newest = newest
        for name in [name for name in self.texts if id(sys.modules.get(name)) != self._modules[name]]:
            del self.texts[name]  # forgotten, or imported anew
            self._known.discard(name)
            self._imports.pop(name, None)
            self._first.pop(name, None)
            self._edits.pop(name, None)
        for name in sys.modules.keys() - self._known:
            module = sys.modules.get(name)
            path = editable(name, module)
            if path is not None:
                try:
                    stamp, text = stamp_of(path), read(path)
                except (OSError, BadInput):
                    continue
                self.texts[name], self._stamps[name], self._modules[name] = SourceFile(path, text), stamp, id(module)
        self._known = set(sys.modules)

    def stale(self) -> dict[str, SourceFile]:
        """The modules whose files say something else than what the process runs, and what they say; the cost is a look
        at the date of each file. Raises `BadInput` for a file that is no text."""
        found = {}
        for name, source in self.texts.items():
            try:
                stamp = stamp_of(source.path)
                if stamp == self._stamps[name]:
                    continue
                text = read(source.path)
            except OSError:  # a file that is gone, or is being replaced
                continue
            if text == source.text:
                self._stamps[name] = stamp
            else:
                found[name] = SourceFile(source.path, text)
        return found

    def take(self, texts: Mapping[str, SourceFile]) -> None:
        """Note that the process runs these now."""
        for name, source in texts.items():
            if name in self.texts:
                self._first.setdefault(name, _digest(self.texts[name].text))
                self.texts[name] = source
            digest = _digest(source.text)
            if self._first.get(name) == digest:  # as it was in the beginning
                self._edits.pop(name, None)
            else:
                self._edits[name] = digest
            self._imports.pop(name, None)

    def edits_behind(self, modules: Iterable[str]) -> str:
        """A short text for the edits, since they were loaded, of modules and of all that these import; empty where
        there are none. What a notebook imports is not known: behind it are all."""
        if not self._edits:
            return ""
        seen, todo = set[str](), list(modules)
        if "__main__" in todo:
            todo += self._edits
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += self.imports(name)
        reached = sorted((name, self._edits[name]) for name in seen & self._edits.keys())
        return _digest(repr(reached)) if reached else ""

    def imports(self, name: str) -> frozenset[str]:
        """The modules that a module's text imports, wherever it does."""
        if name not in self._imports:
            self._imports[name] = imported(self.texts[name].text, name) if name in self.texts else frozenset()
        return self._imports[name]

    def in_order(self, changed: Collection[str]) -> list[str]:
        """Those modules of this process, and all that import them, each after what it imports."""
        behind = {name for name in changed if name in self.texts}
        while more := {name for name in self.texts if name not in behind and self.imports(name) & behind}:
            behind |= more
        order: dict[str, None] = {}
        seen = set[str]()

        def visit(name: str) -> None:
            if name in behind and name not in seen:  # modules that import each other: in some order
                seen.add(name)
                for other in sorted(self.imports(name)):
                    visit(other)
                order[name] = None

        for name in sorted(behind):
            visit(name)
        return list(order)


def read(path: str) -> str:
    """The text of a source file. Raises `BadInput` where it is no text."""
    try:
        return decode_source(Path(path).read_bytes())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read: {error}", "a source file is text, UTF-8 unless it says otherwise"
        ) from None


def imported(text: str, module: str) -> frozenset[str]:
    """The names of modules that a module's text may import; what is imported from a package may be one of them."""
    package = module if _is_package(module) else module.rpartition(".")[0]
    found = set[str]()
    for match in _IMPORT.finditer(text):
        if match["modules"]:
            found.update(part.split()[0] for part in match["modules"].split(",") if part.strip())
            continue
        try:
            origin = resolve_name(match["of"], package)
        except ImportError:  # beyond the top: an example in a docstring
            continue
        names = (part.split() for part in match["names"].strip("()").split(","))
        found.add(origin)
        found.update(f"{origin}.{words[0]}" for words in names if words)
    return frozenset(found - {module})


def _is_package(name: str) -> bool:
    return hasattr(sys.modules.get(name), "__path__")


def stamp_of(path: str) -> Stamp:
    """Of a file as it is now."""
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


loaded = Sources()
