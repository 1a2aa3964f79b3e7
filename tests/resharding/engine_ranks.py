"""What the tests of the resharding engine run inside ranks of their own: many plans, one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.resharding.counting import Held, generation_ranks
from workbench.engines.communicator import Communicator
from workbench.placement import Layout
from workbench.resharding.engine import ReshardingEngine
from workbench.resharding.plan import Distribution, Plan, Reshard
from workbench.resharding.strategies import STRATEGIES, plan_sync, plan_transition
from workbench.resharding.weights import ModelWeights
from workbench.telemetry import Recorder
from workbench.workers.weight_transition import WeightTransition


@dataclass
class Case:
    """A model by what ranks need of it, so that they start without transformers. config: its numbers, by name."""

    label: str
    config: Any
    weights: ModelWeights

    def drawn(self, seed: int) -> dict[str, Tensor]:
        """Every weight whole, all elements drawn; the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return {weight.name: torch.randn(weight.shape, generator=generator) for weight in self.weights}


BUCKET_BYTES = 2**14  # several buckets a layer


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


def shards(held: Held, full: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a rank holds of a whole model, in memory of its own, by the independent cut."""
    found = {name: held.of(name, tuple(tensor.shape), rank) for name, tensor in full.items()}
    return {name: full[name].flatten()[ids] for name, ids in found.items() if ids is not None}


@dataclass
class Ledger:
    """A communicator, and what the telemetry counted since the last look: each movement is recorded by its receiver."""

    communicator: Communicator
    recorder: Recorder

    def look(self) -> Counter[int]:
        received: Counter[int] = Counter()
        for transfer in self.recorder.drain()[1]:
            assert (transfer.kind, transfer.destination) == ("weights", f"main-{self.communicator.rank}")
            assert transfer.columns.startswith(("model.layers.", "model.embed_tokens", "model.norm", "lm_head"))
            received[int(transfer.source.rpartition("-")[2])] += transfer.bytes
        return received


@contextmanager
def ledger() -> Iterator[Ledger]:
    recorder = Recorder()
    with recorder.bind(pool="main"):
        yield Ledger(Communicator(dist.get_rank(), dist.get_world_size(), recorder), recorder)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def run_plan(plan: Plan, before: Held, after: Held, case: Case) -> list[str]:
    """What was wrong on this rank when a plan was executed."""
    rank = dist.get_rank()
    full = case.drawn(7)
    held, expected, start = shards(before, full, rank), shards(after, full, rank), shards(before, full, rank)
    own = {name: tensor.data_ptr() for name, tensor in held.items()}
    with ledger() as books:
        engine = ReshardingEngine(plan, books.communicator, bucket_bytes=BUCKET_BYTES)
        arrived = {name: tensor.clone() for layer in engine.layers(held) for name, tensor in layer.items()}
        received = books.look()

    wrong = [] if equal(arrived, expected) else ["generation weights"]
    if not equal(held, start) or any(held[name].data_ptr() != where for name, where in own.items()):
        wrong.append("training weights after the transition")
    figures = plan.figures()
    position = plan.ranks.index(rank) if rank in plan.ranks else None
    column = np.zeros(len(plan.ranks)) if position is None else figures.matrix[:, position]
    if [received[other] for other in plan.ranks] != column.tolist():
        wrong.append(f"received {dict(received)}, planned {column.tolist()}")
    return wrong


def transitions(cases: list[Case], sizes: list[tuple[int, int, int]]) -> dict[str, list[str]]:
    """Every transition of these layouts, by every strategy: what was wrong on this rank, by case."""
    found = {}
    for case, size, strategy in itertools.product(cases, sizes, STRATEGIES):
        for p_g, t_g in itertools.product(divisors(size[0]), divisors(size[1])):
            n = size[0] * size[1] * size[2]
            order = generation_ranks(*size, p_g, t_g, strided=strategy == "hybridflow")
            after = Held(case.config, (p_g, t_g, n // (p_g * t_g)), order)
            before = Held(case.config, size, list(range(n)))
            if strategy == "full":
                before = Held(case.config, (1, 1, n), list(range(n)), "zero")
            plan = plan_transition(case.weights, Layout(*size, p_g, t_g), strategy)
            found[f"{case.label}: {size} to {(p_g, t_g)} by {strategy}"] = run_plan(plan, before, after, case)
    return found


def syncs(cases: list[Case], sizes: list[tuple[int, int, int]]) -> dict[str, list[str]]:
    """Every weight sync of these layouts, by every strategy, for an engine that rounds the vocabulary up to 16 rows:
    what was wrong on this rank, by case."""
    rank, found = dist.get_rank(), dict[str, list[str]]()
    for case, size, strategy, dtype in itertools.product(cases, sizes, STRATEGIES, (torch.float32, torch.bfloat16)):
        for t_g in divisors(size[1]):
            full, layout = case.drawn(3), Layout(*size).generating(t_g)
            counted = tuple(dataclasses.replace(w, item_bytes=dtype.itemsize) for w in case.weights)
            _, i, j = layout.coordinates(rank)
            plan = plan_sync(ModelWeights(counted, case.weights.layers), layout, strategy, vocabulary_multiple=16)
            mine = plan.weights.of_stage(i, layout.p)
            trained = {w.name: w.cut(full[w.name], j, layout.t).contiguous() for w in mine}
            wrong = found[f"{case.label}: {layout} by {strategy} in {dtype}"] = []
            with ledger() as books:
                transition = WeightTransition(plan, books.communicator)
                weights = dict(transition.weights(trained, dtype))
                received = books.look()
            for weight in plan.weights:
                for start, stop in weight.intervals(rank % t_g, t_g, 16):
                    given, expected = (
                        tensor.narrow(weight.axis or 0, start, stop - start)
                        for tensor in (weights[weight.name], full[weight.name].to(dtype))
                    )
                    if weights[weight.name].shape != weight.shape or not torch.equal(given, expected):
                        wrong.append(weight.name)
            if not received.total() == transition.exchange.received_bytes == plan.figures().received[rank]:
                wrong.append(f"received {received.total()}, planned {plan.figures().received[rank]}")
            if transition.handed_bytes != sum(
                math.prod(w.local_shape(rank % t_g, t_g, 16)) * w.item_bytes for w in plan.weights
            ):
                wrong.append("handed on")
    return found


def reshards(cases: list[Case], pairs: list[tuple[Any, Any]]) -> dict[str, list[str]]:
    """General reshards between pairs of (sizes, ranks, sharding)."""
    found = {}
    for case, (before, after) in itertools.product(cases, pairs):
        plan = Reshard(*(Distribution(case.weights, Layout(*s), tuple(r), kind) for s, r, kind in (before, after)))
        held = (Held(case.config, *before), Held(case.config, *after))
        found[f"{case.label}: {before} to {after}"] = run_plan(plan, *held, case)
    return found


@dataclass
class Memory:
    """Bytes of this rank: of its training weights, of the largest layer with what it is cut out of, of the buffers, and
    measured after each operation of a transition, their peak. right: whether all weights arrived, in several
    transitions."""

    held: int
    layer: int
    bucket: int
    right: bool = True
    peak: int = 0


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation makes: `peak` is the most bytes that were alive after any of them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak, self._live = 0, dict[int, tuple[StorageWeakRef, int]]()
        self._follow(tensors)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self._follow(found for found in tree_leaves(made) if isinstance(found, Tensor))
        return made

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            reference = StorageWeakRef(storage)
            self._live[reference.cdata] = reference, storage.nbytes()
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))


def iterations(case: Case, size: tuple[int, int, int], generate: tuple[int, int], count: int) -> Memory:
    """Many transitions with the weights changed in between."""
    config, weights = case.config, case.weights
    rank, n = dist.get_rank(), size[0] * size[1] * size[2]
    plan = plan_transition(weights, Layout(*size, *generate), "hybridflow")
    before = Held(config, size, list(range(n)))
    order = generation_ranks(*size, *generate, strided=True)
    after = Held(config, (*generate, n // (generate[0] * generate[1])), order)
    full = case.drawn(0)
    held = {name: tensor.requires_grad_() for name, tensor in shards(before, full, rank).items()}
    first, last = shards(before, full, rank), shards(after, full, rank)
    del full
    layers = [sum(w.nbytes for w in group) for _, group in itertools.groupby(weights, key=lambda weight: weight.group)]
    held_bytes = sum(tensor.nbytes for tensor in held.values())
    found = Memory(held=held_bytes, layer=max(layers), bucket=2**16)
    with ledger() as books:
        engine = ReshardingEngine(plan, books.communicator, bucket_bytes=found.bucket, checksums=True)
        for step in range(count):
            for name, tensor in held.items():
                tensor.data.copy_(first[name] + step)
            arrived = {name: tensor.clone() for layer in engine.layers(held) for name, tensor in layer.items()}
            found.right = found.right and equal(arrived, {name: tensor + step for name, tensor in last.items()})
            found.right = found.right and not engine.arrival().differ
            del arrived, name, tensor
        engine = ReshardingEngine(plan, books.communicator, bucket_bytes=found.bucket)
        with LiveBytes(held.values()) as live:
            for layer in engine.layers(held):
                del layer
        found.peak = live.peak
    return found


def four_ranks(small: list[Case], larger: Case) -> tuple[dict[str, list[str]], dict[str, list[str]], Memory]:
    pairs = [
        (((1, 1, 2), [0, 1], "replicas"), ((1, 2, 1), [2, 3], "replicas")),
        (((1, 1, 2), [1, 3], "replicas"), ((2, 1, 1), [3, 0], "replicas")),
        (((1, 1, 4), [0, 1, 2, 3], "fsdp"), ((2, 2, 1), [3, 1, 0, 2], "replicas")),
        (((1, 2, 2), [0, 1, 2, 3], "fsdp"), ((1, 1, 1), [2], "replicas")),
        (((1, 2, 2), [0, 1, 2, 3], "zero"), ((1, 4, 1), [1, 0, 3, 2], "replicas")),
        (((2, 2, 1), [0, 1, 2, 3], "replicas"), ((1, 1, 3), [1, 2, 3], "zero")),
        (((1, 1, 1), [2], "replicas"), ((1, 2, 2), [0, 1, 2, 3], "fsdp")),
    ]
    moved = transitions(small, [(1, 4, 1), (2, 2, 1), (1, 2, 2)])
    return moved, reshards(small, pairs), iterations(larger, (2, 2, 1), (1, 1), 5)
