"""Build the graph of an algorithm's stages by tracing `define`, and let a cell or a panel change that graph."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import Parameter
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

from workbench.algorithms.graph import Graph, Stage, StandIn, mark, stage_of
from workbench.algorithms.lab import Lab
from workbench.algorithms.live_fields import DEFINED, TRACED, LiveFields, as_plain, is_same, value_in_effect
from workbench.batches.batch import Batch
from workbench.data.examples import ExampleStream
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.objectives.losses import clips_in_effect
from workbench.stages.group import GroupOperation, LiveTraining, WorkerGroup
from workbench.stages.runner import StageNames
from workbench.support.checked_calls import checks_calls
from workbench.support.named_fields import remedy_for
from workbench.support.validation import is_settings
from workbench.workers.scoring import weights_in_effect

PROMPT_COLUMNS = ("prompt_ids", "prompt_uid", "prompt")


class TracedBatch(StandIn):
    """A stand-in for a batch while `define` is traced: stages accept it, and calls of its methods become stages."""

    def __init__(self, tracer: Tracer, stage: str) -> None:
        super().__init__(stage)
        object.__setattr__(self, "_tracer", tracer)

    def __getattr__(self, name: str) -> Any:
        tracer: Tracer = object.__getattribute__(self, "_tracer")
        made = getattr(getattr(Batch, name, None), "__annotations__", {})
        if name.startswith("_") or made.get("return") != Batch.__name__:  # it returns no batch
            raise _looks_at(f"{tracer.title}: batch.{name}", self.stage)

        def method(*args: Any, **kwargs: Any) -> TracedBatch:
            plain = tuple(StandIn(a.stage) if isinstance(a, StandIn) else a for a in args)
            inputs = (self.stage, *(a.stage for a in plain if isinstance(a, StandIn)))
            return tracer.note(Stage(name=name, role="batch", operation=name, inputs=inputs, args=plain, kwargs=kwargs))

        return method

    def __getitem__(self, key: Any) -> Any:
        raise _looks_at(f"[{key!r}] of the output of {self.stage}", self.stage)

    def __iter__(self) -> Any:
        raise _looks_at(f"a loop over the output of {self.stage}", self.stage)

    def __len__(self) -> int:
        raise _looks_at(f"len() of the output of {self.stage}", self.stage)

    def __bool__(self) -> bool:
        raise _looks_at(f"the output of {self.stage} as a condition", self.stage)


def _looks_at(what: str, stage: str) -> BadInput:
    return BadInput(
        f"{what} in define",
        "define cannot read the output of a stage: workbench also runs it without outputs, to find its stages",
        "move the code that reads values to a function, and make that a stage: lab.apply(function, batch); a cell "
        f"can read algorithm.made[{stage!r}]",
    )


class TracedGroup:
    """A stand-in for a role while `define` is traced: it records calls of the role's operations."""

    def __init__(self, tracer: Tracer, group: WorkerGroup) -> None:
        self._tracer, self._group = tracer, group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        if isinstance(value, GroupOperation):
            return partial(self._tracer.call, value)
        if isinstance(value, LiveTraining):
            return LiveTraining(self._group.role, lambda: self._group.spec.training, self._refuse)
        return value

    def _refuse(self, role: str, values: Mapping[str, Any]) -> None:
        given = ", ".join(f"lab.{role}.training.{field} = {shown(value)}" for field, value in values.items())
        raise BadInput(
            f"{self._tracer.title}: {given} in define",
            TRACED,
            "change settings in finish(self, metrics), or from a cell",
        )


