"""Checks the arguments of public functions before their body runs: an unknown name, a missing or extra argument, and a
value whose type differs from the annotation raise `BadInput` with value, rule and remedy.

    @checked_call("wb.attach")
    def attach(name: str, *, take_over: bool = False) -> Workbench: ...

    @checks_calls("lab")  # every public method
    class Workbench: ...

Annotations are read as in `workbench.support.validation.value_type`, at the first call of a function. An annotation
that names a class which is imported only for type checkers is not checked.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeVar

from workbench.support.named_fields import NAMED, SEVERAL, check_call
from workbench.support.validation import checked, hints_of

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def checked_call(called: str = "") -> Callable[[F], F]:
    """Make a function check its arguments. called: the call as users write it, for messages; default: the function's
    name."""

    def decorate(function: F) -> F:
        name_of_call, signature = called or function.__name__, inspect.signature(function)
        parameters = signature.parameters
        by_place = [name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        rest = next((name for name, p in parameters.items() if p.kind is NAMED), "")

        @functools.cache
        def hints() -> dict[str, Any]:
            found = hints_of(function)
            return {name: found[name] for name in parameters if found.get(name, Any) is not Any}

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Python 3.11's bind refuses a name in **kwargs that a positional argument has as well
            same = {name: kwargs.pop(name) for name in by_place if rest and name in kwargs}
            bound = check_call(name_of_call, signature, args, kwargs)
            given = bound.arguments
            if same:
                given[rest] = {**given.get(rest, {}), **same}
            for name, hint in hints().items():
                if name not in given:
                    continue
                parameter, value = parameters[name], given[name]
                if parameter.kind is SEVERAL:
                    given[name] = tuple(checked(f"{name}[{i}]", item, hint) for i, item in enumerate(value))
                elif parameter.kind is NAMED:
                    given[name] = {key: checked(key, item, hint) for key, item in value.items()}
                elif value is not parameter.default:
                    given[name] = checked(name, value, hint, parameter.default)
            return function(*bound.args, **bound.kwargs)

        return call  # type: ignore[return-value]

    return decorate


def checks_calls(called: str, internal: str = "") -> Callable[[C], C]:
    """Make every public method of a class check its arguments, except abstract ones.

    called: the users' name for an object of the class, for messages. internal: names that only this package uses; an
    object does not list them, so that Tab offers what users call.
    """
    hidden = frozenset(internal.split())

    def decorate(kind: C) -> C:
        listed: Any = kind.__dir__
        assert hidden <= {*dir(kind)}, f"{kind.__name__} has no {hidden - {*dir(kind)}}"
        if hidden:
            setattr(kind, "__dir__", lambda self: [name for name in listed(self) if name not in hidden])  # noqa: B010
        for name, member in list(vars(kind).items()):
            inner = getattr(member, "__func__", member)  # of a static or class method
            if name.startswith("_") or not isinstance(inner, types.FunctionType):
                continue
            if not getattr(inner, "__isabstractmethod__", False):
                wrapped = checked_call(f"{called}.{name}")(inner)
                if inner is member:  # it may be defined elsewhere: show it as the class's own
                    wrapped.__module__, wrapped.__name__ = kind.__module__, name
                    wrapped.__qualname__ = f"{kind.__qualname__}.{name}"
                setattr(kind, name, wrapped if inner is member else type(member)(wrapped))
        return kind

    return decorate
