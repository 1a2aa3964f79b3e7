"""Weights that one role publishes on its hosts, and of which others take the slices that they need, host to host; so
too its moments of Adam, where the role itself goes to other hosts.

Slices travel as rows of batches do: a host cuts them on request, and whoever asked notes the transfer. So the two roles
need no process group in common, the pools may be on different machines, one that dies leaves the other's collectives
alone, and publisher and taker need not step together: an update may run while what it replaces is still being taken.
vLLM's own engines for weight transfer (nccl, sharded_rdt) need CUDA on both sides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.batches.carrier import carry, columns_of, from_wire, to_wire
from workbench.errors import NotFound
from workbench.placement import Layout
from workbench.resharding import boxes
from workbench.resharding.boxes import Box, Boxes
from workbench.resharding.checksums import Arrival, checksum
from workbench.resharding.distribution import Distribution, WeightShard
from workbench.resharding.plan import Reshard
from workbench.resharding.views import fill, view_of
from workbench.resharding.weights import ModelWeights, Weight, model_weights
from workbench.telemetry import Recorder
from workbench.telemetry.spans import TransferKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Slice = tuple[str, Box]
Ask = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Published:
    """Where weights are published: under which key, and on which hosts, by the numbers that a plan gives its ranks.

    layout: of who publishes. kind: as what its transfers are recorded.
    """

    key: str
    hosts: tuple[str, ...]
    layout: Layout
    kind: TransferKind = "weights"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is published, beside the weights. version: optimizer steps that they have seen. restored: how often they
    were put back to an earlier state, after which equal versions are not equal weights.

    shapes: of the whole weights, by name; empty where none were published. probe_ids, log_probs: tokens, and what the
    publisher gives ids[1:], in nats; empty without a probe. aliases, vocabulary: of the model, see `PackedModule`.
    """

    version: int
    restored: int
    shapes: Mapping[str, tuple[int, ...]]
    probe_ids: Tensor
    log_probs: Tensor
    aliases: Mapping[str, list[str]]
    vocabulary: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of published weights: by name its tensor, and which elements that holds. A copy in host memory;
    or, where nothing is trained while they are taken, what the rank holds itself.

    contents: None for a part of a role's state, of which the controller knows all there is to say.
    """

    contents: Contents | None
    slices: Mapping[str, tuple[Tensor, WeightShard]]

    @torch.no_grad()
    def cut(self, wanted: Iterable[Slice]) -> Tensor:
        """These boxes of weights, row by row, end to end [elements]."""
        return torch.cat([view_of(*self.slices[name], box).reshape(-1).cpu() for name, box in wanted])

    def checksums(self, wanted: Iterable[Slice]) -> list[int]:
        """The checksum of each of these boxes, as it lies here."""
        return [int(checksum(view_of(*self.slices[name], box), box[0])) for name, box in wanted]

    def bit_sums(self, wanted: Iterable[Slice]) -> list[int]:
        """`bit_sum` of each of these boxes."""
        return [bit_sum(view_of(*self.slices[name], box)) for name, box in wanted]


def bit_sum(tensor: Tensor) -> int:
    """The sum of a tensor's elements, their bits read as integers: that of a whole is the sum of its parts', so that
    what a rank holds in the end can be held against what several ranks sent."""
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(bits).sum(dtype=torch.int64))


def weights_of(config: PreTrainedConfig, dtype: str, *layouts: Layout) -> ModelWeights:
    """The weights of a model for these layouts; how its layers are cut must be known only where one of them does."""
    is_cut = any(layout.p * layout.t > 1 for layout in layouts)
    return model_weights(config, dtype=dtype, unknown="refuse" if is_cut else "whole")


def published_parts(weights: ModelWeights, layout: Layout) -> Distribution:
    """Which rank publishes what: the d holders of a slice a stretch of its rows each. So together they keep one copy,
    and all of them serve it."""
    return Distribution(weights, layout, tuple(range(layout.size)), "fsdp")


def plan_of_taking(
    config: PreTrainedConfig, dtype: str, publisher: Layout, taker: Layout, *, vocabulary_multiple: int = 1
) -> Reshard:
    """Who sends which slice to whom. The publisher's ranks come first, then the taker's.

    dtype: that of the published weights. vocabulary_multiple: of the taker, see `Distribution`.
    """
    weights = weights_of(config, dtype, publisher, taker)
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
) -> Snapshot:
    """What a rank publishes of the weights that it holds: copies, in `dtype`.

    held: what the rank holds in the layout, to the end: where they are gathered, every rank takes part.
    """
    by_name = {weight.name: weight for weight in weights}
    whole, parts = Distribution(weights, layout, tuple(range(layout.size))), published_parts(weights, layout)
    slices = {}
    for name, tensor in held:
        mine, part = whole.shard(by_name[name], rank), parts.shard(by_name[name], rank)
        assert mine is not None
        assert part is not None
        copy = torch.empty(part.shape, dtype=dtype)
        fill(copy, part, tensor, mine)
        slices[name] = copy, part
    return Snapshot(contents=contents, slices=slices)


class Pulled(NamedTuple):
    """Slices as they came: end to end, with the checksum of each at their sender, and when, by `perf_counter`. No sums
    where they were not asked for, or nothing was sent."""

    flat: Tensor
    sums: list[int]
    start_s: float
    end_s: float


class WeightSource(Protocol):
    """Where slices come from: other hosts, or files."""

    def pull(self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool) -> Pulled:
        """Slices that rank `rank` of the publisher keeps. Any thread may ask for them."""

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> int:
        """Note what came, under a name; its bytes."""

    def bit_sums(self, published: Published, rank: int, wanted: Sequence[Slice]) -> list[int]:
        """`bit_sum` of each of these slices, where they are kept."""


class WeightExchange:
    """One host's side: what its roles have published, and the way to what others have.

    ask: calls a method of another host by its name: `ask(host, method, *arguments)`.
    """

    def __init__(self, host: str, recorder: Recorder, ask: Ask) -> None:
        self._host, self._recorder, self._ask = host, recorder, ask
        self._snapshots: dict[str, Snapshot] = {}
        self._lock = threading.Lock()

    def publish(self, key: str, snapshot: Snapshot) -> None:
        """Keep a snapshot for others until it is released."""
        with self._lock:
            self._snapshots[key] = snapshot

    def release(self, keys: Iterable[str]) -> None:
        """Forget snapshots; keys of other things are no error."""
        with self._lock:
            for key in keys:
                self._snapshots.pop(key, None)

    @property
    def held_bytes(self) -> int:
        """Bytes of all snapshots."""
        with self._lock:
            return sum(tensor.nbytes for kept in self._snapshots.values() for tensor, _ in kept.slices.values())

    def snapshot(self, key: str) -> Snapshot:
        """One of this host's own."""
        with self._lock:
            found = self._snapshots.get(key)
        if found is None:
            raise NotFound(f"published weights {key} on host {self._host}", "they were released", "sync again")
        return found

    def served(self, key: str, wanted: Sequence[Slice], checksums: bool) -> tuple[dict[str, Any], list[int]]:
        """Slices of a snapshot, for another process, and the checksum of each where they are asked for."""
        snapshot = self.snapshot(key)
        return to_wire(carry({"weights": snapshot.cut(wanted)})), snapshot.checksums(wanted) if checksums else []

    def contents(self, published: Published) -> Contents:
        """What is published, as its first rank says it."""
        host = published.hosts[0]
        here = host == self._host
        found = self.snapshot(published.key).contents if here else self._ask(host, "published_contents", published.key)
        assert isinstance(found, Contents)
        return found

    def is_here(self, published: Published, rank: int) -> bool:
        """Whether what rank `rank` of the publisher keeps is on this host."""
        return published.hosts[rank] == self._host

    def pull(self, published: Published, rank: int, wanted: Sequence[Slice], checksums: bool) -> Pulled:
        """Slices that rank `rank` of the publisher keeps. Any thread may ask for them."""
        began = time.perf_counter()
        if self.is_here(published, rank):
            return Pulled(self.snapshot(published.key).cut(wanted), [], began, time.perf_counter())
        wire, sums = self._ask(published.hosts[rank], "cut_weights", published.key, wanted, checksums)
        flat = columns_of(from_wire(wire))["weights"]
        assert isinstance(flat, Tensor)
        return Pulled(flat, sums, began, time.perf_counter())

    def record(self, published: Published, rank: int, pulled: Pulled, what: str) -> int:
        """Note what came from another host, under a name; its bytes."""
        if self.is_here(published, rank):
            return 0
        shift, recorder = self._recorder.now_s() - time.perf_counter(), self._recorder
        recorder.add_transfer(
            published.hosts[rank], self._host, pulled.start_s + shift, pulled.end_s + shift,
            bytes=pulled.flat.nbytes, columns=what, kind=published.kind,
        )  # fmt: skip
        return pulled.flat.nbytes

    def bit_sums(self, published: Published, rank: int, wanted: Sequence[Slice]) -> list[int]:
        """`bit_sum` of each of these slices, where they are kept."""
        if self.is_here(published, rank):
            return self.snapshot(published.key).bit_sums(wanted)
        found: list[int] = self._ask(published.hosts[rank], "weight_bit_sums", published.key, wanted)
        return found


