"""A short text for a value, which is equal in every process for values of equal content.

Of functions and classes, the compiled code, constants, defaults, captured variables and members count, but not the
address, the place in a file, or comments. Functions that a function calls by name are not followed, except by
`code_behind`.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any


def fingerprint(value: Any) -> str:
    """Return 64 hexadecimal digits. Values that pickle cannot keep (a lock, an open file) count by their type."""
    return _Walk().of(value)


def code_behind(value: Any) -> str:
    """Return a short text for the code of a function or class of the notebook, and for what it uses of the notebook by
    name: functions, classes, numbers, texts and settings such as `wb.Training(...)`."""
    used: dict[str, str] = {}
    todo, seen = [value], set[int]()
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        for function in _functions(part):
            for name in _names(function.__code__):
                other = function.__globals__.get(name)
                if isinstance(other, types.FunctionType | type) and is_of_notebook(other):
                    used[name] = fingerprint(other)
                    todo.append(other)
                elif isinstance(other, bool | int | float | str | bytes) or _is_frozen(other):
                    used[name] = fingerprint(other)
    return fingerprint((value, used))


def _functions(part: Any) -> list[types.FunctionType]:
    if not isinstance(part, type):
        return [part] if isinstance(part, types.FunctionType) else []
    members = (getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(part).values())
    return [member for member in members if isinstance(member, types.FunctionType)]


def _is_frozen(value: Any) -> bool:
    """Whether a value is an object of a frozen dataclass, as settings are."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that a function and the functions in it read, without those that it sets."""
    found: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "LOAD_NAME": set(), "STORE_GLOBAL": set()}
    for line in dis.get_instructions(code):
        found.get(line.opname, set()).add(line.argval)
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (found["LOAD_GLOBAL"] | found["LOAD_NAME"]).union(*map(_names, inner)) - found["STORE_GLOBAL"]


def is_of_notebook(part: Any) -> bool:
    """Whether a function or class was defined in a cell."""
    return getattr(part, "__module__", None) == "__main__"


class _Walk:
    """Walks through a value and all that it holds, each object once. It copies collections before reading them: a
    function may have captured something that another thread changes, such as a workbench in which a stage runs."""

    def __init__(self) -> None:
        # by id; the values are kept, so that no id is reused during the walk
        self._seen: dict[int, tuple[Any, str]] = {}
        self._above: list[int] = []

    def of(self, value: Any) -> str:
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        if id(value) in self._above:  # a function that captured itself, or a list that contains itself
            return _hash("above", len(self._above) - self._above.index(id(value)))
        self._above.append(id(value))
        try:
            digest = self._content(value)
        finally:
            self._above.pop()
        self._seen[id(value)] = (value, digest)
        return digest

    def _content(self, value: Any) -> str:
        kind = type(value).__qualname__
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | Path):
            return _hash(kind, repr(value))
        if isinstance(value, Enum):
            return _hash(kind, value.name)
        if isinstance(value, Mapping):
            return _hash(kind, *sorted(self.of(key) + self.of(item) for key, item in list(value.items())))
        if isinstance(value, set | frozenset):  # their order differs between processes
            return _hash(kind, *sorted(map(self.of, list(value))))
        if isinstance(value, list | tuple):
            return _hash(kind, *map(self.of, list(value)))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.CodeType):
            return _hash(kind, value.co_code.hex(), value.co_names, value.co_varnames, self.of(value.co_consts))
        if isinstance(value, types.FunctionType):
            parts = (value.__code__, value.__defaults__, value.__kwdefaults__, value.__dict__, value.__closure__)
            return _hash(kind, *map(self.of, parts))
        if isinstance(value, types.CellType):
            try:
                return _hash(kind, self.of(value.cell_contents))
            except ValueError:  # not bound yet
                return _hash(kind)
        if isinstance(value, types.MethodType):
            return _hash(kind, self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            return _hash(kind, getattr(value, "__module__", None), value.__name__)
        if isinstance(value, staticmethod | classmethod):
            return _hash(kind, self.of(value.__func__))
        if isinstance(value, property):
            return _hash(kind, *map(self.of, (value.fget, value.fset, value.fdel)))
        if isinstance(value, functools.partial):
            return _hash(kind, *map(self.of, (value.func, value.args, value.keywords)))
        return _hash("object", self.of(type(value)), self._state(value))

    def _class(self, value: type) -> str:
        if value.__module__ == "builtins":
            return _hash("class", value.__qualname__)
        # values with two underscores are Python's own, and Python adds some of them when the class is first used
        own = {
            name: member
            for name, member in list(vars(value).items())
            if (callable(member) or not name.startswith("__")) and not isinstance(member, types.MemberDescriptorType)
        }
        return _hash("class", value.__qualname__, self.of(value.__bases__), self.of(own))

    def _state(self, value: Any) -> str:
        """Return the digest of any other object: of what pickle would keep of it."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:
            return _hash("no state")
        if isinstance(reduced, str):
            return _hash("global", reduced)
        return self.of([list(part) if isinstance(part, Iterator) else part for part in reduced])


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
