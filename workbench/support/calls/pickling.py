"""Pickles what is sent to the process of a user's functions."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text, said
from workbench.support.sources import editable

OF_IMPORT = ("__builtins__", "__cached__", "__loader__", "__spec__")  # set by the import system, not by the module
_registering = threading.Lock()
_installed: dict[str, ModuleType] = {}  # thousands of modules, which each call would check again


OWN_PROCESS = (
    "a function runs in its own process, which can be killed, with copies of the objects that it uses",
    "create such objects inside it, at its first call (functools.cache); or, inline, mark it with "
    "@wb.limits(own_process=False): then it runs in its host, without limits",
)


def pickled(function: Any, advice: tuple[str, str] = OWN_PROCESS) -> bytes:
    """Pickle a function for a process of its own, with the values of the globals and closures that it reads. Raises
    `BadInput` if it holds what no other process can have. advice: rule and remedy of that error."""
    try:
        return by_value(function)
    except Exception as error:
        raise BadInput(
            f"{name_of(function)} cannot be sent to a process of its own: {_culprit(function)}{said(error, 200)}",
            *advice,
        ) from error


def _culprit(function: Any) -> str:
    """Name the variable that a function reads and that cannot be pickled, for a message."""
    try:
        outside, read, _, _ = inspect.getclosurevars(getattr(function, "func", function))
    except (TypeError, ValueError):  # a callable object
        outside, read = {}, getattr(function, "__dict__", {})
    for name, value in {**read, **outside}.items():
        try:
            by_value(value)
        except Exception:
            return f"{name} is {type(value).__name__!r}: "
    return ""


def by_value(thing: Any) -> bytes:
    """Pickle with the present code and globals of the notebook and of modules that the user may edit: another process
    would import the files' versions. By name if these hold what cannot be pickled, such as a lock."""
    return _each_by_value([thing])[0]


def _each_by_value(things: Sequence[Any]) -> list[bytes]:
    try:
        with _editable_by_value() as modules:
            return _dumps(things, modules)
    except Exception:
        return _dumps(things, ())


def _dumps(things: Sequence[Any], modules: Collection[ModuleType]) -> list[bytes]:
    from workbench.support import pickles

    ids = {id(module) for module in modules}

    class Pickler(pickles.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, ModuleType) and id(value) in ids:  # cloudpickle fails on modules in a cycle
                return ModuleType, (value.__name__,), {k: v for k, v in vars(value).items() if k not in OF_IMPORT}
            return super().reducer_override(value)

    return [pickles.dumps(thing, Pickler) for thing in things]


@contextlib.contextmanager
def _editable_by_value() -> Iterator[Collection[ModuleType]]:
    import cloudpickle

    with _registering:
        known = cloudpickle.list_registry_pickle_by_value()
        others = {n: module for n, module in list(sys.modules.items()) if _installed.get(n) is not module}
        of_files = {n: module for n, module in others.items() if isinstance(getattr(module, "__file__", None), str)}
        _installed.update((n, module) for n, module in of_files.items() if not editable(n, module))
        modules = [m for n, m in of_files.items() if n not in known and editable(n, m) and m.__name__ == n]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield modules
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def packed_rows(calls: Sequence[Sequence[Any]], name: str) -> list[bytes]:
    """Pickle the arguments of each call of a function. Raises `BadInput` for values that cannot be sent."""
    try:
        return _each_by_value(calls)
    except Exception as error:
        raise BadInput(
            f"a row for {name} cannot be sent to its process: {said(error, 200)}",
            "columns for a function must be texts, numbers, lists, dicts, or objects of these",
        ) from error


def name_of(function: Any) -> str:
    """Return the name of a function, or of the function that a partial calls, for messages."""
    try:
        while not hasattr(function, "__name__") and hasattr(function, "func"):
            function = function.func
        name = str(getattr(function, "__name__", None) or type(function).__name__)
    except Exception:  # attributes of any class may raise
        name = type(function).__name__
    return plain_text(name, 80)
