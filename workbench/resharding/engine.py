"""Execute one rank's part of a plan on live tensors.

    engine = ReshardingEngine(plan, communicator)
    for layer in engine.layers(trained):    # name -> tensor of this rank's generation shard
        ...                                 # load the layer into the generation engine

The module also has views of a weight's boxes in a rank's tensor, and checksums of slices in the memory of sender and
receiver, which show whether a slice arrived unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from workbench.resharding import boxes
from workbench.resharding.boxes import Box
from workbench.resharding.plan import Plan, WeightShard
from workbench.resharding.weights import Weight

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(view: Tensor, first_row: int) -> Tensor:
    """Return the checksum of the bits of a slice [rows, columns], an int64 scalar. first_row: the index of the slice's
    first row in the weight.

    Each row's elements are summed as integers of their own size, with wrap-around, and the sums are weighted by row
    number. A changed bit changes the checksum, and so do swapped rows.
    """
    integers = view.view(INTEGERS[view.element_size()])
    rows = integers.sum(1, dtype=integers.dtype).long()
    return (rows * torch.arange(first_row + 1, first_row + 1 + len(rows), device=rows.device)).sum()


def checksums_of(views: Sequence[Tensor], slices: Sequence[tuple[str, Box]]) -> list[int]:
    sums = [checksum(view, box[0]) for (_, box), view in zip(slices, views, strict=True)]
    return torch.stack(sums).tolist() if sums else []  # only one synchronisation with a GPU


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Checksums of all that a transition sent to this rank, at the senders and at this rank.

    sent, received: sums, modulo 2^64, of all checksums by the senders and by this rank. differ: (weight, sending rank)
    of each unequal checksum.
    """

    sent: int = 0
    received: int = 0
    differ: tuple[tuple[str, int], ...] = ()

    def with_slices(self, rank: int, names: Sequence[str], sent: Sequence[int], received: Sequence[int]) -> Arrival:
        """Return this arrival plus slices of weights from `rank`, with the checksums of each at both ends."""
        odd = [(name, rank) for name, theirs, mine in zip(names, sent, received, strict=True) if theirs != mine]
        return Arrival(
            sent=(self.sent + sum(sent)) % 2**64,
            received=(self.received + sum(received)) % 2**64,
            differ=tuple(dict.fromkeys([*self.differ, *odd])),
        )


class Checksums:
    """Checksums of the slices sent (or received), summed by the rank at the other end and by weight."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, Tensor]] = {}

    def add(self, ranks: Iterable[int], slices: Sequence[tuple[str, Box]], views: Sequence[Tensor]) -> None:
        """Add slices that were sent to each of `ranks`, or received from it. views: of the slices, [rows, columns]."""
        sums = [checksum(view, box[0]) for (_, box), view in zip(slices, views, strict=True)]
        for rank in ranks:
            mine = self._sums.setdefault(rank, {})
            for (name, _), found in zip(slices, sums, strict=True):
                mine[name] = mine[name] + found if name in mine else found

    def take(self) -> dict[int, tuple[list[str], Tensor]]:
        """Return by rank: names of weights, sorted as at the other end, and their sums [names]; reset all sums."""
        sums, self._sums = self._sums, {}
        return {rank: (sorted(mine), torch.stack([mine[name] for name in sorted(mine)])) for rank, mine in sums.items()}


def blocks(tensor: Tensor, shard: WeightShard) -> Iterator[tuple[Box, Tensor]]:
    """Yield each box of a shard with its elements in the shard's tensor, a view [rows, columns]."""
    sizes = [boxes.size((box,)) for box in shard.boxes]
    parts = (tensor,) if len(sizes) == 1 else tensor.view(-1).split(sizes)
    for box, part in zip(shard.boxes, parts if sizes else (), strict=True):
        yield box, part.view(box[1] - box[0], box[3] - box[2])


def view_of(tensor: Tensor, shard: WeightShard, box: Box) -> Tensor:
    """Return the elements of `box`, which lies inside one box of the shard, as a view [rows, columns] of its tensor."""
    for (r0, r1, c0, c1), block in blocks(tensor, shard):
        if r0 <= box[0] and box[1] <= r1 and c0 <= box[2] and box[3] <= c1:
            return block[box[0] - r0 : box[1] - r0, box[2] - c0 : box[3] - c0]
    raise ValueError(f"{box} is inside none of {shard.boxes}")


