"""A role's state in files: what each of its ranks writes, and what a rank of any layout reads.

Files have the same parts as a move (`role_state`), cut alike, but each element once: replicas write a stretch of rows
each, all at the same time.

    <folder>/parameters-00000.safetensors     fp32 weights that the rank holds, by transformers' names
    <folder>/exp_avg-00000.safetensors        moments of Adam
    <folder>/state-00000.pt                   of a user's own worker: what its `state()` gives, pickled; read only with
                                              the checksum that the checkpoint's manifest has
    <folder>/model/                           the model, as transformers and vLLM load it
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from workbench.engines.training.optimizers import MOMENTS, StateKind
from workbench.errors import StageError
from workbench.placement import ROLLOUT, Layout
from workbench.placement.state import FlatReshard, Part
from workbench.resharding.checksums import checksums_of
from workbench.resharding.distribution import Distribution, WeightShard
from workbench.resharding.plan import Reshard
from workbench.resharding.views import fill, view_of
from workbench.support import files as own_files
from workbench.workers.role_state import KINDS, RankState, engine_of, held_slices, rank_state, take_kind
from workbench.workers.weight_exchange import Published, Pulled, Slice
from workbench.workers.worker import Worker


@dataclass(frozen=True, kw_only=True)
class RoleFiles:
    """Where a role's state is, and how it is laid out. folder: absolute, visible to all hosts. parts: empty for a
    user's own worker. layout: of the ranks that wrote it. model: whether the model is written too. states: of files to
    read, the checksums of those of a user's own worker, by name."""

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

    def part(self, what: str) -> Part | None:
        return next((part for part in self.parts if part.what == what), None)

    def plan(self, saved: Part, part: Part, layout: Layout) -> Reshard:
        """Which rank of a layout reads which elements from which file. Readers are numbered after the writers."""
        readers = tuple(range(self.layout.size, self.layout.size + layout.size))
        kind = FlatReshard if "flat" in (saved.sharding, part.sharding) else Reshard
        return kind(self.distribution(saved), part.distribution(layout, readers))

    def expected(self, *, moments: bool) -> list[Path]:
        kinds = [kind for part in self.parts for kind in KINDS[part.what] if moments or kind not in MOMENTS]
        found = [self.file(kind, rank) for kind in kinds for rank in self.ranks]
        return [*found, *([Path(self.folder, "model", "config.json")] if self.model else [])]

    def file(self, what: str, rank: int) -> Path:
        """The file of one kind of state of a rank."""
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
        for part in files.parts:
            mine = files.distribution(part)
            by_name = {weight.name: weight for weight in part.weights}
            for kind in KINDS[part.what]:
                if kind in MOMENTS and not engine.has_moments:
                    continue
                tensors = {}
                live = part.distribution(files.layout, files.ranks)
                for name, (tensor, held) in held_slices(engine, files.role, live, rank, kind):
                    kept = mine.shard(by_name[name], rank)
                    if kept is not None and kept.boxes:
                        tensors[name] = _cut(tensor, held, kept)
                path, needed = files.file(kind, rank), sum(tensor.nbytes for tensor in tensors.values())
                with own_files.disk_errors(path, needed):
                    save_file(tensors, path)
                    own_files.to_disk(path)  # before the checkpoint is renamed to its place
    return rank_state(worker, moving=bool(files.parts) or files.role == ROLLOUT)


def read_role(worker: Worker, files: RoleFiles, parts: Sequence[Part], rank: int, state: RankState) -> None:
    """Read what `rank` of the role is to hold in its worker's layout. All ranks of the role call it.

    parts: of its state. Raises `StageError` where what it holds in the end differs from the files.
    """
    engine = engine_of(worker)
    if files.role == ROLLOUT:  # the next sync sends it the actor's weights
        worker.load_extra_state(state.extra)
        return
    if not files.parts:
        if (path := files.file("state", rank)).name in files.states:
            worker.load_state(_unpickled(path, files.states[path.name]))
        return
    if engine is not None:
        engine.load()
        engine.begin_state(state.moments)
        for part in parts:
            saved = files.part(part.what)
            if saved is None:
                continue
            plan = files.plan(saved, part, worker.layout)
            for kind in KINDS[part.what]:
                if state.moments or kind not in MOMENTS:
                    source = Published(key=kind, hosts=tuple(map(str, files.ranks)), layout=files.layout, kind="move")
                    take_kind(
                        engine, files.role, plan, rank, _Files(files, files.distribution(saved), kind), source, kind
                    )
        engine.end_state(state.steps)
        engine.restore_loss_scale(state.loss_scale)
    worker.load_extra_state(state.extra)


def _unpickled(path: Path, sha256: str) -> dict[str, Any]:
    """A worker's state. The very bytes that are unpickled are those that were saved."""
    data = own_files.read_bytes(path, limit=None)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StageError(f"{str(path)!r} has another checksum", f"SHA-256 {sha256[:12]} was written", "restore again")
    found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=False)
    return found


@torch.no_grad()
def _cut(tensor: Tensor, held: WeightShard, kept: WeightShard) -> Tensor:
    if kept == held:
        return tensor.detach().cpu().contiguous()
    part = torch.empty(kept.shape, dtype=tensor.dtype)
    fill(part, kept, tensor, held)
    return part


@dataclass
class _Files:
    """The files of one kind of state, as a source of slices."""

    files: RoleFiles
    distribution: Distribution
    kind: StateKind
    _open: dict[int, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pull(self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool) -> Pulled:
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

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> int:
        return pulled.nbytes
