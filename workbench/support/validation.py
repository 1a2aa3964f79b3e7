"""Checks values of users with pydantic; its errors become `BadInput`, with value, rule and remedy.

    @settings(called="")
    class Sampling:
        top_k: NonNegativeInt = 0
        top_p: Annotated[Number, Field(gt=0, le=1), Rule("must be a number in (0, 1]")] = 1.0

Types are strict: True is no number, and "1" is no whole number. Numbers of numpy become Python's, and a list is taken
for a tuple. `__post_init__` checks rules between fields. An annotation that cannot be evaluated, or that pydantic does
not know, is not checked; all others are, also in users' subclasses and operations.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt
from pydantic import BeforeValidator, ConfigDict, Field, GetPydanticSchema, Strict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError, SchemaError, core_schema

from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.support.named_fields import check_call

T = TypeVar("T")
OWNER = "_assign"  # key in the `__dict__` of settings that belong to an object
NO_DEFAULT = inspect.Parameter.empty
CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)
# pydantic's kind of error -> the rule; other kinds have pydantic's text
RULES = {
    "bool_type": "must be True or False",
    "callable_type": "must be a function",
    "dict_type": "must be a dict",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be a whole number",
    "is_instance_of": "must be {class}",
    "is_type": "must be a class",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "sequence_str": "must be a list",
    "string_type": "must be a text",
    "tuple_type": "must be a tuple or a list",
}
ESTIMATORS = ("gae", "grpo", "dr_grpo", "dapo", "rloo")  # names that users give as a loss by mistake
# how to get an object of a workbench class
SOURCES = {
    "an Algorithm": "make one, such as wb.PPO(lab)",
    "a Batch": "pass the result of lab.prompts.next(n) or of a stage",
    "a Placement": "write wb.Placement.colocate(devices=1), or another placement",
    "a Workbench": "pass the result of wb.open(...)",
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """For an `Annotated`: rule and remedy of messages, where pydantic's constraint says too little."""

    rule: str
    remedy: str = ""


def _as_int(value: Any) -> Any:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return value
    number = int(value)
    if not -(2**63) <= number < 2**64:  # the range of tensors and seeds
        raise PydanticCustomError("int_overflow", "must fit into 64 bits")
    return number


def _as_float(value: Any) -> Any:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):  # pydantic also takes objects with __float__
        raise PydanticKnownError("float_type")
    try:
        number = float(value)
    except OverflowError:
        raise PydanticCustomError("float_overflow", "must be at most 1.8e+308, the largest float") from None
    if math.isnan(number):
        raise PydanticCustomError("float_nan", "must be a number, not nan")
    return number


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else value


def _as_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _as_tuple(value: Any) -> Any:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise PydanticKnownError("list_type")
    return tuple(value)


Whole = Annotated[int, BeforeValidator(_as_int)]
Number = Annotated[float, BeforeValidator(_as_float)]
PositiveInt = Annotated[Whole, Field(ge=1)]
NonNegativeInt = Annotated[Whole, Field(ge=0)]
FINITE = Field(allow_inf_nan=False)
PositiveFloat = Annotated[Number, Field(gt=0), FINITE]
NonNegativeFloat = Annotated[Number, Field(ge=0), FINITE]
ZeroToOne = Annotated[Number, Field(ge=0, le=1)]
SEQUENCE = Strict(False)  # for a tuple: accept a list


