"""Command lines: a parser that suggests the nearest word for a misspelt one, and options from annotations."""

from __future__ import annotations

import argparse
import difflib
import inspect
import itertools
import json
import re
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin

from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text

CHOICE = re.compile(r"(?s)(.*)invalid choice: '?(.*?)'? \(choose from (.*)\)$")


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that takes only whole option names. Exit code 2 for wrong usage, as in argparse."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Like argparse's method, but unknown arguments are reported by this subparser, not by its parents."""
        found, more = super().parse_known_args(args, namespace)
        if more:
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(more)}" + _nearest(more[0].partition("=")[0], options))
        return found, more

    def error(self, message: str) -> NoReturn:
        if wrong := CHOICE.match(message):
            message += _nearest(wrong[2], re.findall(r"[^\s,']+", wrong[3]))
        super().error(plain_text(message))


def _nearest(wrong: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1)
    return f". write {near[0]} (the nearest)" if near else ""


def _json_object(text: str) -> dict[str, Any]:
    if isinstance(value := json.loads(text), dict):
        return value
    raise ValueError(text)


BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# By type: the rule for a text, in words, and its reader. For a union, the first type in this order that reads the text.
READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    types.NoneType: ("none", lambda text: {"none": None}[text.lower()]),
    bool: ("true or false", lambda text: BOOLS[text.lower()]),
    int: ("a whole number", int),
    float: ("a number", float),
    dict: ("a JSON object", _json_object),
    str: ("a text", str),
    Path: ("a path", Path),
}
ORDER = [words for words, _ in READERS.values()]


class Option(NamedTuple):
    """An option of a command line. hint: the annotation of its value. metavar: the value's name in the help."""

    flag: str
    hint: Any
    help: str = ""
    metavar: str | None = None
    required: bool = False

    def add_to(self, group: Any, dest: str) -> None:
        """Add the option to a group of argparse; an option that is not given is no attribute of the result. Raises
        `BadInput` for an annotation that cannot be read from text."""
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if not self._is_flag:
            items, count = _items(self.hint)
            readers = [_readers(hint) for hint in items]
            choices = [words.removeprefix("one of ") for words in readers[0] if words.startswith("one of ")]
            metavar = self.metavar or (f"{{{choices[0].replace(', ', ',')}}}" if choices else None)
            how = {"metavar": metavar, "nargs": count, "action": "extend" if count == "*" else "store"}
        group.add_argument(
            self.flag, dest=dest, required=self.required, default=argparse.SUPPRESS,
            help=self.help.replace("%", "%%"), **how,
        )  # fmt: skip

    def value(self, texts: Any) -> Any:
        """Convert argparse's result to the annotation. Raises `BadInput` where that is impossible."""
        from workbench.support.validation import checked

        if self._is_flag:
            return texts
        items, count = _items(self.hint)
        if count is None:
            return checked(self.flag, self._read(items[0], texts), self.hint)
        values = [self._read(hint, text) for hint, text in zip(itertools.cycle(items), texts, strict=False)]
        return checked(self.flag, tuple(values) if isinstance(count, int) else values, self.hint)

    @property
    def _is_flag(self) -> bool:
        return _items(self.hint) == ((bool,), None)

    def _read(self, hint: Any, text: str) -> Any:
        readers = _readers(hint)
        for read in readers.values():
            with suppress(ValueError, KeyError):
                return read(text)
        raise BadInput(f"argument {self.flag}: {text!r} is not {' or '.join(readers)}")


def options_of(main: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of the parameters of `main`, by parameter. Raises `BadInput` where two options have the same
    name, or a parameter cannot be an option."""
    found: dict[str, Option] = {}
    signature = inspect.signature(main, eval_str=True)
    for name, parameter in signature.parameters.items():
        flag = "--" + name.strip("_").lower().replace("_", "-")  # --max-new-tokens for MAX_NEW_TOKENS
        default, hint = parameter.default, parameter.annotation
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadInput(f"{main.__name__}({parameter})", "an option must be a parameter that can be given by name")
        taken = {option.flag: other for other, option in found.items()} | {"--help": "the help"}
        if flag in taken:
            raise BadInput(f"{main.__name__}({name}=...)", f"{flag} belongs to {taken[flag]}", "choose another name")
        required = default is parameter.empty
        if hint is parameter.empty:
            hint = str if required or default is None else type(default)
        if hint in (list, tuple):  # item types are those of the default
            kinds: Any = Union[tuple(map(type, default)) or (str,)] if isinstance(default, hint) else str  # noqa: UP007
            hint = tuple[kinds, ...] if hint is tuple else list[kinds]
        said = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, str)][:1]
        shown = [] if required else [f"(default: {_shown(default)})"]
        found[name] = Option(flag, hint, " ".join(said + shown), required=required)
    return found


def _items(hint: Any) -> tuple[tuple[Any, ...], int | str | None]:
    """Return the annotations of the texts of an option, and their number in argparse's form. For a list or None it is a
    list, which is empty for an option without texts."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _items(args[0])
    if origin in (Union, types.UnionType):
        return next((found for found in map(_items, args) if found[1] is not None), ((hint,), None))
    if origin is tuple and args and Ellipsis not in args:
        return args, len(args)
    return (args[:1] or (str,), "*") if origin in (list, tuple, Sequence) else ((hint,), None)


def _readers(hint: Any) -> dict[str, Callable[[str], Any]]:
    """Return the rule for a text, in words, and its reader, for each type of a union, in the order of trying."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        return _readers(args[0])
    if origin is Literal:
        values = {_shown(value): value for value in args}
        return {f"one of {', '.join(values)}": values.__getitem__}
    if origin in (Union, types.UnionType):
        found = {words: read for part in args for words, read in _readers(part).items()}
        return dict(sorted(found.items(), key=lambda item: ORDER.index(item[0]) if item[0] in ORDER else -1))
    if origin not in READERS:
        raise BadInput(
            inspect.formatannotation(hint),
            "an option must be a number, a text, a bool, a Literal, None, a dict, or a list or tuple of these",
            "create such objects inside the function",
        )
    words, read = READERS[origin]
    return {words: read}


def _shown(value: Any) -> str:
    """Return a default as it is written on the command line."""
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    return "none" if value is None else str(value) or "''"