def fill(target: Tensor, wanted: WeightShard, source: Tensor, held: WeightShard) -> None:
    """Copy the elements that two shards of a weight share from `source` to `target`."""
    for box, block in blocks(source, held):
        for common in boxes.intersect((box,), wanted.boxes):
            r0, r1, c0, c1 = common
            view_of(target, wanted, common).copy_(block[r0 - box[0] : r1 - box[0], c0 - box[2] : c1 - box[2]])


def convert_shard(tensor: Tensor, held: WeightShard, wanted: WeightShard, device: torch.device | None = None) -> Tensor:
    """Convert a tensor from the shard `held` to the shard `wanted` of a weight, with only their common elements set;
    return the tensor itself if the shards are equal. device: of a new tensor; None: the old one's."""
    if held == wanted:
        return tensor
    result = torch.empty(wanted.shape, dtype=tensor.dtype, device=device or tensor.device)
    fill(result, wanted, tensor, held)
    return result


BUCKET_BYTES = 64 * 2**20
NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
Slice = tuple[str, Box]


@dataclass
class _Bucket:
    """Slices of one group of weights that are sent together, few enough for small buffers.

    sends: destinations -> slices; receives: (source, destinations) -> slices, in the same order on both sides.
    """

    group: str
    sends: dict[tuple[int, ...], list[Slice]] = field(default_factory=dict)
    receives: dict[tuple[int, tuple[int, ...]], list[Slice]] = field(default_factory=dict)


class Exchange(Protocol):
    """The way in which ranks of a pool exchange tensors, for example a `Communicator`."""

    rank: int

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], weights: str = ""
    ) -> None: ...


