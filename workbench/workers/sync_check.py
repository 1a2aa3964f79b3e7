"""Whether a weight sync arrived: the gap between engine and trainer on a probe, and what may be rounding."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.engines.generation import GenerationEngine
from workbench.errors import SyncError
from workbench.messages.metrics import Mean, Metrics
from workbench.workers.engine_weights import TrainerWeights, differing_weights
from workbench.workers.worker import Context

# Largest mean gap, in nats, between engine and trainer on the probe right after a sync, by dtype and device.
# `benchmarks/sync_gap.py` prints what they are taken from. CPU, SmolLM2-135M and tiny models, before and after updates:
# float32 at most 6e-6 (135M, 30 layers) and 8e-7 (tiny), bfloat16 0.048 and 0.017; in both a layer left out, two layers
# swapped or one with another's keys make 0.31 and more of the 135M model. GPU (H100, SmolLM2-135M and 1.4B parameters):
# bfloat16 0.02 on sampled tokens; float32 0.004 on random tokens while its attention was in TF32 (`_exact_products` of
# the vLLM engine), which is kept as what may pass. Weights that lag behind by a few small steps move the probe less
# than bfloat16 rounds: these are found by their bits, where the engine's can be read, as on a GPU. float16 rounds less
# than bfloat16, and may differ as much.
SYNC_TOLERANCE = {
    ("float32", "cpu"): 2e-4,
    ("bfloat16", "cpu"): 0.1,
    ("float16", "cpu"): 0.1,
    ("float32", "cuda"): 1e-2,
    ("bfloat16", "cuda"): 0.1,
    ("float16", "cuda"): 0.1,
}
# Rounding grows where the trainer finds the probe less likely than this (0.1 on random tokens, of 15 nats each, of the
# 135M model in bfloat16), and so does what may pass.
LIKELY_NATS = 5.0
# Of an adapter that is added to weights: half a last place is lost of each sum, which matters less the larger it is.
LEAST_OF_ADAPTER = 0.9


def sync_tolerance(dtype: str, device: torch.device, log_probs: Tensor) -> float:
    """Largest mean gap in nats that is rounding, on tokens with these log-probabilities by the trainer."""
    return SYNC_TOLERANCE[dtype, device.type] * max(1.0, -float(log_probs.mean()) / LIKELY_NATS)


def metrics_of_adapter(arrived: float | None) -> Metrics:
    """The share of an adapter's change that a sync of summed weights has kept, see `arriving`; a warning where much of
    it was rounded away, so that rollouts are not those of the policy that is trained."""
    if arrived is None:
        return {}
    if arrived < LEAST_OF_ADAPTER:
        warnings.warn(
            f"{arrived:.1%} of the adapter's change arrived in the generation engine: the rest is less than the last "
            "place of the bfloat16 weights that it is added to. wb.Generation(engine='vllm') on the actor's own ranks "
            "holds the adapter beside the model; or use wb.Model(..., dtype='float32') for the actor",
            RuntimeWarning,
            stacklevel=2,
        )
    return {"sync/adapter_arrived": Mean(total=arrived, count=1)}


class SyncMetrics:
    """The metrics of the newest weight sync. The first generation after it reports them; so does the same generation
    when it is run again, because it was interrupted or its kernel had died: no metric is lost."""

    def __init__(self) -> None:
        self._metrics, self._taken = Metrics(), False
        self._seed: tuple[int, ...] = ()

    def note(self, metrics: Metrics) -> Metrics:
        """A sync has ended."""
        self._metrics, self._taken = metrics, False
        return metrics

    def take(self, seed: Sequence[int] = ()) -> Metrics:
        """What is to be reported. seed: of the generation that reports it; without one, nobody does so again."""
        if self._taken and not (seed and tuple(seed) == self._seed):
            return Metrics()
        self._taken, self._seed = True, tuple(seed)
        return self._metrics


def require_small(
    gap: float,
    version: int,
    trainer: TrainerWeights,
    differ: Sequence[str] | None,
    generator: GenerationEngine,
    dtype: str,
    context: Context,
) -> Metrics:
    """The gap on the probe right after a sync to `version` as a metric; `SyncError`, on every rank, where it is more
    than rounding on one of them, or weights differ. Every rank calls it.

    differ: weights of the engine that are known not to be the trainer's; None: look for them if the gap is large.
    """
    # every rank raises, or none: one that went on would wait for the others. NaN is no number to compare with.
    known = torch.tensor([gap, len(differ or ())], dtype=torch.float64).nan_to_num(nan=torch.inf)
    worst, most = context.communicator.all_reduce_max(known).tolist()
    limit = sync_tolerance(dtype, context.device, trainer.log_probs)
    if worst > limit or most:
        raise SyncError(
            f"after the sync to weights version {version} engine and trainer differ by {worst:.3g} nats",
            f"at most {limit:.2g} is rounding in {dtype} on {context.device.type}, and none in bits",
            f"{_what_differs(trainer, differ, generator, context)}; Generation(check_sync=False) goes on all the same",
        )
    return {"sync_gap/mean": Mean(total=gap, count=1)}


def _what_differs(
    trainer: TrainerWeights, differ: Sequence[str] | None, generator: GenerationEngine, context: Context
) -> str:
    """Which weights of the engine are not the trainer's, on any rank; every rank calls it."""
    if differ is None and context.host.offloads:
        return "the trainer's weights have left the device, and were not compared with the engine's"

    def mine() -> list[str]:
        return list(differing_weights(trainer, generator)[1] if differ is None else differ)

    found = list(dict.fromkeys(context.communicator.shared_by_group(context.communicator.world_size, mine)))
    if not found:
        return "all weights that can be read in the engine are the trainer's: another is not"
    return f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''} did not arrive"
