"""Conversations that are longer than what the policy reads: where a new context begins, and with which tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workbench.models.tokenizers import render_reply, turn_end
from workbench.settings.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workbench.workers.conversation import Conversation

GO_ON = "Go on."  # what stands between a summary and the turns that come behind it


class Compaction:
    """Begins new contexts of conversations, as `Context` says."""

    def __init__(self, context: Context, tokenizer: PreTrainedTokenizerBase) -> None:
        self._context, self._tokenizer = context, tokenizer

    def room(self, context_tokens: int) -> int:
        """Tokens that a turn may have behind so many."""
        return max(self._context.max_tokens - context_tokens, self._context.turn_tokens)

    def remember(self, conversation: Conversation, answer_ids: Sequence[int]) -> None:
        """Note the newest turn and what it was answered; those that no context will begin with are forgotten."""
        conversation.exchanges.append([*conversation.last_turn_ids, *answer_ids])
        del conversation.exchanges[: -self._context.keep_turns]

    def is_due(self, conversation: Conversation, answer_ids: Sequence[int]) -> bool:
        """Whether a new context begins before the turn that comes behind an answer."""
        read = len(conversation.context_ids) + len(answer_ids)
        return conversation.turns > 0 and read + self._context.turn_tokens > self._context.max_tokens

    def question(self, conversation: Conversation, max_model_tokens: int) -> list[int]:
        """What the policy is asked for a summary; empty where it is not, or has no room for one."""
        if not isinstance(self._context.summary, str):
            return []
        asked = self._written(self._context.summary, conversation.response_ids[-1])
        room = max_model_tokens - len(conversation.context_ids) - len(asked)
        return asked if room >= self._context.turn_tokens else []

    @property
    def function(self) -> Callable[[str], Any] | None:
        """The user's, which summarizes in place of the policy."""
        return self._context.summary if callable(self._context.summary) else None

    @property
    def summary_room(self) -> int:
        """Tokens that a summary may have."""
        return self._context.turn_tokens

    def begins_with(self, conversation: Conversation, summary_ids: Sequence[int] = ()) -> list[int] | None:
        """The tokens of the next context, up to the policy's turn; None where not even the newest turn fits."""
        most = self._context.max_tokens - self._context.turn_tokens
        head = [*conversation.prompt_ids, *conversation.response_ids[: conversation.turn_starts[0]]]
        summary_ids = summary_ids[: self.summary_room]  # a function's may be longer
        if summary_ids:
            end = turn_end(self._tokenizer)
            head += summary_ids if summary_ids[-1] == end else [*summary_ids, end]
            head += self._written(GO_ON, end)
        for n in range(len(conversation.exchanges), 0, -1):
            kept = [token for exchange in conversation.exchanges[-n:] for token in exchange]
            if len(head) + len(kept) <= most:
                return head + kept
        return None

    def _written(self, text: str, after: int) -> list[int]:
        """What a user says behind a turn, up to the policy's next one. after: the turn's last token."""
        if self._tokenizer.chat_template:
            return render_reply(self._tokenizer, [{"role": "user", "content": text}], after=after)
        return list(self._tokenizer.encode(text, add_special_tokens=False))
