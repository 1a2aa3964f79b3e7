"""One rank's part of taking published weights: which slices it requests, in which order, and where it writes them.

A bucket of slices has at most BUCKET_BYTES. A rank uses one bucket and requests AHEAD more, which publishers fill
meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.placement import Layout
from workbench.placement.change import BUFFER_BYTES
from workbench.resharding import boxes
from workbench.resharding.boxes import Boxes
from workbench.resharding.engine import Arrival, checksums_of, view_of
from workbench.resharding.patches import Patch
from workbench.resharding.plan import Distribution, Reshard, WeightShard
from workbench.resharding.weights import ModelWeights, Weight
from workbench.telemetry import Recorder
from workbench.workers.weight_exchange import HostCall, Published, Pulled, Slice, Snapshot, WeightExchange, WeightSource

AHEAD = 3
BUCKET_BYTES = BUFFER_BYTES // (AHEAD + 1)
PROBE_ROWS, PROBE_COLUMNS = 16_384, 1024
PROBE_BYTES = 4 * PROBE_ROWS * PROBE_COLUMNS
SLOW_S = 1.0


class WeightIntake:
    """One rank's part of a plan of taking weights, a layer at a time; it can be used repeatedly.

    rank: in the taker's layout. received_bytes: from other hosts so far; whole_bytes: of the slices that were received
    or patched. checksums: whether to compare the checksums of sent and arrived slices; arrival: the last comparison.
    Besides the taker's own tensors of a layer, it needs memory for `AHEAD` + 1 buckets.
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
                        layer.add_boxes(movement.source, weight, movement.boxes)
                # the plan has no movement for elements that this rank itself publishes
                layer.add_boxes(
                    me, weight, boxes.intersect(plan.destination.boxes(weight, me), plan.source.boxes(weight, me))
                )
            self._layers.append(layer)

    @torch.no_grad()
    def weights(
        self, published: Published, device: torch.device, kept: dict[str, Tensor] | None = None, *, since: str = ""
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's weights, for `GenerationEngine.update_weights`: each in its whole shape, with this rank's
        slices written.

        kept: whole tensors by name, in which the weights are written and stay; None: each is dropped after its layer.
        since: the key of the weights in `kept`; then patches may come, and only layers with changes are yielded.
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
        """Write the elements that this rank needs into its live tensors. held: for each name a tensor, and which
        elements of the weight it holds."""
        for _, buckets in self._pulled(published):
            for bucket in buckets:
                self._write(bucket, [view_of(*held[name], box) for name, box in bucket.wanted])

    def _write(self, bucket: _Bucket, views: Sequence[Tensor]) -> bool:
        """Write a bucket's slices to their places; return whether anything changed. The checksums that are compared are
        those of the written elements."""
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
        """Yield, layer by layer, what this rank needs; the next buckets are requested while the last one is used."""
        self.arrival = Arrival()
        asked = iter([request for layer in self._layers for request in layer.buckets_by_source(self._rank)])
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="pull") as ahead:
            coming = deque[Future[Pulled]]()

            def ask() -> None:
                if (request := next(asked, None)) is not None:
                    coming.append(ahead.submit(self._exchange.pull, published, *request, self._checksums, since))

            def buckets(layer: _Layer) -> Iterator[_Bucket]:
                for rank, wanted in layer.buckets_by_source(self._rank):
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

    def buckets_by_source(self, taker: int) -> list[tuple[int, list[Slice]]]:
        """Return the layer's buckets by source, in the order of requests: each taker begins at another source."""
        found = list(self.sources.items())
        first = taker % max(1, len(found))
        return [(source, bucket) for source, buckets in found[first:] + found[:first] for bucket in buckets]

    def add_boxes(self, source: int, weight: Weight, found: Boxes) -> None:
        """Add boxes of a weight that come from a rank, in buckets of at most `BUCKET_BYTES`; rows are not split."""
        for r0, r1, c0, c1 in found:
            row_bytes = (c1 - c0) * weight.item_bytes
            rows = max(1, BUCKET_BYTES // row_bytes)
            for start in range(r0, r1, rows):
                stop = min(start + rows, r1)
                nbytes = (stop - start) * row_bytes
                if nbytes > self._room.get(source, 0):
                    self.sources.setdefault(source, []).append([])
                    self._room[source] = BUCKET_BYTES
                self.sources[source][-1].append((weight.name, (start, stop, c0, c1)))
                self._room[source] -= nbytes


def probe() -> tuple[Snapshot, Reshard]:
    """Return a weight of `PROBE_BYTES` that a host publishes to be timed, and another process's plan to take it."""
    weights = ModelWeights((Weight(name="probe", shape=(PROBE_ROWS, PROBE_COLUMNS), item_bytes=4),), 1)
    plan = Reshard(*(Distribution(weights, Layout(), (rank,)) for rank in (0, 1)))
    whole = WeightShard(((0, PROBE_ROWS, 0, PROBE_COLUMNS),), (PROBE_ROWS, PROBE_COLUMNS))
    return Snapshot(contents=None, slices={"probe": (torch.zeros(PROBE_ROWS, PROBE_COLUMNS), whole)}), plan


def timed_bytes_s(key: str, host: str, call: HostCall) -> float:
    """Measure the bytes per second from a host, which has published a `probe` under a key, to this process: the faster
    of two tries, after a first one that allocates memory for buckets; over a slow link only the first one counts.
    call: as in `WeightExchange`."""
    snapshot, plan = probe()
    intake = WeightIntake(plan, 0, WeightExchange("here", Recorder(), call), checksums=True)
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