class Tracer(StageNames):
    """A stand-in for a workbench: `define` runs on it, and it records the stages that `define` calls."""

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
        if name == "last_metrics":
            raise BadInput(
                f"{self.title}: lab.last_metrics in define",
                "workbench also runs define before these stages, to find them",
                "read them in finish(self, metrics), and keep what define needs in a field",
            )
        value = getattr(lab, name)  # plain values, such as the seed; raises for a role that does not exist
        if callable(value):
            raise BadInput(
                f"{self.title}: lab.{name} in define",
                "workbench also runs define to find its stages, which would repeat this call each time",
                "call it in a function that is a stage: lab.apply(function, batch); or call it between iterations: in "
                "a cell, in run(evaluate=...), or in finish",
            )
        return value

    def _prompts(self, n: int) -> TracedBatch:
        source = self._lab.prompts.source
        columns = (*PROMPT_COLUMNS, *(() if source is None else source.extra_columns))
        return self.note(Stage(name="prompts", role="prompts", operation="prompts", args=(n,), writes=columns))

    def apply(self, function: Callable[..., Any], *batches: StandIn, **kwargs: Any) -> TracedBatch:
        """Record a stage: a function of batches, or the `next` of a stream of examples, whose columns are known."""
        stream = getattr(function, "__self__", None)
        if isinstance(stream, ExampleStream):
            kind, writes = stream.examples.kind, stream.columns
            return self.note(
                Stage(name=kind, role="prompts", operation=kind, kwargs=kwargs, writes=writes, function=function)
            )
        name = str(getattr(function, "__name__", type(function).__name__))
        return self.note(stage_of(function, name, tuple(batch.stage for batch in batches), (), kwargs))

    def call(self, called: GroupOperation, /, *args: Any, **kwargs: Any) -> TracedBatch:
        operation, inputs = called.operation, tuple[str, ...]()
        batch = kwargs.pop("batch", None)
        if operation.takes_batch:
            if batch is None:
                batch, args = next(iter(args), None), args[1:]
            if not isinstance(batch, StandIn):
                where = f"{called.group.role}.{operation.name}"
                raise BadInput(f"{where}({type(batch).__name__})", "the first argument must be a batch")
            inputs = (batch.stage,)
        return self.note(stage_of(called, operation.name, inputs, args, kwargs))

    def note(self, stage: Stage) -> TracedBatch:
        """Record a stage under a unique name."""
        taken, number = {other.name for other in self.stages}, 1
        name = wanted = (isinstance(stage.function, GroupOperation) and self.stage_name) or stage.name
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        self.stages.append(stage if name == stage.name else replace(stage, name=name))
        return TracedBatch(self, name)

    def graph(self) -> Graph:
        """Return the graph of the recorded stages, after checking their columns."""
        if not self.stages:
            raise BadInput(
                f"{self.title}: no stage was called", "define must call stages of the workbench that it is given"
            )
        return Graph(self.title, ()).checked(self.stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a stage. default: the operation's default; `inspect.Parameter.empty` if it has none. source: where
    the value comes from, in words. field: the algorithm's field that the value comes from: "clip",
    "sampling.temperature". in_effect: what is used if the value alone does not say it: the loss's own clip for None,
    the weights of all components of a reward; else ""."""

    name: str
    value: Any
    default: Any
    source: str
    field: str = ""
    in_effect: str = ""


def in_effect(values: Mapping[str, Any]) -> dict[str, str]:
    """Return `Argument.in_effect` by argument name. values: all arguments of the stage."""
    found = {name: f"{clip:g}" for name, clip in clips_in_effect(values).items() if values.get(name) is None}
    if "weights" in values and isinstance(values.get("function"), Mapping):
        weights = weights_in_effect(values["function"], values["weights"])
        found |= {"weights": ", ".join(f"{name} {weight:g}" for name, weight in weights.items())}
    return found


def fields_of(algorithm: Any, stage: str) -> dict[str, str]:
    """Return each argument's field: trace `define` once per field, with a mark as its value; look for the mark."""
    found: dict[str, str] = {}
    for path, name, value, marked in _marked_fields(algorithm):
        trial = object.__new__(type(algorithm))
        trial.__dict__.update(algorithm.__dict__, **{name: value, "_live": False})
        tracer = Tracer(algorithm.lab, type(algorithm).__name__)
        with suppress(Exception):  # `define` may fail on a mark: then the stages traced before the failure are used
            trial.define(tracer)
        for traced in tracer.stages:
            if traced.name == stage:
                found |= {name: path for name, value in traced.given_arguments.items() if value is marked}
    return found


def _marked_fields(algorithm: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield, for each field and each field of its settings: the path, the algorithm's field, that field's value with a
    mark in it, and the mark."""
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


Once = Mapping[str, Mapping[str, Any]]  # by stage, the arguments for its next run only


@checks_calls("algo")
class StageEdits(LiveFields, ABC):
    """Base of the algorithms: `graph` has the stages that `define` calls, with all changes made to them since."""

    _made: dict[str, Any]
    _edits: list[Callable[[Graph], Graph]]
    _once: Once = MappingProxyType({})  # always replaced as a whole: a panel's thread may change it at the same time
    _under_way = False
    # by stage, the arguments given to `replace`; None: a function replaced the stage
    _replaced: dict[str, dict[str, Any] | None]
    _keep_rows: ClassVar[tuple[str, ...]] = ()  # functions of `define` that return as many rows as they take

    @abstractmethod
    def define(self, lab: Any) -> None:
        """Call the stages of one iteration. `graph` runs this on stand-ins, so it must not read the rows of a batch."""

    @property
    def made(self) -> dict[str, Any]:
        """The results of the newest iteration's stages so far, by stage name: batches and metrics."""
        return self._made

    @property
    def under_way(self) -> bool:
        """Whether an iteration has begun and has not ended."""
        return self._under_way

    @abstractmethod
    def _end(self) -> None:
        """End the iteration."""

    def graph(self) -> Graph:
        """Return the stages of one iteration, with the current fields and edits."""
        return self._graph_with(self._once)

    def _graph_with(self, once: Once, lasting: Graph | None = None) -> Graph:
        """Return `lasting` with the arguments of `once`. lasting: default: the graph with the current edits."""
        graph = lasting or self._lasting_graph()
        for stage, arguments in once.items():
            if stage in graph.names:  # a changed field may have removed the stage
                graph = graph.replaced(stage, None, arguments)
        return graph

    def _written_graph(self) -> Graph:
        """Return the graph of `define`, without edits."""
        tracer = Tracer(self.lab, type(self).__name__)
        token = DEFINED.set(self)
        try:
            self.define(tracer)
        finally:
            DEFINED.reset(token)
        return tracer.graph()

    def _lasting_graph(self) -> Graph:
        """Return the graph with all edits, but without the arguments of `once`."""
        graph = self._written_graph()
        for edit in self._edits:
            graph = edit(graph)
        return graph

    def replace(self, stage: str, function: Callable[..., Any] | None = None, /, **arguments: Any) -> None:
        """Change arguments of a stage, or replace the stage by an operation such as `lab.actor.mine`, or by a function
        that takes its batch and returns a batch. `algo.replace("update_actor", clip=0.1)`;
        `algo.replace("compute_reward", my_stage)`.

        If the stage has run in this iteration, it runs again, and so do all stages that ran on its output; `BadInput`
        if one of these has updated a role. `lab.history.changes()` lists the changes. Checkpoints and later kernels
        keep arguments that are numbers or texts. They do not keep functions: run the function's cell again.
        """
        before = self.graph()
        self._edit(lambda graph: graph.replaced(stage, function, arguments), f"replacing {stage!r}", again=stage)
        known = self._replaced.get(stage, {})
        self._replaced[stage] = None if function is not None or known is None else {**known, **arguments}
        if function is None:
            self._note_arguments(before, stage, arguments)
        else:
            self._note_edit(stage, None, function)

    def once(self, stage: str, /, **arguments: Any) -> None:
        """Change arguments for the next run of a stage only: `algo.once("update_actor", clip=0.1)`. After that run the
        earlier arguments apply again. Checkpoints do not keep the change; a `replace` of the stage cancels it.

        `lab.history.changes()` lists the change, with "once" after the setting's name.
        """
        before = self.graph()
        wanted = {**self._once, stage: {**self._once.get(stage, {}), **arguments}}
        before[stage]  # raises where there is no such stage
        after = self._graph_with(wanted)
        after.check_corrections(type(self).__name__)
        after.check_rows(f"{type(self).__name__}.once", self._keep_rows)
        self._check_open_updates(f"once({stage!r}) with {', '.join(arguments)}", after)
        self._once = wanted
        self._note_arguments(before, stage, arguments, " once")

    def arguments(self, stage: str) -> list[Argument]:
        """Return all arguments that the stage would run with now, and the source of each: a field, `define`, the
        operation's default, or a change of this stage."""
        now, lasting, written = self.graph()[stage], self._lasting_graph()[stage], self._written_graph()
        first = written[stage].given_arguments if stage in written.names else {}
        fields = {} if lasting.edited or stage not in written.names else fields_of(self, stage)
        given, later, defaults = now.given_arguments, lasting.given_arguments, now.defaults
        values = {name: value for name, value in {**defaults, **given}.items() if value is not Parameter.empty}
        title, found, meaning = type(self).__name__, list[Argument](), in_effect(values)
        for name, value in values.items():
            default, told = defaults.get(name, Parameter.empty), meaning.get(name, "")
            same = name not in later or (name in first and is_same(first[name], later[name]))
            field = fields.get(name, "") if same or not self._edits else ""
            if name in self._once.get(stage, {}):
                source = "changed for the next run"
            elif self._edits and not same:
                source = "changed for this stage"
            elif field:
                source = f"{title}.{field}" + (", changed" if self._is_changed(field) else "")
            else:
                source = f"{title}.define" if name in given else "default"
            found.append(Argument(name=name, value=value, default=default, source=source, field=field, in_effect=told))
        return found

    def change_argument(self, stage: str, name: str, value: Any, *, once: bool) -> None:
        """Change an argument of a stage. once: for its next run only; else from now on, by setting the field that the
        argument comes from, or by `replace`. A wrong value or an unknown argument raises `BadInput`, without a change.
        """
        known = {argument.name: argument for argument in self.arguments(stage)}
        if name not in known:
            raise BadInput(f"{stage}({name}=...)", f"it takes {', '.join(known)}", remedy_for(name, list(known)))
        if once:
            self.once(stage, **{name: value})
        elif field := known[name].field:
            self._check_open_updates(f"{field} = {shown(value)}", self._graph_with(self._once_without(stage, name)))
            owner, _, last = field.rpartition(".")
            setattr(getattr(self, owner) if owner else self, last, value)
            self._once = self._once_without(stage, name)
        else:
            self.replace(stage, **{name: value})

    def insert(self, function: Callable[..., Any], /, *, after: str, name: str | None = None, **arguments: Any) -> None:
        """Insert a stage after another stage: an operation, or a function that takes a batch and returns a batch.

        Raises `BadInput` if a stage after the insertion has run in this iteration.
        """
        called = name or str(getattr(function, "__name__", type(function).__name__))
        names = self.graph().names
        behind = names[names.index(after) + 1 :] if after in names else []
        if ran := [stage for stage in behind if self._under_way and stage in self.made]:
            raise BadInput(
                f"inserting {called!r} after {after!r}",
                f"{ran[0]!r}, a later stage, has already run in this iteration",
                "finish the iteration first, with iterate(), or give it up, with restart()",
            )
        self._edit(lambda graph: graph.inserted(after, function, called, arguments), f"inserting {called!r}")
        self._note_edit(called, None, f"inserted after {after}")

    def remove(self, stage: str) -> None:
        """Remove a stage: stages that took its output take its input instead. If it has run in this iteration, the
        stages that ran on its output run again, as in `replace`."""
        self._edit(lambda graph: graph.removed(stage), f"removing {stage!r}", again=stage)
        self._note_edit(stage, None, "removed")

    def _kept_arguments(self) -> dict[str, dict[str, Any]]:
        """Return the arguments given to `replace`, except those that a file cannot hold, such as functions."""
        return {stage: plain for stage, given in [*self._replaced.items()] if (plain := as_plain(given or {}))}

    def _take_arguments(self, kept: Mapping[str, Mapping[str, Any]]) -> None:
        """Apply the result of `_kept_arguments`; arguments that were replaced since then stay as they are."""
        for stage, arguments in kept.items():
            if (now := self._replaced.get(stage, {})) is None:
                continue
            new = {name: value for name, value in arguments.items() if name not in now}
            self._edits.append(partial(_with_arguments, stage, new))
            self._replaced[stage] = {**now, **new}

    def _edit(self, edit: Callable[[Graph], Graph], what: str, *, again: str | None = None) -> None:
        """Apply an edit of the graph. again: the stage whose output is out of date after the edit."""
        before = self._lasting_graph()
        after = edit(before)  # raises for a wrong edit, before anything is changed
        stale = [name for name in before.downstream(again) if name in self.made] if again and self._under_way else []
        if updated := [name for name in stale if before[name].updates]:
            raise BadInput(
                what,
                f"{updated[0]!r} has updated {before[updated[0]].role!r} in this iteration with data that would change",
                "finish the iteration first, with iterate(), or give it up, with restart(), which keeps the update",
            )
        once = {name: arguments for name, arguments in self._once.items() if name != again}
        self._check_open_updates(what, self._graph_with(once, after), stale)
        self._once = once
        self._edits.append(edit)
        for name in [name for name in self.made if name.partition(" (draw ")[0] in stale]:  # also DAPO's further draws
            del self.made[name]
        if self._under_way and all(name in self.made for name in after.names):  # the edit removed the remaining stages
            self._end()

    def _has_run(self, stage: str, once: Once) -> None:
        """Drop the `once` arguments with which a stage has just run, unless they were changed meanwhile."""
        if stage in once and self._once.get(stage) is once[stage]:
            self._once = {name: arguments for name, arguments in self._once.items() if name != stage}

    def _once_without(self, stage: str, argument: str) -> Once:
        """Return the arguments given to `once`, without one argument of a stage."""
        rest = {name: value for name, value in self._once.get(stage, {}).items() if name != argument}
        others = {name: arguments for name, arguments in self._once.items() if name != stage}
        return {**others, stage: rest} if rest else others

    def _check_open_updates(self, what: str, after: Graph, stale: Collection[str] = ()) -> None:
        if self._under_way:
            self.graph().check_open_updates(self.lab, what, self.made.keys(), after, stale)

    def _note_arguments(self, before: Graph, stage: str, arguments: Mapping[str, Any], how: str = "") -> None:
        was = {**before[stage].defaults, **before[stage].given_arguments}
        for name, value in arguments.items():
            old = None if was.get(name) is Parameter.empty else was.get(name)
            old, new = (value_in_effect({**was, **arguments}, name, one) for one in (old, value))
            noted = bool(as_plain({name: value})) and (bool(how) or self._replaced.get(stage) is not None)
            self._note_edit(f"{stage}.{name}{how}", old, new, noted=noted)

    def _note_edit(self, what: str, before: Any, after: Any, *, noted: bool = False) -> None:
        self.lab.runner.live.note(f"{type(self).__name__}.{what}", before, after, noted=noted)


def _with_arguments(stage: str, arguments: Mapping[str, Any], graph: Graph) -> Graph:
    """Return the graph with the arguments that the stage takes; unchanged if the graph no longer has the stage."""
    if stage not in graph.names:
        return graph
    known = {**graph[stage].defaults, **graph[stage].given_arguments}
    return graph.replaced(stage, None, {name: value for name, value in arguments.items() if name in known})
