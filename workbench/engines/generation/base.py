"""What the actor asks of a generation engine, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from workbench.engines.generation.endings import Ending, Endings, check_sequence, check_vocabulary, response_room
from workbench.errors import BadInput
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, int], None]  # rows done, rows in all, tokens made so far


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses in the order of the prompts; `log_probs[i][t]` belongs to `response_ids[i][t]` (see `Sampling`).

    The end-of-sequence token or stop that ended a response is its last part. `endings[i]` is "length" for a response
    cut at max_new_tokens (or at the model's longest sequence). `sets[i][t]`: with `Sampling.keep_mask` the tokens that
    could be drawn in the place of `response_ids[i][t]`, none where all could; else None.
    """

    response_ids: list[list[int]]
    log_probs: list[list[float]]
    endings: list[Ending]
    sets: list[list[Sequence[int]]] | None = None

    @property
    def finished(self) -> list[bool]:
        return [ending != "length" for ending in self.endings]


@dataclass(frozen=True, kw_only=True)
class Response:
    """The response to a row of a `Decoding`; its parts are those of a `Rollout`."""

    row: int
    ids: list[int]
    log_probs: list[float]
    ending: Ending
    sets: list[Sequence[int]]


class Decoding(ABC):
    """Rows that are decoded together: each ends by itself, and others may be added at any time.

    open: rows that were added and have not ended. tokens: made so far, in all rows.
    """

    open: int
    tokens: int

    def __init__(self, settings: Generation, vocab_size: int, ends: Endings) -> None:
        self._settings, self._vocab_size, self._ends, self.tokens = settings, vocab_size, ends, 0

    def add(
        self, row: int, prompt_ids: Sequence[int], seed: int, room: int, stop: tuple[str, ...] | None = None
    ) -> None:
        """Add a row, under a number that none of the open ones has. Raises `BadInput` for a prompt that cannot be.

        What it draws depends on its prompt and its `seed`, not on when it comes. room: most tokens of the response.
        stop: strings that end it, in place of those of `Sampling`.
        """
        room = response_room(row, prompt_ids, room, self._settings, self._vocab_size)
        self._add(row, prompt_ids, seed, room, self._ends if stop is None else self._ends.with_strings(stop))

    @abstractmethod
    def _add(self, row: int, prompt_ids: Sequence[int], seed: int, room: int, ends: Endings) -> None:
        """`add` of a row that is checked. ends: what ends it; its token ids are those of all rows."""

    @abstractmethod
    def step(self) -> list[Response]:
        """Make the next token of the rows that are decoded; the responses that have ended with it."""


class GenerationEngine(ABC):
    """Draws responses from the newest weights it was given.

    weights_version: of the last `update_weights`; -1 after one that failed, and after `sleep`, until the next succeeds.
    """

    weights_version: int
    _settings: Generation
    _tokenizer: PreTrainedTokenizerBase
    _end_ids: frozenset[int]
    _vocab_size: int

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None = None,
    ) -> Rollout:
        """One response a prompt. Row i is drawn with its own stream `seeds[i]`: neither rank nor order matters.

        Where `progress` raises, all rows are given up.
        """
        if len(seeds) != len(prompt_ids):
            raise BadInput(f"{len(seeds)} seeds for {len(prompt_ids)} prompts", "each prompt has a seed of its own")
        made: dict[int, Response] = {}
        with self.decoding(sampling) as decoding:
            for row, (ids, seed) in enumerate(zip(prompt_ids, seeds, strict=True)):
                decoding.add(row, ids, seed, sampling.max_new_tokens)
            while decoding.open:
                made.update((response.row, response) for response in decoding.step())
                if progress is not None:
                    progress(len(made), len(prompt_ids), decoding.tokens)
        responses = [made[row] for row in range(len(prompt_ids))]
        return Rollout(
            response_ids=[response.ids for response in responses],
            log_probs=[response.log_probs for response in responses],
            endings=[response.ending for response in responses],
            sets=[response.sets for response in responses] if sampling.keeps_mask else None,
        )

    def decoding(self, sampling: Sampling) -> AbstractContextManager[Decoding]:
        """Decode rows that are not all known beforehand; at the end, those that are open are given up.

        What is computed for a row may be used again for one that continues it. Every rank of a tensor group adds the
        same rows, before the same steps.
        """
        self._require_weights()
        if sampling.token_ids:
            check_vocabulary(sampling.token_ids, self._vocab_size, "stop_token_ids or logit_bias")
        return self._decoding(sampling, Endings(self._tokenizer, sampling, self._end_ids))

    def log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """log softmax(logits) of token_ids[1:] given what precedes each, fp32 [len - 1], temperature 1."""
        self._require_weights()
        check_sequence(token_ids, self._settings, self._vocab_size)
        return self._log_probs(token_ids)

    @abstractmethod
    def _decoding(self, sampling: Sampling, ends: Endings) -> AbstractContextManager[Decoding]:
        """`decoding` of an engine that has its weights."""

    @abstractmethod
    def _log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """`log_probs` of tokens that are checked."""

    @abstractmethod
    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Take new weights (transformers' names) in place, drop stale caches, return bytes taken.

        Each in the shape of the whole weight. A rank of a tensor group reads only its own slices of it: the rest may be
        uninitialised memory. After an error, that of the iterator included, weights are mixed; a complete update
        repairs them.
        """

    @property
    def takes_adapter(self) -> bool:
        """Whether `update_weights` takes the weights of an adapter, as `TrainingEngine.scaled_adapter` names them, and
        nothing else: the model beside it is that of the files."""
        return False

    def readable_weights(self) -> Mapping[str, Tensor]:
        """The weights that can be read in place, live, by transformers' names: not those that an engine has fused,
        packed or cut. A vocabulary matrix may have rows of padding at its end."""
        return {}

    @property
    def lacks_weights(self) -> bool:
        """Whether `sleep` freed its weights, and no `update_weights` came since."""
        return False

    def sleep(self) -> int:
        """Free weights and key-value cache on the device, without a copy of either; bytes freed.

        The next sync brings every weight, and a cache of other weights is useless. `update_weights` allocates the
        weights again, generating or scoring the cache. An engine that has nothing of its own to free, or cannot,
        returns 0.
        """
        return 0

    def _require_weights(self) -> None:
        if self.lacks_weights:
            raise BadInput(
                "a generation engine that sleeps",
                "its weights were freed, for the trainer to use the memory of the device",
                "give it weights first; an operation of your own that generates is registered with generates=True",
            )

    @abstractmethod
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that live on this rank's device: {"weights": .., "kv_cache": ..}."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine; the process groups of the process stay."""
