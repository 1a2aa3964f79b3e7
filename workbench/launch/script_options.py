"""A function's parameters as options of a command line: what they are called, how their texts are read, their help."""

from __future__ import annotations

import argparse
import inspect
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from workbench.errors import BadInput


class Reader(NamedTuple):
    """How a text becomes a value; `what` it must be, in words. Raises `ValueError` for another."""

    what: str
    read: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.what}") from error


def _true_or_false(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError(text)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


# in the order in which those of a union are tried: a text is everything
READERS: dict[Any, Reader] = {
    types.NoneType: Reader("none", _none),
    bool: Reader("true or false", _true_or_false),
    int: Reader("a whole number", int),
    float: Reader("a number", float),
    dict: Reader("a JSON object", _object),
    Path: Reader("a path", Path),
    str: Reader("a text", str),
}


class _Many(argparse.Action):
    """Keeps the values of an option as the container that `const` is."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, self.const(values))


def option_of(name: str) -> str:
    """What the option of a parameter is called: `--max-new-tokens` of MAX_NEW_TOKENS."""
    return "--" + name.strip("_").lower().replace("_", "-")


def parameters_of(main: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `main` by option, with their annotations evaluated. Raises `BadInput` where two have the same,
    or one cannot be an option."""
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
        hint, *more = get_args(hint)
        said = next((text for text in more if isinstance(text, str)), "")
    required = parameter.default is inspect.Parameter.empty
    shown = "" if required else f"(default: {_shown(parameter.default)})"
    group.add_argument(
        option,
        dest=parameter.name,
        required=required,
        default=argparse.SUPPRESS,
        help=" ".join(filter(None, (said, shown))).replace("%", "%%"),
        **_reading(hint, parameter),
    )


def _reading(hint: Any, parameter: inspect.Parameter) -> dict[str, Any]:
    """How argparse reads an option of a type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    given = [kind for kind in _alternatives(hint) if kind is not types.NoneType]
    origin = get_origin(given[0]) or given[0]
    if len(given) == 1 and origin in (list, tuple, Sequence):
        kinds = [kind for kind in get_args(given[0]) if kind is not Ellipsis]
        if not kinds and isinstance(parameter.default, (list, tuple)):
            kinds = [type(item) for item in parameter.default]
        fixed = origin is tuple and bool(get_args(given[0])) and Ellipsis not in get_args(given[0])
        item = Union[tuple(kinds)] if kinds else str  # noqa: UP007 (of kinds that are known here only)
        container = tuple if origin is tuple else list
        count = len(kinds) if fixed else "*"
        return {"action": _Many, "const": container, "nargs": count, "type": _reader(item, parameter)}
    return {"type": _reader(hint, parameter)}


def _reader(hint: Any, parameter: inspect.Parameter) -> Reader:
    if get_origin(hint) is Literal:
        values = {str(value): value for value in get_args(hint)}
        return Reader(f"one of {', '.join(values)}", lambda text: _looked_up(values, text))
    kinds = [get_origin(kind) or kind for kind in _alternatives(hint)]
    if len(kinds) > 1:
        readers = [_reader(kind, parameter) for kind in _alternatives(hint)]
        readers.sort(key=lambda reader: ORDER.get(reader.what, 0))
        return Reader(" or ".join(reader.what for reader in readers), lambda text: _first(readers, text))
    if kinds[0] not in READERS:
        raise BadInput(
            f"parameter {parameter.name}: {inspect.formatannotation(hint)}",
            "an option is a number, a text, a bool, a Literal, none, a dict, or a list or tuple of these",
            "make it inside the function",
        )
    return READERS[kinds[0]]


ORDER = {reader.what: number for number, reader in enumerate(READERS.values())}


def _looked_up(values: dict[str, Any], text: str) -> Any:
    if text not in values:
        raise ValueError(text)
    return values[text]


def _first(readers: Sequence[Reader], text: str) -> Any:
    for reader in readers:
        try:
            return reader.read(text)
        except ValueError:
            continue
    raise ValueError(text)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _shown(value: Any) -> str:
    """A default as it would be written on the command line."""
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value) or "''"
