"""A function's parameters as options of a command line: their names and help; pydantic reads their texts."""

from __future__ import annotations

import argparse
import inspect
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, Json, TypeAdapter, ValidationError

from workbench.errors import BadInput


def _none(text: str) -> str | None:
    return None if text.lower() == "none" else text


# type -> how pydantic reads it from a text, and what the text must be, in words; of a union, the first that reads it
TYPES: dict[Any, tuple[Any, str]] = {
    types.NoneType: (Annotated[None, BeforeValidator(_none)], "none"),
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    dict: (Json[dict[str, Any]], "a JSON object"),
    Path: (Path, "a path"),
    str: (str, "a text"),
}
ORDER = [kind for kind, _ in TYPES.values()]


class _Read(argparse.Action):
    """Keeps what pydantic reads from the texts of an option. const: the annotation to read them as, and in words."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        hint, what = self.const
        try:
            setattr(namespace, self.dest, TypeAdapter(hint).validate_python(values))
        except ValidationError as error:
            wrong = values if isinstance(values, str) else values[error.errors()[0]["loc"][0]]  # type: ignore[call-overload]
            raise argparse.ArgumentError(self, f"{wrong!r} is not {what}") from None


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
        reading: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    else:
        read_as, what, count = _read_as(hint, parameter)
        reading = {"action": _Read, "const": (read_as, what), "nargs": count}
    group.add_argument(
        option,
        dest=parameter.name,
        required=required,
        default=argparse.SUPPRESS,
        help=" ".join(filter(None, (said, shown))).replace("%", "%%"),
        **reading,
    )


def _read_as(hint: Any, parameter: inspect.Parameter) -> tuple[Any, str, int | str | None]:
    """The annotation with which pydantic reads an option; what each of its texts must be, in words; how many texts."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        inner, what, count = _read_as(args[0], parameter)
        return Annotated[inner, *args[1:]], what, count
    if origin is Literal:
        values = {str(value): value for value in args}
        return Annotated[hint, BeforeValidator(lambda text: values.get(text))], f"one of {', '.join(values)}", None
    if origin in (list, tuple, Sequence):
        defaults = parameter.default if not args and isinstance(parameter.default, (list, tuple)) else ()
        kinds = [kind for kind in args or map(type, defaults) if kind is not Ellipsis] or [str]
        items, whats, _ = zip(*(_read_as(kind, parameter) for kind in kinds), strict=True)
        if origin is tuple and args and Ellipsis not in args:
            return tuple[items], " or ".join(dict.fromkeys(whats)), len(items)
        item, what, _ = _read_as(Union[tuple(kinds)], parameter)  # noqa: UP007 (of kinds that are known here only)
        return (tuple[item, ...] if origin is tuple else list[item]), what, "*"  # type: ignore[valid-type]
    if origin in (Union, types.UnionType):
        parts = [_read_as(kind, parameter) for kind in args if kind is not types.NoneType]
        if len(parts) == 1 and parts[0][2] is not None:  # an option without texts is an empty list, so none is no text
            return parts[0]
        kinds_and_words = [part[:2] for part in parts] + [TYPES[kind] for kind in args if kind is types.NoneType]
        kinds_and_words.sort(key=lambda part: ORDER.index(part[0]) if part[0] in ORDER else -1)
        union = Union[tuple(kind for kind, _ in kinds_and_words)]  # noqa: UP007
        return Annotated[union, Field(union_mode="left_to_right")], " or ".join(w for _, w in kinds_and_words), None
    if origin not in TYPES:
        raise BadInput(
            f"parameter {parameter.name}: {inspect.formatannotation(hint)}",
            "an option is a number, a text, a bool, a Literal, none, a dict, or a list or tuple of these",
            "make it inside the function",
        )
    return *TYPES[origin], None


def _shown(value: Any) -> str:
    """A default as it would be written on the command line."""
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value) or "''"
