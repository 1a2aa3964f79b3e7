"""What the test of layouts runs inside ranks of its own: an iteration's stages, on workers that are called directly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.workers.preference_ranks import preferences_of
from tests.workers.update_ranks import ROWS, context_here, ppo_by_hand, shard_of
from workbench.batches.columns import Ragged
from workbench.messages.calls import Output
from workbench.messages.metrics import as_metrics, reported
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.roles import ActorWorker, CriticWorker, ReferenceWorker, RewardWorker

TINY = "tiny-llama-tied"
TRAINING = Training(engine="torch", learning_rate=1e-2, eps=1e-3, micro_batch_tokens=50)


def stages(layout: Layout, folder: Path) -> dict[str, Any]:
    """Columns and metrics of each stage on this rank; `counts` says whether they are the stage's result."""
    context = replace(context_here(str(folder)), layout=layout)

    def spec(role: str) -> Model:
        training = TRAINING if role == "reward" else None
        model = Model(TINY, seed=5, training=training)
        return model.filled(role, dtype="float32", training=TRAINING, generation=Generation(engine="transformers"))

    actor, critic = ActorWorker(spec("actor"), context), CriticWorker(spec("critic"), context)
    reference, reward = ReferenceWorker(spec("reference"), context), RewardWorker(spec("reward"), context)
    k, d = context.groups.data.rank, context.groups.data.world_size
    shard = shard_of(list(range(k, ROWS, d)), ())
    prompts = replace(shard, meta={"seed": (1, 2)}, sample=np.zeros(len(shard), dtype=np.int64))
    prompts.columns["prompt_uid"] = torch.arange(k, ROWS, d)
    done: dict[str, Output] = {}
    done["before"] = actor.generate_sequences(prompts, max_new_tokens=5)
    done["old"] = actor.compute_log_prob(shard)
    done["gradient norms"] = actor.compute_gradient_norm(shard)
    done["ref"] = reference.compute_ref_log_prob(shard)
    done["values"] = critic.compute_values(shard, final=True)
    done["rewards"] = reward.compute_reward(shard)
    done["pairs"] = reward.compute_pair_rewards(pairs_of(shard))
    old, ref = done["old"].columns["old_log_prob"], done["ref"].columns["ref_log_prob"]
    assert isinstance(old, Ragged)
    told = replace(shard, columns={**shard.columns, "old_log_prob": old, "ref_log_prob": ref})
    report = actor.measure_gradient(
        told, update="update_actor", columns=(), arguments={"entropy_coefficient": 0.01, "kl_coefficient": 0.1}
    )
    state = actor.state()
    done["actor"] = actor.update_actor(told, epochs=2, entropy_coefficient=0.01, kl_coefficient=0.1)
    actor.load_state(state)
    done["actor again"] = actor.update_actor(  # with PPO's loss as a user writes it
        told, loss=ppo_by_hand, epochs=2, entropy_coefficient=0.01, kl_coefficient=0.1
    )
    done["sft"] = actor.update_sft(shard)
    rated = preferences_of(shard)
    for stage in (reference.compute_ref_feedback_log_prob, reference.compute_teacher_log_prob):
        done[stage.__name__] = output = stage(rated)
        rated = replace(rated, columns={**rated.columns, **output.columns}, meta={**rated.meta, **output.meta})
    done["kto"] = actor.update_kto(rated, epochs=2)
    done["distilled"] = actor.update_distill(rated)
    done["critic"] = critic.update_critic(shard, epochs=2)
    done["pairs learned"] = reward.update_reward(pairs_of(shard))
    done["centred"] = reward.center(shard)
    done["rewards after"] = reward.compute_reward(shard)
    gap = actor.sync_weights()
    done["after"] = actor.generate_sequences(prompts, max_new_tokens=5)
    reference.load_state(reference.state())
    reward.save_model("scores")
    return {
        "counts": context.groups.is_leader,
        "columns": {stage: {n: _values(c) for n, c in output.columns.items()} for stage, output in done.items()},
        "metrics": {stage: reported(as_metrics(output.metrics)) for stage, output in done.items()},
        "gap": gap["sync_gap/mean"],
        "compared": actor.compare_weights(),
        "digests": actor.weight_digests(),
        "reference": reference.weight_digests(),
        "share": sum(minibatch.share for minibatch in report.minibatches),
        "norm": report.minibatches[0].norm,
    }


def stages_of(layouts: list[Layout], folder: Path) -> list[dict[str, Any]]:
    """The stages in each layout; models are saved under its number in `folder`."""
    return [stages(layout, folder / str(number)) for number, layout in enumerate(layouts)]


def pairs_of(shard: Shard) -> Shard:
    """Each response against itself without its last three tokens."""
    chosen = shard.ragged("response_ids")
    rejected = Ragged.of([row[:-3] for row in chosen.rows()], torch.int64)
    return replace(shard, columns={**shard.columns, "chosen_ids": chosen, "rejected_ids": rejected})


def _values(column: Any) -> Any:
    return column.values if isinstance(column, Ragged) else column
