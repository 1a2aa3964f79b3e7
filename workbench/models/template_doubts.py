"""What about a tokenizer and its chat template would go wrong without a word, told when a workbench opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.errors import BadInput
from workbench.errors.plain_text import plain_text
from workbench.models.chat_template import rendered
from workbench.models.tokenizers import TURN, differing_ends, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def template_doubts(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int] = (), text: str = ""
) -> list[str]:  # fmt: skip
    """A sentence for each doubt, with what to set. prompt_ids, text: of one prompt."""
    ends = differing_ends(tokenizer), _end(tokenizer)
    return [one for one in (*ends, _bos(tokenizer, prompt_ids), _trip(tokenizer, text)) if one]


def _end(tokenizer: PreTrainedTokenizerBase) -> str:
    """Whether the end that the template writes behind a turn is a text at which generation does not stop."""
    if not tokenizer.chat_template:
        return ""
    turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": TURN}]
    try:
        whole = rendered(tokenizer, turns, next_turn=False)
    except BadInput:
        return ""
    behind = whole.rpartition(TURN)[2].strip() if TURN in whole else ""
    if not behind or any(behind.startswith(token) for token in special_tokens(tokenizer)):
        return ""
    return (
        f"the chat template of {tokenizer.name_or_path!r} ends a turn with {behind!r:.40}, which is no special token: "
        f"generation does not stop there. Set wb.Sampling(stop=[{behind!r:.40}])"
    )


def _bos(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    if tokenizer.bos_token_id is None or list(prompt_ids[:2]) != [tokenizer.bos_token_id] * 2:
        return ""
    return (
        f"prompts begin with two {tokenizer.bos_token!r} (BOS): the chat template writes it twice, or a message begins "
        "with it. Models are trained with one: give texts that are rendered already with chat=False, or take it out of "
        "chat_template in the model's folder"
    )


def _trip(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Whether a text becomes another one as token ids. A space at its ends may be lost."""
    if not text:
        return ""
    back = str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False, verbose=False)))
    if back.strip() == text.strip():
        return ""
    pairs = enumerate(zip(text, back, strict=False))
    at = next((i for i, (one, two) in pairs if one != two), min(len(text), len(back)))
    before, after = (plain_text(one[max(0, at - 10) : at + 20], 40) for one in (text, back))
    return (
        f"the tokenizer of {tokenizer.name_or_path!r} does not give texts back: {before!r} comes back as {after!r}, "
        "and that is what reward functions read. Set clean_up_tokenization_spaces=false in tokenizer_config.json where "
        "spaces differ, or take a tokenizer that does not change texts"
    )
