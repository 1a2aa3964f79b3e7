"""Values that users give, checked by pydantic; its errors become `BadInput`, with value, rule and remedy.

    @settings(called="")
    class Sampling:
        top_k: NonNegativeInt = 0
        top_p: Annotated[Number, Field(gt=0, le=1), Rule("must be a number in (0, 1]")] = 1.0

Types are strict: True is no number, and "1" is no whole number. Numbers of numpy become Python's; where an annotation
has `SEQUENCE`, a list becomes a tuple. `__post_init__` checks what fields must be together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import ErrorDetails, PydanticKnownError

from workbench.errors import BadInput, WorkbenchError
from workbench.support.named_fields import check_names

T = TypeVar("T")
CONFIG = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


@dataclasses.dataclass(frozen=True)
class Rule:
    """In an `Annotated`: the rule and the remedy of messages, where pydantic's constraint says too little."""

    rule: str
    remedy: str = ""


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _as_float(value: Any) -> Any:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):  # pydantic also takes objects with __float__
        raise PydanticKnownError("float_type")
    return value if isinstance(value, int) else float(value)


Whole = Annotated[int, BeforeValidator(_as_int)]
Number = Annotated[float, BeforeValidator(_as_float)]
PositiveInt = Annotated[Whole, Field(ge=1)]
NonNegativeInt = Annotated[Whole, Field(ge=0)]
PositiveFloat = Annotated[Number, Field(gt=0)]
NonNegativeFloat = Annotated[Number, Field(ge=0)]
FINITE = Field(allow_inf_nan=False)
SEQUENCE = Strict(False)  # of a tuple: a list will do

# pydantic's kind of error -> the rule, with what its context says
RULES: Mapping[str, Callable[[Any], str]] = {
    "bool_type": lambda _: "must be True or False",
    "callable_type": lambda _: "must be a function",
    "dataclass_exact_type": lambda said: f"must be a wb.{said['class_name']}(...)",
    "finite_number": lambda _: "must be a finite number",
    "float_type": lambda _: "must be a number",
    "greater_than": lambda said: f"must be more than {said['gt']:g}",
    "greater_than_equal": lambda said: f"must be at least {said['ge']:g}",
    "int_type": lambda _: "must be a whole number",
    "is_instance_of": lambda said: f"must be a {said['class']}",
    "is_type": lambda _: "must be a class",
    "less_than": lambda said: f"must be less than {said['lt']:g}",
    "less_than_equal": lambda said: f"must be at most {said['le']:g}",
    "literal_error": lambda said: f"must be one of {said['expected'].replace(' or ', ', ')}",
    "string_type": lambda _: "must be a text",
}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(*, kw_only: bool = True, called: str | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are checked against their annotations.

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

        made.__init__, made.__signature__ = __init__, signature
        return made

    return decorate


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value`, as an annotation wants it; `BadInput` where it is something else."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise _refused(error.errors(), name, value, hint) from None


@functools.lru_cache(maxsize=256)
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=None if is_pydantic_dataclass(hint) else CONFIG)


def check_fields(instance: Any) -> None:
    """Raise `BadInput` where a field of a dataclass, which need not be one of ours, is not what its annotation says.

    Annotations of numbers, functions, settings and choices are checked, where they can be evaluated.
    """
    with contextlib.suppress(NameError):
        hints = get_type_hints(type(instance), include_extras=True)
        for field in dataclasses.fields(instance):
            hint = hints[field.name]
            kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            if all(map(_is_checked, kinds)):
                with_numpy: Any = Union[tuple({int: Whole, float: Number}.get(kind, kind) for kind in kinds)]  # noqa: UP007
                checked(f"{type(instance).__name__}.{field.name}", getattr(instance, field.name), with_numpy)


def _is_checked(kind: Any) -> bool:
    origins = (Annotated, Callable, Literal)
    return kind in (int, float, types.NoneType) or get_origin(kind) in origins or is_pydantic_dataclass(kind)


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
        return BadInput(f"{made.__name__}({args[0]!r:.60})", "takes its fields by name", f"write {names[0]}=")
    check_names(made.__name__, inspect.signature(made).parameters.values(), kwargs, len(args))
    name = names[field] if isinstance(field := first["loc"][0], int) else field
    value = {**dict(zip(names, args, strict=False)), **kwargs}[name]
    hint = get_type_hints(made, include_extras=True)[name]
    details = [detail for detail in error.errors() if detail["loc"][:1] == first["loc"][:1]]
    return _refused(details, prefix + name, value, hint)


def _refused(details: Sequence[ErrorDetails], name: str, value: Any, hint: Any) -> Exception:
    """The error for a value. details: of pydantic, several for a union."""
    first = details[0]
    if isinstance(raised := first.get("ctx", {}).get("error"), WorkbenchError):
        return raised
    kinds = [hint, *get_args(hint)]
    own = next((part for kind in kinds for part in get_args(kind) if isinstance(part, Rule)), None)
    if own is not None:
        return BadInput(f"{name}={value!r:.60}", own.rule, own.remedy)
    said = [
        RULES[d["type"]](d.get("ctx")) if d["type"] in RULES else d["msg"].replace("Input should be", "must be")
        for d in details
    ]
    rule = " or ".join([said[0], *(text.removeprefix("must be ") for text in said[1:])])
    remedy = ""
    if first["type"] == "dataclass_exact_type":
        fields = ", ".join(f"{key}={item!r}" for key, item in value.items()) if isinstance(value, Mapping) else "..."
        remedy = f"write wb.{first['ctx']['class_name']}({fields})"
    return BadInput(f"{name}={value!r:.60}", rule + (", or None" if type(None) in kinds else ""), remedy)


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `BadInput` unless `value` is one of `choices`."""
    if value not in choices:
        raise BadInput(f"{name}={value!r}", f"must be one of {', '.join(map(repr, choices))}")


def at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    """Raise `BadInput` unless `value` is at least (or, `strictly`, more than) `least`."""
    checked(name, value, Number)
    if not (value > least if strictly else value >= least):
        raise BadInput(f"{name}={value!r}", f"must be {'more than' if strictly else 'at least'} {least}")


def whole(name: str, value: int, least: int = 1) -> None:
    """Raise `BadInput` unless `value` is a whole number of at least `least`."""
    checked(name, value, Whole)
    at_least(name, value, least)
