"""What pydantic's errors say in our words: the rule that a value breaks, and a remedy for it."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails

NO_DEFAULT = inspect.Parameter.empty


def _limit(value: Any) -> str:
    """A limit of a constraint, as short as it is exact: 1 for 1.0."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _kind(name: str) -> str:
    """A class, with its article."""
    known = {"Sequence": "a list", "SupportsFloat": "a number", "ndarray": "an array"}
    return known.get(name) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


# pydantic's kind of error -> the rule, with what its context says
RULES: Mapping[str, Callable[[Any], str]] = {
    "bool_type": lambda _: "must be True or False",
    "callable_type": lambda _: "must be a function",
    "dataclass_exact_type": lambda said: f"must be a wb.{said['class_name']}(...)",
    "dict_type": lambda _: "must be a dict",
    "finite_number": lambda _: "must be a finite number",
    "float_nan": lambda _: "must be a number, not nan",
    "float_overflow": lambda _: f"must be at most {sys.float_info.max:.1e}, the largest float",
    "float_type": lambda _: "must be a number",
    "greater_than": lambda said: f"must be more than {_limit(said['gt'])}",
    "greater_than_equal": lambda said: f"must be at least {_limit(said['ge'])}",
    "int_overflow": lambda _: "must fit into 64 bits",
    "int_type": lambda _: "must be a whole number",
    "is_instance_of": lambda said: f"must be {_kind(said['class'])}",
    "is_type": lambda _: "must be a class",
    "less_than": lambda said: f"must be less than {_limit(said['lt'])}",
    "less_than_equal": lambda said: f"must be at most {_limit(said['le'])}",
    "list_type": lambda _: "must be a list",
    "literal_error": lambda said: f"must be one of {said['expected'].replace(' or ', ', ')}",
    "mapping_type": lambda _: "must be a mapping, such as a dict",
    "missing": lambda _: "must have more items",
    "multiple_of": lambda said: f"must be a multiple of {_limit(said['multiple_of'])}",
    "names_type": lambda _: "must be a list of names",
    "none_required": lambda _: "must be None",
    "sequence_str": lambda _: "must be a list",
    "string_pattern_mismatch": lambda said: f"must match {said['pattern']!r}",
    "string_too_long": lambda said: f"must have at most {said['max_length']} characters",
    "string_too_short": lambda said: f"must have at least {said['min_length']} characters",
    "string_type": lambda _: "must be a text",
    "too_long": lambda said: f"must have at most {said['max_length']} items",
    "too_short": lambda said: f"must have at least {said['min_length']} items",
    "tuple_type": lambda _: "must be a tuple or a list",
}

# pydantic's kind of error -> a value that would do, as it is written
EXAMPLES: Mapping[str, Callable[[Any], str]] = {
    "bool_type": lambda _: "True",
    "callable_type": lambda _: "a_function",
    "dict_type": lambda _: "{...}",
    "finite_number": lambda _: "1.0",
    "float_nan": lambda _: "1.0",
    "float_overflow": lambda _: "1.0",
    "float_type": lambda _: "1.0",
    "greater_than_equal": lambda said: _limit(said["ge"]),
    "int_overflow": lambda _: "1",
    "int_type": lambda _: "1",
    "less_than_equal": lambda said: _limit(said["le"]),
    "list_type": lambda _: "[...]",
    "mapping_type": lambda _: "{...}",
    "names_type": lambda _: "['...']",
    "none_required": lambda _: "None",
    "sequence_str": lambda _: "[...]",
    "string_type": lambda _: "'...'",
    "tuple_type": lambda _: "(...)",
}

# estimators that users give as a loss: all of them train with this one
LOSS_OF: Mapping[str, str] = dict.fromkeys(("gae", "grpo", "dr_grpo", "dapo", "rloo"), "'ppo'")

# where an object of a class of ours comes from
SOURCES: Mapping[str, str] = {
    "Algorithm": "make one, such as wb.PPO(lab)",
    "Batch": "give what lab.prompts.next(n), or a stage, has returned",
    "Layout": "write wb.Layout(1, 1, 1)",
    "Path": "write the path as a text",
    "Placement": "write wb.Placement.colocate(devices=1), or another placement",
    "Workbench": "give what wb.open(...) has returned",
}


def said_of(detail: ErrorDetails) -> str:
    """What an error of pydantic says, in our words."""
    if detail["type"] in RULES:
        return RULES[detail["type"]](detail.get("ctx"))
    return detail["msg"].replace("Input should be", "must be")


def example_of(name: str, value: object, detail: ErrorDetails, default: object = NO_DEFAULT) -> str:
    """A remedy: the default, or another value that would do. name: as in messages, such as "Sampling.top_p"."""
    field, said, kind = name.rpartition(".")[2], detail.get("ctx", {}), detail["type"]
    called = f"{field}=" if field.isidentifier() else ""
    if kind == "is_instance_of" and said["class"] in SOURCES:
        return SOURCES[said["class"]]
    if kind == "literal_error":
        choices = said["expected"].replace(" or ", ", ").split(", ")
        if isinstance(value, str) and field == "loss" and (loss := LOSS_OF.get(value.lower())) in choices:
            return f"write loss={loss}, the loss that {value.upper()} uses"
        near = difflib.get_close_matches(repr(value), choices, n=1) if isinstance(value, str) else []
        return f"write {called}{(near or choices)[0]}"
    if kind in ("float_type", "int_type") and isinstance(value, str) and (number := _number_in(value)) is not None:
        return f"write {called}{number!r}, without quotes"
    of_number = kind.startswith(("float", "int", "finite"))  # any other number would be a guess
    if (isinstance(default, (bool, int, float, str)) and default != "") or (default is None and of_number):
        return f"write {called}{default!r}, its default"
    if kind == "is_instance_of":
        return f"give {_kind(said['class'])}"
    return f"write {called}{EXAMPLES[kind](said)}" if kind in EXAMPLES else ""


def _number_in(text: str) -> int | float | None:
    """The finite number that a text writes, if it does."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            return number if math.isfinite(number) else None
    return None
