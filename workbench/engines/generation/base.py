"""What the actor asks of a generation engine, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from workbench.engines.generation.endings import Ending, Endings, check_sequence, response_room
from workbench.errors import BadInput
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, int], None]  # rows done, rows in all, tokens made so far


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses in the order of the prompts; `log_probs[i][t]` belongs to `response_ids[i][t]` (see `Sampling`).

    The end-of-sequence token or stop that ended a response is its last part. `endings[i]` is "length" for a response
    cut at max_new_tokens (or at the model's longest sequence).
    """

    response_ids: list[list[int]]
    log_probs: list[list[float]]
    endings: list[Ending]

    @property
    def finished(self) -> list[bool]:
        return [ending != "length" for ending in self.endings]


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
        room: Sequence[int] | None = None,
        *,
        continued: bool = False,
    ) -> Rollout:
        """One response a prompt. Row i is drawn with its own stream `seeds[i]`: neither rank nor order matters.

        room: most tokens of each response, where `sampling.max_new_tokens` is too many. continued: the prompts continue
        prompts and responses of the call before, whose computation may be used again.
        """
        self._require_weights()
        most = response_room(prompt_ids, sampling, seeds, self._settings, self._vocab_size, room)
        ends = Endings(self._tokenizer, sampling, self._end_ids)
        return self._generate(prompt_ids, sampling, seeds, progress, most, ends, continued=continued)

    def log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """log softmax(logits) of token_ids[1:] given what precedes each, fp32 [len - 1], temperature 1."""
        self._require_weights()
        check_sequence(token_ids, self._settings, self._vocab_size)
        return self._log_probs(token_ids)

    @abstractmethod
    def _generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None,
        room: Sequence[int],
        ends: Endings,
        *,
        continued: bool,
    ) -> Rollout:
        """`generate` with arguments that are checked. room: of each response."""

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
