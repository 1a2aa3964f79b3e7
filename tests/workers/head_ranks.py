"""What the test of fp32 heads runs inside ranks of its own: one update of an actor in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tests.workers.update_ranks import LONGEST, ROWS, context_here, shard_of
from workbench.messages.metrics import as_metrics, reported
from workbench.models import heads, tensor_parallel
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.settings.engines import DType, Generation
from workbench.settings.training import HeadDType, Training
from workbench.workers.roles.actor import ActorWorker


@dataclass(frozen=True, kw_only=True)
class Headed:
    engine: str = "torch"
    head_dtype: HeadDType = "float32"
    dtype: DType = "bfloat16"
    layout: Layout | None = None
    zero_stage: int = 3


def run_headed(cases: list[Headed]) -> list[dict[str, Any]]:
    return [_run(case) for case in cases]


def _run(case: Headed) -> dict[str, Any]:
    context = context_here()
    if case.layout is not None:
        context = replace(context, layout=case.layout)
    training = Training(
        engine="torch" if case.engine == "torch" else "deepspeed", zero_stage=case.zero_stage,
        head_dtype=case.head_dtype, micro_batch_tokens=4 * LONGEST,
    )  # fmt: skip
    model = Model("tiny-llama-tied", dtype=case.dtype, training=training, generation=Generation(engine="transformers"))
    worker = ActorWorker(model, context)
    seen = set()
    masked = heads.ChosenLogProbs.forward
    product = tensor_parallel.VocabularyParallelHead._logits

    def chosen(ctx: Any, logits: Tensor, *others: Any) -> Any:
        seen.add(logits.dtype)
        return masked(ctx, logits, *others)

    def cut(self: Any, hidden: Tensor) -> Tensor:
        logits = product(self, hidden)
        seen.add(logits.dtype)
        return logits

    heads.ChosenLogProbs.forward = staticmethod(chosen)  # type: ignore[method-assign,assignment]
    tensor_parallel.VocabularyParallelHead._logits = cut  # type: ignore[method-assign]
    try:
        data = context.groups.data
        shard = shard_of(list(range(data.rank, ROWS, data.world_size)), ())
        output = worker.update_actor(shard)
    finally:
        heads.ChosenLogProbs.forward = staticmethod(masked)  # type: ignore[method-assign]
        tensor_parallel.VocabularyParallelHead._logits = product  # type: ignore[method-assign]
    (dtype,) = seen
    metrics = reported(as_metrics(output.metrics))
    return {"head": dtype, "norm": metrics["grad_norm"], "scale": metrics.get("loss_scale")}
