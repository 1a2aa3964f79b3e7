"""The handle of all ranks of one role: its methods are the primitive operations."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from workbench.backends.hosts import Hosts
from workbench.batches.batch import Batch
from workbench.batches.location import Chunks, minibatch_rows
from workbench.batches.store import Weights
from workbench.display.html import table
from workbench.errors import BadInput, NotFound
from workbench.errors.plain_text import shown
from workbench.messages.operation import Operation, checked_arguments, operations
from workbench.models.spec import Model
from workbench.placement import ROLLOUT, Layout, Pool
from workbench.settings.training import LIVE, Training
from workbench.stages.ledger import Counters, Ownership
from workbench.support.checked_calls import checked_call
from workbench.support.fingerprint import code_behind, fingerprint, is_of_notebook
from workbench.support.named_fields import SYNONYMS, remedy_for
from workbench.support.sources import loaded
from workbench.support.validation import PositiveInt, checked, whole
from workbench.workers.roles import ROLE_WORKERS

if TYPE_CHECKING:
    from workbench.stages.run import Run


class Caller(Protocol):
    """Carries out the calls of a group: the workbench, and for the actor the rollout workers."""

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def submit(
        self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Run: ...


class GroupOperation:
    """One operation of a group, to be called from a cell: `lab.critic.compute_values(batch)`."""

    def __init__(
        self, group: WorkerGroup, operation: Operation, caller: Caller, asked: WorkerGroup | None = None
    ) -> None:
        self.group, self.operation, self.caller = group, operation, caller
        self._asked = asked or group
        self._spec: Model | None = None
        self._method: Any = None
        self._method_code = ""
        self.__name__ = operation.name
        self.__doc__ = operation.doc
        self.__signature__ = self._signature()

    def _signature(self) -> inspect.Signature:
        parameters = list(self.operation.signature.parameters.values())
        if self.operation.takes_batch:
            parameters[0] = inspect.Parameter("batch", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Batch)
        if self.operation.samples:
            parameters.insert(
                1, inspect.Parameter("samples", inspect.Parameter.KEYWORD_ONLY, default=1, annotation=int)
            )
        keyword, last = inspect.Parameter.KEYWORD_ONLY, parameters[-1:]
        place = -1 if last and last[0].kind is inspect.Parameter.VAR_KEYWORD else len(parameters)
        limit = inspect.Parameter("timeout_s", keyword, default=None, annotation=float | None)
        parameters[place:place] = [limit]
        return inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation and wait; inside `with lab.overlap():`, submit it and return a promise of its result.

        timeout_s: raises `StageTimeout` when ranks take longer; they finish what they began, and the result is dropped.
        """
        self._asked.take_edits()
        now = self.now
        return now.caller.call(now.group, now.operation, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Run:
        """Run the operation in the background. Returns a `Run`: await it, wait for it, or give it to the next stage."""
        self._asked.take_edits()
        now = self.now
        return now.caller.submit(now.group, now.operation, args, kwargs)

    @property
    def now(self) -> GroupOperation:
        """The operation that carries out the call now: rollout workers come and go."""
        return self._asked.operations.get(self.operation.name, self)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Return all arguments by name, checked, and the number of samples per row; without the batch and `timeout_s`,
        which every operation takes."""
        own = dict(kwargs)
        own.pop("timeout_s", None)
        samples = own.pop("samples", 1) if self.operation.samples else 1
        if self.operation.samples:
            whole("samples", samples, 1)
        arguments = checked_arguments(self.operation, self.group.role, args, own)
        if samples > 1 and arguments.get("resume"):
            raise BadInput(f"samples={samples} with resume=True", "its rows have responses", "leave samples out")
        if arguments.get("function", self) is None:  # the role's own function scores
            arguments["function"] = self.group.spec.function
        if self.operation.check_model is not None:
            self.operation.check_model(arguments, self.group.spec)
        return arguments, samples

    def check_columns(self, arguments: Mapping[str, Any], names: Collection[str]) -> None:
        """Raise `BadInput` where a batch with columns of these names does not suit these arguments."""
        if self.operation.check_columns is not None:
            self.operation.check_columns(arguments, self.group.spec, names)

    def deal_rows(self, rows: int) -> tuple[list[Chunks], list[int]]:
        """Return the row numbers of each rank, one array per minibatch, and the ranks whose outputs make the result.

        Raises `BadInput` where rows cannot be dealt out: minibatches that do not divide them, or a rank without rows.
        """
        group, operation, where = self.group, self.operation, f"{self.group.role}.{self.operation.name}"
        wanted = group.spec.training.minibatches if operation.minibatched and group.spec.training else 1
        # only updates need equal minibatches; inference uses the same cut where it can, see Training
        parts = len(operation.protocol.collect(group.layout))
        follows = rows % wanted == 0 and rows // wanted >= parts
        minibatches = minibatch_rows(rows, wanted if operation.updates or follows else 1)
        dealt = operation.protocol.deal(group.layout, minibatches, where)
        collected = operation.protocol.gather(group.layout, dealt, rows, where)
        for rank, chunks in enumerate(dealt):
            if not all(map(len, chunks)):
                cut = f"in {len(minibatches)} minibatches " if len(minibatches) > 1 else ""
                raise BadInput(
                    f"{rows} rows for {where} {cut}on {len(group.hosts)} ranks",
                    f"rank {rank} would have none",
                    f"use at least {len(collected) * len(minibatches)} rows",
                )
        return dealt, collected

    def code(self, arguments: Mapping[str, Any], samples: int = 1) -> str:
        """Return a short text that is equal for equal code, arguments and models, including functions that score and
        the code they use by name, see `code_behind`; "" for what the user does by hand."""
        if self.operation.by_hand is not None and self.operation.by_hand(arguments):
            return ""
        method, spec = getattr(self.group.worker_class, self.operation.name), self.group.spec
        if method is not self._method or spec is not self._spec:  # reading the code of a class takes milliseconds
            self._method, self._spec = method, spec
            training = None if spec.training is None else spec.training.without_rates
            behind = [code_behind(part) for part in (spec.function, spec.worker) if is_of_notebook(part)]
            self._method_code = fingerprint((method, spec.changed(training=training), behind))
        values = [
            one for value in arguments.values() for one in (value.values() if isinstance(value, dict) else [value])
        ]
        values = [one[0] if isinstance(one, tuple) and one else one for one in values]
        called = [getattr(value, "func", value) for value in values if callable(value)]  # of a partial
        called = [getattr(value, "__func__", value) for value in called]  # of a method
        given = (getattr(value, "__module__", "") for value in called)
        edits = loaded.edits_behind({*self.group.modules, *given})
        behind = [code_behind(one if isinstance(one, FunctionType | type) else type(one)) for one in called]
        return fingerprint((self._method_code, edits, behind, sorted(arguments.items()), samples))[:12]

    def __repr__(self) -> str:
        return f"<{self.group.role}.{self.operation.name}{self.__signature__}>"


class WorkerGroup:
    """All ranks of one role. Operations complete with Tab and show signature and docstring with `?`.

    layout: of its ranks, for the protocols of its operations. lab: the workbench. worker_role: the role whose workers
    carry out its operations. Normally its own; where the actor has an adapter and no other reference is declared, the
    reference is the actor without the adapter, and holds nothing of its own.
    """

    def __init__(
        self,
        role: str,
        pool: Pool,
        hosts: tuple[str, ...],
        layout: Layout,
        spec: Model,
        worker_class: type,
        lab: Any,
        worker_role: str | None = None,
    ) -> None:
        self.worker_role, self._lab = worker_role or role, lab
        self.role, self.dropped = role, False
        self.place(pool, hosts, layout)
        self.operations: dict[str, GroupOperation] = {}
        self.set_worker(spec, worker_class)

    def set_worker(self, spec: Model, worker_class: type) -> None:
        """Replace the operations by those that a worker class has now."""
        for name in self.operations:
            delattr(self, name)
        self.spec, self.worker_class, self.operations = spec, worker_class, {}
        found = operations(worker_class)
        self._own = {name: GroupOperation(self, operation, self._lab) for name, operation in found.items()}
        self.take_back()

    @property
    def modules(self) -> set[str]:
        """The modules that define its operations, without the modules that these import."""
        parts = (*self.worker_class.__mro__, self.spec.function)
        return {getattr(part, "__module__", None) or "" for part in parts if part is not None}

    def take_edits(self) -> None:
        """See `Workbench.autoreload`."""
        self._lab.take_edits()

    def place(self, pool: Pool, hosts: tuple[str, ...], layout: Layout) -> None:
        """Set the pool, hosts and layout of its ranks."""
        self.pool, self.hosts, self.layout = pool, hosts, layout

    @property
    def training(self) -> LiveTraining:
        """The role's training settings now. An assignment takes effect from the next stage on:
        `lab.actor.training.learning_rate = 5e-6`; `lab.history.changes()` lists assignments."""
        return LiveTraining(self.role, lambda: self.spec.training, self._lab.runner.live.retrain)

    @training.setter
    def training(self, training: Training) -> None:
        checked("training", training, Training)
        self.training.take({field.name: getattr(training, field.name) for field in fields(training)})

    def __setattr__(self, name: str, value: Any) -> None:
        live = next((f".{field}" for field in (name, *SYNONYMS.get(name, ())) if field in LIVE), "")
        typo = name != "training" and difflib.get_close_matches(name, ["training"])
        if live or (typo and not isinstance(value, GroupOperation)):
            remedy = f"write lab.{self.role}.training{live}" + (f" = {shown(value)}" if live else "")
            raise BadInput(f"lab.{self.role}.{name} = {shown(value)}", "a role has no such setting", remedy)
        super().__setattr__(name, value)

    @checked_call("group.move")
    def move(self, pool: str, devices: PositiveInt | None = None) -> Any:
        """Move this role to another pool, with all that it has learned: `lab.critic.move("scorers")`. devices: how many
        a new pool of that name gets. See `lab.move`."""
        return self._lab.move(self._lab.placement.with_role(self.worker_role, pool, devices))

    @checked_call("group.relayout")
    def relayout(self, layout: Layout | tuple[int, ...]) -> Any:
        """Give this role another layout (p, t, d) in its pool: `lab.actor.relayout((1, 2, 1))`. See `lab.move`."""
        return self._lab.move(self._lab.placement.with_layout(self.worker_role, layout))

    def take_back(self) -> None:
        """Make the group carry out all of its operations itself."""
        for name, operation in self._own.items():
            self.delegate(name, operation)

    def delegate(self, name: str, operation: GroupOperation) -> None:
        """Have another group carry out an operation of this one."""
        self.operations[name] = operation
        setattr(self, name, operation)

    def __getattr__(self, name: str) -> GroupOperation:
        near = remedy_for(name, self.operations, str)
        raise AttributeError(
            f"{self.role!r} has no operation {name!r}; {near + '; ' if near else ''}it has {', '.join(self.operations)}"
        )

    def __repr__(self) -> str:
        layout = f" {self.layout}" if self.layout.p * self.layout.t > 1 else ""
        return f"<{self.role}: {self.model} on pool {self.pool.name}, {len(self.hosts)} rank(s){layout}>"

    @property
    def model(self) -> str:
        """A short text that says what its ranks hold."""
        shared = self.worker_role != self.role
        return f"{self.spec}, the {self.worker_role} without its adapter" if shared else str(self.spec)

    def _repr_html_(self) -> str:
        rows = [
            {
                "operation": name,
                "reads": "by arguments" if callable(o.operation.reads) else ", ".join(o.operation.reads),
                "writes": "by arguments" if callable(o.operation.writes) else ", ".join(o.operation.writes),
                "protocol": o.operation.protocol.name,
            }
            for name, o in self.operations.items()
        ]
        return table(rows, caption=repr(self).strip("<>"))


class LiveTraining:
    """Reads and changes the `Training` of a role. Every value is checked at once; a wrong value changes nothing.

    The fields in `workbench.settings.training.LIVE` can be assigned. Each update sends them to the ranks, so that all
    ranks, and processes that start later, have the same settings. An update that is under way keeps the settings that
    it was called with.
    """

    def __init__(
        self, role: str, now: Callable[[], Training | None], assign: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self.__dict__.update(_role=role, _now=now, _assign=assign)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.take({name: value})

    def take(self, values: Mapping[str, Any]) -> None:
        """Assign several fields at once, such as schedule and total_steps, which have to fit together."""
        self._assign(self._role, values)

    def __eq__(self, other: object) -> bool:
        return bool(self._now() == (other._now() if isinstance(other, LiveTraining) else other))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the present settings, which are frozen."""
        return replace, (self._now(),)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._now())

    def __dir__(self) -> list[str]:
        return [field.name for field in fields(Training)]


