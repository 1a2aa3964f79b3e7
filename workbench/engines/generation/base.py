"""The interface of generation engines: all that the actor requires of an engine.

Also where responses end: how much room each response has, and which tokens and strings end it, alike for every engine.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from workbench.errors import BadInput
from workbench.models.loading import longest_sequence, rope_of
from workbench.models.packing import LAYER_TYPES
from workbench.models.tokenizers import turn_end
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What ended a response: the end-of-sequence token; a stop string or stop token; or the limit of tokens.
Ending = Literal["eos", "stop", "length"]


def response_room(row: int, prompt_ids: Sequence[int], most: int, settings: Generation, vocab_size: int) -> int:
    """Return a response's most tokens, at most `most`. Raises `BadInput`, with the row, for an invalid prompt."""
    if not len(prompt_ids):
        raise BadInput(f"prompt {row} is empty", "a prompt needs at least one token", "start it with the BOS token")
    if len(prompt_ids) >= settings.max_model_tokens:
        raise BadInput(
            f"prompt {row} has {len(prompt_ids)} tokens",
            f"prompt and response share max_model_tokens={settings.max_model_tokens}",
            "shorten the prompt or raise Generation.max_model_tokens",
        )
    check_vocabulary(prompt_ids, vocab_size, f"prompt {row}")
    return min(most, settings.max_model_tokens - len(prompt_ids))


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raise `BadInput` unless all ids are in the model's vocabulary."""
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise BadInput(
            f"{what} holds a token id outside 0..{vocab_size - 1}",
            "ids must come from the tokenizer of the model that generates",
            "tokenize the text with the actor's tokenizer",
        )


def check_model(config: Any, settings: Generation, model: str = "the model") -> None:
    """Raise `BadInput` for a model with fewer positions than `settings.max_model_tokens`, and for one that the engine
    would compute wrongly: all that can be known before its weights are loaded."""
    positions = longest_sequence(config)
    if positions is not None and settings.max_model_tokens > positions:
        scaled = rope_of(config).get("rope_type") == "dynamic"
        more = "; beyond them its 'dynamic' position scaling makes rows depend on each other" if scaled else ""
        raise BadInput(
            f"Generation.max_model_tokens={settings.max_model_tokens}",
            f"{model} was built for {positions} positions{more}",
            f"give max_model_tokens={positions} or less",
        )
    if settings.engine == "vllm" and rope_of(config).get("rope_type") == "dynamic" and not rope_of(config).get("alpha"):
        raise BadInput(
            f"Generation.engine='vllm' for {model}, whose rotary embedding is dynamic",
            "vLLM scales the positions of all rows, transformers only those of rows longer than the original limit",
            "use engine='transformers'",
        )
    if settings.engine == "transformers":
        _check_batching(config)


def _check_batching(config: Any) -> None:
    """Raise `BadInput` for a model whose rows cannot share a batch: they are padded at their beginnings."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if keeps_state(config):
        raise BadInput(
            f"a model of type {config.model_type} with Generation(engine='transformers')",
            "rows join and leave a batch with their keys and values, but layers of this model keep another state",
            "use Generation(engine='vllm')",
        )
    takes = inspect.signature(family.forward).parameters if family else ("position_ids",)
    if "position_ids" not in takes and config.model_type not in ("bloom", "mpt"):  # these bias attention by distances
        raise BadInput(
            f"a model of type {config.model_type} with Generation(engine='transformers')",
            "rows are padded at their beginnings, and it takes no position_ids: it would count the padding",
            "use a model whose forward takes position_ids",
        )


def keeps_state(config: Any) -> bool:
    """Return whether layers of a model keep another state than keys and values, such as Mamba's."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return getattr(family, "_is_stateful", False) or bool(layers - LAYER_TYPES - {"chunked_attention"})


def end_token_ids(generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a response: the tokenizer's EOS token, the end of a turn in its chat template, and those
    in the model's generation config."""
    ids = generation_config.eos_token_id
    listed = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id), turn_end(tokenizer)]
    return frozenset([*listed, *own])


