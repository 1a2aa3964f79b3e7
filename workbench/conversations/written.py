"""What a hand writes into a conversation, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.conversations.tree import Turn
from workbench.data.user_functions import are_messages
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.tokenizers import is_text, render_reply, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def as_turn(tokenizer: PreTrainedTokenizerBase, text: str, *, stop: Sequence[str], room: int) -> tuple[list[int], str]:
    """A text as the tokens of a turn, and its ending. room: tokens that it may have."""
    ids, stops = _encoded(tokenizer, text), any(text.endswith(one) for one in stop)
    ids += [] if stops else [turn_end(tokenizer)]
    if len(ids) > room:
        raise BadInput(
            f"a turn of {len(ids)} tokens", f"there is room for {room}", "shorten it, or raise max_new_tokens"
        )
    return ids, "stop" if stops else "eos"


def as_answer(tokenizer: PreTrainedTokenizerBase, answer: Any, turn: Turn) -> list[int]:
    """A text, or messages, as the tokens that answer a turn."""
    if isinstance(answer, str):
        return _encoded(tokenizer, answer)
    if not isinstance(answer, list):
        raise BadInput(f"answer={shown(answer)}", "must be a text, or messages", "answer='= 42'")
    if not are_messages(answer):
        rule = "messages have a role and a content, and no half characters"
        raise BadInput(f"answer={shown(answer)}", rule, "answer=[{'role': 'tool', 'content': '= 42'}]")
    return render_reply(tokenizer, answer, after=turn.token_ids[-1])


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    if not is_text(text):
        raise BadInput(f"the text {shown(text)}", "has half a character", "write whole characters")
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
