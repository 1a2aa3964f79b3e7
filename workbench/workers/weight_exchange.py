"""Weights that one role publishes on its hosts, and that other roles take in slices, host to host. When a role moves,
also its Adam moments.

Slices travel like rows of batches: a host cuts them on request, and the taker records the transfer. So the two roles
need no common process group, their pools may be on different machines and fail independently, and publisher and taker
need not step together: an update may run while weights from before it are still being taken. vLLM's own engines for
weight transfer (nccl, sharded_rdt) need CUDA on both sides.

    publisher's memory ──one copy──> bucket in shared memory ──one copy──> taker's memory
                                     (on another machine: a copy of the bucket there)

A publisher that keeps its previously published weights finds what changed. A taker that has exactly these weights gets
patches of the changes (`workbench.resharding.patches`); other takers get whole slices.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.batches.columns import array_of, tensor_over
from workbench.errors import NotFound
from workbench.placement import Layout
from workbench.resharding import boxes
from workbench.resharding.boxes import Box
from workbench.resharding.engine import checksums_of, fill, view_of
from workbench.resharding.patches import Change, Patch, change
from workbench.resharding.plan import Distribution, Reshard, WeightShard
from workbench.resharding.weights import ITEM_BYTES, ModelWeights, Weight, model_weights
from workbench.telemetry import Recorder
from workbench.telemetry.spans import TransferKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Slice = tuple[str, Box]
Sent = Tensor | Patch
HostCall = Callable[..., Any]  # call(host, method, *arguments): calls a method of another host


@dataclass(frozen=True, kw_only=True)
class Published:
    """Where weights are published. hosts: by their numbers in a plan. layout: the publisher's. kind: the kind under
    which transfers are recorded."""

    key: str
    hosts: tuple[str, ...]
    layout: Layout
    kind: TransferKind = "weights"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A description of published weights. version: their optimizer steps. restored: how often they were restored to an
    earlier state; after a restore equal versions are not equal weights.

    shapes: of the whole weights, by name; empty if none were published. probe_ids, log_probs: tokens, and the
    publisher's log-probabilities of ids[1:], in nats; empty without a probe. log_probs_without: log-probabilities of
    the model without the published adapter. aliases, vocabulary: of the model, see `PackedModule`.

    keeps: whether the publisher keeps the weights, to find later changes. since: the key of the weights kept before,
    from which patches lead to these; "" without. took_s: seconds until publication, without the probe.
    """

    version: int
    restored: int
    shapes: Mapping[str, tuple[int, ...]]
    probe_ids: Tensor
    log_probs: Tensor
    aliases: Mapping[str, list[str]]
    vocabulary: frozenset[str]
    log_probs_without: Tensor | None = None
    keeps: bool = False
    since: str = ""
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of published weights: for each name a tensor, and which elements it holds. Tensors are copies in
    host memory, or the live tensors if nothing is trained while they are taken.

    contents: None for a part of a role's state. changes: since `contents.since`, for the weights that need not be sent
    whole.
    """

    contents: Contents | None
    slices: Mapping[str, tuple[Tensor, WeightShard]]
    changes: Mapping[str, Change] = field(default_factory=dict)

    @torch.no_grad()
    def cut(self, wanted: Iterable[Slice]) -> list[Tensor]:
        """Return each of these boxes of weights, row by row [elements], in host memory, for reading only: a box that is
        one piece of host memory already is not copied."""
        with self._beside_updates():
            return _in_host_memory([view_of(*self.slices[name], box).reshape(-1) for name, box in wanted])

    def sent(self, wanted: Sequence[Slice], since: str) -> list[Sent]:
        """Return the slices for a taker that has the weights published under the key `since`: patches, if those were
        the previous weights, and if the patches are smaller; else whole slices."""
        known = since and self.contents is not None and since == self.contents.since
        patches = [self._patch(*one) if known else None for one in wanted]
        whole = iter(self.cut([one for one, patch in zip(wanted, patches, strict=True) if patch is None]))
        return [next(whole) if patch is None else patch for patch in patches]

    def _patch(self, name: str, box: Box) -> Patch | None:
        change = self.changes.get(name)
        if change is None:
            return None
        patch = Patch.of(change.within(self.slices[name][1], box), boxes.size((box,)))
        return patch if patch.nbytes < patch.whole_bytes else None

    @torch.no_grad()
    def checksums(self, wanted: Sequence[Slice]) -> list[int]:
        with self._beside_updates():
            return checksums_of([view_of(*self.slices[name], box) for name, box in wanted], wanted)

    @property
    def on_gpu(self) -> bool:
        return any(tensor.is_cuda for tensor, _ in self.slices.values())

    def _beside_updates(self) -> AbstractContextManager[Any]:
        """Use, on a GPU, a stream that does not wait for concurrent computation."""
        return torch.cuda.stream(_side_stream()) if self.on_gpu else nullcontext()


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def _in_host_memory(flat: list[Tensor]) -> list[Tensor]:
    """Return flat tensors in host memory; tensors on a GPU are copied to pinned memory with one wait for all."""
    if not flat or not flat[0].is_cuda:
        return flat
    copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in flat]
    for copy, part in zip(copies, flat, strict=True):
        copy.copy_(part, non_blocking=True)
    torch.cuda.current_stream(flat[0].device).synchronize()
    return copies


def weights_of(config: PreTrainedConfig, dtype: str, *layouts: Layout) -> ModelWeights:
    """Return a model's weights for these layouts; only a layout that cuts layers must know how to cut them."""
    is_cut = any(layout.p * layout.t > 1 for layout in layouts)
    return model_weights(config, dtype=dtype, unknown="refuse" if is_cut else "whole")


