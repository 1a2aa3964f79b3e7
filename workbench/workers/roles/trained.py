"""The operations of all trained roles: saving, checksums, gradients without a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from workbench.engines.training import TrainingEngine
from workbench.errors import BadInput
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL, VALUES_OF_RANKS
from workbench.messages.shards import Shard
from workbench.models.heads import PackedModule
from workbench.models.saving import SHARD_GB
from workbench.models.spec import Model
from workbench.support.validation import PositiveFloat
from workbench.workers.gradients import GradientProbe, GradientReport
from workbench.workers.model_worker import ModelWorker
from workbench.workers.passes import TokenBudget
from workbench.workers.worker import Context


def check_update(arguments: Mapping[str, Any]) -> None:
    if arguments["aggregation"] == "fixed-length" and arguments["max_response_tokens"] is None:
        raise BadInput("aggregation='fixed-length'", "divides by max_response_tokens", "give max_response_tokens")


class TrainedWorker(ModelWorker):
    engine: TrainingEngine

    def __init__(self, spec: Model, context: Context, module: PackedModule) -> None:
        super().__init__(spec, context)
        self.hold(module, trained=True)

    def state(self) -> dict[str, Any]:
        return self.trained_state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.load_trained_state(state)

    @register(ONE_TO_ALL)
    def weights_checksum(self) -> float:
        """Sum of the absolute values of all weights in fp64: equal on ranks that hold the same weights."""
        return float(sum(tensor.double().abs().sum().item() for _, tensor in self.engine.named_weights()))

    @register(ONE_TO_ALL)
    def save_model(self, path: str | Path, *, card: str = "", shard_gb: PositiveFloat = SHARD_GB) -> str:
        """Write the weights as they are now, with configuration and tokenizer, as transformers does: `wb.Model(path)`,
        and vLLM, load it. The absolute path, once a rank.

        path: a folder that is empty or not there yet; relative to where the workbench was opened, on the machine of the
        role's first rank. Weights are written in the role's dtype; those of a value or score head as "score".
        card: a model card in Markdown, such as `wb.model_card(lab)`, which tells of the run; it becomes README.md.
        shard_gb: largest size of a safetensors file, in 1e9 bytes; more weights go into several with an index.
        """
        return self.write_weights(path, card, shard_gb)

    @register(VALUES_OF_RANKS, reads=lambda arguments: arguments["columns"], minibatched=True)
    def measure_gradient(
        self,
        batch: Shard,
        *,
        update: str,
        columns: tuple[str, ...],
        arguments: Mapping[str, Any],
        micro_batch_tokens: int | None = None,
    ) -> GradientReport:
        """The gradient that one of this role's updates would pass to its optimizer, as each rank sees it; no step is
        taken.

        update, arguments: the operation and its arguments. columns: those of the batch that it reads.
        micro_batch_tokens: in place of the setting's.
        """
        engine, budget = self.engine, self.budget
        counts = self.context.groups.counts
        probe = GradientProbe(engine, counts)
        self.engine = cast(TrainingEngine, probe)
        if micro_batch_tokens is not None:
            module = cast(PackedModule, engine.module)
            self.budget = TokenBudget(micro_batch_tokens, self.context, engine, module, trained=True)
        try:
            output = getattr(self, update)(batch, **arguments)
        finally:
            self.engine, self.budget = engine, budget
            cast(PackedModule, engine.module).expect(budget.tokens)
        metrics = {name: metric.value for name, metric in output.metrics.items()}
        return GradientReport(counts=counts, metrics=metrics, minibatches=tuple(probe.minibatches))
