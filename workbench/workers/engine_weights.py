"""Checks whether a generation engine holds the trainer's weights: bit for bit where they can be read, else by its
log-probabilities on a probe; and decides whether a gap on the probe may be rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.engines.generation import GenerationEngine
from workbench.engines.training.base import TrainingEngine
from workbench.errors import SyncError
from workbench.messages.metrics import Mean, Metrics
from workbench.workers.worker import Context

# A text that language models find likely, but not certain: rounding in bfloat16 moves the log-probability of a token
# more, the less likely the token is (of random tokens up to 1 %), and a certain token hides an error. It is fixed, so
# that every rank, rollout workers and a resumed run have the same probe.
PROBE_TEXT = (
    "Once upon a time there was a little girl who lived in a small house at the edge of the forest with her mother and "
    "her grandmother."
)
PROBE_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class EngineWeights:
    """Result of `compare_weights`. read: weights that could be read in the engine. differ: those with other bits.

    gap: mean gap in nats between both log-probabilities on a probe. moved_gap, moved_differ: the same after a sync with
    a vocabulary rotated by one, or with an adapter of zeros, see `compare_weights`; None if the engine computes with
    the trainer's own tensors.
    """

    read: int
    differ: tuple[str, ...]
    gap: float
    moved_gap: float | None = None
    moved_differ: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerWeights:
    """The trainer's weights, of this process or another pool, to which an engine is compared.

    named_weights: yields them, whole, by transformers' names, in the engine's dtype or one from which it casts; every
    rank iterates to the end. log_probs: the trainer's of probe_ids[1:], in nats. aliases, vocabulary: of its module,
    see `PackedModule`. live: addresses of the trained tensors, if they are in this process. log_probs_without: if the
    engine holds an adapter beside the model, `named_weights` are the adapter's, and these are the log-probabilities of
    the model without it.
    """

    named_weights: Callable[[], Iterator[tuple[str, Tensor]]]
    probe_ids: Tensor
    log_probs: Tensor
    aliases: Mapping[str, list[str]]
    vocabulary: Collection[str]
    live: Collection[int] = ()
    log_probs_without: Tensor | None = None


def probe_gap(trainer: TrainerWeights, generator: GenerationEngine, moved: int = 0) -> float:
    """Return the mean gap in nats between trainer and engine on the probe; the engine is asked for tokens i + moved."""
    return float((trainer.log_probs - generator.log_probs((trainer.probe_ids + moved).tolist()).cpu()).abs().mean())


def compare_weights(trainer: TrainerWeights, generator: GenerationEngine) -> EngineWeights:
    """Compare weights as they are, and after a sync that moves embeddings and output head far. Every rank calls it.

    A sync after a small step says little about weights that cannot be read. So the rows of the vocabulary matrices are
    rotated by one and synced: the engine must then give token i + 1 the log-probability that the trainer gives token i,
    which an outdated head or embedding does not. If the engine holds an adapter, zeros are synced instead: the engine
    must then equal the model alone. Afterwards the engine gets the trainer's weights again.
    """
    weights = generator.readable_weights()
    read, differ = differing_weights(trainer, generator)
    if weights and all(tensor.data_ptr() in trainer.live for tensor in weights.values()):
        return EngineWeights(read=read, differ=differ, gap=probe_gap(trainer, generator))

    alone = trainer.log_probs_without

    def moved() -> Iterator[tuple[str, Tensor]]:
        for name, weight in trainer.named_weights():
            if alone is not None:
                yield name, torch.zeros_like(weight)
            else:
                yield name, weight.roll(1, 0) if name in trainer.vocabulary else weight

    before, version = probe_gap(trainer, generator), generator.weights_version
    try:
        generator.update_weights(moved(), version)
        moved_trainer = trainer if alone is None else replace(trainer, log_probs=alone)
        moved_gap = probe_gap(moved_trainer, generator, int(alone is None))
        _, moved_differ = differing_weights(replace(trainer, named_weights=moved), generator)
    finally:
        generator.update_weights(trainer.named_weights(), version)
    return EngineWeights(read=read, differ=differ, gap=before, moved_gap=moved_gap, moved_differ=moved_differ)


def probe_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor:
    """Return the tokens of `PROBE_TEXT`, without the vocabulary's last token, filled up with random tokens."""
    known = [token for token in tokenizer(PROBE_TEXT).input_ids if token < vocab_size - 1][:PROBE_TOKENS]
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(0, vocab_size - 1, (PROBE_TOKENS - len(known),), generator=generator)
    return torch.cat([torch.tensor(known, dtype=torch.int64), others])


def differing_weights(trainer: TrainerWeights, generator: GenerationEngine) -> tuple[int, tuple[str, ...]]:
    """Return how many weights could be read in the engine, and the names of those whose bits are not the trainer's.
    Every rank calls it."""
    held, names = generator.readable_weights(), trainer.aliases
    read, differ = 0, list[str]()
    for name, weight in trainer.named_weights():
        for alias in names.get(name, [name]):
            mine = held.get(alias)
            if mine is None or mine.shape[1:] != weight.shape[1:] or len(mine) < len(weight):
                continue
            read += 1
            if not torch.equal(mine[: len(weight)], weight.to(mine.device, mine.dtype)):
                differ.append(alias)
    return read, tuple(differ)