def uncut_weights(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> ModelWeights:
    """Return weights that are whole on each rank that has them, such as those of an adapter."""
    item = ITEM_BYTES[dtype]
    return ModelWeights(tuple(Weight(name=n, shape=tuple(s), item_bytes=item) for n, s in shapes.items()), 1)


def published_parts(weights: ModelWeights, layout: Layout) -> Distribution:
    """Return which rank publishes which elements: the d holders of a slice publish a range of its rows each, so that
    together they keep one copy, and all of them serve it."""
    return Distribution(weights, layout, tuple(range(layout.size)), "fsdp")


def plan_of_taking(weights: ModelWeights, publisher: Layout, taker: Layout, *, vocabulary_multiple: int = 1) -> Reshard:
    """Plan which rank sends which slice to which rank. Publishing ranks come first, then taking ranks.

    weights: the published weights. vocabulary_multiple: the taker's, see `Distribution`.
    """
    ranks = tuple(range(publisher.size, publisher.size + taker.size))
    needed = Distribution(weights, taker, ranks, vocabulary_multiple=vocabulary_multiple)
    return Reshard(published_parts(weights, publisher), needed)


@torch.no_grad()
def take_snapshot(
    held: Iterable[tuple[str, Tensor]],
    weights: ModelWeights,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    contents: Contents,
    kept: dict[str, Tensor] | None = None,
) -> Snapshot:
    """Copy, in `dtype`, the part of a rank's weights that it publishes.

    held: all weights that the rank holds in the layout; every rank iterates to the end, as ZeRO gathers them. kept: the
    copies of `contents.since`, which the new copies replace, on the device of the weights; None: nothing is compared.
    """
    by_name = {weight.name: weight for weight in weights}
    whole, parts = Distribution(weights, layout, tuple(range(layout.size))), published_parts(weights, layout)
    slices, changes = {}, {}
    for name, tensor in held:
        mine, part = whole.shard(by_name[name], rank), parts.shard(by_name[name], rank)
        assert mine is not None and part is not None
        copy = torch.empty(part.shape, dtype=dtype, device="cpu" if kept is None else tensor.device)
        fill(copy, part, tensor, mine)
        if kept is not None:
            if contents.since and (found := change(kept[name], copy)) is not None:
                changes[name] = found
            kept[name] = copy
        slices[name] = copy, part
    return Snapshot(contents=contents, slices=slices, changes=changes)


class Pulled(NamedTuple):
    """Slices that arrived, each row by row [elements] and for reading only: they may be the publisher's memory, or
    shared memory. sums: the checksum of each slice, computed where it was cut; empty if not requested. start_s, end_s:
    by `perf_counter`."""

    parts: list[Sent]
    sums: list[int]
    start_s: float
    end_s: float

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def whole_bytes(self) -> int:
        return sum(part.whole_bytes if isinstance(part, Patch) else part.nbytes for part in self.parts)


class WeightSource(Protocol):
    """A source of slices: other hosts, or files."""

    def pull(
        self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> Pulled:
        """Return slices of the publisher's rank `rank`; since: or patches, see `Snapshot.sent`. Thread-safe."""

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> bool:
        """Record arrived slices under the name `what`; return whether they came from elsewhere."""


class WeightExchange:
    """One host's part of the exchange: what its roles have published, and access to what other hosts have published."""

    def __init__(self, host: str, recorder: Recorder, call: HostCall) -> None:
        self._host, self._recorder, self._call = host, recorder, call
        self._snapshots: dict[str, Snapshot] = {}
        self._lock = threading.Lock()

    def publish(self, key: str, snapshot: Snapshot) -> None:
        if snapshot.on_gpu:  # complete it before another stream reads it
            torch.cuda.current_stream().synchronize()
        with self._lock:
            self._snapshots[key] = snapshot

    def release(self, keys: Iterable[str]) -> None:
        """Forget snapshots; keys of other objects are ignored."""
        with self._lock:
            for key in keys:
                self._snapshots.pop(key, None)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(tensor.nbytes for kept in self._snapshots.values() for tensor, _ in kept.slices.values())

    def snapshot(self, key: str) -> Snapshot:
        with self._lock:
            found = self._snapshots.get(key)
        if found is None:
            raise NotFound(f"no published weights {key} on host {self._host}", "they were released", "sync again")
        return found

    def served(
        self, key: str, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> tuple[list[Any], list[int]]:
        """Return slices of a snapshot, or patches of them, as arrays for another process, and the slices' checksums if
        requested."""
        snapshot = self.snapshot(key)
        parts = [part if isinstance(part, Patch) else array_of(part) for part in snapshot.sent(wanted, since)]
        return parts, snapshot.checksums(wanted) if checksums else []

    def contents(self, published: Published) -> Contents:
        """Return the description of published weights, from the publisher's first rank."""
        host, key = published.hosts[0], published.key
        found = self.snapshot(key).contents if host == self._host else self._call(host, "published_contents", key)
        assert isinstance(found, Contents)
        return found

    def pull(
        self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> Pulled:
        began = time.perf_counter()
        if published.hosts[rank] == self._host:
            snapshot = self.snapshot(published.key)
            sums = snapshot.checksums(wanted) if checksums else []
            return Pulled(snapshot.sent(wanted, since), sums, began, time.perf_counter())
        found, sums = self._call(published.hosts[rank], "cut_weights", published.key, wanted, checksums, since)
        parts = [part if isinstance(part, Patch) else tensor_over(part) for part in found]
        return Pulled(parts, sums, began, time.perf_counter())

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> bool:
        """See `WeightSource`; slices that are already on this host are not recorded."""
        if published.hosts[rank] == self._host:
            return False
        shift = self._recorder.now_s() - time.perf_counter()
        self._recorder.add_transfer(
            published.hosts[rank], self._host, pulled.start_s + shift, pulled.end_s + shift,
            bytes=pulled.nbytes, columns=what, kind=published.kind,
        )  # fmt: skip
        return True
