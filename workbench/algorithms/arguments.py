"""The arguments of a stage, and which of them come from fields of the algorithm."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from workbench.algorithms.marks import mark
from workbench.algorithms.tracing import Tracer
from workbench.objectives.covariance import clips_in_effect
from workbench.support.validation import is_settings
from workbench.workers.scoring import weights_in_effect


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a stage. default: the operation's own; `inspect.Parameter.empty` where it has none. source: where
    the value comes from, in words. field: of the algorithm, which gives the value: "clip", "sampling.temperature".
    in_effect: what a value stands for that does not say it all: a loss's own clip for None, the weights of all
    components of a reward; else empty."""

    name: str
    value: Any
    default: Any
    source: str
    field: str = ""
    in_effect: str = ""


def in_effect(values: Mapping[str, Any]) -> dict[str, str]:
    """By argument of a stage, what its value stands for. values: of all of its arguments."""
    found = {name: f"{clip:g}" for name, clip in clips_in_effect(values).items() if values.get(name) is None}
    if "weights" in values and isinstance(values.get("function"), Mapping):
        weights = weights_in_effect(values["function"], values["weights"])
        found |= {"weights": ", ".join(f"{name} {weight:g}" for name, weight in weights.items())}
    return found


def fields_of(algorithm: Any, stage: str) -> dict[str, str]:
    """By argument, the field that it comes from: `define` is traced once for each field, with a mark in its place."""
    found: dict[str, str] = {}
    for path, name, value, marked in _marked_fields(algorithm):
        trial = object.__new__(type(algorithm))
        trial.__dict__.update(algorithm.__dict__, **{name: value, "_live": False})
        tracer = Tracer(algorithm.lab, type(algorithm).__name__)
        with suppress(Exception):  # a mark is no value for all that a `define` may do: what was traced before counts
            trial.define(tracer)
        for traced in tracer.stages:
            if traced.name == stage:
                found |= {name: path for name, value in traced.given_arguments.items() if value is marked}
    return found


def _marked_fields(algorithm: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """For each field of settings, and each field: its path, the field of the algorithm, its value with a mark in it,
    the mark."""
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if field.name == "lab":
            continue
        for inner in dataclasses.fields(value) if is_settings(type(value)) else ():
            settings, marked = copy.copy(value), mark(getattr(value, inner.name))
            settings.__dict__[inner.name] = marked
            yield f"{field.name}.{inner.name}", field.name, settings, marked
        marked = mark(value)
        yield field.name, field.name, marked, marked
