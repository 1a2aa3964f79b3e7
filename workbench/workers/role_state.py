"""A role's state on its way to other processes, or to files and back: its ranks publish it, and new ranks take it.

Weights and moments go from host to host, and each rank receives what its process lacks; step counts and random states,
a few kilobytes, go through the controller. Files have the same parts as a move, cut alike, but each element is written
once: replicas write a range of rows each, all at the same time.

    <folder>/parameters-00000.safetensors     fp32 weights that the rank holds, by transformers' names
    <folder>/exp_avg-00000.safetensors        moments of Adam
    <folder>/state-00000.pt                   of a user's own worker: the pickled result of `state()`; read only if its
                                              checksum is that in the checkpoint's manifest
    <folder>/model/                           the model, as transformers and vLLM load it
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.engines.training.steps import ADAM, CODES, MOMENTS, MUON, SCALES, StateKind
from workbench.errors import BadInput, StageError
from workbench.placement import ROLLOUT, Layout
from workbench.placement.state import FlatReshard, Part
from workbench.resharding import boxes
from workbench.resharding.engine import checksums_of, convert_shard, view_of
from workbench.resharding.plan import Distribution, Reshard, WeightShard
from workbench.support import files as own_files
from workbench.telemetry import Transfer
from workbench.workers.model_worker import random_state
from workbench.workers.weight_exchange import Published, Pulled, Slice, Snapshot, WeightExchange, WeightSource
from workbench.workers.weight_intake import WeightIntake
from workbench.workers.worker import Worker

KINDS: dict[str, tuple[StateKind, ...]] = {
    "weights": ("weights",), "parameters": ("parameters",), "moments": ADAM, "momentum": MUON,
    "codes": CODES, "scales": SCALES,
}  # fmt: skip
"""`Part` -> the engine's kinds of tensors."""


def kinds_of(parts: Sequence[Part], *, moments: bool) -> Iterator[tuple[Part, StateKind]]:
    """Yield a state's parts with the engine's names of their tensors. moments: whether the role has moments."""
    for part in parts:
        for kind in KINDS[part.what]:
            if moments or kind not in MOMENTS:
                yield part, kind


LayoutOnHosts = tuple[Layout, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class RoleMove:
    """The move of one role. key: part of the keys under which state is published. parts: of its state, see `state_of`.

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
        """All keys under which the role's ranks publish."""
        return [self._key(kind) for _, kind in kinds_of(self.parts, moments=True)]

    def _key(self, kind: StateKind) -> str:
        return f"{self.key}-{self.role}-{kind}"

    def of_kinds(self, *, moments: bool) -> Iterator[tuple[Part, StateKind, Published]]:
        """Yield the published parts, in order. moments: whether the role has moments."""
        for part, kind in kinds_of(self.parts, moments=moments):
            yield part, kind, Published(key=self._key(kind), hosts=self.hosts, layout=self.source[0], kind="move")


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The part of a rank's state that goes through the controller: optimizer steps, whether there are moments, the
    random generators of its process, `Worker.extra_state`, and the state of a loss scale."""

    steps: int
    moments: bool
    random: dict[str, Any] = field(repr=False)
    extra: dict[str, Any]
    loss_scale: tuple[float, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Received:
    """The transfers by which a host took something over. start_s, end_s: unix times; the end is after verification."""

    transfers: list[Transfer]
    start_s: float
    end_s: float


def publish_state(worker: Worker, move: RoleMove, rank: int, exchange: WeightExchange) -> RankState:
    """Publish the state that this rank holds, without a copy: it must not change until it is released."""
    engine = engine_of(worker)
    if engine is not None:
        engine.load()
    state = rank_state(worker)
    if state.moments and "moments" not in {part.what for part in move.parts}:
        raise StageError(
            f"{move.role} has moments after {state.steps} optimizer steps",
            "no moments were expected: the update that made them did not end properly",
            "run an update of the role to its end, then move",
        )
    for part, kind, published in move.of_kinds(moments=state.moments):
        assert engine is not None
        held = part.distribution(*move.source)
        slices = dict(held_slices(engine, move.role, held, held.ranks[rank], kind))
        exchange.publish(published.key, Snapshot(contents=None, slices=slices))
    return state


def rank_state(worker: Worker, *, moving: bool = True) -> RankState:
    """Return the part of a rank's state that goes through the controller. moving: whether to ask the worker for its
    `extra_state`."""
    kind, engine = type(worker), engine_of(worker)
    ours = [method.__module__.startswith("workbench.") for method in (kind.state, kind.extra_state)]
    if moving and ours == [False, True]:
        raise BadInput(
            f"moving {kind.__name__}", "it has a state of its own",
            "define `extra_state` and `load_extra_state` too",
        )  # fmt: skip
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
    """Yield one kind of a rank's state, live: for each name a tensor, and which elements of the weight it holds. Raises
    `StageError` if the engine holds other elements than the distribution says."""
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
    """Take the state that this rank of the role will hold. Raises `StageError` if what arrived is not what was sent."""
    engine = engine_of(worker)
    if engine is not None:
        engine.load()
        engine.begin_state(state.moments)
        for part, kind, published in move.of_kinds(moments=state.moments):
            plan = part.reshard(move.source, move.destination)
            take_kind(engine, move.role, plan, rank, exchange, published, kind)
        engine.end_state(state.steps, state.loss_scale)
    worker.load_extra_state(state.extra)


def take_kind(
    engine: TrainingEngine, role: str, plan: Reshard, rank: int, source: WeightSource, published: Published,
    kind: StateKind,
) -> None:  # fmt: skip
    """Fill the tensors of one kind of state that `rank` of the plan's destination holds, and verify them."""
    held = dict(held_slices(engine, role, plan.destination, plan.destination.ranks[rank], kind))
    intake = WeightIntake(plan, rank, source, checksums=True)
    intake.place(published, held)
    for name, sender in intake.arrival.differ:
        raise StageError(
            f"{kind} of {role}: {name} is not what was sent", f"the checksum of rank {sender}, its sender, differs",
            "try again",
        )  # fmt: skip


def engine_of(worker: Worker) -> TrainingEngine | None:
    return cast("TrainingEngine | None", getattr(worker, "engine", None))


# --- in files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoleFiles:
    """The files of a role's state, and how they are laid out. folder: absolute, visible to all hosts. parts: empty for
    a user's own worker. layout: of the ranks that wrote the files. model: whether the model is written too. states:
    checksums, by name, of a user's own worker's files to read."""

    role: str
    folder: str
    parts: tuple[Part, ...]
    layout: Layout
    model: bool = False
    states: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.layout.size))

    def distribution(self, part: Part) -> Distribution:
        once = replace(part, sharding="fsdp") if part.sharding == "replicas" else part
        return once.distribution(self.layout, self.ranks)

    def plan(self, saved: Part, part: Part, layout: Layout) -> Reshard:
        """Plan which rank of a layout reads which elements from which file. Readers are numbered after the writers."""
        readers = tuple(range(self.layout.size, self.layout.size + layout.size))
        kind = FlatReshard if "flat" in (saved.sharding, part.sharding) else Reshard
        return kind(self.distribution(saved), part.distribution(layout, readers))

    def expected(self, *, moments: bool) -> list[Path]:
        kinds = kinds_of(self.parts, moments=moments)
        found = [self.file(kind, rank) for _, kind in kinds for rank in self.ranks]
        return [*found, *([Path(self.folder, "model", "config.json")] if self.model else [])]

    def file(self, what: str, rank: int) -> Path:
        return Path(self.folder, f"{what}-{rank:05d}.{'pt' if what == 'state' else 'safetensors'}")


