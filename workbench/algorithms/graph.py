"""The dataflow of an algorithm as a graph: its stages, the columns each reads and writes, and the role it runs on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.algorithms.lab import Lab
from workbench.batches.batch import Batch
from workbench.batches.schema import MADE_BY, SCHEMA
from workbench.data.prompt_stream import PromptStream
from workbench.display.graph import draw
from workbench.errors import BadInput, StageError
from workbench.errors.plain_text import shown
from workbench.settings.engines import check_untruncated, keeps_mask, truncation
from workbench.stages.group import GroupOperation
from workbench.support.calls.pickling import name_of
from workbench.support.named_fields import remedy_for
from workbench.support.validation import checked, hints_of
from workbench.workers.user_loss import ParameterNames, reads


class Mark:
    """Stands for a field's value while `define` is traced. It compares like the value and has its attributes."""

    def __init__(self, value: Any) -> None:
        self.marked = value

    def __bool__(self) -> bool:
        return bool(self.marked)

    def __eq__(self, other: object) -> bool:
        return bool(self.marked == other)

    def __hash__(self) -> int:
        return hash(self.marked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["marked"], name)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


# marks of numbers and texts are of a subclass, so that they compute like the value; bool and None have no subclasses
MARKED: dict[type, Any] = {
    kind: type(kind.__name__, (kind,), {"__deepcopy__": Mark.__deepcopy__}) for kind in (int, float, str)
}


def mark(value: Any) -> Any:
    """Return a new object that stands for this value, and that `is` tells apart from every other object."""
    made: Any = MARKED.get(type(value), Mark)(value)
    made.marked = value
    return made


def unmarked(value: Any) -> Any:
    """Return the value that a mark stands for; any other value unchanged."""
    kinds: Any = (Mark, *MARKED.values())
    return value.marked if isinstance(value, kinds) else value


