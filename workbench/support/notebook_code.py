"""What a function or class of the notebook does, told from what it did before its cell was run again."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from workbench.support.fingerprint import fingerprint


def code_behind(value: Any) -> str:
    """A short text for what a function or class of the notebook does, and for what of the notebook it uses by name:
    functions, classes, numbers, texts and settings such as `wb.Training(...)`."""
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
                if isinstance(other, FunctionType | type) and is_of_notebook(other):
                    used[name] = fingerprint(other)
                    todo.append(other)
                elif isinstance(other, bool | int | float | str | bytes) or _is_frozen(other):
                    used[name] = fingerprint(other)
    return fingerprint((value, used))


def _functions(part: Any) -> list[FunctionType]:
    """A function, or the functions of a class."""
    if not isinstance(part, type):
        return [part] if isinstance(part, FunctionType) else []
    members = (getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(part).values())
    return [member for member in members if isinstance(member, FunctionType)]


def _is_frozen(value: Any) -> bool:
    """Whether it is an object of a dataclass that cannot be changed, as settings are."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _names(code: CodeType) -> set[str]:
    """The names that a function's lines look up, those of functions in it among them."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def is_of_notebook(part: Any) -> bool:
    """Whether a function or class was defined in a cell."""
    return getattr(part, "__module__", None) == "__main__"
