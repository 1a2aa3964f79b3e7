"""Weights that one role publishes on its hosts, and of which others take slices, host to host; also its moments of
Adam, when the role moves.

Slices travel as rows of batches do: a host cuts them on request, and the taker records the transfer. So the two roles
need no process group in common, their pools may be on different machines and fail independently, and publisher and
taker need not step together: an update may run while weights from before it are still being taken. vLLM's own engines
for weight transfer (nccl, sharded_rdt) need CUDA on both sides.

    publisher's memory ──one copy──> bucket in shared memory ──one copy──> taker's memory
                                     (on another machine: a copy of the bucket there)

A publisher that keeps what it published before compares, and a taker that has just that is sent patches of what changed
(`workbench.resharding.patches`); any other is sent whole slices.

One rank's part of taking published weights: which slices it asks for, in which order, and where they go.

A bucket of slices has at most BUCKET_BYTES. A rank has one in use and asks for AHEAD more, which publishers fill
meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.batches.columns import array_of, tensor_over
from workbench.errors import NotFound
from workbench.placement import Layout
from workbench.placement.change import BUFFER_BYTES
from workbench.resharding import boxes
from workbench.resharding.boxes import Box, Boxes
from workbench.resharding.engine import Arrival, checksums_of, fill, view_of
from workbench.resharding.patches import Change, Patch, change
from workbench.resharding.plan import Distribution, Reshard, WeightShard
from workbench.resharding.weights import ITEM_BYTES, ModelWeights, Weight, model_weights
from workbench.settings.engines import SyncMode
from workbench.telemetry import Recorder
from workbench.telemetry.spans import TransferKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


Slice = tuple[str, Box]
Sent = Tensor | Patch
Ask = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Published:
    """Where weights are published: the key, and the hosts by their numbers in a plan. layout: of the publisher. kind:
    of the recorded transfers."""

    key: str
    hosts: tuple[str, ...]
    layout: Layout
    kind: TransferKind = "weights"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is published, beside the weights. version: optimizer steps of the weights. restored: how often they were put
    back to an earlier state, after which equal versions are not equal weights.

    shapes: of the whole weights, by name; empty where none were published. probe_ids, log_probs: tokens, and the
    publisher's log-probabilities of ids[1:], in nats; empty without a probe. log_probs_without: those of the model
    alone, where an adapter is published. aliases, vocabulary: of the model, see `PackedModule`.

    keeps: whether the publisher keeps it, to say later what has changed. since: the key of what it kept before, from
    which patches lead here; "" without. took_s: seconds until it was published, without the probe.
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
    """One rank's part of published weights: by name a tensor, and which elements it holds. A copy in host memory; or
    the live tensors, where nothing is trained while they are taken.

    contents: None for a part of a role's state. changes: since `contents.since`, of the weights that are not to be sent
    whole.
    """

    contents: Contents | None
    slices: Mapping[str, tuple[Tensor, WeightShard]]
    changes: Mapping[str, Change] = field(default_factory=dict)

    @torch.no_grad()
    def cut(self, wanted: Iterable[Slice]) -> list[Tensor]:
        """Each of these boxes of weights, row by row [elements], in host memory, for reading only: a box that is one
        piece of host memory already is not copied."""
        return _in_host_memory([view_of(*self.slices[name], box).reshape(-1) for name, box in wanted])

    def sent(self, wanted: Sequence[Slice], since: str) -> list[Sent]:
        """The same for who has what was published under the key `since`: patches, where that was the one before, and
        where they are smaller."""
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
        return checksums_of([view_of(*self.slices[name], box) for name, box in wanted], wanted)


def _in_host_memory(flat: list[Tensor]) -> list[Tensor]:
    """Flat tensors, those on a GPU copied to pinned memory with one wait for all."""
    if not flat or not flat[0].is_cuda:
        return flat
    copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in flat]
    for copy, part in zip(copies, flat, strict=True):
        copy.copy_(part, non_blocking=True)
    torch.cuda.current_stream(flat[0].device).synchronize()
    return copies


def weights_of(config: PreTrainedConfig, dtype: str, *layouts: Layout) -> ModelWeights:
    """The weights of a model for these layouts; only a layout that cuts layers needs to know how."""
    is_cut = any(layout.p * layout.t > 1 for layout in layouts)
    return model_weights(config, dtype=dtype, unknown="refuse" if is_cut else "whole")


def uncut_weights(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> ModelWeights:
    """Weights that are whole on every rank that has them, such as those of an adapter."""
    item = ITEM_BYTES[dtype]
    return ModelWeights(tuple(Weight(name=n, shape=tuple(s), item_bytes=item) for n, s in shapes.items()), 1)


def published_parts(weights: ModelWeights, layout: Layout) -> Distribution:
    """Which rank publishes what: the d holders of a slice publish a stretch of its rows each, so that together they
    keep one copy, and all of them serve it."""
    return Distribution(weights, layout, tuple(range(layout.size)), "fsdp")


def plan_of_taking(weights: ModelWeights, publisher: Layout, taker: Layout, *, vocabulary_multiple: int = 1) -> Reshard:
    """Who sends which slice to whom. Publishing ranks come first, then taking ones.

    weights: that are published. vocabulary_multiple: of the taker, see `Distribution`.
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
    """What a rank publishes of the weights that it holds: copies, in `dtype`.

    held: all that the rank holds in the layout; every rank iterates to the end, as ZeRO gathers them. kept: the copies
    of `contents.since`, which are exchanged for the new ones, on the device of the weights; None: nothing is compared.
    """
    by_name = {weight.name: weight for weight in weights}
    whole, parts = Distribution(weights, layout, tuple(range(layout.size))), published_parts(weights, layout)
    slices, changes = {}, {}
    for name, tensor in held:
        mine, part = whole.shard(by_name[name], rank), parts.shard(by_name[name], rank)
        assert mine is not None
        assert part is not None
        copy = torch.empty(part.shape, dtype=dtype, device="cpu" if kept is None else tensor.device)
        fill(copy, part, tensor, mine)
        if kept is not None:
            found = change(kept[name], copy) if contents.since else None
            if found is not None:
                changes[name] = found
            kept[name] = copy
        slices[name] = copy, part
    return Snapshot(contents=contents, slices=slices, changes=changes)