class ReshardingEngine:
    """Executes this rank's part of a plan, any number of times.

    Weights are sent one layer at a time, in buckets, whose buffers take `bucket_bytes` (more only if one row of a
    weight is larger).

    Every rank of the plan calls `layers` at the same time; ranks are numbered as in the communicator. checksums:
    compute them for all slices, for `arrival`; both sides read each slice once more for this, which on a CPU takes up
    to a quarter of a transition's time.
    """

    def __init__(
        self, plan: Plan, communicator: Exchange, *, bucket_bytes: int = BUCKET_BYTES, checksums: bool = False
    ) -> None:
        self.plan, self._communicator, self.rank = plan, communicator, communicator.rank
        self._weights = {weight.name: weight for weight in plan.weights}
        self._held = {w.name: s for w in plan.weights if (s := plan.source.shard(w, self.rank)) is not None}
        self._needed = {w.name: s for w in plan.weights if (s := plan.destination.shard(w, self.rank)) is not None}
        self._gathered = {w.name: s for w in plan.weights if (s := self._gathered_shard(w)) is not None}
        self._buckets = {
            group: list(self._plan_buckets(group, list(weights), max(1, bucket_bytes // 2)))
            for group, weights in itertools.groupby(plan.weights, key=lambda weight: weight.group)
        }
        self._checksums, self._sent, self._received = checksums, Checksums(), Checksums()

    def layers(self, held: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's weights after the transition, by name, one layer at a time.

        held: this rank's weights before it: contiguous tensors with the shapes of `plan.source.shard`; empty on a rank
        that holds none. They do not change; weights that are complete already are yielded without a copy. One layer
        needs memory in addition to `held`: drop each layer before you ask for the next. Every rank must iterate to the
        end.
        """
        self._sent, self._received = Checksums(), Checksums()  # drop those of an unfinished transition
        for group in self._buckets:
            yield self._layer(group, held)

    @torch.no_grad()  # around the generator, it would keep each layer alive until the next one is made
    def _layer(self, group: str, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered = {name: self._prepare(name, held) for name in self._gathered if self._weights[name].group == group}
        for bucket in self._buckets[group]:
            self._exchange(bucket, held, gathered)
        needed = {name: self._needed[name] for name in gathered if name in self._needed}
        return {name: convert_shard(gathered.pop(name), self._gathered[name], shard) for name, shard in needed.items()}

    def arrival(self) -> Arrival:
        """Compare the last transition's checksums of senders with this rank's. Every rank of the plan calls this at the
        same time, once per transition. Needs `checksums`."""
        sent, received = self._sent.take(), self._received.take()
        theirs = {rank: torch.empty_like(sums) for rank, (_, sums) in received.items()}
        self._communicator.exchange([(rank, sums) for rank, (_, sums) in sent.items()], list(theirs.items()))
        found = Arrival()
        for rank, (names, sums) in received.items():
            found = found.with_slices(rank, names, theirs[rank].tolist(), sums.tolist())
        return found

    def _gathered_shard(self, weight: Weight) -> WeightShard | None:
        """Return this rank's shard of a weight when everything has arrived: its generation shard, or the whole."""
        needed = self._needed.get(weight.name)
        if self.rank not in self.plan.ranks or not (found := self.plan.materialised(weight, self.rank)):
            return needed
        return needed if needed is not None and needed.boxes == found else WeightShard(found, weight.shape)

    def _plan_buckets(self, group: str, weights: list[Weight], limit: int) -> Iterator[_Bucket]:
        """Yield buckets with a group's weights, in bands of rows of at most `limit` bytes together."""
        bucket, filled = _Bucket(group), 0
        for weight in weights if self.rank in self.plan.ranks else ():
            rows, columns = weight.matrix
            each = max(1, limit // (columns * weight.item_bytes))
            for start in range(0, rows, each):
                stop = min(start + each, rows)
                if filled and filled + (stop - start) * columns * weight.item_bytes > limit:
                    yield bucket
                    bucket, filled = _Bucket(group), 0
                filled += (stop - start) * columns * weight.item_bytes
                self._add(bucket, weight, (start, stop, 0, columns))
        yield bucket

    def _add(self, bucket: _Bucket, weight: Weight, band: Box) -> None:
        for movement in self.plan.movements(weight, self.plan.block_of(self.rank)):
            slices = [(weight.name, box) for box in boxes.intersect(movement.boxes, (band,))]
            if slices and movement.source == self.rank:
                bucket.sends.setdefault(movement.destinations, []).extend(slices)
            elif slices and self.rank in movement.destinations:
                bucket.receives.setdefault((movement.source, movement.destinations), []).extend(slices)

    def _prepare(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor in which a weight is gathered, with the elements that this rank holds already. If the rank
        holds no weights, the tensor is float32 on the CPU."""
        mine, wanted = self._held.get(name), self._gathered[name]
        if mine is not None and mine.boxes == wanted.boxes:
            return held[name].data.view(wanted.shape)
        like = next(iter(held.values()), NOTHING)
        gathered = torch.empty(wanted.shape, dtype=like.dtype, device=like.device)
        if mine is not None:
            fill(gathered, wanted, held[name].data, mine)
        return gathered

    def _exchange(self, bucket: _Bucket, held: Mapping[str, Tensor], gathered: dict[str, Tensor]) -> None:
        sends = []
        for destinations, slices in bucket.sends.items():
            views = [view_of(held[name].data, self._held[name], box) for name, box in slices]
            if self._checksums:
                self._sent.add(destinations, slices, views)
            packed = views[0] if _is_run(views) else torch.cat([view.reshape(-1) for view in views])
            sends += [(rank, packed) for rank in destinations]
        receives, unpack, arriving = [], [], []
        for (source, _), slices in bucket.receives.items():
            views = [view_of(gathered[name], self._gathered[name], box) for name, box in slices]
            arriving.append((source, slices, views))
            if _is_run(views):
                receives.append((source, views[0]))
            else:
                buffer = views[0].new_empty(sum(view.numel() for view in views))
                receives.append((source, buffer))
                unpack.append((buffer, views))
        self._communicator.exchange(sends, receives, bucket.group)
        for buffer, views in unpack:
            for view, part in zip(views, buffer.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))
        for source, slices, views in arriving if self._checksums else ():
            self._received.add((source,), slices, views)


def _is_run(views: list[Tensor]) -> bool:
    """Whether views form one contiguous tensor, which can be sent or received without a buffer."""
    return len(views) == 1 and views[0].is_contiguous()
