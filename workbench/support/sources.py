"""The modules of this process that the user may edit, each with the text that the process runs, to find edits and the
code that they affect. Installed packages, and this one, are not included."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import decode_source, resolve_name
from pathlib import Path
from types import ModuleType

from workbench.errors import BadInput

_NOT_EDITED = ("__main__", "__mp_main__")
_INSTALLED = tuple(
    {
        os.path.realpath(path) + os.sep
        for path in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)

Stamp = tuple[int, int]  # time of the last write to a file, in nanoseconds, and its size in bytes


@dataclass(frozen=True)
class SourceFile:
    """A module's file and the text in it."""

    path: str
    text: str


class Sources:
    """The sources of one process. A module counts from the first `note` after its import; callers call `note` often.

    texts: by module, the text that the process runs.
    """

    def __init__(self) -> None:
        self.texts: dict[str, SourceFile] = {}
        self._imported: dict[str, str] = {}  # by module, the text when `note` first saw it
        self._elsewhere: dict[str, str] = {}  # texts of edited modules that only other processes have
        self._stamps: dict[str, Stamp] = {}
        self._modules: dict[str, int] = {}
        self._newest: tuple[int, str] | None = None
        self._known: set[str] = set()

    def note(self) -> None:
        """Add the modules that were imported since the last call."""
        newest = len(sys.modules), next(reversed(sys.modules))
        if newest == self._newest:
            return
        self._newest = newest
        for name in [name for name in self.texts if id(sys.modules.get(name)) != self._modules[name]]:
            del self.texts[name]  # removed from sys.modules, or imported again
            self._known.discard(name)
        for name in sys.modules.keys() - self._known:
            module = sys.modules.get(name)
            path = editable(name, module)
            if path is not None:
                try:
                    stamp, text = stamp_of(path), _read(path)
                except (OSError, BadInput):
                    continue
                self.texts[name], self._imported[name] = SourceFile(path, text), text
                self._stamps[name], self._modules[name] = stamp, id(module)
        self._known = set(sys.modules)

    def stale(self) -> dict[str, SourceFile]:
        """Return the modules whose files differ from the text that the process runs, with the new texts. Costs one
        `stat` per file. Raises `BadInput` for a file that is not text."""
        found = {}
        for name, source in self.texts.items():
            try:
                stamp = stamp_of(source.path)
                if stamp == self._stamps[name]:
                    continue
                text = _read(source.path)
            except OSError:  # the file is gone, or is being replaced
                continue
            if text == source.text:
                self._stamps[name] = stamp
            else:
                found[name] = SourceFile(source.path, text)
        return found

    def take(self, texts: Mapping[str, SourceFile]) -> None:
        """Note that the processes run these texts now."""
        for name, source in texts.items():
            if name in self.texts:
                self.texts[name] = source
            else:
                self._elsewhere[name] = source.text

    def edits_behind(self, modules: Iterable[str]) -> str:
        """Return a short text for the edits, since loading, of modules and of all that they import; "" without edits.
        The imports of a notebook are unknown, so all edits count for it."""
        edits = self._elsewhere | {n: s.text for n, s in self.texts.items() if s.text != self._imported[n]}
        if not edits:
            return ""
        seen, todo = set[str](), list(modules)
        if "__main__" in todo:
            todo += edits
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += imports_of(self.texts[name].text, name) if name in self.texts else ()
        reached = sorted((name, edits[name]) for name in seen & edits.keys())
        return hashlib.sha256(repr(reached).encode()).hexdigest()[:16] if reached else ""


loaded = Sources()


def editable(name: str, module: ModuleType | None) -> str | None:
    """Return the file of a module that the user may edit; None for other modules."""
    path = getattr(module, "__file__", None)
    if name in _NOT_EDITED or name.partition(".")[0] == "workbench" or not isinstance(path, str):
        return None
    return path if path.endswith(".py") and not _installed(path) else None


@functools.cache
def _installed(path: str) -> bool:
    known = any(folder in path for folder in ("site-packages", "dist-packages"))
    return known or os.path.realpath(path).startswith(_INSTALLED)


@functools.cache
def imports_of(text: str, module: str) -> frozenset[str]:
    """Return the names of modules that a module's text may import, anywhere in it. A name that is imported from a
    package may be a module, too."""
    package = module if hasattr(sys.modules.get(module), "__path__") else module.rpartition(".")[0]
    found = set[str]()
    with contextlib.suppress(SyntaxError, ValueError, ImportError):  # the file was broken after its import
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                origin = resolve_name(origin, package) if node.level else origin
                found.update((origin, *(f"{origin}.{alias.name}" for alias in node.names)))
    return frozenset(found - {module})


def in_order(texts: Mapping[str, SourceFile]) -> list[str]:
    """Return the names of modules, each after those of them that it imports."""
    seen, order = set[str](), list[str]()

    def visit(name: str) -> None:
        if name in texts and name not in seen:  # modules that import each other come in any order
            seen.add(name)
            for other in sorted(imports_of(texts[name].text, name)):
                visit(other)
            order.append(name)

    for name in sorted(texts):
        visit(name)
    return order


def stamp_of(path: str) -> Stamp:
    """Return the stamp of a file as it is now."""
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size


def _read(path: str) -> str:
    """Return the text of a source file. Raises `BadInput` for a file that is not text."""
    try:
        return decode_source(Path(path).read_bytes())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{path} cannot be read: {error}", "a source file must be text, in UTF-8 or its declared encoding"
        ) from None
