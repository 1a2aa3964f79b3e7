"""A role's state on its way to other processes: what its ranks publish, and what each new rank takes.

Weights and moments go from host to host, each rank receives what its process lacks; step counts and random states, a
few kilobytes, go by the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.engines.training.optimizers import ADAM, CODES, MOMENTS, MUON, SCALES, StateKind
from workbench.errors import StageError
from workbench.placement import Layout
from workbench.placement.state import Part
from workbench.resharding import boxes
from workbench.resharding.distribution import Distribution, WeightShard
from workbench.resharding.plan import Reshard
from workbench.telemetry import Transfer
from workbench.workers.model_worker import random_state
from workbench.workers.weight_exchange import Published, Snapshot, WeightExchange, WeightSource
from workbench.workers.weight_intake import WeightIntake
from workbench.workers.worker import Worker

KINDS: dict[str, tuple[StateKind, ...]] = {
    "weights": ("weights",), "parameters": ("parameters",), "moments": ADAM, "momentum": MUON,
    "codes": CODES, "scales": SCALES,
}  # fmt: skip
"""What an engine calls the tensors of a `Part`."""

LayoutOnHosts = tuple[Layout, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class RoleMove:
    """The move of one role. key: part of the keys of what is published. parts: of its state, see `state_of`.

    source, destination: its layout before and after, and for each rank the number of its process among `hosts`.
    """

    role: str
    key: str
    hosts: tuple[str, ...]
    parts: tuple[Part, ...]
    source: LayoutOnHosts
    destination: LayoutOnHosts

    @property
    def published(self) -> list[str]:
        """All keys under which its ranks publish."""
        return [self._key(kind) for part in self.parts for kind in KINDS[part.what]]

    def _key(self, kind: StateKind) -> str:
        return f"{self.key}-{self.role}-{kind}"

    def of_kinds(self, *, moments: bool) -> Iterator[tuple[Part, StateKind, Published]]:
        """What is published, in order. moments: whether the role has moments."""
        for part in self.parts:
            for kind in KINDS[part.what]:
                if moments or kind not in MOMENTS:
                    layout = self.source[0]
                    yield part, kind, Published(key=self._key(kind), hosts=self.hosts, layout=layout, kind="move")


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The part of a rank's state that goes by the controller: optimizer steps, whether there are moments, the random
    generators of its process, `Worker.extra_state`, and the state of a loss scale."""

    steps: int
    moments: bool
    random: dict[str, Any] = field(repr=False)
    extra: dict[str, Any]
    loss_scale: tuple[float, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Received:
    """What a host took over, and when: unix times, until it was verified."""

    transfers: list[Transfer]
    start_s: float
    end_s: float


def publish_state(worker: Worker, move: RoleMove, rank: int, exchange: WeightExchange) -> RankState:
    """Publish what this rank holds, without a copy: it must not change until it is released."""
    engine = engine_of(worker)
    if engine is not None:
        engine.load()
    state = rank_state(worker)
    if state.moments and "moments" not in {part.what for part in move.parts}:
        raise StageError(
            f"{move.role} has moments after {state.steps} optimizer steps",
            "none were expected: the update that made them did not end as it should have",
            "run an update of the role to its end, then move",
        )
    for part, kind, published in move.of_kinds(moments=state.moments):
        assert engine is not None
        held = part.distribution(*move.source)
        slices = dict(held_slices(engine, move.role, held, held.ranks[rank], kind))
        exchange.publish(published.key, Snapshot(contents=None, slices=slices))
    return state


def rank_state(worker: Worker, *, moving: bool = True) -> RankState:
    """The part of a rank's state that goes by the controller. moving: whether the worker is asked for its
    `extra_state`."""
    engine = engine_of(worker)
    return RankState(
        steps=0 if engine is None else getattr(engine, "steps", 0),
        moments=engine is not None and engine.has_moments,
        random=random_state(),
        extra=worker.extra_state() if moving else {},
        loss_scale=None if engine is None or engine.loss_scale is None else engine.loss_scale.state,
    )


def held_slices(
    engine: TrainingEngine, role: str, distribution: Distribution, rank: int, kind: StateKind
) -> Iterator[tuple[str, tuple[Tensor, WeightShard]]]:
    """What a rank of a distribution holds of a kind of state, live: by name a tensor, and which elements of the weight
    it is. `StageError` where the engine holds other elements than the distribution says."""
    shards = {w.name: distribution.shard(w, rank) for w in distribution.weights}
    for name, tensor in engine.held_state(kind):
        shard = shards.get(name)
        if shard is None or tensor.numel() != boxes.size(shard.boxes):
            raise StageError(
                f"{role} holds {tensor.numel()} elements of {name} ({kind}) on rank {rank}",
                f"{0 if shard is None else boxes.size(shard.boxes)} were expected of {type(engine).__name__}",
            )
        yield name, (tensor.view(shard.shape), shard)


def take_state(worker: Worker, move: RoleMove, rank: int, exchange: WeightExchange, state: RankState) -> None:
    """Take what this rank of the role is to hold. Raises `StageError` where what arrived is not what was sent."""
    engine = engine_of(worker)
    if engine is not None:
        engine.load()
        engine.begin_state(state.moments)
        for part, kind, published in move.of_kinds(moments=state.moments):
            plan = part.reshard(move.source, move.destination)
            take_kind(engine, move.role, plan, rank, exchange, published, kind)
        engine.end_state(state.steps)
        engine.restore_loss_scale(state.loss_scale)
    worker.load_extra_state(state.extra)


def take_kind(
    engine: TrainingEngine, role: str, plan: Reshard, rank: int, source: WeightSource, published: Published,
    kind: StateKind,
) -> None:  # fmt: skip
    """Fill what `rank` of the plan's destination holds of one kind of state, and verify it."""
    held = dict(held_slices(engine, role, plan.destination, plan.destination.ranks[rank], kind))
    intake = WeightIntake(plan, rank, source, checksums=True)
    intake.place(published, held)
    for name, sender in intake.arrival.differ:
        raise StageError(
            f"{kind} of {role}: {name} is not what was sent", f"checksums of what came from rank {sender} differ",
            "try it again",
        )  # fmt: skip


def engine_of(worker: Worker) -> TrainingEngine | None:
    return cast("TrainingEngine | None", getattr(worker, "engine", None))
