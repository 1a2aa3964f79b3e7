"""How the actor's weights get to roles in other processes: to rollout workers before they generate, to the reference.

    actor's pool      ... update_actor │ publish_weights │ update_actor ...
                                       └────────┐ slices, host to host
    rollout pool      generate_sequences │ receive_weights │ generate_sequences ...

The actor's ranks keep a copy of their weights for as long as it is being taken, and go on. So what arrives is of one
version, whatever the actor does meanwhile, and training and generation overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workbench.batches.store import Weights
from workbench.errors import BadInput
from workbench.messages.operation import Operation
from workbench.placement import ROLLOUT
from workbench.stages.group import GroupOperation, WorkerGroup
from workbench.stages.isolated import aside
from workbench.stages.run import Run
from workbench.workers.roles.rollout import DELEGATED
from workbench.workers.weight_exchange import Published

if TYPE_CHECKING:
    from workbench.controller import Workbench


class Publication:
    """The actor's weights as they are when all that was called before has run, published for one taker.

    run: of the actor's ranks. weights: which those are, once it is done. where: what the taker is told.
    """

    def __init__(self, lab: Workbench, **what: bool) -> None:
        self._lab, self.weights = lab, Weights(steps=-1, state="not published")
        key = f"{lab._id}-weights-{lab._run_number + 1}"
        self.where = Published(key=key, hosts=lab.actor.hosts, layout=lab.actor.layout)
        self.run = lab.prepare(lab.actor, "publish_weights", (key,), what, then=self._note)

    def _note(self) -> None:
        self.weights = self._lab.weights["actor"]

    def taken_by(
        self, group: WorkerGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        then: Callable[[], None] | None = None,
    ) -> Run:  # fmt: skip
        """Publish, and prepare the run of who takes it. The actor's hosts forget it when that has ended, however."""
        run = self._lab.prepare(group, operation, args, kwargs, first=lambda: [self.run], then=then)
        run.updates = True  # the role's later stages wait for it, and are not run where it fails
        run.when_over(lambda: self.run.when_over(self._release))
        self._lab.send(self.run)
        return run

    def _release(self) -> None:
        for host in self.where.hosts:
            self._lab._backend.ask(host, "release", [self.where.key])


class WeightSync:
    """One role that takes the actor's weights over, by an operation of its own: when it has to, and how."""

    def __init__(self, lab: Workbench, role: str, operation: str) -> None:
        self._lab, self._role, self._operation = lab, role, operation
        self._last: tuple[Publication, Run] | None = None

    def due(self) -> bool:
        """Whether the role will lag behind the actor when all that was called so far has run."""
        lab = self._lab
        updates = [run.number for run in lab.open_runs() if run.updates and run.group is lab.actor]
        if self._last is not None and not self._last[1].done:
            publication = self._last[0]
            later = any(number > publication.run.number for number in updates)
            return later or (publication.run.done and publication.weights != lab.weights["actor"])
        return bool(updates) or lab.weights[self._role] != lab.weights["actor"]

    def start(self, *, probe: bool) -> Run:
        """Send it off; the role's run. probe: whether what the trainer makes of the probe goes along."""
        lab = self._lab
        publication = Publication(lab, probe=probe)

        def taken() -> None:
            lab.weights[self._role] = publication.weights
            lab._save_state()

        take = publication.taken_by(lab.groups[self._role], self._operation, (publication.where,), {}, then=taken)
        self._last = publication, take
        lab.send(take)
        return take


class RolloutCaller:
    """Carries out on the rollout workers what the actor is asked for, after a weight sync where they lag.

    In a blocking call the sync is waited for first, so that its error is the call's own.
    """

    def __init__(self, lab: Workbench) -> None:
        self._lab, self._sync = lab, WeightSync(lab, ROLLOUT, "receive_weights")
        self._rollout = rollout = lab.groups[ROLLOUT]
        for name in DELEGATED:
            operation = rollout.operations[name].operation
            lab.actor.delegate(name, GroupOperation(rollout, operation, self, asked=lab.actor))
            if name != "generate_sequences":  # which takes the weights as they are
                rollout.delegate(name, GroupOperation(rollout, operation, self))

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._lab.carry_out(self._prepare(operation, args, kwargs, wait=not self._lab.overlapping))

    def submit(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        run = self._prepare(operation, args, kwargs, wait=False)
        self._lab.send(run)
        return run

    def _prepare(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], *, wait: bool) -> Run:
        lab, name = self._lab, operation.name
        rollout, generation = self._rollout, lab.description.generation
        lab._check_alive(rollout)
        assert generation is not None

        def synced() -> Sequence[Run]:
            if not self._sync.due():
                return ()
            sync = self._sync.start(probe=generation.check_sync)
            if wait:
                sync.result()
            return (sync,)

        if name in ("generate_sequences", "sync_weights"):
            return lab.prepare(rollout, name, args, kwargs, first=synced)
        # these two look at the trainer's side as well
        rollout.operations[name].arguments(args, kwargs)
        if name == "compare_weights":
            synced()
        publication = Publication(lab, weights=name == "compare_weights")
        return publication.taken_by(rollout, name, args, {**kwargs, "published": publication.where})


def refresh_reference(lab: Workbench) -> None:
    """`lab.refresh_reference()`: the reference takes over the actor's weights."""
    lab.require_nothing_passed_over("refresh_reference()")
    if lab.description.actor_is_reference:
        raise BadInput(
            "refresh_reference() with an adapter", "the reference is the actor without it, and stays so",
            "declare a reference of its own in models=",
        )  # fmt: skip
    for role, operation in (("reference", "take_weights"), ("actor", "publish_weights")):
        if role not in lab.groups or operation not in lab.groups[role].operations:
            raise BadInput(
                "refresh_reference() here", f"the workbench needs a {role} with the operation {operation}",
                "open it with a reference, and with workers derived from workbench's own",
            )  # fmt: skip
    with aside(lab, "refresh_reference"):
        WeightSync(lab, "reference", "take_weights").start(probe=False).result()