# --- settings and other dataclasses -----------------------------------------------------------------------------------


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(*, kw_only: bool = True, called: str | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are checked against their annotations. Fields of subclasses are
    checked as well, whichever `dataclass` decorator made them.

    called: prefix of field names in messages; default: the class's name and a dot.
    """

    def decorate(cls: type[T]) -> type[T]:
        check_before_post_init(cls, called)
        made: Any = dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)
        init, frozen = made.__init__, made.__setattr__
        hints, signature = get_type_hints(made), inspect.signature(made)  # for readers: without constraints
        made.__signature__ = signature.replace(
            parameters=[p.replace(annotation=hints[name]) for name, p in signature.parameters.items()]
        )

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                init(self, *args, **kwargs)
            except TypeError:
                check_call(made.__name__, signature, args, kwargs)
                raise

        def __new__(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
            if cls is not made and (args or kwargs):
                check_call(cls.__name__, inspect.signature(cls.__init__), (cls, *args), kwargs)
            return object.__new__(cls)

        def __init_subclass__(cls: type[Any], **kwargs: Any) -> None:
            super(made, cls).__init_subclass__(**kwargs)
            check_before_post_init(cls, called)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if OWNER not in self.__dict__ or name.startswith("_"):
                frozen(self, name, value)
            else:
                self.__dict__[name] = self.__dict__[OWNER](name, value)

        def __getstate__(self: Any) -> dict[str, Any]:
            return {name: value for name, value in self.__dict__.items() if name != OWNER}

        made.__init__, made.__new__, made.__init_subclass__ = __init__, __new__, classmethod(__init_subclass__)
        made.__setattr__, made.__getstate__, made.__is_settings__ = __setattr__, __getstate__, True
        return made

    return decorate


def is_settings(kind: Any) -> bool:
    """Whether a class was made by `settings`, or is a subclass of one that was."""
    return isinstance(kind, type) and getattr(kind, "__is_settings__", False)


def owned(value: T, assign: Callable[[str, Any], Any]) -> T:
    """Return a copy of settings that calls `assign(field, value)` when a field is assigned, and keeps what that
    returns. Its copies and pickles are frozen like all settings."""
    mine = copy.copy(value)
    mine.__dict__[OWNER] = assign
    return mine


def check_before_post_init(
    cls: type[Any], called: str | None = None, then: Callable[[Any], None] = lambda made: None
) -> None:
    """Make a class that will become a dataclass check its fields before its `__post_init__`. called: as in `settings`.
    then: called with each finished instance."""
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


def check_fields(instance: Any, prefix: str) -> None:
    """Check the fields of a dataclass against their annotations, and convert values as these require.

    prefix: precedes field names in messages. A field may always have its default, whatever the annotation says.
    """
    kind = type(instance)
    if "__checked_fields__" not in vars(kind):
        hints = hints_of(kind)
        known = [field for field in dataclasses.fields(kind) if field.name in hints]
        kind.__checked_fields__ = [(f.name, f.default, hints[f.name], _adapter(hints[f.name])) for f in known]
    for name, default, hint, adapter in kind.__checked_fields__:
        value = getattr(instance, name, default)
        if value is not default and adapter is not None:
            kept = _validated(adapter, prefix, name, value, hint, default)
            if kept is not value:
                object.__setattr__(instance, name, kept)


# --- one value --------------------------------------------------------------------------------------------------------


def checked(name: str, value: Any, hint: Any, default: Any = NO_DEFAULT) -> Any:
    """Return `value`, converted to its annotation. Raises `BadInput` for a wrong value. default: for the remedy."""
    adapter = _adapter(hint)
    return value if adapter is None else _validated(adapter, "", name, value, hint, default)


def _validated(adapter: TypeAdapter[Any], prefix: str, name: str, value: Any, hint: Any, default: Any) -> Any:
    try:
        return adapter.validator.validate_python(value)
    except ValidationError as error:
        raise _refused(error, prefix + name, value, hint, default) from None


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `BadInput` unless `value` is one of `choices`."""
    checked(name, value, Literal[choices])


def at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    """Raise `BadInput` unless `value` is at least (or, `strictly`, more than) `least`."""
    checked(name, value, Annotated[Number, Gt(least) if strictly else Ge(least)])


def whole(name: str, value: int, least: int = 1) -> None:
    """Raise `BadInput` unless `value` is a whole number of at least `least`."""
    checked(name, value, Annotated[Whole, Ge(least)])


def _adapter(hint: Any) -> TypeAdapter[Any] | None:
    try:
        return _cached_adapter(hint)
    except TypeError:  # the hint is not hashable
        return _make_adapter(hint)


def _make_adapter(hint: Any) -> TypeAdapter[Any] | None:
    """Return an adapter; None for an annotation that pydantic does not know."""
    try:
        return TypeAdapter(value_type(hint), config=CONFIG)
    except (PydanticUserError, SchemaError, TypeError):
        return None


_cached_adapter = functools.lru_cache(maxsize=512, typed=True)(_make_adapter)


def value_type(hint: Any) -> Any:
    """Return the annotation that a value is checked against: numbers may be numpy's, a list is accepted as a tuple, an
    object of a class is checked by `isinstance`, and of the metadata only pydantic's counts."""
    origin, args = get_origin(hint), get_args(hint)
    inner = tuple(map(value_type, args)) if origin not in (Annotated, Literal, Callable) else ()
    if hint in (int, float):
        return Whole if hint is int else Number
    if hint is tuple or origin is tuple:
        return Annotated[tuple[inner] if args else tuple, SEQUENCE]  # type: ignore[valid-type]
    if origin is Annotated:
        kinds = (FieldInfo, BaseMetadata, GroupedMetadata)
        kept = [part for part in args[1:] if isinstance(part, kinds) or hasattr(part, "__get_pydantic_core_schema__")]
        return Annotated[value_type(args[0]), *kept] if kept else value_type(args[0])
    if origin in (Union, types.UnionType):
        return Union[inner]  # noqa: UP007 (of types that are known here only)
    if origin is Iterable:
        return Annotated[tuple[inner[0], ...], BeforeValidator(_as_tuple)]  # type: ignore[valid-type]
    if origin is Sequence:
        return Annotated[list[inner[0]], BeforeValidator(_as_list)]  # type: ignore[valid-type]
    if origin is Mapping:
        return Annotated[dict[inner], BeforeValidator(_as_dict)]  # type: ignore[misc,valid-type]
    if origin in (list, dict):
        return origin[inner]
    if getattr(hint, "_is_protocol", False) and not getattr(hint, "_is_runtime_protocol", False):
        return Any
    known = ("builtins", "typing", "collections.abc")
    if isinstance(hint, type) and not (origin or hint.__module__ in known or is_typeddict(hint)):
        name, where = hint.__name__, "wb.mapping" if hint.__module__.startswith("workbench.mapping.") else "wb"
        said = f"a {where}.{name}(...)" if is_settings(hint) else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
        schema = core_schema.is_instance_schema(hint, cls_repr=said)
        return Annotated[Any, GetPydanticSchema(lambda *_: schema)]
    return hint


def hints_of(owner: Any) -> dict[str, Any]:
    """Return the annotations of a function, or of a class and its bases, without those that cannot be evaluated."""
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
            except Exception:  # an expression can raise NameError, AttributeError, SyntaxError and others
                continue
    return found


# --- the translator ---------------------------------------------------------------------------------------------------


def _refused(error: ValidationError, name: str, value: Any, hint: Any, default: Any) -> Exception:
    """Return the error for a value that pydantic refused: for its first error; for a union, of all branches."""
    details = error.errors(include_url=False)
    if isinstance(raised := details[0].get("ctx", {}).get("error"), WorkbenchError):
        return raised
    rule, remedy = _rule_of(hint)
    if rule:
        return BadInput(f"{name}={shown(value)}", rule, remedy or _remedy(name, value, details[0], default))
    inside, item = _item(details[0]["loc"], name, value)
    here = [detail for detail in details if _item(detail["loc"], name, value)[0] == inside]
    default = default if inside == name else NO_DEFAULT
    said = list(dict.fromkeys(map(_said, here)))
    rule = " or ".join([said[0], *(text.removeprefix("must be ") for text in said[1:])])
    rule += ", or None" if type(None) in get_args(hint) and inside == name else ""
    remedies = (_remedy(inside, item, detail, default) for detail in here)
    return BadInput(f"{inside}={shown(item)}", rule, next(filter(None, remedies), ""))


def _said(detail: ErrorDetails) -> str:
    """Return the rule that a value breaks."""
    kind, ctx = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        return f"must be one of {', '.join(_choices(detail))}"
    whole = {key: f"{v:.0f}" for key, v in ctx.items() if isinstance(v, float) and v.is_integer() and abs(v) < 1e15}
    plain = {**ctx, **whole}
    return (
        RULES[kind].format(**plain)
        if kind in RULES
        else re.sub(r"^\w+ should (.*?)( after .*)?$", r"must \1", detail["msg"])
    )


def _choices(detail: ErrorDetails) -> list[str]:
    return str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")


def _remedy(name: str, value: object, detail: ErrorDetails, default: object) -> str:
    """Return the nearest choice, the source of an object, the default, or the limit. name: such as "Sampling.top_p"."""
    field, kind, ctx = name.rpartition(".")[2], detail["type"], detail.get("ctx", {})
    called = f"{field}=" if field.isidentifier() else ""
    if kind == "literal_error":
        if field == "loss" and value in ESTIMATORS and "'ppo'" in _choices(detail):
            return f"write loss='ppo', the loss that {str(value).upper()} uses"
        near = difflib.get_close_matches(repr(value), _choices(detail), n=1) if isinstance(value, str) else []
        return f"write {called}{(near or _choices(detail))[0]}"
    if kind == "is_instance_of":
        given = ", ".join(f"{key}={shown(item)}" for key, item in value.items()) if type(value) is dict else "..."
        of_settings = str(ctx["class"]).startswith("a wb.")
        return f"write {ctx['class'][2:].replace('...', given)}" if of_settings else SOURCES.get(ctx["class"], "")
    if kind in ("float_type", "int_type") and isinstance(value, str) and re.fullmatch(r"-?\d+\.?\d*(e-?\d+)?", value):
        return f"write {called}{value}, without quotes"
    if kind == "list_type" and isinstance(value, str) and default is None:
        return f"write {called}[{value!r}]"
    if default is None or (isinstance(default, (bool, int, float, str)) and default != ""):
        return f"write {called}{default!r}, its default"
    limit = ctx.get("ge", ctx.get("le"))
    return "" if limit is None else f"write {called}{limit:g}"


def _item(place: tuple[int | str, ...], name: str, value: Any) -> tuple[str, Any]:
    """Return name and value of the wrong part inside lists and mappings; branches of a union are skipped."""
    if place[-1:] == ("[key]",):
        return f"a key of {name}", place[-2]
    for step in place:
        if isinstance(value, (list, tuple)) and isinstance(step, int) and step < len(value):
            name, value = f"{name}[{step}]", value[step]
        elif isinstance(value, dict) and step in value:
            name, value = f"{name}[{step!r}]", value[step]
    return name, value


def _rule_of(hint: Any) -> tuple[str, str]:
    """Return rule and remedy of an annotation with a `Rule`, or with one in a union; otherwise two empty texts."""
    origin, args = get_origin(hint), get_args(hint)
    for part in args[1:] if origin is Annotated else ():
        if isinstance(part, Rule):
            return part.rule, part.remedy
    nested = {Annotated: args[:1], Union: args, types.UnionType: args}.get(origin, ())
    return next(filter(any, map(_rule_of, nested)), ("", ""))
