"""A function's parameters as options of a command line: their names and help; pydantic reads their texts."""

from __future__ import annotations

import argparse
import inspect
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from workbench.errors import BadInput
from workbench.support.rules import said_of
from workbench.support.validation import rule_of

UNREADABLE = "unreadable"  # pydantic's kind of error for a text that is no value of the type
BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _reader(read: Callable[[str], Any]) -> BeforeValidator:
    """Reads a text before pydantic does; `read` raises a `ValueError` or a `KeyError` for one that it cannot read."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise PydanticCustomError(UNREADABLE, UNREADABLE) from None

    return BeforeValidator(reader)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


class Reading(NamedTuple):
    """How an option is read: the annotation that pydantic reads its texts as; what each text must be, in words; how
    many texts there are, as argparse says it."""

    hint: Any
    what: str
    texts: int | str | None = None


# by type; of a union, the first in this order that reads the text
TYPES: dict[Any, Reading] = {
    types.NoneType: Reading(Annotated[None, _reader(lambda text: {"none": None}[text.lower()])], "none"),
    bool: Reading(Annotated[bool, _reader(lambda text: BOOLS[text.lower()])], "true or false"),
    int: Reading(Annotated[int, _reader(int)], "a whole number"),
    float: Reading(Annotated[float, _reader(float)], "a number"),
    dict: Reading(Annotated[dict[str, Any], _reader(_object)], "a JSON object"),
    Path: Reading(Path, "a path"),
    str: Reading(str, "a text"),
}


class _Read(argparse.Action):
    """Keeps what pydantic reads from the texts of an option. const: its `Reading`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        reading: Reading = self.const
        try:
            setattr(namespace, self.dest, TypeAdapter(reading.hint).validate_python(values))
        except ValidationError as error:
            raise argparse.ArgumentError(self, _refusal(error.errors(), values, reading)) from None


def _refusal(details: Sequence[ErrorDetails], values: Any, reading: Reading) -> str:
    """What an option answers to a text that cannot be read, or whose value the annotation does not allow."""
    broken = [detail for detail in details if detail["type"] != UNREADABLE]
    place = (broken or details)[0]["loc"]
    in_list = isinstance(values, list) and place and isinstance(place[0], int) and place[0] < len(values)
    wrong = values[place[0]] if in_list else values if isinstance(values, str) else " ".join(values)
    if not broken:
        return f"{wrong!r} is not {reading.what}"
    rule, remedy = rule_of(reading.hint)
    return ". ".join(filter(None, (f"{wrong!r} {rule or said_of(broken[0])}", remedy)))


def option_of(name: str) -> str:
    """What the option of a parameter is called: `--max-new-tokens` of MAX_NEW_TOKENS."""
    return "--" + name.strip("_").lower().replace("_", "-")


def parameters_of(main: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `main` by option, with their annotations evaluated. Raises `BadInput` where two have the same
    option, or one cannot be an option."""
    hints = get_type_hints(main, include_extras=True)
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(main).parameters.items():
        option = option_of(name)
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadInput(f"{main.__name__}({parameter})", "an option is a parameter of its own, given by name")
        if option in found or option == "--help":
            other = found[option].name if option in found else "the help"
            raise BadInput(f"{main.__name__}({name}=...)", f"{option} is {other}'s", "choose another name")
        default = parameter.default
        unsaid = str if default in (inspect.Parameter.empty, None) else type(default)
        found[option] = parameter.replace(annotation=hints.get(name, unsaid))
    return found


def add_option(group: Any, option: str, parameter: inspect.Parameter) -> None:
    """Add a parameter's option to a group of argparse. One that is not given leaves the default to the function."""
    hint, said = parameter.annotation, ""
    if get_origin(hint) is Annotated:
        said = next((text for text in get_args(hint)[1:] if isinstance(text, str)), "")
        hint = get_args(hint)[0] if get_args(hint)[0] is bool else hint
    required = parameter.default is inspect.Parameter.empty
    shown = "" if required else f"(default: {_shown(parameter.default)})"
    if hint is bool:
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    else:
        reading = _read_as(hint, parameter)
        how = {"action": _Read, "const": reading, "nargs": reading.texts}
    group.add_argument(
        option,
        dest=parameter.name,
        required=required,
        default=argparse.SUPPRESS,
        help=" ".join(filter(None, (said, shown))).replace("%", "%%"),
        **how,
    )


def _read_as(hint: Any, parameter: inspect.Parameter) -> Reading:
    """How an option of an annotation is read. Raises `BadInput` for an annotation that no text can be read as."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        inner = _read_as(args[0], parameter)
        return inner._replace(hint=Annotated[inner.hint, *args[1:]])
    if origin is Literal:
        values = {"none" if value is None else str(value): value for value in args}
        return Reading(Annotated[hint, _reader(values.__getitem__)], f"one of {', '.join(values)}")
    if origin in (list, tuple, Sequence):
        return _read_several(origin, args, parameter)
    if origin in (Union, types.UnionType):
        return _read_union(args, parameter)
    if origin not in TYPES:
        raise BadInput(
            f"parameter {parameter.name}: {inspect.formatannotation(hint)}",
            "an option is a number, a text, a bool, a Literal, none, a dict, or a list or tuple of these",
            "make it inside the function",
        )
    return TYPES[origin]


def _read_several(origin: Any, args: tuple[Any, ...], parameter: inspect.Parameter) -> Reading:
    """A list, or a tuple, of one length or of any."""
    defaults = parameter.default if not args and isinstance(parameter.default, (list, tuple)) else ()
    kinds = [kind for kind in args or map(type, defaults) if kind is not Ellipsis] or [str]
    if origin is tuple and args and Ellipsis not in args:
        items = [_read_as(kind, parameter) for kind in kinds]
        fixed: Any = tuple[tuple(item.hint for item in items)]  # type: ignore[misc]
        return Reading(fixed, " or ".join(dict.fromkeys(item.what for item in items)), len(items))
    item = _read_as(Union[tuple(kinds)], parameter)  # noqa: UP007 (of kinds that are known here only)
    return Reading(tuple[item.hint, ...] if origin is tuple else list[item.hint], item.what, "*")  # type: ignore[name-defined]


def _read_union(args: tuple[Any, ...], parameter: inspect.Parameter) -> Reading:
    """The first type of a union that reads the text. A list or nothing is a list: an option without texts is empty."""
    parts = [_read_as(kind, parameter) for kind in args]
    several = [part for part in parts if part.texts is not None]
    if several:
        return several[0]
    order = [reading.what for reading in TYPES.values()]
    parts.sort(key=lambda part: order.index(part.what) if part.what in order else -1)
    union: Any = Union[tuple(part.hint for part in parts)]  # noqa: UP007
    return Reading(Annotated[union, Field(union_mode="left_to_right")], " or ".join(part.what for part in parts))


def _shown(value: Any) -> str:
    """A default as it would be written on the command line."""
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value) or "''"
