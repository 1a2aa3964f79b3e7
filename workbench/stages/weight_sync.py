"""Sends the actor's weights to roles in other processes: to rollout workers before they generate, to the reference.

    actor's pool      ... update_actor │ publish_weights │ update_actor ...
                                       └────────┐ slices, host to host
    rollout pool      generate_sequences │ receive_weights │ generate_sequences ...

The actor's ranks keep a copy of their weights until the receiver has it, and go on training. So all weights that
arrive are of one version, and training and generation overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.batches.store import Weights
from workbench.errors import BadInput
from workbench.messages.operation import Operation
from workbench.placement import ROLLOUT
from workbench.stages.group import GroupOperation, WorkerGroup
from workbench.stages.run import Run
from workbench.stages.runner import StageRunner
from workbench.stages.stage import StageRun
from workbench.workers.roles.rollout import DELEGATED
from workbench.workers.weight_exchange import Published
from workbench.workers.weight_transition import PatchDecision


class Publication:
    """The actor's weights after all runs that were called before, published for one receiver.

    run: of the actor's ranks. weights: which they are; None until they are published. where: for the receiver.
    """

    def __init__(self, runner: StageRunner, **what: bool | None) -> None:
        self._runner = runner
        self.weights: Weights | None = None
        actor = runner.groups.by_role["actor"]
        key = f"{runner.ownership.controller}-weights-{runner.counters.run + 1}"
        self.where = Published(key=key, hosts=actor.hosts, layout=actor.layout)
        self.run = runner.prepare(actor, "publish_weights", (key,), what, then=self._note)

    def _note(self) -> None:
        self.weights = self._runner.counters.weights["actor"]

    def taken_by(
        self, group: WorkerGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        then: Callable[[], None] | None = None,
    ) -> StageRun:  # fmt: skip
        """Publish, and prepare the receiver's run. The actor's hosts drop the copy when that run has ended."""
        # the role's later stages wait for it, and do not run if it fails
        try:
            run = self._runner.prepare(group, operation, args, kwargs, first=lambda: [self.run], then=then,
                                       as_update=True)  # fmt: skip
        except BaseException:
            self.run.cancel()
            raise
        run.when_done(lambda: self.run.when_done(self._release))
        self._runner.scheduler.submit_unwaited(self.run)
        return run

    def _release(self) -> None:
        for host in self.where.hosts:
            self._runner.hosts.backend.ask(host, "release", [self.where.key])


class WeightSync:
    """A role that receives the actor's weights with its own operation: decides when a sync is due, and starts it."""

    def __init__(self, runner: StageRunner, role: str, operation: str) -> None:
        self._runner, self._role, self._operation = runner, role, operation
        self._last: tuple[Publication, StageRun] | None = None
        generation = runner.hosts.description.generation
        self._decision = PatchDecision(generation.sync) if role == ROLLOUT and generation else None

    def due(self) -> bool:
        """Whether the role will lag behind the actor after all runs that were called so far."""
        weights, actor = self._runner.counters.weights, self._runner.groups.by_role["actor"]
        updates = [run.number for run in self._runner.open_runs() if run.updates and run.group is actor]
        if self._last is not None and not self._last[1].done:
            publication = self._last[0]
            later = any(number > publication.run.number for number in updates)
            return later or (publication.run.done and publication.weights != weights["actor"])
        return bool(updates) or weights[self._role] != weights["actor"]

    def start(self, *, probe: bool, merged: bool = False) -> StageRun:
        """Start a sync, and return the role's run. probe: whether to send the trainer's outputs for the probe as well.
        merged: see `publish_weights`."""
        runner = self._runner
        publication = Publication(
            runner, probe=probe, merged=merged, keep=None if self._decision is None else self._decision.patches
        )

        def taken() -> None:
            assert publication.weights is not None
            runner.counters.weights[self._role] = publication.weights

        take = publication.taken_by(
            runner.groups.by_role[self._role], self._operation, (publication.where,), {}, then=taken
        )
        self._last = publication, take
        take.when_done(lambda: self._note_cost(take))
        runner.scheduler.submit_unwaited(take)
        return take

    def _note_cost(self, take: StageRun) -> None:
        if self._decision is not None and not take.future.cancelled() and take.future.exception() is None:
            ranks: Sequence[tuple[bool, float]] = take.future.result()  # whether it went by patches, and its seconds
            self._decision.note(max(seconds for _, seconds in ranks), patches=ranks[0][0])


class RolloutCaller:
    """Runs the actor's generation calls on the rollout workers, after a weight sync if their weights lag behind.

    A blocking call waits for the sync first, so that an error of the sync is raised by the call.
    """

    def __init__(self, runner: StageRunner) -> None:
        self._runner, self._sync = runner, WeightSync(runner, ROLLOUT, "receive_weights")
        self._rollout = rollout = runner.groups.by_role[ROLLOUT]
        actor = runner.groups.by_role["actor"]
        for name in DELEGATED:
            operation = rollout.operations[name].operation
            actor.delegate(name, GroupOperation(rollout, operation, self, asked=actor))
            if name != "generate_sequences":  # called on the workers, it uses the weights that they have
                rollout.delegate(name, GroupOperation(rollout, operation, self))

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._runner.carry_out(self._prepare(operation, args, kwargs, wait=not self._runner.scheduler.overlaps))

    def submit(
        self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StageRun:
        run = self._prepare(operation, args, kwargs, wait=False)
        self._runner.scheduler.submit_unwaited(run)
        return run

    def _prepare(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], *, wait: bool) -> StageRun:
        runner, name = self._runner, operation.name
        rollout, generation = self._rollout, runner.hosts.description.generation
        runner.groups.check_alive(rollout)
        assert generation is not None

        def synced() -> Sequence[Run]:
            if not self._sync.due():
                return ()
            sync = self._sync.start(probe=generation.check_sync)
            if wait:
                sync.result()
            return (sync,)

        if name in ("generate_sequences", "sync_weights"):
            return runner.prepare(rollout, name, args, kwargs, first=synced)
        # the other two operations read the trainer's weights as well
        rollout.operations[name].arguments(args, kwargs)
        if name == "compare_weights":
            synced()
        publication = Publication(runner, weights=name == "compare_weights")
        return publication.taken_by(rollout, name, args, {**kwargs, "published": publication.where})


def refresh_reference(runner: StageRunner) -> None:
    """Give the reference the actor's weights, as iterative DPO and TR-DPO (arXiv:2404.09656) do: the KL to it is 0
    until the actor's next step. The weights go from host to host, to each rank its own part; meanwhile the actor's
    ranks together keep one copy of them in host memory."""
    runner.require_nothing_to_skip("refresh_reference()")
    groups = runner.groups.by_role
    if runner.hosts.description.actor_is_reference:
        raise BadInput(
            "refresh_reference() with an adapter", "the reference is the actor without its adapter, and never changes",
            "declare a reference of its own in models=",
        )  # fmt: skip
    for role, operation in (("reference", "take_weights"), ("actor", "publish_weights")):
        if role not in groups or operation not in groups[role].operations:
            raise BadInput(
                "refresh_reference() here", f"the workbench needs a {role} with the operation {operation}",
                "open it with a reference, and with workers derived from workbench's own",
            )  # fmt: skip
    with runner.isolated("refresh_reference"):
        WeightSync(runner, "reference", "take_weights").start(probe=False, merged=True).result()
