"""What the tests of losses on logits run inside ranks of their own, and the losses: gradients on eight fixed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.workers.update_ranks import LONGEST, ROWS, context_here, ppo_by_hand, shard_of
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.roles import ActorWorker

VOCABULARY = 264


def entropy_of(logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def with_entropy(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, logits: Any) -> Tensor:
    loss, _ = ppo_by_hand(log_prob, old_log_prob, advantages)
    return loss - 0.3 * logits.map(entropy_of)


def of_hidden_states(log_prob: Tensor, hidden_states: Tensor, advantages: Tensor) -> Tensor:
    return -log_prob * advantages + hidden_states.square().mean(-1) * advantages.cos()


def of_some_positions(logits: Any, mask: Tensor, advantages: Tensor) -> Tensor:
    """The squared logits of two tokens, where advantages are positive; with a number of the position."""
    return logits.map(lambda x, a: x[:, :2].square() * a[:, None], advantages, where=advantages > 0).sum(-1)


LOSSES: Mapping[str, dict[str, Any]] = {
    "built in": {"loss": ppo_by_hand, "entropy_coefficient": 0.3},
    "by hand": {"loss": with_entropy},
    "hidden": {"loss": of_hidden_states},
    "some": {"loss": of_some_positions},
    "demonstrated": {"loss": ppo_by_hand, "sft_coefficient": 0.5},
}


def worker_of(engine: str, layout: Layout, rows: int) -> Any:
    """An actor on this rank. rows: of a micro-batch."""
    stage = 0 if engine == "torch" else int(engine[-1])
    training = Training(
        engine="torch" if engine == "torch" else "deepspeed", zero_stage=stage, micro_batch_tokens=rows * LONGEST
    )
    generation = Generation(engine="transformers")
    spec = Model(name="tiny-llama", dtype="float32", training=training, generation=generation)
    return ActorWorker(spec, replace(context_here(), layout=layout))


def gradients(cases: list[tuple[str, Layout, int]]) -> list[dict[str, Any]]:
    """For each engine, layout and number of rows the gradient of each loss, as sketches, and its value's share."""
    found = []
    for engine, layout, rows in cases:
        worker = worker_of(engine, layout, rows)
        data = worker.context.groups.data
        shard = shard_of(list(range(data.rank, ROWS, data.world_size)), ())
        shard.columns["demonstrated"] = torch.as_tensor(shard.rows) % 3 == 2
        reports = {
            name: worker.measure_gradient(shard, update="update_actor", columns=(), arguments=arguments)
            for name, arguments in LOSSES.items()
        }
        found.append(
            {
                name: {
                    "share": sum(minibatch.share for minibatch in report.minibatches),
                    "sketches": {n: torch.tensor(s.buckets) for n, s in report.minibatches[0].sketches.items()},
                }
                for name, report in reports.items()
            }
        )
    return found
