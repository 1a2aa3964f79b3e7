"""Values that users give, checked by pydantic; its errors become `BadInput`, with value, rule and remedy.

    @settings(called="")
    class Sampling:
        top_k: NonNegativeInt = 0
        top_p: Annotated[Number, Field(gt=0, le=1), Rule("must be a number in (0, 1]")] = 1.0

Types are strict: True is no number, and "1" is no whole number. Numbers of numpy become Python's; where an annotation
has `SEQUENCE`, a list becomes a tuple. `__post_init__` checks what fields must be together.

Annotations of users (fields of algorithms and of subclasses of settings, arguments of operations) are read by
`value_type`: there, every tuple takes a list. An annotation that cannot be evaluated, or that pydantic does not know,
is not checked; all others are.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import pydantic.dataclasses
from annotated_types import BaseMetadata, GroupedMetadata
from pydantic import BeforeValidator, ConfigDict, Field, GetPydanticSchema, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError, SchemaError, core_schema

from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.support.named_fields import check_names
from workbench.support.rules import NO_DEFAULT, example_of, said_of

T = TypeVar("T")
OWNER = "_assign"  # in the `__dict__` of settings that belong to an object
CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


@dataclasses.dataclass(frozen=True)
class Rule:
    """In an `Annotated`: the rule and the remedy of messages, where pydantic's constraint says too little."""

    rule: str
    remedy: str = ""


def _as_int(value: Any) -> Any:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return value
    number = int(value)
    if not -(2**63) <= number < 2**64:  # of tensors, and of seeds
        raise PydanticCustomError("int_overflow", "out of range")
    return number


def _as_float(value: Any) -> Any:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):  # pydantic also takes objects with __float__
        raise PydanticKnownError("float_type")
    try:
        number = float(value)
    except OverflowError:
        raise PydanticCustomError("float_overflow", "out of range") from None
    if math.isnan(number):
        raise PydanticCustomError("float_nan", "not a number")
    return number


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else value


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _as_tuple(value: Any) -> Any:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise PydanticCustomError("names_type", "not a list")
    return tuple(value)


