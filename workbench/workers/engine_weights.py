"""Whether a generation engine holds the trainer's weights: bit for bit where they can be read, else by its
log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.engines.generation.base import GenerationEngine
from workbench.engines.training.base import TrainingEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text that language models find likely, but not certain: rounding in bfloat16 moves the log-probability of a token
# the more, the less likely it is (of random tokens up to 1 %), and a certain token hides an error. It is fixed, so that
# every rank, rollout workers and a resumed run have the same probe.
PROBE_TEXT = (
    "Once upon a time there was a little girl who lived in a small house at the edge of the forest with her mother and "
    "her grandmother."
)
PROBE_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class EngineWeights:
    """read: weights that could be read in the engine. differ: those of them whose bits are not the trainer's.

    gap: mean gap in nats between the log-probabilities of both on a probe. moved_gap, moved_differ: the same after a
    sync of weights whose vocabulary was rotated by one, or of an adapter of zeros, see `compare_weights`; None where
    the engine computes with the trainer's own tensors.
    """

    read: int
    differ: tuple[str, ...]
    gap: float
    moved_gap: float | None = None
    moved_differ: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainerWeights:
    """What an engine is compared with: the trainer's weights, here or from another pool.

    named_weights: yields them, whole, by transformers' names, in the engine's dtype or one that it casts from; every
    rank iterates to the end. log_probs: the trainer's of probe_ids[1:], nats. aliases, vocabulary: of its module, see
    `PackedModule`. live: addresses of the tensors that it trains, where they are in this process. log_probs_without:
    where the engine holds an adapter beside the model, and `named_weights` are the adapter's, the log-probabilities of
    the model alone.
    """

    named_weights: Callable[[], Iterator[tuple[str, Tensor]]]
    probe_ids: Tensor
    log_probs: Tensor
    aliases: Mapping[str, list[str]]
    vocabulary: Collection[str]
    live: Collection[int] = ()
    log_probs_without: Tensor | None = None


def probe_gap(trainer: TrainerWeights, generator: GenerationEngine, moved: int = 0) -> float:
    """Mean gap in nats between trainer and engine on the probe, the engine being asked for tokens i + moved."""
    return float((trainer.log_probs - generator.log_probs((trainer.probe_ids + moved).tolist()).cpu()).abs().mean())


def compare_weights(trainer: TrainerWeights, generator: GenerationEngine) -> EngineWeights:
    """Compare weights as they are, and after a sync that moves embeddings and output head far. Every rank calls it.

    A sync after a small step says little about weights that cannot be read. So the rows of the vocabulary matrices are
    rotated by one and synced: the engine must then give token i + 1 what the trainer gives token i, which an outdated
    head or embedding does not. Where the engine holds an adapter, zeros are synced in its place: the engine must then
    be the model alone. Afterwards the engine gets the trainer's weights again.
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
    """The tokens of `PROBE_TEXT`, without the vocabulary's last; random ones where a tokenizer gives too few."""
    known = [token for token in tokenizer(PROBE_TEXT).input_ids if token < vocab_size - 1][:PROBE_TOKENS]
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(0, vocab_size - 1, (PROBE_TOKENS - len(known),), generator=generator)
    return torch.cat([torch.tensor(known, dtype=torch.int64), others])


def differing_weights(trainer: TrainerWeights, generator: GenerationEngine) -> tuple[int, tuple[str, ...]]:
    """How many weights could be read in the engine, and the names of those whose bits are not the trainer's. Every rank
    calls it."""
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
    """The trainer's log-probabilities of ids[1:], at temperature 1, on every rank; every rank calls it."""
    ids = ids.to(device)
    positions = torch.arange(len(ids) - 1, device=device)
    with torch.no_grad():
        log_probs, _ = trainer.forward(
            input_ids=ids, lengths=(len(ids),), positions=positions, targets=ids[1:], temperature=1.0
        )
    return trainer.everywhere(log_probs).cpu()