def trainer_log_probs(trainer: TrainingEngine, ids: Tensor, device: torch.device) -> Tensor:
    """Return the trainer's log-probabilities of ids[1:], at temperature 1, on every rank; every rank calls it."""
    ids = ids.to(device)
    positions = torch.arange(len(ids) - 1, device=device)
    with torch.no_grad():
        log_probs, _ = trainer.forward(
            input_ids=ids, lengths=(len(ids),), positions=positions, targets=ids[1:], temperature=1.0
        )
    return trainer.everywhere(log_probs).cpu()


# --- is the gap of a sync rounding ------------------------------------------------------------------------------------

# Largest mean gap, in nats, between engine and trainer on the probe right after a sync, by device and dtype.
# `benchmarks/sync_gap.py` prints the measurements behind these limits. CPU, SmolLM2-135M and tiny models, before and
# after updates: float32 at most 6e-6 (135M, 30 layers) and 8e-7 (tiny), bfloat16 0.048 and 0.017; in both a layer left
# out, two layers swapped or a layer with another's keys make at least 0.31 with the 135M model. GPU (H100, SmolLM2-135M
# and 1.4B parameters): bfloat16 0.02 on sampled tokens; float32 0.004 on random tokens while its attention was in TF32
# (see `exact_products` of the vLLM engine), which still passes. Weights that lag behind by a few small steps move the
# probe less than bfloat16 rounds: their bits show them, if the engine's can be read, as on a GPU. float16 rounds less
# than bfloat16, and may differ as much.
SYNC_TOLERANCE = {
    "cpu": {"float32": 2e-4, "bfloat16": 0.1, "float16": 0.1},
    "cuda": {"float32": 1e-2, "bfloat16": 0.1, "float16": 0.1},
}
# Rounding grows if the trainer finds the probe less likely than this (0.1 on random tokens, of 15 nats each, of the
# 135M model in bfloat16), and so does the tolerance.
LIKELY_NATS = 5.0


def sync_tolerance(dtype: str, device: torch.device, log_probs: Tensor) -> float:
    """Return the largest mean gap in nats that is rounding, for these log-probabilities by the trainer."""
    return SYNC_TOLERANCE[device.type][dtype] * max(1.0, -float(log_probs.mean()) / LIKELY_NATS)


class SyncMetrics:
    """The metrics of the newest weight sync. The first generation after the sync reports them; the same generation
    reports them again if it is repeated because it was interrupted or its kernel died: no metric is lost."""

    def __init__(self) -> None:
        self._metrics, self._taken = Metrics(), False
        self._seed: tuple[int, ...] = ()

    def note(self, metrics: Metrics) -> Metrics:
        """Record the metrics of a sync that has ended."""
        self._metrics, self._taken = metrics, False
        return metrics

    def take(self, seed: Sequence[int] = ()) -> Metrics:
        """Return the metrics to report. seed: of the generation that reports; empty: they are not reported again."""
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
    """Return the gap between engine and trainer on the probe, right after a sync to `version`, as a metric. Raises
    `SyncError` on every rank if the gap of one rank is more than rounding, or weights differ. Every rank calls it.

    differ: weights of the engine known to differ from the trainer's; None: look for them if the gap is large.
    """
    # every rank raises, or none: a rank that went on would wait for the others. NaN cannot be compared.
    known = torch.tensor([gap, len(differ or ())], dtype=torch.float64).nan_to_num(nan=torch.inf)
    worst, most = context.communicator.all_reduce_max(known).tolist()
    limit = sync_tolerance(dtype, context.device, trainer.log_probs)
    if worst > limit or most:
        raise SyncError(
            f"after the sync to weights version {version} engine and trainer differ by {worst:.3g} nats",
            f"rounding in {dtype} on {context.device.type} gives at most {limit:.2g}, and weights must be equal",
            f"{_what_differs(trainer, differ, generator, context)}; Generation(check_sync=False) turns the check off",
        )
    return {"sync_gap/mean": Mean(total=gap, count=1)}


def _what_differs(
    trainer: TrainerWeights, differ: Sequence[str] | None, generator: GenerationEngine, context: Context
) -> str:
    """Say which weights of the engine are not the trainer's, on any rank; every rank calls it."""
    if differ is None and context.host.offloads:
        return "the trainer's weights are not on the device now, and were not compared with the engine's"

    def mine() -> list[str]:
        return list(differing_weights(trainer, generator)[1] if differ is None else differ)

    found = list(dict.fromkeys(context.communicator.shared_by_group(context.communicator.world_size, mine)))
    if not found:
        return "all weights that can be read in the engine equal the trainer's: another weight differs"
    return f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''} did not arrive"