Whole = Annotated[int, BeforeValidator(_as_int)]
Number = Annotated[float, BeforeValidator(_as_float)]
PositiveInt = Annotated[Whole, Field(ge=1)]
NonNegativeInt = Annotated[Whole, Field(ge=0)]
PositiveFloat = Annotated[Number, Field(gt=0)]
NonNegativeFloat = Annotated[Number, Field(ge=0)]
FINITE = Field(allow_inf_nan=False)
SEQUENCE = Strict(False)  # of a tuple: a list will do


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(*, kw_only: bool = True, called: str | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are checked against their annotations. So are those of subclasses,
    whichever `dataclass` made them.

    called: stands before the names of fields in messages; default: the class's name and a dot.
    """

    def decorate(cls: type[T]) -> type[T]:
        made: Any = pydantic.dataclasses.dataclass(cls, frozen=True, kw_only=kw_only, config=CONFIG)
        check = made.__init__
        signature = _plain_signature(made)
        prefix = f"{cls.__name__}." if called is None else called

        @functools.wraps(check)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                check(self, *args, **kwargs)
            except ValidationError as error:
                raise _refused_fields(error, made, prefix, args, kwargs) from None

        def __new__(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
            if cls is not made and (args or kwargs):
                parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
                check_names(cls.__name__, parameters, kwargs, len(args))
            return object.__new__(cls)

        def __init_subclass__(cls: type[Any], **kwargs: Any) -> None:
            super(made, cls).__init_subclass__(**kwargs)
            check_before_post_init(cls, called)

        frozen = made.__setattr__

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if OWNER not in self.__dict__ or name.startswith("_"):
                frozen(self, name, value)
            else:
                self.__dict__[name] = self.__dict__[OWNER](name, value)

        def __getstate__(self: Any) -> dict[str, Any]:
            return {name: value for name, value in self.__dict__.items() if name != OWNER}

        made.__setattr__, made.__getstate__ = __setattr__, __getstate__
        made.__init__, made.__signature__, made.__new__ = __init__, signature, __new__
        made.__init_subclass__ = classmethod(__init_subclass__)
        return made

    return decorate


def owned(value: T, assign: Callable[[str, Any], Any]) -> T:
    """A copy of settings that calls `assign(field, value)` for an assignment to one of its fields, and keeps what that
    returns. Copies of it, and what is pickled, are frozen as all settings are."""
    mine = copy.copy(value)
    mine.__dict__[OWNER] = assign
    return mine


class LiveMapping(dict[str, Any]):
    """A mapping in which each change is an assignment of the whole: `assign(changed)` checks it, and returns what holds
    then. Copies of it, and what is pickled, are plain dicts."""

    def __init__(self, values: Mapping[str, Any], assign: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        super().__init__(values)
        self._assign = assign

    def _become(self, values: dict[str, Any]) -> None:
        taken = dict(self._assign(values))
        super().clear()
        super().update(taken)

    def __setitem__(self, name: str, value: Any) -> None:
        self._become({**self, name: value})

    def __delitem__(self, name: str) -> None:
        self.pop(name)

    def __ior__(self, other: Any) -> LiveMapping:  # type: ignore[misc, override]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._become(dict(self) | dict(*args, **kwargs))

    def pop(self, name: str, *default: Any) -> Any:
        rest = dict(self)
        value = rest.pop(name, *default)
        self._become(rest)
        return value

    def popitem(self) -> tuple[str, Any]:
        rest = dict(self)
        item = rest.popitem()
        self._become(rest)
        return item

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def clear(self) -> None:
        self._become({})

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def checked(name: str, value: Any, hint: Any, default: Any = NO_DEFAULT) -> Any:
    """`value`, as an annotation wants it; `BadInput` where it is something else. default: for the remedy."""
    adapter = _adapter(hint)
    if adapter is None:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _refused([(detail["loc"], detail) for detail in error.errors()], name, value, hint, default) from None


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    try:
        return _cached_adapter(hint)
    except TypeError:  # not hashable
        return _make_adapter(hint)


def _make_adapter(hint: Any) -> TypeAdapter[Any] | None:
    """None for an annotation that pydantic does not know."""
    try:
        return TypeAdapter(value_type(hint), config=None if is_pydantic_dataclass(hint) else CONFIG)
    except (PydanticUserError, SchemaError, TypeError):
        return None


_cached_adapter = functools.lru_cache(maxsize=256)(_make_adapter)


def value_type(hint: Any) -> Any:
    """The annotation that a value is checked against: numbers may be numpy's, a list is taken for a tuple, an object of
    a class is checked by `isinstance`, and of the metadata only pydantic's counts."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (int, float):
        return Whole if hint is int else Number
    if hint is tuple or origin is tuple:
        return Annotated[tuple[tuple(map(value_type, args))] if args else tuple, SEQUENCE]  # type: ignore[misc]
    if origin is Annotated:
        inner, constraints = value_type(args[0]), constraints_of(hint)
        return Annotated[inner, *constraints] if constraints else inner
    if origin in (Union, types.UnionType):
        return Union[tuple(map(value_type, args))]  # noqa: UP007 (of types that are known here only)
    if origin is Iterable:
        return Annotated[tuple[value_type(args[0]), ...], BeforeValidator(_as_tuple)]  # type: ignore[misc]
    if origin is Sequence:
        return Annotated[list[value_type(args[0])], BeforeValidator(_as_list)]  # type: ignore[misc]
    if origin is Mapping:
        return Annotated[dict[tuple(map(value_type, args))], BeforeValidator(_as_dict)]  # type: ignore[misc]
    if origin in (list, dict):
        return origin[tuple(map(value_type, args))]
    if getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False):
        return Any
    known = ("builtins", "typing", "collections.abc")
    if isinstance(hint, type) and not (
        origin or hint.__module__ in known or is_pydantic_dataclass(hint) or is_typeddict(hint)
    ):
        return Annotated[Any, GetPydanticSchema(lambda *_: core_schema.is_instance_schema(hint))]
    return hint


def constraints_of(hint: Any) -> list[Any]:
    """The metadata of an `Annotated` that pydantic reads; of other annotations none."""
    metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    kinds = (FieldInfo, BaseMetadata, GroupedMetadata, Rule)
    return [part for part in metadata if isinstance(part, kinds) or hasattr(part, "__get_pydantic_core_schema__")]


def hints_of(owner: Any) -> dict[str, Any]:
    """The annotations of a function, or of a class and its bases, without those that cannot be evaluated."""
    parts = reversed(owner.__mro__) if isinstance(owner, type) else [inspect.unwrap(owner)]
    found: dict[str, Any] = {}
    for part in parts:
        names = vars(sys.modules[part.__module__]) if isinstance(part, type) else part.__globals__
        local = dict(vars(part)) if isinstance(part, type) else None
        for name, hint in inspect.get_annotations(part).items():
            found.pop(name, None)
            try:
                one = types.SimpleNamespace(__annotations__={name: hint})
                found |= get_type_hints(one, names, local, include_extras=True)
            except Exception:  # what an expression can raise: NameError, AttributeError, SyntaxError and others
                continue
    return found


def check_fields(instance: Any, prefix: str) -> None:
    """Check the fields of a dataclass against their annotations; values are kept as these want them.

    prefix: stands before the names of fields in messages. A field whose default is None may be None.
    """
    hints = hints_of(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name, None)
        if field.name in hints and not (value is None and field.default is None):
            kept = checked(prefix + field.name, value, hints[field.name], field.default)
            if kept is not value:
                object.__setattr__(instance, field.name, kept)


def check_before_post_init(
    cls: type[Any], called: str | None = None, then: Callable[[Any], None] = lambda made: None
) -> None:
    """Let a class that will be a dataclass check its fields before its `__post_init__`. called: as in `settings`. then:
    called with an instance that has been made."""
    after = getattr(cls, "__post_init__", None)

    def __post_init__(self: Any, *args: Any) -> None:
        outermost = getattr(type(self), "__post_init__", None) is __post_init__ and dataclasses.is_dataclass(self)
        if outermost:
            check_fields(self, f"{type(self).__name__}." if called is None else called)
        if after is not None:
            after(self, *args)
        if outermost:
            then(self)

    cls.__post_init__ = functools.wraps(after)(__post_init__) if after else __post_init__


