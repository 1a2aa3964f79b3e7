"""Where responses end: how much room each has, which tokens and strings end it. The same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from workbench.errors import BadInput
from workbench.models.tokenizers import turn_end
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What ended a response: the end-of-sequence token; a stop string or stop token; no room for more tokens.
Ending = Literal["eos", "stop", "length"]


def response_room(row: int, prompt_ids: Sequence[int], most: int, settings: Generation, vocab_size: int) -> int:
    """Most tokens of a response that may have `most`. Raises `BadInput`, with the row, for a prompt that cannot be."""
    if not len(prompt_ids):
        raise BadInput(f"prompt {row} is empty", "a prompt has at least one token", "start it with the BOS token")
    if len(prompt_ids) >= settings.max_model_tokens:
        raise BadInput(
            f"prompt {row} has {len(prompt_ids)} tokens",
            f"prompt and response share max_model_tokens={settings.max_model_tokens}",
            "shorten the prompt or raise Generation.max_model_tokens",
        )
    check_vocabulary(prompt_ids, vocab_size, f"prompt {row}")
    return min(most, settings.max_model_tokens - len(prompt_ids))


def check_sequence(token_ids: Sequence[int], settings: Generation, vocab_size: int) -> None:
    """Raise `BadInput` unless the engine can score `token_ids`."""
    if not 2 <= len(token_ids) <= settings.max_model_tokens:
        raise BadInput(
            f"a sequence of {len(token_ids)} tokens",
            f"only 2 to max_model_tokens={settings.max_model_tokens} tokens can be scored",
            "cut the sequence or raise Generation.max_model_tokens",
        )
    check_vocabulary(token_ids, vocab_size, "the sequence")


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Raise `BadInput` unless all ids are the model's."""
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise BadInput(
            f"{what} holds a token id outside 0..{vocab_size - 1}",
            "ids must come from the tokenizer of the model that generates",
            "tokenize the text with the actor's tokenizer",
        )


def check_model_length(config: Any, settings: Generation) -> None:
    """Raise `BadInput` when the model has fewer positions than `settings.max_model_tokens`."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and settings.max_model_tokens > positions:
        raise BadInput(
            f"Generation.max_model_tokens={settings.max_model_tokens}",
            f"the model was built for {positions} positions",
            f"give max_model_tokens={positions} or less",
        )


def end_token_ids(generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a response: the tokenizer's EOS token, the end of a turn in its chat template, and those of the
    model's generation config."""
    ids = generation_config.eos_token_id
    listed = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id), turn_end(tokenizer)]
    return frozenset([*listed, *own])


class Endings:
    """Says what, if anything, has ended a growing response.

    token_ids: all tokens at which a response ends. strings: whether strings end it, too. tail: how many of a response's
    newest tokens are searched. A token has at least one byte, so as many tokens as the longest stop string has bytes
    hold it; a few more are for decoders that treat their first token in a special way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, eos_ids: frozenset[int]) -> None:
        self._tokenizer, self._sampling, self._given_eos_ids = tokenizer, sampling, eos_ids
        self._stop, self._least = sampling.stop, sampling.min_new_tokens
        self.strings, self._closes = bool(sampling.stop), dict[int, bool]()
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self.token_ids = self._eos_ids | set(sampling.stop_token_ids)
        self.tail = max((len(text.encode()) for text in sampling.stop), default=0) + 8

    def with_strings(self, stop: tuple[str, ...]) -> Endings:
        """The same with other strings."""
        if stop == self._stop:
            return self
        return Endings(self._tokenizer, replace(self._sampling, stop=stop), self._given_eos_ids)

    def of(self, newest_ids: Sequence[int], length: int) -> Ending | None:
        """What the newest token has ended a response of `length` tokens with; a stop string may contain special tokens.
        newest_ids: at least the last `tail` of them, or all."""
        if length <= self._least:
            return None
        if newest_ids[-1] in self.token_ids:
            return "eos" if newest_ids[-1] in self._eos_ids else "stop"
        if not self.strings or not self._may_close(newest_ids[-1]):
            return None
        before, text = (self._text(ids) for ids in (newest_ids[-self.tail : -1], newest_ids[-self.tail :]))
        # characters from before the newest token; an incomplete one at their end is decoded again with it
        old = next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(before))
        return "stop" if any(text.find(stop, max(0, old + 1 - len(stop))) >= 0 for stop in self._stop) else None

    def _may_close(self, token: int) -> bool:
        """Whether a stop string can end in this token's text. The token is decoded behind another one, as some decoders
        treat the first one in a special way; a part of a character may end any string."""
        known = self._closes.get(token)
        if known is None:
            text = self._text([token, token])
            known = self._closes[token] = "\ufffd" in text or any(stop[-1] in text for stop in self._stop)
        return known

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
