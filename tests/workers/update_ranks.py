"""What the tests of updates run inside ranks of their own: updates of an actor or a critic on eight fixed rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.engines.communicator import Communicator
from workbench.errors import SyncError
from workbench.messages.calls import HostInfo
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.telemetry import Recorder
from workbench.workers.roles import actor, hybrid
from workbench.workers.roles.critic import CriticWorker
from workbench.workers.weight_exchange import WeightExchange
from workbench.workers.worker import Context

ROWS = 8
LONGEST = 22  # prompt and response together; the shortest row has 20, so a budget of k x 22 tokens means k rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """Updates to make. rows: of a micro-batch. without_advantage: rows whose advantages are 0, for each update.
    written: whether the loss is one that a user has written."""

    role: str = "actor"
    engine: str = "torch"
    rows: int = 8
    without_advantage: tuple[tuple[int, ...], ...] = ((),)
    skipping: bool = True
    check_sync: bool = False
    written: bool = False


def ppo_by_hand(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip: float = 0.2) -> Any:
    """PPO's loss as a user writes it in a cell."""
    ratio = (log_prob - old_log_prob).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -surrogate, {"clip_fraction": surrogate != ratio * advantages}


def squared_by_hand(values: Tensor, old_values: Tensor, returns: Tensor) -> Any:
    """The critic's loss as a user writes it."""
    plain, near = (values - returns) ** 2, (values.clamp(old_values - 0.2, old_values + 0.2) - returns) ** 2
    return 0.5 * torch.maximum(plain, near), {"value_clip_fraction": near > plain}


def run_cases(cases: list[Case]) -> list[list[dict[str, Any]]]:
    """For each case the outcome of each update on this rank's share of the rows: metrics, and how weights moved."""
    return [_run(case) for case in cases]


def sync_with_gaps(gaps: list[float]) -> list[str]:
    """Two syncs of an actor whose engine then differs by these gaps, one a rank, and a third where none differs: what
    each raised on this rank, "" for nothing."""
    worker = worker_of(Case())
    worker.spec = replace(worker.spec, generation=Generation(engine="transformers"))
    worker.generator.weights_version = -1  # as after an update
    measured, said = hybrid.probe_gap, []
    for broken in (True, True, False):
        hybrid.probe_gap = (lambda *asked: gaps[dist.get_rank()]) if broken else measured
        try:
            worker.sync_weights()
            said.append("")
        except SyncError as error:
            said.append(str(error))
    return said


def context_here(folder: str = ".") -> Context:
    """What a host would offer this rank of the default group; without one, the only rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    host = HostInfo(lab="x", pool="p", rank=rank, world_size=size, device="cpu:0", threads=1, log_path=None)
    recorder = Recorder()
    return Context(
        host=host, layout=Layout(p=1, t=1, d=size), communicator=Communicator(rank, size, recorder), recorder=recorder,
        progress=lambda done, total, tokens: None, seed=0, tokenizer_name="tiny-llama", folder=folder,
        max_model_tokens=64, exchange=WeightExchange(host.name, recorder, lambda host, method, *args: None),
    )  # fmt: skip


def worker_of(case: Case) -> Any:
    context = context_here()
    stage = 0 if case.engine == "torch" else int(case.engine[-1])
    training = Training(
        engine="torch" if case.engine == "torch" else "deepspeed", zero_stage=stage, max_grad_norm=0.0,
        # with an eps this large AdamW moves a weight in proportion to its gradient, however small that is
        learning_rate=100.0, eps=1e3, micro_batch_tokens=case.rows * LONGEST,
    )  # fmt: skip
    generation = Generation(engine="transformers", check_sync=case.check_sync)
    spec = Model(name="tiny-llama", dtype="float32", training=training, generation=generation)
    worker: Any = actor.ActorWorker(spec, context) if case.role == "actor" else CriticWorker(spec, context)
    if case.role == "critic":  # whose head starts at 0, and then sends no gradient into the layers
        drawn = torch.randn(worker.engine.module.score.weight.shape, generator=torch.Generator().manual_seed(1))
        worker.engine.module.score.weight.data.copy_(drawn / 10)
    return worker


def _run(case: Case) -> list[dict[str, Any]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    worker = worker_of(case)
    find = actor._rows_without_advantage
    if not case.skipping:
        actor._rows_without_advantage = lambda advantages, mask: frozenset()
    outcomes = []
    try:
        for without in case.without_advantage:
            before = _weights(worker)
            shard = shard_of(list(range(rank, ROWS, size)), without)
            update = worker.update_actor if case.role == "actor" else worker.update_critic
            loss = {"loss": ppo_by_hand if case.role == "actor" else squared_by_hand} if case.written else {}
            output = update(shard, aggregation="sequence-mean-token-mean", **loss)
            moved = {name: weight - before[name] for name, weight in _weights(worker).items()}
            outcomes.append({"metrics": output.metrics, "moved": moved})
    finally:
        actor._rows_without_advantage = find
    return outcomes


def _weights(worker: Any) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in worker.engine.named_weights()}


def shard_of(mine: list[int], without_advantage: tuple[int, ...]) -> Shard:
    """This rank's rows: prompts of 5 to 7 tokens, responses of 15, of which the first of some rows are masked."""
    generator = torch.Generator().manual_seed(0)
    columns: dict[str, list[Tensor]] = {}
    for row in range(ROWS):
        columns.setdefault("prompt_ids", []).append(torch.randint(8, 264, (5 + row % 3,), generator=generator))
        columns.setdefault("response_ids", []).append(torch.randint(8, 264, (15,), generator=generator))
        columns.setdefault("response_mask", []).append(torch.arange(15) >= row % 4)
        for name in ("old_log_prob", "advantages", "values", "returns"):
            columns.setdefault(name, []).append(torch.randn(15, generator=generator))
        columns["old_log_prob"][-1] -= 6
        if row in without_advantage:
            columns["advantages"][-1] = torch.where(columns["response_mask"][-1], 0.0, 1.0)
    table = {name: Ragged.of([rows[i] for i in mine], rows[0].dtype) for name, rows in columns.items()}
    return Shard(columns=dict(table), rows=np.array(mine), minibatch_sizes=(len(mine),), meta={"temperature": 1.0})
