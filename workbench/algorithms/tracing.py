"""Tracing an algorithm: `define` runs on stand-ins that compute nothing and record the stages that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from workbench.algorithms.graph import Graph, Stage, StandIn, stage_of
from workbench.algorithms.lab import Lab
from workbench.batches.batch import Batch
from workbench.data.example_stream import ExampleStream
from workbench.errors import BadInput
from workbench.stages.group import GroupOperation, WorkerGroup
from workbench.stages.runner import StageNames

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
