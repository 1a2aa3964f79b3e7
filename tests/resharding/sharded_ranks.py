"""What the tests of sharded training run inside ranks of their own: models that FSDP2 and ZeRO-3 have sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.training_ranks import make_engine, sequences, train
from tests.resharding.counting import Held
from tests.resharding.engine_ranks import BUCKET_BYTES, ledger
from workbench.models.heads import TokenLogProbs
from workbench.placement import Layout
from workbench.resharding.engine import Arrival, ReshardingEngine
from workbench.resharding.plan import Distribution, Plan, Reshard, Sharding
from workbench.resharding.strategies import ZeroSync
from workbench.resharding.weights import ModelWeights
from workbench.workers.weight_transition import WeightTransition

GENERATE = (1, 2)  # tensor ranks
MULTIPLE = 16  # to which an engine rounds the vocabulary up


@dataclass
class Seen:
    """What was wrong on this rank, by case; checksums after a transition, and after one with an element flipped."""

    wrong: dict[str, list[str]] = field(default_factory=dict)
    clean: Arrival = field(default_factory=Arrival)
    flipped: Arrival = field(default_factory=Arrival)
    flipped_from: int = -1


def model(config: LlamaConfig) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def by_fsdp(config: LlamaConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Local shards and whole weights of a model after a step with FSDP2."""
    sharded = model(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    ids = sequences(0)[dist.get_rank()][None]
    sharded(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    local, whole = {}, {}
    for name, parameter in sharded.named_parameters():
        shard = parameter.detach()
        assert isinstance(shard, DTensor)
        local[name], whole[name] = shard.to_local(), shard.full_tensor()
    return local, whole


def by_zero(config: LlamaConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same with DeepSpeed's ZeRO-3."""
    engine = make_engine("zero3", module=TokenLogProbs(model(config), micro_batch_tokens=1024), learning_rate=1e-2)
    train(engine, range(1))
    local = dict(engine.local_weights())
    stored = {parameter.ds_tensor.untyped_storage().data_ptr() for parameter in engine.module.parameters()}  # type: ignore[attr-defined]
    assert {shard.untyped_storage().data_ptr() for shard in local.values()} == stored  # where DeepSpeed keeps them
    return local, {name: weight.clone() for name, weight in engine.named_weights()}


def differing(found: dict[str, Tensor], ids: Held, whole: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not, to the bit and in shape, the elements that an independent cut says."""
    wrong = sorted(found.keys() ^ whole.keys())
    for name in found.keys() & whole.keys():
        mine = ids.of(name, tuple(whole[name].shape), dist.get_rank())
        if mine is None or not torch.equal(found[name], whole[name].flatten()[mine]):
            wrong.append(name)
    return wrong


def resharded(plan: Plan, local: dict[str, Tensor], whole: dict[str, Tensor], after: Held) -> list[str]:
    """What was wrong with a transition of a library's own shards."""
    rank = dist.get_rank()
    with ledger() as books:
        engine = ReshardingEngine(plan, books.communicator, bucket_bytes=BUCKET_BYTES, checksums=True)
        arrived = {name: tensor.clone() for layer in engine.layers(local) for name, tensor in layer.items()}
        received = books.look()
        wrong = differing(arrived, after, whole)
        arrival = engine.arrival()
    matrix = plan.figures().matrix
    if [received[other] for other in plan.ranks] != matrix[:, rank].tolist():
        wrong.append(f"received {dict(received)}, planned {matrix[:, rank].tolist()}")
    if arrival.differ or arrival.sent != arrival.received or not arrival.sent:
        wrong.append(f"checksums {arrival}")
    return wrong


def synced(plan: ZeroSync, local: dict[str, Tensor], whole: dict[str, Tensor], t_g: int) -> list[str]:
    """What was wrong with a sync to an engine."""
    rank = dist.get_rank()
    with ledger() as books:
        transition = WeightTransition(plan, books.communicator)
        weights, wrong = dict(transition.weights(local, torch.float32)), []
        received = books.look().total()
    for weight in plan.weights:
        for start, stop in weight.intervals(rank % t_g, t_g, MULTIPLE):
            given, expected = (
                tensor.narrow(weight.axis or 0, start, stop - start)
                for tensor in (weights[weight.name], whole[weight.name])
            )
            if weights[weight.name].shape != weight.shape or not torch.equal(given, expected):
                wrong.append(weight.name)
    if not received == transition.exchange.received_bytes == plan.figures().received[rank]:
        wrong.append(f"received {received}, planned {plan.figures().received[rank]}")
    return wrong


def flips(plan: Plan, local: dict[str, Tensor], seen: Seen) -> None:
    """The checksums of a transition, and of one in which a bit changes on its way to rank 1."""
    with ledger() as books:
        communicator: Any = books.communicator
        engine = ReshardingEngine(plan, communicator, bucket_bytes=BUCKET_BYTES, checksums=True)
        list(engine.layers(local))
        seen.clean = engine.arrival()
        exchange = communicator.exchange

        def flipping(sends: Any, receives: Any, weights: str = "") -> None:
            exchange(sends, receives, weights)
            if communicator.rank == 1 and weights == "model.layers.1" and seen.flipped_from < 0:
                seen.flipped_from, buffer = receives[0]
                buffer.view(-1).view(torch.int32)[-1] ^= 1

        communicator.exchange = flipping
        list(engine.layers(local))
        seen.flipped = engine.arrival()


def everything(config: LlamaConfig, weights: ModelWeights) -> Seen:
    seen, n = Seen(), dist.get_world_size()
    ranks = list(range(n))
    kinds: dict[Sharding, Any] = {"fsdp": by_fsdp, "zero": by_zero}
    for kind, shard in kinds.items():
        local, whole = shard(config)
        seen.wrong[f"{kind}: what a rank holds"] = differing(local, Held(config, (1, 1, n), ranks, kind), whole)
        source = Distribution(weights, Layout(d=n), tuple(ranks), kind)
        for t_g in GENERATE:
            size = (1, t_g, n // t_g)
            plan = Reshard(source, Distribution(weights, Layout(*size), tuple(ranks)))
            seen.wrong[f"{kind} to {size}"] = resharded(plan, local, whole, Held(config, size, ranks))
            for gathers in (False, True) if kind == "zero" else ():
                sync = ZeroSync(weights, n, t_g, whole=gathers, vocabulary_multiple=MULTIPLE)
                seen.wrong[f"{kind} to an engine {size}, whole={gathers}"] = synced(sync, local, whole, t_g)
    flips(ZeroSync(weights, n, 1), local, seen)
    return seen