class Groups:
    """by_role: the groups. lead: the group whose tokenizer makes the tokens, and whose hosts get tables.

    lab: their workbench. delegate_rollout: called after the groups of rollout workers were made, so that they generate
    for the actor. when_changed: called after a role was added or dropped.
    """

    lead: WorkerGroup
    numeric: WorkerGroup

    def __init__(self, hosts: Hosts, ownership: Ownership, counters: Counters, lab: Any) -> None:
        self._hosts, self._ownership, self._counters, self._lab = hosts, ownership, counters, lab
        self.by_role: dict[str, WorkerGroup] = {}
        self.delegate_rollout: Callable[[], object] = lambda: None
        self.when_changed: list[Callable[[], object]] = []

    def make(self) -> None:
        """Make the groups of a workbench that is being opened."""
        self._refresh()
        self.lead = self.by_role[self._hosts.description.lead]
        place = self._hosts.place_of("numeric")
        self.numeric = WorkerGroup("numeric", *place, self.lead.spec, ROLE_WORKERS["numeric"], self._lab)

    def follow_hosts(self) -> None:
        """Place all groups on the current hosts; handles of the roles that stay remain valid."""
        self._refresh()
        for group in (*self.by_role.values(), self.numeric):
            group.place(*self._hosts.place_of(group.worker_role))

    def take_new_code(self) -> None:
        """Replace the groups' operations by those that their worker classes have now."""
        for role, (model, _) in self._wanted().items():
            self.by_role[role].set_worker(model, model.worker or ROLE_WORKERS[role])
        self.numeric.set_worker(self.numeric.spec, ROLE_WORKERS["numeric"])
        if ROLLOUT in self.by_role:
            self.delegate_rollout()

    @property
    def compute_advantages(self) -> GroupOperation:
        """The operation that belongs to no role."""
        return self.numeric.operations["compute_advantages"]

    def check_whole(self, group: WorkerGroup) -> None:
        """Raise where the group cannot take a stage: its role was dropped, or its pool was lost."""
        if group.dropped:
            there = f"the workbench has {', '.join(self.by_role)}"
            raise NotFound(f"the {group.role} was dropped", there, f"lab.add({group.role!r}, ...)")
        self._hosts.require_whole(group.pool, group.role)

    def check_alive(self, group: WorkerGroup) -> None:
        """Raise where the group cannot take a stage, the workbench is closed, or another kernel drives it."""
        self._ownership.check_drives()
        self.check_whole(group)

    def _wanted(self) -> dict[str, tuple[Model, str]]:
        """Return for each role its model, and the role whose workers carry out its operations."""
        description = self._hosts.description
        wanted = {role: (model, role) for role, model in description.models.items()}
        if description.actor_is_reference:
            wanted["reference"] = replace(description.models["actor"], adapter=None, worker=None), "actor"
        return wanted

    def _refresh(self) -> None:
        """Make a group for each role without one, and drop the groups of roles that are gone."""
        wanted = self._wanted()
        for role, group in list(self.by_role.items()):
            if role not in wanted or group.worker_role != wanted[role][1]:
                del self.by_role[role]
                self._counters.weights.pop(role, None)
                group.dropped = True
                if role == ROLLOUT:
                    self.by_role["actor"].take_back()
        for role, (model, worker_role) in wanted.items():
            if role in self.by_role:
                self.by_role[role].spec = model
            else:
                self._add(role, model, worker_role)
        for act in self.when_changed:
            act()

    def _add(self, role: str, model: Model, worker_role: str) -> None:
        kind = model.worker or ROLE_WORKERS[role]
        place = self._hosts.place_of(worker_role)
        self.by_role[role] = WorkerGroup(role, *place, model, kind, self._lab, worker_role)
        if model.trained or (role in ("reference", ROLLOUT) and worker_role == role):
            # an actor with the user's worker class may load other weights than rollout workers do
            own = role == ROLLOUT and self._hosts.description.models["actor"].worker is not None
            self._counters.weights[role] = Weights.fresh(0) if own else Weights(steps=0, state="")
        if role == ROLLOUT:
            self.delegate_rollout()
