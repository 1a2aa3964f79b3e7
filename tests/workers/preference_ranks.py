"""What the test of preferences and distillation runs inside ranks of its own: the stages on eight fixed rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.workers.update_ranks import ROWS, context_here, shard_of
from workbench.batches.columns import Ragged
from workbench.messages.calls import Output
from workbench.messages.metrics import Metrics, as_metrics
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.roles import ActorWorker, ReferenceWorker, TeacherWorker

STUDENT, TEACHER = "tiny-llama-tied", "tiny-llama"


def stages_of(engines: list[str]) -> list[dict[str, Metrics]]:
    """The metrics of each stage on this rank's share of the rows, with each engine."""
    return [stages(engine) for engine in engines]


def stages(engine: str) -> dict[str, Metrics]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    context, stage = context_here(), 0 if engine == "torch" else int(engine[-1])
    training = Training(
        engine="torch" if engine == "torch" else "deepspeed", zero_stage=stage, learning_rate=1e-3, eps=1e-3,
        micro_batch_tokens=60,
    )  # fmt: skip

    def spec(role: str, name: str) -> Model:
        generation = Generation(engine="transformers")
        return Model(name, seed=5).filled(role, dtype="float32", training=training, generation=generation)

    actor = ActorWorker(spec("actor", STUDENT), context)
    reference = ReferenceWorker(spec("reference", STUDENT), context)
    teacher = TeacherWorker(spec("teacher", TEACHER), context)
    shard = preferences_of(shard_of(list(range(rank, ROWS, size)), ()))
    pairs = _with(shard, reference.compute_ref_pair_log_prob(shard))
    rated = _with(shard, reference.compute_ref_feedback_log_prob(shard))
    taught = _with(shard, scored := teacher.compute_teacher_log_prob(shard, top_k=8))
    done = {
        "teacher": scored,
        "ipo": actor.update_ipo(pairs, epochs=2),
        "orpo": actor.update_orpo(pairs),
        "kto": actor.update_kto(rated, beta=0.3, epochs=3),
        "feedback": actor.compute_feedback_log_prob(rated, beta=0.3),
        "distill": actor.update_distill(taught, beta=0.5, epochs=2),
    }
    return {stage: as_metrics(output.metrics) for stage, output in done.items()}


def preferences_of(shard: Shard) -> Shard:
    """Each response against itself without its last three tokens; good where it is of an even row; beside it, its end
    as the answer to another prompt. Two minibatches."""
    responses = shard.ragged("response_ids")
    rejected = Ragged.of([row[:-3] for row in responses.rows()], torch.int64)
    mismatched = Ragged.of([row[-9:] for row in responses.rows()], torch.int64)
    columns = {
        **shard.columns,
        "chosen_ids": responses,
        "rejected_ids": rejected,
        "mismatched_ids": mismatched,
        "desirable": torch.as_tensor(shard.rows % 2 == 0),
    }
    half = len(shard) // 2
    return replace(shard, columns=columns, minibatch_sizes=(half, len(shard) - half))


def _with(shard: Shard, output: Output) -> Shard:
    more: dict[str, Any] = dict(output.columns)
    return replace(shard, columns={**shard.columns, **more}, meta={**shard.meta, **output.meta})