def write_role(worker: Worker, files: RoleFiles, rank: int) -> RankState:
    """Write this rank's part of its role's state. All ranks of the role call it."""
    engine, state = engine_of(worker), {} if files.parts else worker.state()
    if files.parts or state:
        own_files.private_folder(Path(files.folder))
    if not files.parts:
        if state:
            torch.save(state, pickled := io.BytesIO())
            own_files.write_bytes(files.file("state", rank), pickled.getvalue(), flush=True)
    elif engine is not None:
        engine.load()
        for part, kind in kinds_of(files.parts, moments=engine.has_moments):
            mine, live = files.distribution(part), part.distribution(files.layout, files.ranks)
            by_name, tensors = {weight.name: weight for weight in part.weights}, {}
            for name, (tensor, held) in held_slices(engine, files.role, live, rank, kind):
                kept = mine.shard(by_name[name], rank)
                if kept is not None and kept.boxes:
                    tensors[name] = convert_shard(tensor, held, kept, torch.device("cpu")).cpu().contiguous()
            path, needed = files.file(kind, rank), sum(tensor.nbytes for tensor in tensors.values())
            with own_files.disk_errors(path, needed):
                save_file(tensors, path)
                own_files.to_disk(path)  # flush before the checkpoint is renamed to its final path
    return rank_state(worker, moving=bool(files.parts) or files.role == ROLLOUT)


def read_role(worker: Worker, files: RoleFiles, parts: Sequence[Part], rank: int, state: RankState) -> None:
    """Read the state that `rank` of the role will hold in its worker's layout. All ranks of the role call it.

    parts: of its state. Raises `StageError` if the held state differs from the files in the end.
    """
    engine = engine_of(worker)
    if files.role == ROLLOUT:  # the next sync sends the actor's weights
        worker.load_extra_state(state.extra)
        return
    if not files.parts:
        if (path := files.file("state", rank)).name in files.states:
            worker.load_state(_unpickled(path, files.states[path.name]))
        return
    if engine is not None:
        engine.load()
        engine.begin_state(state.moments)
        written = {part.what: part for part in files.parts}
        for part, kind in kinds_of([part for part in parts if part.what in written], moments=state.moments):
            saved = written[part.what]
            source = Published(key=kind, hosts=tuple(map(str, files.ranks)), layout=files.layout, kind="move")
            slices = _Files(files, files.distribution(saved), kind)
            take_kind(engine, files.role, files.plan(saved, part, worker.layout), rank, slices, source, kind)
        engine.end_state(state.steps, state.loss_scale)
    worker.load_extra_state(state.extra)


def _unpickled(path: Path, sha256: str) -> dict[str, Any]:
    """Return a worker's state, unpickled from the same bytes whose checksum was verified."""
    data = own_files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StageError(f"{str(path)!r} has another checksum", f"SHA-256 {sha256[:12]} was written", "restore again")
    return cast(dict[str, Any], torch.load(io.BytesIO(data), weights_only=False))


@dataclass
class _Files:
    """The files of one kind of state, as a source of slices."""

    files: RoleFiles
    distribution: Distribution
    kind: StateKind
    _open: dict[int, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pull(
        self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> Pulled:
        began = time.perf_counter()
        with self._lock:
            if rank not in self._open:
                self._open[rank] = safe_open(self.files.file(self.kind, rank), framework="pt")
        weights = {weight.name: weight for weight in self.distribution.weights}
        views = []
        for name, box in wanted:
            shard = self.distribution.shard(weights[name], rank)
            assert shard is not None
            views.append(view_of(self._open[rank].get_tensor(name), shard, box))
        sums = checksums_of(views, wanted) if checksums else []
        return Pulled([view.reshape(-1) for view in views], sums, began, time.perf_counter())

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> bool:
        return True
