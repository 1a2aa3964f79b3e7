"""Tracing an algorithm: `define` runs on stand-ins that compute nothing and record the stages that it calls, and which
of their arguments come from fields of the algorithm."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from workbench.algorithms.graph import Graph, Stage, StandIn, stage_of
from workbench.algorithms.lab import Lab
from workbench.algorithms.marks import mark
from workbench.batches.batch import Batch
from workbench.data.example_stream import ExampleStream
from workbench.errors import BadInput
from workbench.objectives.covariance import clips_in_effect
from workbench.stages.group import GroupOperation, WorkerGroup
from workbench.stages.runner import StageNames
from workbench.support.validation import is_settings
from workbench.workers.scoring import weights_in_effect

PROMPT_COLUMNS = ("prompt_ids", "prompt_uid", "prompt")


class TracedBatch(StandIn):
    """A stand-in for a batch: it can be given to stages, and its methods become stages."""

    def __init__(self, tracer: Tracer, stage: str) -> None:
        super().__init__(stage)
        object.__setattr__(self, "_tracer", tracer)

    def __getattr__(self, name: str) -> Any:
        tracer: Tracer = object.__getattribute__(self, "_tracer")
        if name.startswith("_") or not callable(getattr(Batch, name, None)):
            raise BadInput(
                f"{tracer.title}: batch.{name}",
                "the lines of a dataflow do not look at what is in a batch: they are also run without one",
                "put what depends on values into a function, as a stage: lab.apply(function, batch)",
            )

        def method(*args: Any, **kwargs: Any) -> TracedBatch:
            plain = tuple(StandIn(a.stage) if isinstance(a, StandIn) else a for a in args)
            inputs = (self.stage, *(a.stage for a in plain if isinstance(a, StandIn)))
            return tracer.note(Stage(name=name, role="batch", operation=name, inputs=inputs, args=plain, kwargs=kwargs))

        return method


class TracedGroup:
    """A stand-in for a role: its operations are recorded."""

    def __init__(self, tracer: Tracer, group: WorkerGroup) -> None:
        self._tracer, self._group = tracer, group

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)
        return partial(self._tracer.call, operation) if isinstance(operation, GroupOperation) else operation


class Tracer(StageNames):
    """Stands in for a workbench while the lines of an algorithm are run to see what they call."""

    def __init__(self, lab: Lab, title: str) -> None:
        self.title, self._lab = title, lab
        self.stages: list[Stage] = []
        self.prompts = SimpleNamespace(next=self._prompts)

    def __getattr__(self, name: str) -> Any:
        lab = self._lab
        if name == "compute_advantages":
            return partial(self.call, lab.compute_advantages)
        if name in lab.groups:
            return TracedGroup(self, lab.groups[name])
        return getattr(lab, name)  # plain values, such as the seed; and the error for a role that is not there

    def _prompts(self, n: int) -> TracedBatch:
        source = self._lab.prompts.source
        columns = (*PROMPT_COLUMNS, *(() if source is None else source.extra_columns))
        return self.note(Stage(name="prompts", role="prompts", operation="prompts", args=(n,), writes=columns))

    def apply(self, function: Callable[..., Any], *batches: StandIn, **kwargs: Any) -> TracedBatch:
        """A function of batches, as a stage; or the `next` of a stream of examples, whose columns are known."""
        stream = getattr(function, "__self__", None)
        if isinstance(stream, ExampleStream):
            kind, writes = stream.examples.kind, stream.columns
            return self.note(
                Stage(name=kind, role="prompts", operation=kind, kwargs=kwargs, writes=writes, function=function)
            )
        name = str(getattr(function, "__name__", type(function).__name__))
        return self.note(stage_of(function, name, tuple(batch.stage for batch in batches), (), kwargs))

    def call(self, called: GroupOperation, /, *args: Any, **kwargs: Any) -> TracedBatch:
        """A call of an operation, as a stage."""
        operation, inputs = called.operation, tuple[str, ...]()
        batch = kwargs.pop("batch", None)
        if operation.takes_batch:
            if batch is None:
                batch, args = next(iter(args), None), args[1:]
            if not isinstance(batch, StandIn):
                where = f"{called.group.role}.{operation.name}"
                raise BadInput(f"{where}({type(batch).__name__})", "its first argument is a batch")
            inputs = (batch.stage,)
        return self.note(stage_of(called, operation.name, inputs, args, kwargs))

    def note(self, stage: Stage) -> TracedBatch:
        """Record a stage under a unique name."""
        taken, number = {other.name for other in self.stages}, 1
        named = isinstance(stage.function, GroupOperation) and self.stage_name
        name = wanted = named or stage.name
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        self.stages.append(replace(stage, name=name))
        return TracedBatch(self, name)

    def graph(self) -> Graph:
        """The recorded stages, checked."""
        if not self.stages:
            raise BadInput(
                f"{self.title}: no stage was called", "its lines call stages of the workbench they are given"
            )
        return Graph(self.title, ()).checked(self.stages)


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
