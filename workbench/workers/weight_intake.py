"""One rank's part of taking published weights: which slices it asks for, in which order, and where they go.

A bucket of slices has at most BUCKET_BYTES. A rank has one in use and asks for AHEAD more, which publishers fill
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
from workbench.resharding.boxes import Box, Boxes
from workbench.resharding.checksums import Arrival, checksums_of
from workbench.resharding.distribution import Distribution, WeightShard
from workbench.resharding.plan import Reshard
from workbench.resharding.views import view_of
from workbench.resharding.weights import ModelWeights, Weight
from workbench.telemetry import Recorder
from workbench.workers.weight_exchange import Ask, Published, Pulled, Slice, Snapshot, WeightExchange, WeightSource

AHEAD = 3
BUCKET_BYTES = BUFFER_BYTES // (AHEAD + 1)
PROBE_ROWS, PROBE_COLUMNS = 16_384, 1024
PROBE_BYTES = 4 * PROBE_ROWS * PROBE_COLUMNS


class WeightIntake:
    """One rank's part of a plan of taking, again and again, a layer at a time.

    rank: in the taker's layout. received_bytes: from other hosts so far. checksums: whether to compare those of slices
    as they were sent and as they arrived; arrival: the comparison of the last time. Beside the taker's own tensors of a
    layer, memory is needed for `AHEAD` + 1 buckets.
    """

    def __init__(self, plan: Reshard, rank: int, exchange: WeightSource, *, checksums: bool = False) -> None:
        self._exchange, self._rank, self.received_bytes = exchange, rank, 0
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

    def weights(self, published: Published, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights, for `GenerationEngine.update_weights`: each in its whole shape, with this rank's slices
        written."""
        for layer, buckets in self._pulled(published):
            matrices: dict[str, Tensor] = {}
            by_name = {weight.name: weight for weight in layer.weights}
            for bucket in buckets:
                for name, (r0, r1, c0, c1), part in self._as_sent(bucket):
                    if name not in matrices:
                        matrices[name] = torch.empty(by_name[name].matrix, dtype=part.dtype, device=device)
                    matrices[name][r0:r1, c0:c1].copy_(part)
            for weight in layer.weights:
                yield weight.name, matrices.pop(weight.name).view(weight.shape)

    @torch.no_grad()
    def place(self, published: Published, held: Mapping[str, tuple[Tensor, WeightShard]]) -> None:
        """Write what this rank needs into its live tensors. held: by name a tensor, and which elements of the weight it
        holds. Checksums are of these tensors in the end."""
        for _, buckets in self._pulled(published):
            for bucket in buckets:
                views = [view_of(*held[name], box) for name, box in bucket.wanted]
                for view, part in zip(views, bucket.pulled.parts, strict=True):
                    source = part.pin_memory() if view.is_cuda else part
                    view.copy_(source.view(view.shape), non_blocking=True)
                self._compare(bucket, views)

    def _pulled(self, published: Published) -> Iterator[tuple[_Layer, Iterator[_Bucket]]]:
        """Layer by layer what this rank needs; the next buckets are requested while the last is used."""
        self.arrival = Arrival()
        asked = iter([request for layer in self._layers for request in layer.in_turn(self._rank)])
        with ThreadPoolExecutor(AHEAD, thread_name_prefix="pull") as ahead:
            coming = deque[Future[Pulled]]()

            def ask() -> None:
                if (request := next(asked, None)) is not None:
                    coming.append(ahead.submit(self._exchange.pull, published, *request, self._checksums))

            def buckets(layer: _Layer) -> Iterator[_Bucket]:
                for rank, wanted in layer.in_turn(self._rank):
                    pulled = coming.popleft().result()
                    ask()
                    self.received_bytes += self._exchange.record(published, rank, pulled, layer.group)
                    yield _Bucket(rank, wanted, pulled)

            for _ in range(AHEAD):
                ask()
            for layer in self._layers:
                yield layer, buckets(layer)

    def _as_sent(self, bucket: _Bucket) -> Iterator[tuple[str, Box, Tensor]]:
        """The boxes of a bucket, after comparing their checksums."""
        pairs = zip(bucket.wanted, bucket.pulled.parts, strict=True)
        parts = [part.view(box[1] - box[0], box[3] - box[2]) for (_, box), part in pairs]
        self._compare(bucket, parts)
        for (name, box), part in zip(bucket.wanted, parts, strict=True):
            yield name, box, part

    def _compare(self, bucket: _Bucket, views: Sequence[Tensor]) -> None:
        """Record whether slices have the checksums that they had where they were cut."""
        sent = bucket.pulled.sums
        if sent:
            names = [name for name, _ in bucket.wanted]
            self.arrival = self.arrival.with_slices(bucket.rank, names, sent, checksums_of(views, bucket.wanted))


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
    after a first one in which memory for buckets is made. ask: as in `WeightExchange`."""
    snapshot, plan = probe()
    intake = WeightIntake(plan, 0, WeightExchange("here", Recorder(), ask), checksums=True)
    published = Published(key=key, hosts=(host, "here"), layout=Layout(), kind="move")
    took_s = []
    for _ in range(3):
        (_, shard), target = snapshot.slices["probe"], torch.empty(PROBE_ROWS, PROBE_COLUMNS)
        began = time.perf_counter()
        intake.place(published, {"probe": (target, shard)})
        took_s.append(time.perf_counter() - began)
    return PROBE_BYTES / min(took_s[1:])
