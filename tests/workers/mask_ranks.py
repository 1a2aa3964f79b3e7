"""What the test of sampling masks runs inside ranks of its own: log-probabilities and an update over the same sets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.update_ranks import LONGEST, ROWS, context_here, shard_of
from workbench.batches.columns import Ragged
from workbench.messages.metrics import as_metrics, reported
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.sampling_mask import MASK_COLUMNS, mask_columns


@dataclass(frozen=True, kw_only=True)
class Masked:
    """engine: "torch", or "zero3". layout: None: data parallel over all ranks. rows: of a micro-batch."""

    engine: str = "torch"
    layout: Layout | None = None
    rows: int = 8


def run_masked(cases: list[Masked]) -> list[dict[str, Any]]:
    return [_run(case) for case in cases]


def _run(case: Masked) -> dict[str, Any]:
    context = context_here()
    if case.layout is not None:
        context = replace(context, layout=case.layout)
    training = Training(
        engine="torch" if case.engine == "torch" else "deepspeed", zero_stage=3, max_grad_norm=0.0,
        learning_rate=100.0, eps=1e3, micro_batch_tokens=case.rows * LONGEST,
    )  # fmt: skip
    model = Model("tiny-llama-tied", dtype="float32", training=training, generation=Generation(engine="transformers"))
    worker = ActorWorker(model, context)
    groups = context.groups
    mine = list(range(groups.data.rank, ROWS, groups.data.world_size))
    shard = masked_shard(mine)
    old = worker.compute_log_prob(shard)
    assert old.columns is not None
    before = {name: weight.clone() for name, weight in worker.engine.named_weights()}
    ready = replace(shard, columns={**shard.columns, **old.columns}, meta={**shard.meta, **old.meta})
    output = worker.update_actor(ready, entropy_coefficient=0.1)
    column = old.columns["old_log_prob"]
    assert isinstance(column, Ragged)
    return {
        "rank": dist.get_rank(), "counts": groups.is_leader, "mine": mine, "rows": column.rows(),
        "metrics": reported(as_metrics(output.metrics)),
        "moved": {name: weight - before[name] for name, weight in worker.engine.named_weights()},
    }  # fmt: skip


def masked_shard(mine: list[int]) -> Shard:
    """The rows of `shard_of`, each token with a set of 1 to 40 tokens, and some with all."""
    shard = shard_of(mine, ())
    draws = torch.Generator().manual_seed(9)
    sets = []
    for ids in shard_of(list(range(ROWS)), ()).ragged("response_ids").rows():
        row = []
        for place, token in enumerate(ids.tolist()):
            others = torch.randint(0, 264, (int(torch.randint(0, 40, (1,), generator=draws)),), generator=draws)
            row.append([] if place % 5 == 4 else sorted({token, *others.tolist()}))
        sets.append(row)
    columns = {n: c for n, c in shard.columns.items() if n != "old_log_prob"} | mask_columns([sets[i] for i in mine])
    assert set(MASK_COLUMNS) <= columns.keys()
    return replace(shard, columns=columns)
