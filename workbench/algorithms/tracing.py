"""Tracing an algorithm: `define` runs on stand-ins that compute nothing and record the stages that it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.algorithms.graph import Graph, Stage, StandIn, stage_of
from workbench.algorithms.lab import Lab
from workbench.data.example_stream import ExampleStream
from workbench.errors import BadInput
from workbench.stages.group import GroupOperation, WorkerGroup
from workbench.stages.stage_names import StageNames

PROMPT_COLUMNS = ("prompt_ids", "prompt_uid", "prompt")


class TracedBatch(StandIn):
    """A stand-in for a batch: it can be given to stages, and its methods become stages."""

    def __init__(self, tracer: Tracer, stage: Stage) -> None:
        super().__init__(stage.name)
        object.__setattr__(self, "_tracer", tracer)

    def __getattr__(self, name: str) -> Any:
        from workbench.batches.batch import Batch

        tracer: Tracer = object.__getattribute__(self, "_tracer")
        if name.startswith("_") or not callable(getattr(Batch, name, None)):
            raise BadInput(
                f"{tracer.title}: batch.{name}",
                "the lines of a dataflow do not look at what is in a batch: they are also run without one",
                "put what depends on values into a function, as a stage: lab.apply(function, batch)",
            )

        def method(*args: Any, **kwargs: Any) -> TracedBatch:
            others = tuple(a.stage for a in args if isinstance(a, StandIn))
            plain = tuple(StandIn(a.stage) if isinstance(a, StandIn) else a for a in args)
            inputs = (self.stage, *others)
            return tracer.note(Stage(name=name, role="batch", operation=name, inputs=inputs, args=plain, kwargs=kwargs))

        return method


class Tracer(StageNames):
    """Stands in for a workbench while the lines of an algorithm are run to see what they call."""

    def __init__(self, lab: Lab, title: str) -> None:
        self.title, self._lab = title, lab
        self.stages: list[Stage] = []
        self.prompts = _TracedPrompts(self, lab)

    def __getattr__(self, name: str) -> Any:
        lab = self._lab
        if name == "compute_advantages":
            return _TracedOperation(self, lab.compute_advantages)
        if name in lab.groups:
            return _TracedGroup(self, lab.groups[name])
        return getattr(lab, name)  # plain values, such as the seed; and the error for a role that is not there

    def apply(self, function: Callable[..., Any], *batches: StandIn, **kwargs: Any) -> TracedBatch:
        """A function of batches, as a stage; or the `next` of a stream of examples, whose columns are known."""
        stream = getattr(function, "__self__", None)
        if isinstance(stream, ExampleStream):
            kind = stream.examples.kind
            return self.note(
                Stage(
                    name=kind, role="prompts", operation=kind, kwargs=kwargs, writes=stream.columns, function=function
                )
            )
        name = str(getattr(function, "__name__", type(function).__name__))
        return self.note(stage_of(function, name, tuple(batch.stage for batch in batches), (), kwargs))

    def note(self, stage: Stage) -> TracedBatch:
        """Record a stage under a unique name."""
        taken, number = {other.name for other in self.stages}, 1
        name = wanted = (
            self._stage_name if self._stage_name and isinstance(stage.function, GroupOperation) else stage.name
        )
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        stage = replace(stage, name=name)
        if stage.role == "batch":
            stage = replace(stage, columns=_columns_after(stage, {s.name: s.columns for s in self.stages}))
        self.stages.append(stage)
        return TracedBatch(self, stage)

    def graph(self) -> Graph:
        """The recorded stages, checked."""
        return Graph(self.title, ()).checked(self.stages)


def _columns_after(stage: Stage, known: Mapping[str, tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Columns of what a batch's own method returns."""
    have = known[stage.inputs[0]]
    if have is None:
        return None
    if stage.operation == "select":
        return tuple(stage.args)
    if stage.operation == "rename":
        return tuple(stage.kwargs.get(old, old) for old in have)
    if stage.operation == "drop":
        return tuple(name for name in have if name not in stage.args)
    if stage.operation == "join":
        more = known[stage.inputs[1]]
        return None if more is None else (*have, *more)
    return have


class _TracedPrompts:
    def __init__(self, tracer: Tracer, lab: Lab) -> None:
        self._tracer = tracer
        self._extra = lab.prompts.source.extra_columns if lab.prompts.source is not None else ()

    def next(self, n: int) -> TracedBatch:
        columns = (*PROMPT_COLUMNS, *self._extra)
        return self._tracer.note(Stage(name="prompts", role="prompts", operation="prompts", args=(n,), writes=columns))


class _TracedGroup:
    def __init__(self, tracer: Tracer, group: WorkerGroup) -> None:
        self._tracer, self._group = tracer, group

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)
        return _TracedOperation(self._tracer, operation) if isinstance(operation, GroupOperation) else operation


class _TracedOperation:
    def __init__(self, tracer: Tracer, operation: GroupOperation) -> None:
        self._tracer, self._operation = tracer, operation

    def __call__(self, *args: Any, **kwargs: Any) -> TracedBatch:
        operation = self._operation.operation
        batch = kwargs.pop("batch") if "batch" in kwargs else None
        inputs: tuple[str, ...] = ()
        if operation.takes_batch:
            batch, args = (batch, args) if batch is not None else (args[0] if args else None, args[1:])
            if not isinstance(batch, StandIn):
                where = f"{self._operation.group.role}.{operation.name}"
                raise BadInput(f"{where}({type(batch).__name__})", "its first argument is a batch")
            inputs = (batch.stage,)
        return self._tracer.note(stage_of(self._operation, operation.name, inputs, args, kwargs))


def trace(lab: Lab, lines: Callable[[Any], object], title: str) -> Graph:
    """The graph of an algorithm's lines: a function of a workbench that calls its stages."""
    tracer = Tracer(lab, title)
    lines(tracer)
    if not tracer.stages:
        raise BadInput(f"{title}: no stage was called", "its lines call stages of the workbench they are given")
    return tracer.graph()