class Endings:
    """Decides whether a growing response has ended, and how.

    token_ids: all tokens at which a response ends. strings: whether strings end responses, too. tail: how many of a
    response's newest tokens are searched. A token has at least one byte, so a stop string of n bytes spans at most n
    tokens; a few more are for decoders that treat their first token specially.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._sampling, self._given_eos_ids = tokenizer, sampling, eos_ids
        self._stop, self._least = sampling.stop, sampling.min_new_tokens
        self.strings, self._closes = bool(sampling.stop), dict[int, bool]()
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self.token_ids = self._eos_ids | set(sampling.stop_token_ids)
        self.tail = max((len(text.encode()) for text in sampling.stop), default=0) + 8

    def with_strings(self, stop: tuple[str, ...]) -> Endings:
        """Return the same endings with other stop strings."""
        if stop == self._stop:
            return self
        return Endings(self._tokenizer, replace(self._sampling, stop=stop), self._given_eos_ids)

    def of(self, newest_ids: Sequence[int], length: int) -> Ending | None:
        """Return how the newest token has ended a response of `length` tokens, or None; a stop string may contain
        special tokens. newest_ids: at least its last `tail` tokens, or all."""
        if length <= self._least:
            return None
        if newest_ids[-1] in self.token_ids:
            return "eos" if newest_ids[-1] in self._eos_ids else "stop"
        if not self.strings or not self._may_close(newest_ids[-1]):
            return None
        before, text = (self._text(ids) for ids in (newest_ids[-self.tail : -1], newest_ids[-self.tail :]))
        # characters that precede the newest token; an incomplete one at their end is decoded again with it
        old = next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(before))
        return "stop" if any(text.find(stop, max(0, old + 1 - len(stop))) >= 0 for stop in self._stop) else None

    def _may_close(self, token: int) -> bool:
        """Return whether a stop string can end in this token's text. The token is decoded after another one, as some
        decoders treat the first one specially; a part of a character may end any string."""
        known = self._closes.get(token)
        if known is None:
            text = self._text([token, token])
            known = self._closes[token] = "\ufffd" in text or any(stop[-1] in text for stop in self._stop)
        return known

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


Progress = Callable[[int, int, int], None]  # rows done, rows in all, tokens made so far


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses in the order of the prompts; `log_probs[i][t]` belongs to `response_ids[i][t]` (see `Sampling`).

    The end-of-sequence token or stop that ended a response is part of it. `endings[i]` is "length" for a response cut
    at max_new_tokens (or at the model's longest sequence). `sets[i][t]`: with `Sampling.keep_mask`, the tokens that
    could be drawn in the place of `response_ids[i][t]`, empty if all could; without it `sets` is None.
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
    """The response to a row of a `Decoding`; its fields are those of a `Rollout`."""

    row: int
    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    ending: Ending = "length"
    sets: list[Sequence[int]] = field(default_factory=list)


class Decoding(ABC):
    """Rows that are decoded together: each row ends by itself, and others may be added at any time.

    open: number of rows that were added and have not ended. tokens: made so far, in all rows.
    """

    open: int
    tokens: int

    def __init__(self, settings: Generation, vocab_size: int, ends: Endings) -> None:
        self._settings, self._vocab_size, self._ends, self.tokens = settings, vocab_size, ends, 0

    def add(
        self,
        row: int,
        prompt_ids: Sequence[int],
        seed: int,
        room: int,
        stop: tuple[str, ...] | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        """Add a row, under a number that no open row has. Raises `BadInput` for an invalid prompt.

        The row's tokens depend on its prompt and `seed`, not on when it is added. room: most tokens to draw. stop:
        strings that end it, in place of those of `Sampling`. begun: tokens that the response has already; the result's
        `ids` include them, its `log_probs` are of the drawn tokens only.
        """
        room = response_room(row, [*prompt_ids, *begun], room, self._settings, self._vocab_size)
        ends = self._ends if stop is None else self._ends.with_strings(stop)
        self._add(Response(row=row, ids=[*begun]), prompt_ids, seed, room, ends)

    @abstractmethod
    def _add(self, response: Response, prompt_ids: Sequence[int], seed: int, room: int, ends: Endings) -> None:
        """Add a row that has been checked. response: gets its tokens. ends: decides where the row ends; its token ids
        are those of all rows."""

    @abstractmethod
    def step(self) -> list[Response]:
        """Make the next token of the rows in the batch; return the responses that have ended with it."""


class GenerationEngine(ABC):
    """Draws responses with the newest weights that it was given.

    weights_version: of the last `update_weights`; -1 after a failed update, and after `sleep`, until the next one
    succeeds. takes_adapter: whether `update_weights` takes only an adapter's weights, named as by
    `TrainingEngine.scaled_adapter`: the model beside the adapter is read from the files.
    """

    weights_version: int
    takes_adapter = False
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
        *,
        begun: Sequence[Sequence[int] | None] | None = None,
        pause_after: int | None = None,
        keep_cache: bool = False,
    ) -> Rollout:
        """Draw one response per prompt. Row i uses its own random stream `seeds[i]`: neither rank nor order matters.

        begun: tokens that each response has already, see `Decoding.add`; None: nothing is drawn for this row.
        pause_after: most tokens to draw per row. keep_cache: see `decoding`.

        If `progress` raises, all rows are dropped.
        """
        made: dict[int, Response] = {}
        had_of_rows = [()] * len(seeds) if begun is None else begun
        with self.decoding(sampling, keep_cache=keep_cache) as decoding:
            for row, (ids, seed, had) in enumerate(zip(prompt_ids, seeds, had_of_rows, strict=True)):
                if had is None or len(had) >= sampling.max_new_tokens:
                    made[row] = Response(row=row, ids=[*(had or ())])
                    continue
                room = sampling.max_new_tokens - len(had)
                decoding.add(row, ids, seed, min(room, pause_after or room), begun=had)
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

    def decoding(self, sampling: Sampling, *, keep_cache: bool = False) -> AbstractContextManager[Decoding]:
        """Decode rows that need not all be known in advance; rows that are open at the end are dropped.

        Computation for a row may be reused for a row that continues it. keep_cache: reuse also the cache of earlier
        decodings, computed with older weights; only vLLM has it. Every rank of a tensor group adds the same rows,
        before the same steps.
        """
        self._require_weights()
        if sampling.token_ids:
            check_vocabulary(sampling.token_ids, self._vocab_size, "stop_token_ids or logit_bias")
        return self._decoding(sampling, Endings(self._tokenizer, sampling, self._end_ids), keep_cache)

    def log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """Return log softmax(logits) of token_ids[1:] given the tokens before each, fp32 [len - 1], temperature 1."""
        self._require_weights()
        if not 2 <= len(token_ids) <= self._settings.max_model_tokens:
            raise BadInput(
                f"a sequence of {len(token_ids)} tokens",
                f"only 2 to max_model_tokens={self._settings.max_model_tokens} tokens can be scored",
                "cut the sequence or raise Generation.max_model_tokens",
            )
        check_vocabulary(token_ids, self._vocab_size, "the sequence")
        return self._log_probs(token_ids)

    @abstractmethod
    def _decoding(self, sampling: Sampling, ends: Endings, keep_cache: bool) -> AbstractContextManager[Decoding]:
        """Implement `decoding` for an engine that has its weights."""

    @abstractmethod
    def _log_probs(self, token_ids: Sequence[int]) -> Tensor:
        """Implement `log_probs` for tokens that have been checked."""

    @abstractmethod
    def update_weights(
        self, named_weights: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False
    ) -> int:
        """Take new weights (transformers' names) in place, drop stale caches, return the bytes taken.

        Each weight comes in its whole shape. A rank of a tensor group reads only its own slices of it: the rest may be
        uninitialised memory. partial: only layers with changes come, each with all of its weights. After an error,
        including one of the iterator, weights are mixed; a complete update repairs them.
        """

    def live_weights(self) -> dict[str, Tensor]:
        """Return the tensors with which the engine computes, all by transformers' names, if it needs nothing but new
        values in them: a caller that writes into them then calls `update_weights` with no weights and partial=True.
        Empty if the engine keeps some weights in another form, or has none now."""
        return {}

    def readable_weights(self) -> Mapping[str, Tensor]:
        """Return the weights that can be read in place, live, by transformers' names: not those that an engine has
        fused, packed or cut. A vocabulary matrix may have rows of padding at its end."""
        return {}

    @property
    def lacks_weights(self) -> bool:
        """Whether `sleep` freed the weights, and no `update_weights` followed."""
        return False

    def sleep(self) -> int:
        """Free weights and key-value cache on the device, without a copy of either; return the freed bytes.

        The next sync brings every weight, and a cache of other weights is useless. `update_weights` allocates the
        weights again; generating or scoring allocates the cache. An engine that has nothing of its own to free, or
        cannot free it, returns 0.
        """
        return 0

    def _require_weights(self) -> None:
        if self.lacks_weights:
            raise BadInput(
                "the generation engine sleeps",
                "its weights were freed, so that the trainer can use the memory of the device",
                "sync the weights first; register your own operation with generates=True if it generates",
            )

    @abstractmethod
    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes on this rank's device: {"weights": .., "kv_cache": ..}."""

    @abstractmethod
    def close(self) -> None:
        """Free the engine; the process's process groups stay."""