def _plain_signature(made: Any) -> inspect.Signature:
    """The signature of a class for people: types without their constraints."""
    hints, signature = get_type_hints(made), inspect.signature(made)
    return signature.replace(parameters=[p.replace(annotation=hints[name]) for name, p in signature.parameters.items()])


def _refused_fields(
    error: ValidationError, made: Any, prefix: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Exception:
    """The error of a class for arguments that pydantic refused."""
    first, names = error.errors()[0], list(inspect.signature(made).parameters)
    if not first["loc"]:  # raised by __post_init__
        return first["ctx"]["error"]
    if first["type"] == "unexpected_positional_argument":
        return BadInput(f"{made.__name__}({shown(args[0])})", "takes its fields by name", f"write {names[0]}=")
    check_names(made.__name__, inspect.signature(made).parameters.values(), kwargs, len(args))
    name = names[field] if isinstance(field := first["loc"][0], int) else field
    value = {**dict(zip(names, args, strict=False)), **kwargs}[name]
    hint = get_type_hints(made, include_extras=True)[name]
    details = [(detail["loc"][1:], detail) for detail in error.errors() if detail["loc"][:1] == first["loc"][:1]]
    return _refused(details, prefix + name, value, hint, inspect.signature(made).parameters[name].default)


Located = tuple[tuple[int | str, ...], ErrorDetails]  # where in the value, and what pydantic says


def _refused(located: Sequence[Located], name: str, value: Any, hint: Any, default: Any) -> Exception:
    """The error for a value; `located`: several for a union, and for a tuple or list."""
    place, first = located[0]
    if isinstance(raised := first.get("ctx", {}).get("error"), WorkbenchError):
        return raised
    rule, remedy = rule_of(hint)
    if rule:
        return BadInput(f"{name}={shown(value)}", rule, remedy or example_of(name, value, first, default))
    inside, item = _item(place, name, value)
    in_item = inside != name
    if in_item:  # the first wrong item
        located = [(where, detail) for where, detail in located if _item(where, name, value)[0] == inside]
        name, value, default = inside, item, NO_DEFAULT
    said = list(dict.fromkeys(said_of(detail) for _, detail in located))
    rule = " or ".join([said[0], *(text.removeprefix("must be ") for text in said[1:])])
    if first["type"] == "dataclass_exact_type":
        fields = ", ".join(f"{key}={shown(item)}" for key, item in value.items()) if type(value) is dict else "..."
        remedy = f"write wb.{first['ctx']['class_name']}({fields})"
    remedy = remedy or next(filter(None, (example_of(name, value, detail, default) for _, detail in located)), "")
    nothing = type(None) in get_args(hint) and not in_item
    return BadInput(f"{name}={shown(value)}", rule + (", or None" if nothing else ""), remedy)


def _item(place: tuple[int | str, ...], name: str, value: Any) -> tuple[str, Any]:
    """Name and value of what is wrong inside lists and mappings; branches of a union are passed over."""
    if place[-1:] == ("[key]",):
        return f"a key of {name}", place[-2]
    for step in place:
        if isinstance(value, (list, tuple)) and isinstance(step, int) and step < len(value):
            name, value = f"{name}[{step}]", value[step]
        elif isinstance(value, dict) and step in value:
            name, value = f"{name}[{step!r}]", value[step]
    return name, value


def rule_of(hint: Any) -> tuple[str, str]:
    """Rule and remedy of an annotation that has a `Rule`, or has one in a union; else two empty texts."""
    found = [part for part in get_args(hint)[1:] if isinstance(part, Rule)] if get_origin(hint) is Annotated else []
    if found:
        return found[0].rule, found[0].remedy
    nested = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return next(filter(any, map(rule_of, nested)), ("", ""))
    return "", ""


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `BadInput` unless `value` is one of `choices`."""
    try:
        known = value in choices
    except (TypeError, ValueError, RuntimeError):  # an array, or a tensor: == has many answers
        known = False
    if not known:
        near = difflib.get_close_matches(value, map(str, choices), n=1) if isinstance(value, str) else []
        remedy = f"write {near[0]!r} (the nearest)" if near else f"write {choices[0]!r}" if choices else ""
        raise BadInput(f"{name}={shown(value)}", f"must be one of {', '.join(map(repr, choices))}", remedy)


def at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    """Raise `BadInput` unless `value` is at least (or, `strictly`, more than) `least`."""
    checked(name, value, Number)
    if not (value > least if strictly else value >= least):
        rule = f"must be {'more than' if strictly else 'at least'} {least}"
        raise BadInput(f"{name}={shown(value)}", rule, "give more" if strictly else f"give {least} or more")


def whole(name: str, value: int, least: int = 1) -> None:
    """Raise `BadInput` unless `value` is a whole number of at least `least`."""
    checked(name, value, Whole)
    at_least(name, value, least)