class Pulled(NamedTuple):
    """Slices that arrived, each row by row [elements] and for reading only: they may be memory of the publisher, or
    shared memory. sums: the checksum of each, taken where it was cut; empty where not asked for. start_s, end_s: by
    `perf_counter`."""

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


# Syncs of either kind that `Generation(sync="auto")` times before it keeps to one.
TRIALS = 3


class Choice:
    """Whether the next sync goes by patches. mode: "delta", always; "whole", never; "auto": as it took less time, of
    `TRIALS` each, patches first, whose first is whole."""

    def __init__(self, mode: SyncMode) -> None:
        self._mode, self._took_s = mode, {True: list[float](), False: list[float]()}

    @property
    def patches(self) -> bool:
        patched, whole = self._took_s[True], self._took_s[False]
        if self._mode != "auto" or len(patched) < TRIALS:
            return self._mode != "whole"
        return len(whole) >= TRIALS and median(patched) < median(whole)

    def note(self, seconds: float, *, patches: bool) -> None:
        """What a sync took that was to go in this way."""
        self._took_s[patches].append(seconds)


class WeightSource(Protocol):
    """Where slices come from: other hosts, or files."""

    def pull(
        self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> Pulled:
        """Slices of rank `rank` of the publisher; since: or patches, see `Snapshot.sent`. Any thread may call it."""

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> bool:
        """Record what arrived, under a name; whether it came from elsewhere."""


class WeightExchange:
    """One host's part: what its roles have published, and access to that of others.

    ask: `ask(host, method, *arguments)` calls a method of another host.
    """

    def __init__(self, host: str, recorder: Recorder, ask: Ask) -> None:
        self._host, self._recorder, self._ask = host, recorder, ask
        self._snapshots: dict[str, Snapshot] = {}
        self._lock = threading.Lock()

    def publish(self, key: str, snapshot: Snapshot) -> None:
        with self._lock:
            self._snapshots[key] = snapshot

    def release(self, keys: Iterable[str]) -> None:
        """Forget snapshots; keys of other things are no error."""
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
            raise NotFound(f"published weights {key} on host {self._host}", "they were released", "sync again")
        return found

    def served(
        self, key: str, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> tuple[list[Any], list[int]]:
        """Slices of a snapshot, or patches of them, as arrays for another process, and the checksums of the slices
        where asked for."""
        snapshot = self.snapshot(key)
        parts = [part if isinstance(part, Patch) else array_of(part) for part in snapshot.sent(wanted, since)]
        return parts, snapshot.checksums(wanted) if checksums else []

    def contents(self, published: Published) -> Contents:
        """What is published, as its first rank describes it."""
        host = published.hosts[0]
        here = host == self._host
        found = self.snapshot(published.key).contents if here else self._ask(host, "published_contents", published.key)
        assert isinstance(found, Contents)
        return found

    def is_here(self, published: Published, rank: int) -> bool:
        return published.hosts[rank] == self._host

    def pull(
        self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool, since: str = ""
    ) -> Pulled:
        began = time.perf_counter()
        if self.is_here(published, rank):
            snapshot = self.snapshot(published.key)
            sums = snapshot.checksums(wanted) if checksums else []
            return Pulled(snapshot.sent(wanted, since), sums, began, time.perf_counter())
        arrays, sums = self._ask(published.hosts[rank], "cut_weights", published.key, wanted, checksums, since)
        parts = [array if isinstance(array, Patch) else tensor_over(array) for array in arrays]
        return Pulled(parts, sums, began, time.perf_counter())

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> bool:
        """See `WeightSource`; nothing is recorded of what is on this host already."""
        if self.is_here(published, rank):
            return False
        shift, recorder = self._recorder.now_s() - time.perf_counter(), self._recorder
        recorder.add_transfer(
            published.hosts[rank], self._host, pulled.start_s + shift, pulled.end_s + shift,
            bytes=pulled.nbytes, columns=what, kind=published.kind,
        )  # fmt: skip
        return True


AHEAD = 3
BUCKET_BYTES = BUFFER_BYTES // (AHEAD + 1)
PROBE_ROWS, PROBE_COLUMNS = 16_384, 1024
PROBE_BYTES = 4 * PROBE_ROWS * PROBE_COLUMNS
SLOW_S = 1.0


class WeightIntake:
    """One rank's part of a plan of taking, again and again, a layer at a time.

    rank: in the taker's layout. received_bytes: from other hosts so far; whole_bytes: of the slices that these were or
    patched. checksums: whether to compare those of slices
    as they were sent and as they arrived; arrival: the comparison of the last time. Beside the taker's own tensors of a
    layer, memory is needed for `AHEAD` + 1 buckets.
    """

    def __init__(self, plan: Reshard, rank: int, exchange: WeightSource, *, checksums: bool = False) -> None:
        self._exchange, self._rank, self.received_bytes, self.whole_bytes = exchange, rank, 0, 0
        self._checksums, self.arrival = checksums, Arrival()
        self._layers: list[_Layer] = []
        me = plan.destination.ranks[rank]
        for group, weights in groupby(plan.weights, key=lambda weight: weight.group):
            layer = _Layer(group, [w for w in weights if plan.destination.shard(w, me) is not None])
            for weight in layer.weights:
                for movement in plan.movements(weight):
                    if me in movement.destinations:
                        layer.take(movement.source, weight, movement.boxes)
                # what a rank of the publisher has itself moves nowhere
                layer.take(
                    me, weight, boxes.intersect(plan.destination.boxes(weight, me), plan.source.boxes(weight, me))
                )
            self._layers.append(layer)

    @torch.no_grad()
    def weights(
        self,
        published: Published,
        device: torch.device,
        kept: dict[str, Tensor] | None = None,
        *,
        since: str = "",
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights, for `GenerationEngine.update_weights`: each in its whole shape, with this rank's slices
        written.

        kept: of whole shapes by name, in which they are written, and which stay; None: each is dropped after its layer.
        since: the key of what `kept` has: then patches may come, and only layers in which something changed are given.
        """
        for layer, buckets in self._pulled(published, since):
            matrices = {} if kept is None else kept
            by_name, changed = {weight.name: weight for weight in layer.weights}, False
            for bucket in buckets:
                for (name, _), part in zip(bucket.wanted, bucket.pulled.parts, strict=True):
                    if name not in matrices and isinstance(part, Tensor):
                        matrices[name] = torch.empty(by_name[name].shape, dtype=part.dtype, device=device)
                found = [(matrices[name].view(by_name[name].matrix), box) for name, box in bucket.wanted]
                changed |= self._write(bucket, [matrix[r0:r1, c0:c1] for matrix, (r0, r1, c0, c1) in found])
            for weight in layer.weights if changed else ():
                yield weight.name, matrices[weight.name] if kept is not None else matrices.pop(weight.name)

    @torch.no_grad()
    def place(self, published: Published, held: Mapping[str, tuple[Tensor, WeightShard]]) -> None:
        """Write what this rank needs into its live tensors. held: by name a tensor, and which elements of the weight it
        holds."""
        for _, buckets in self._pulled(published):
            for bucket in buckets:
                self._write(bucket, [view_of(*held[name], box) for name, box in bucket.wanted])

    def _write(self, bucket: _Bucket, views: Sequence[Tensor]) -> bool:
        """Write a bucket's slices where they belong; whether anything changed. What is compared are the checksums of
        what lies there in the end."""
        for view, part in zip(views, bucket.pulled.parts, strict=True):
            if isinstance(part, Patch):
                part.add_to(view)
            else:
                view.copy_((part.pin_memory() if view.is_cuda else part).view(view.shape), non_blocking=True)
        if sent := bucket.pulled.sums:
            names = [name for name, _ in bucket.wanted]
            self.arrival = self.arrival.with_slices(bucket.rank, names, sent, checksums_of(views, bucket.wanted))
        return any(part.nbytes for part in bucket.pulled.parts)

    def _pulled(self, published: Published, since: str = "") -> Iterator[tuple[_Layer, Iterator[_Bucket]]]:
        """Layer by layer what this rank needs; the next buckets are requested while the last is used."""
        self.arrival = Arrival()
        asked = iter([request for layer in self._layers for request in layer.in_turn(self._rank)])
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="pull") as ahead:
            coming = deque[Future[Pulled]]()

            def ask() -> None:
                if (request := next(asked, None)) is not None:
                    coming.append(ahead.submit(self._exchange.pull, published, *request, self._checksums, since))

            def buckets(layer: _Layer) -> Iterator[_Bucket]:
                for rank, wanted in layer.in_turn(self._rank):
                    pulled = coming.popleft().result()
                    ask()
                    if self._exchange.record(published, rank, pulled, layer.group):
                        self.received_bytes += pulled.nbytes
                        self.whole_bytes += pulled.whole_bytes
                    yield _Bucket(rank, wanted, pulled)

            for _ in range(AHEAD):
                ask()
            for layer in self._layers:
                yield layer, buckets(layer)


class _Bucket(NamedTuple):
    rank: int  # of the publisher
    wanted: Sequence[Slice]
    pulled: Pulled


@dataclass(eq=False)
class _Layer:
    """The weights of a layer that a rank needs, and which slices of them come from which rank."""

    group: str
    weights: list[Weight]
    sources: dict[int, list[list[Slice]]] = field(default_factory=dict)
    _room: dict[int, int] = field(default_factory=dict)

    def in_turn(self, taker: int) -> list[tuple[int, list[Slice]]]:
        """Its buckets by source, in the order of asking: each taker begins at another source."""
        found = list(self.sources.items())
        first = taker % max(1, len(found))
        return [(source, bucket) for source, buckets in found[first:] + found[:first] for bucket in buckets]

    def take(self, source: int, weight: Weight, found: Boxes) -> None:
        """Add boxes of a weight that come from a rank, in buckets of at most `BUCKET_BYTES`; a row stays whole."""
        for r0, r1, c0, c1 in found:
            row_bytes = (c1 - c0) * weight.item_bytes
            rows = max(1, BUCKET_BYTES // row_bytes)
            for start in range(r0, r1, rows):
                self._add(source, (weight.name, (start, min(start + rows, r1), c0, c1)), row_bytes)

    def _add(self, source: int, wanted: Slice, row_bytes: int) -> None:
        nbytes = (wanted[1][1] - wanted[1][0]) * row_bytes
        if nbytes > self._room.get(source, 0):
            self.sources.setdefault(source, []).append([])
            self._room[source] = BUCKET_BYTES
        self.sources[source][-1].append(wanted)
        self._room[source] -= nbytes


def probe() -> tuple[Snapshot, Reshard]:
    """A weight of `PROBE_BYTES` that a host publishes to be timed, and the plan by which another process takes it."""
    weights = ModelWeights((Weight(name="probe", shape=(PROBE_ROWS, PROBE_COLUMNS), item_bytes=4),), 1)
    plan = Reshard(*(Distribution(weights, Layout(), (rank,)) for rank in (0, 1)))
    whole = WeightShard(((0, PROBE_ROWS, 0, PROBE_COLUMNS),), (PROBE_ROWS, PROBE_COLUMNS))
    return Snapshot(contents=None, slices={"probe": (torch.zeros(PROBE_ROWS, PROBE_COLUMNS), whole)}), plan


def timed_bytes_s(key: str, host: str, ask: Ask) -> float:
    """Bytes a second from a host, which has published a `probe` under a key, to this process: the faster of two times,
    after a first one in which memory for buckets is made; over a slow link that one counts. ask: as in
    `WeightExchange`."""
    snapshot, plan = probe()
    intake = WeightIntake(plan, 0, WeightExchange("here", Recorder(), ask), checksums=True)
    published = Published(key=key, hosts=(host, "here"), layout=Layout(), kind="move")
    took_s = []
    for _ in range(3):
        (_, shard), target = snapshot.slices["probe"], torch.empty(PROBE_ROWS, PROBE_COLUMNS)
        began = time.perf_counter()
        intake.place(published, {"probe": (target, shard)})
        took_s.append(time.perf_counter() - began)
        if took_s[0] > SLOW_S:
            break
    return PROBE_BYTES / min(took_s[1:] or took_s)