class WeightIntake:
    """One rank's part of a plan of taking, again and again, a layer at a time.

    rank: in the taker's layout. received_bytes: that it received from other hosts so far. checksums: compare those of
    slices as they were sent and as they arrived. arrival: what that said of the last time. Beside what the taker makes
    of a layer, memory is needed for what one host sends of it, and for what is on its way while that is used.
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
        self._shards = {w.name: shard for w in plan.weights if (shard := plan.destination.shard(w, me)) is not None}

    def weights(self, published: Published, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """What this rank generates with, for `GenerationEngine.update_weights`: each weight in its whole shape, with
        this rank's slices written."""
        self.arrival = Arrival()
        for layer, parts in self._pulled(published):
            matrices: dict[str, Tensor] = {}
            by_name = {weight.name: weight for weight in layer.weights}
            for name, (r0, r1, c0, c1), part in parts:
                if name not in matrices:
                    matrices[name] = torch.empty(by_name[name].matrix, dtype=part.dtype, device=device)
                matrices[name][r0:r1, c0:c1].copy_(part)
            for weight in layer.weights:
                yield weight.name, matrices.pop(weight.name).view(weight.shape)

    def shards(self, published: Published) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of each weight afterwards, in the shape in which it holds it."""
        for _, parts in self._pulled(published):
            tensors: dict[str, Tensor] = {}
            for name, box, part in parts:
                shard = self._shards[name]
                if name not in tensors:
                    tensors[name] = torch.empty(shard.shape, dtype=part.dtype)
                view_of(tensors[name], shard, box).copy_(part)
            yield from tensors.items()

    def bit_sums(self, published: Published) -> dict[str, int]:
        """For each weight the `bit_sum` that what this rank holds of it must have, as the publishers say."""
        wanted: dict[int, list[Slice]] = {}
        for layer in self._layers:
            for rank, slices in layer.sources.items():
                wanted.setdefault(rank, []).extend(slices)
        found: dict[str, int] = {}
        for rank, slices in wanted.items():
            sums = self._exchange.bit_sums(published, rank, slices)
            for (name, _), total in zip(slices, sums, strict=True):
                found[name] = found.get(name, 0) + total
        return found

    def slices(self, published: Published) -> Iterator[tuple[str, Box, Tensor]]:
        """What this rank needs, as it comes: a weight's name, a box of it, and that box's elements [rows, columns]."""
        self.arrival = Arrival()
        for _, parts in self._pulled(published):
            yield from parts

    def _pulled(self, published: Published) -> Iterator[tuple[_Layer, Iterator[tuple[str, Box, Tensor]]]]:
        """Layer by layer what this rank needs of it. What comes next is on its way while the last is used."""
        asked = iter([request for layer in self._layers for request in layer.in_turn(self._rank)])
        with ThreadPoolExecutor(1, thread_name_prefix="pull") as ahead:

            def ask() -> Future[Pulled] | None:
                request = next(asked, None)
                return request and ahead.submit(self._exchange.pull, published, *request, self._checksums)

            coming = ask()

            def parts(layer: _Layer) -> Iterator[tuple[str, Box, Tensor]]:
                nonlocal coming
                for rank, wanted in layer.in_turn(self._rank):
                    assert coming is not None
                    pulled, coming = coming.result(), ask()
                    yield from self._split(published, rank, wanted, pulled, layer.group)

            for layer in self._layers:
                yield layer, parts(layer)

    def _split(
        self, published: Published, rank: int, wanted: Sequence[Slice], pulled: Pulled, what: str
    ) -> Iterator[tuple[str, Box, Tensor]]:
        """The boxes of what came from one source, noted and compared with what was sent."""
        self.received_bytes += self._exchange.record(published, rank, pulled, what)
        split = pulled.flat.split([boxes.size((box,)) for _, box in wanted])
        parts = [part.view(box[1] - box[0], box[3] - box[2]) for (_, box), part in zip(wanted, split, strict=True)]
        if pulled.sums:
            received = [int(checksum(part, box[0])) for (_, box), part in zip(wanted, parts, strict=True)]
            self.arrival = self.arrival.with_slices(rank, [name for name, _ in wanted], pulled.sums, received)
        for (name, box), part in zip(wanted, parts, strict=True):
            yield name, box, part


@dataclass(eq=False)
class _Layer:
    """What moves together: the weights of a layer that a rank needs, and which slices of them come from which rank."""

    group: str
    weights: list[Weight]
    sources: dict[int, list[Slice]] = field(default_factory=dict)

    def in_turn(self, taker: int) -> list[tuple[int, list[Slice]]]:
        """Its sources, in the order in which a taker asks them: each begins at another."""
        found = list(self.sources.items())
        first = taker % max(1, len(found))
        return found[first:] + found[:first]

    def take(self, source: int, weight: Weight, found: Boxes) -> None:
        """Note that boxes of a weight come from a rank."""
        if found:
            self.sources.setdefault(source, []).extend((weight.name, box) for box in found)