KEEP_ROWS = ("select", "rename", "drop", "join")  # methods of a batch that keep its number of rows
MOST_ROWS = 10_000_000  # per batch: the rows' indices alone are an array


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One node: `operation` of `role` on the outputs of the stages `inputs`.

    name: unique in the graph: the name given to `reported_as`, or the operation's; a second one is called operation_2.
    role: a role of the workbench, "numeric" (arithmetic on the actor's hosts), "prompts" (a batch that starts an
    iteration), "batch" (a method of a batch) or "notebook" (a function).
    columns: the columns of the batch after the stage; None if it makes no batch, or if they are not known before it
    runs (after functions and methods of a batch).
    """

    name: str
    role: str
    operation: str
    inputs: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    updates: bool = False
    samples: bool = False
    edited: bool = False
    function: Callable[..., Any] | None = None

    @property
    def code(self) -> str:
        """A short text that is equal for equal code and arguments; "" unless the stage is an operation of a role."""
        made = self.function
        return made.code(*made.arguments(self.args, self.kwargs)) if isinstance(made, GroupOperation) else ""

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments, checked, if the stage is an operation of a role; {} for other stages."""
        operation = self.function
        return operation.arguments(self.args, self.kwargs)[0] if isinstance(operation, GroupOperation) else {}

    @property
    def _method(self) -> Callable[..., Any]:
        """The function that draws prompts, or the method of a batch; its first parameter is the stream or the batch."""
        return PromptStream.next if self.role == "prompts" else getattr(Batch, self.operation)

    @property
    def _parameters(self) -> list[inspect.Parameter]:
        """The parameters of the stage's function other than its batches."""
        if isinstance(self.function, GroupOperation):
            signature, batches = self.function.__signature__, int(self.function.operation.takes_batch)
        elif self.function is None:
            signature, batches = inspect.signature(self._method), 1
        else:
            signature, batches = inspect.signature(self.function), len(self.inputs)
        return list(signature.parameters.values())[batches:]

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each argument; `inspect.Parameter.empty` if the argument is required."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {p.name: p.default for p in self._parameters if p.kind not in several}

    @property
    def given_arguments(self) -> dict[str, Any]:
        """The given arguments by name, without batches and without arguments that have no name."""
        names = [p.name for p in self._parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        plain = {name: value for name, value in zip(names, self.args, strict=False) if not isinstance(value, StandIn)}
        return {**plain, **self.kwargs}

    def with_arguments(self, arguments: Mapping[str, Any]) -> Stage:
        """Return a "prompts" or "batch" stage with other arguments; `BadInput` for an argument it does not take."""
        signature, hints = inspect.signature(self._method), hints_of(self._method)
        names = list(signature.parameters)[1:]
        try:
            signature.bind_partial(None, **arguments)
        except TypeError as error:
            raise BadInput(f"{self.name} with {', '.join(arguments)}", f"it takes {', '.join(names)}") from error
        arguments = {name: checked(name, value, hints.get(name, Any)) for name, value in arguments.items()}
        if signature.parameters[names[0]].kind is inspect.Parameter.VAR_POSITIONAL:
            return replace(self, kwargs={**self.kwargs, **arguments})
        # all by name, so that a new value replaces one that was given by position
        return replace(self, args=(), kwargs={**dict(zip(names, self.args, strict=False)), **self.kwargs, **arguments})

    def call(self, lab: Lab, values: Mapping[str, Any]) -> Any:
        """Run the stage. values: the batches of its inputs, by stage name."""
        inputs = [values[name] for name in self.inputs]
        if self.role == "prompts":
            return (self.function or lab.prompts.next)(*self.args, **self.kwargs)
        if self.role == "batch":
            args = [values[a.stage] if isinstance(a, StandIn) else a for a in self.args]
            return getattr(inputs[0], self.operation)(*args, **self.kwargs)
        assert self.function is not None
        if self.role == "notebook":
            return self.function(*inputs, *self.args, **self.kwargs)
        with lab.reported_as(self.name):
            return self.function(*inputs, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Graph:
    """The stages of one iteration, in call order."""

    title: str
    stages: tuple[Stage, ...]

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise BadInput(f"stage {name!r}", f"{self.title} has {', '.join(self.names)}")

    @property
    def names(self) -> list[str]:
        """The stages' names, in call order."""
        return [stage.name for stage in self.stages]

    def consumers(self, name: str) -> list[Stage]:
        """Return the stages that take a stage's output."""
        return [stage for stage in self.stages if name in stage.inputs]

    def downstream(self, name: str) -> list[str]:
        """Return a stage and all stages that depend on its output, directly or through others."""
        found = {self[name].name}
        for stage in self.stages:
            if found & set(stage.inputs):
                found.add(stage.name)
        return [stage for stage in self.names if stage in found]

    def call(self, stage: Stage, lab: Lab, values: Mapping[str, Any]) -> Any:
        """Run a stage of this graph. values: the results of earlier stages, by name.

        Raises `StageError` if later stages take a batch from the stage, but it returns none.
        """
        made = stage.call(lab, values)
        takers = self.consumers(stage.name)
        if takers and not isinstance(made, Batch):
            given = "None" if made is None else f"{type(made).__name__} {shown(made)}"
            raise StageError(
                f"stage {stage.name!r}: {stage.operation} returned {given}",
                f"the stage {takers[0].name!r} needs a batch from it",
                "make it return a batch, or replace the stage with replace()",
            )
        return made

    def check_columns(self) -> None:
        """Raise `BadInput` if an operation does not accept the columns that its batch will have. Batches from functions
        are not checked, because their columns are not known."""
        for stage in self.stages:
            have = self[stage.inputs[0]].columns if stage.inputs else None
            if have is not None and isinstance(stage.function, GroupOperation):
                stage.function.check_columns(stage.arguments, have)

    def check_corrections(self, title: str) -> None:
        """Raise `BadInput` if a stage, its loss or its estimator compares with `rollout_log_prob`, but an earlier stage
        samples with truncation and keeps no sampling mask. title: the start of the message."""
        for stage in self.stages:
            given = stage.arguments if stage.samples else {}
            if (truncated := truncation(given)) and not keeps_mask(given):
                for name in self.downstream(stage.name):
                    loss, estimator = (self[name].arguments.get(argument) for argument in ("loss", "estimator"))
                    if correction := self[name].arguments.get("correction"):
                        check_untruncated(f"{title}: {name} with {correction}", truncated)
                    if reads(loss, "rollout_log_prob"):
                        check_untruncated(f"{title}: {name} with loss={name_of(loss)}", truncated)
                    if reads(estimator, "old_log_prob", "rollout_log_prob"):
                        check_untruncated(f"{title}: {name} with estimator={name_of(estimator)}", truncated)

    def check_open_updates(
        self, lab: Lab, what: str, made: Set[str], after: Graph, stale: Collection[str] = ()
    ) -> None:
        """Raise `BadInput` if a change would restart an update that an interrupt left between two optimizer steps: the
        update would repeat the steps it has taken.

        what: the change, for the message. after: the graph with the change. made: the stages that have run. stale: the
        stages among these that would run again.
        """
        opened = lab.runner.interrupted.open_updates()
        for stage in self.stages:
            if stage.name in made or f"{stage.role}.{stage.operation}" not in opened:
                continue
            if self._unrun_stages(stage.name, made) != after._unrun_stages(stage.name, made - {*stale}):
                raise BadInput(
                    what,
                    f"an interrupt left {stage.name!r} between two of its steps: this change would restart it, and "
                    "repeat steps",
                    "finish it with the same call, or give it up with restart(), which keeps the steps already taken",
                )

    def _unrun_stages(self, until: str, made: Set[str]) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return name, code and inputs of each stage up to and including `until` that has not run."""
        stages = self.stages[: self.names.index(until) + 1] if until in self.names else ()
        return [(stage.name, stage.code, stage.inputs) for stage in stages if stage.name not in made]

    def check_rows(self, title: str, keep: Collection[str] = ()) -> None:
        """Raise `BadInput` if the rows of a stage's batch cannot be divided among its ranks and minibatches.

        title: the start of the message. keep: the stages whose functions return as many rows as they take. Stages after
        an unknown number of rows are not checked.
        """
        rows: dict[str, int | None] = {}
        for stage in self.stages:
            given = rows.get(stage.inputs[0]) if stage.inputs else None
            n = stage.kwargs.get("n", stage.args[0] if stage.args else None)
            if given is not None and stage.samples:
                given *= stage.kwargs.get("samples", 1)
            if stage.role == "prompts":
                given = n
            elif stage.role == "batch" and stage.operation not in KEEP_ROWS:
                given = given * n if given is not None and stage.operation == "repeat" else None
            elif stage.role == "notebook" and (stage.edited or stage.name not in keep):
                given = None
            rows[stage.name] = given
            if given is not None and given > MOST_ROWS:
                raise BadInput(title, f"a batch has at most {MOST_ROWS:,} rows", "ask for fewer")
            if given is None or not stage.inputs or not isinstance(stage.function, GroupOperation):
                continue
            try:
                stage.function.deal_rows(given)
            except BadInput as error:
                raise BadInput(f"{title}: {stage.name}: {error.value}", error.rule, error.remedy) from None

    def edges(self) -> dict[str, set[str]]:
        """Return, for each stage, the stages whose columns it reads: a subset of all stages that its batch passed."""
        made_by: dict[str, dict[str, str]] = {}
        found: dict[str, set[str]] = {}
        for stage in self.stages:
            columns = {column: maker for name in stage.inputs for column, maker in made_by[name].items()}
            found[stage.name] = {columns[column] for column in stage.reads if column in columns} or set(stage.inputs)
            # a function or a method of a batch may write any column: all later reads depend on it
            opaque = stage.role in ("batch", "notebook")
            made = dict.fromkeys(columns if opaque else stage.writes, stage.name)
            made_by[stage.name] = made if opaque else columns | made
        return found

    def replaced(self, name: str, function: Callable[..., Any] | None, arguments: Mapping[str, Any]) -> Graph:
        """Return the graph with other arguments for a stage, or with a function or an operation in its place."""
        old = self[name]
        if function is not None:
            new = replace(stage_of(function, name, old.inputs, (), arguments), edited=True)
        elif old.function is not None and old.role != "prompts":
            new = stage_of(old.function, name, old.inputs, old.args, {**old.kwargs, **arguments})
        else:
            new = old.with_arguments(arguments)
        return self.checked([new if stage.name == name else stage for stage in self.stages])

    def inserted(self, after: str, function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Graph:
        """Return the graph with a new stage between `after` and the stages that take its output."""
        before = self[after]
        if name in self.names:
            raise BadInput(f"a second stage {name!r}", "names of stages are unique", "give another name=")
        new = replace(stage_of(function, name, (before.name,), (), arguments), edited=True)
        stages = [_rewired(stage, after, name) for stage in self.stages]
        stages.insert(self.names.index(after) + 1, new)
        return self.checked(stages)

    def removed(self, name: str) -> Graph:
        """Return the graph without a stage; the stages that took its output take its input instead."""
        gone = self[name]
        if not gone.inputs and self.consumers(name):
            raise BadInput(f"removing {name!r}", "it takes no batch, and other stages need its output")
        before = gone.inputs[0] if gone.inputs else ""
        return self.checked([_rewired(stage, name, before) for stage in self.stages if stage.name != name])

    def checked(self, stages: Iterable[Stage]) -> Graph:
        """Return the graph of these stages; `BadInput` if a stage reads a column that its input does not have."""
        known: dict[str, tuple[str, ...] | None] = {}
        out = []
        for stage in stages:
            have = known[stage.inputs[0]] if stage.inputs else ()
            missing = [] if have is None else [column for column in stage.reads if column not in have]
            if missing:
                if missing[0] not in SCHEMA and isinstance(stage.function, GroupOperation):  # a user's function
                    stage.function.check_columns(stage.arguments, have or ())
                maker = MADE_BY.get(missing[0])
                near = f"call {maker} first, and give its result to this stage" if maker else ""
                if maker and self.stages:  # a change of this graph, such as replace("update_actor", loss=mine)
                    called, _, given = maker.rstrip(")").partition("(")
                    near = f"first insert(lab.{called}, {f'{given}, ' if given else ''}after={stage.inputs[0]!r})"
                near = near or remedy_for(missing[0], have or (), str)
                if any(callable(x) and missing[0] in ParameterNames.of(x).needed for x in stage.arguments.values()):
                    near = near or "give the parameter a default"  # some batches have it, such as `token_versions`
                raise BadInput(
                    f"{self.title}: stage {stage.name!r} would read column {missing[0]!r}",
                    f"its input has {', '.join(have or ())}",
                    near or "keep the stage that writes it, or replace this one too",
                )
            unknown = have is None or stage.role in ("batch", "notebook")
            known[stage.name] = None if unknown else tuple(dict.fromkeys((*(have or ()), *stage.writes)))
            out.append(replace(stage, columns=known[stage.name]))
        return Graph(self.title, tuple(out))

    def __repr__(self) -> str:
        return f"<Graph {self.title}: {' > '.join(self.names)}>"

    def _repr_html_(self) -> str:
        return draw(self)


def _rewired(stage: Stage, old: str, new: str) -> Stage:
    inputs = tuple(new if name == old else name for name in stage.inputs)
    args = tuple(StandIn(new) if isinstance(a, StandIn) and a.stage == old else a for a in stage.args)
    return replace(stage, inputs=inputs, args=args)


def stage_of(
    function: Callable[..., Any], name: str, inputs: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Stage:
    """Return a stage for an operation or a function, after checking the arguments."""
    if not callable(function):
        raise BadInput(f"stage {name!r}: {shown(function)}", "a stage is an operation, or a function of a batch")
    if not isinstance(function, GroupOperation):
        called = getattr(function, "__name__", type(function).__name__)
        check_takes(function, f"stage {name!r}: {called}", (*inputs, *args), kwargs)
        return Stage(
            name=name, role="notebook", operation=called, inputs=inputs, args=args, kwargs=kwargs, function=function
        )
    function = function.now
    operation, takes_batch = function.operation, function.operation.takes_batch
    plain = {name: unmarked(value) for name, value in kwargs.items()}
    arguments, _ = function.arguments(tuple(map(unmarked, args)), plain)
    return Stage(
        name=name, role=function.group.role, operation=operation.name, inputs=inputs[:1] if takes_batch else (),
        args=args, kwargs=kwargs, reads=operation.needed(arguments) if takes_batch else (),
        writes=operation.written(arguments), updates=operation.updates, samples=operation.samples, function=function,
    )  # fmt: skip


def check_takes(function: Callable[..., Any], what: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise `BadInput` if the function does not take these arguments."""
    signature = inspect.signature(function, follow_wrapped=False)  # a decorator may pass further arguments
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = "its first argument is the batch" if args else "it is called without arguments"
        raise BadInput(f"{what}: {error}", f"it takes {signature}; {given}") from None


@dataclass(frozen=True)
class StandIn:
    """Represents the output batch of a stage among the arguments of a call."""

    stage: str
