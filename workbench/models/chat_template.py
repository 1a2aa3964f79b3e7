"""Renders chat templates, with a time limit, because they are programs that come with a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import said, shown
from workbench.models.control_tokens import unmarked
from workbench.support.time_limit import TooLong, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIMEOUT_S = 10.0
ROLES = ("system", "user", "assistant", "tool")
# how widespread templates begin a conversation
_BEGUN = re.compile(
    r"\s*(?:<s>|<bos>|<\|bos\|>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>)?\s*"
    r"(<\|im_start\|>(?:system|user)\n|<\|start_header_id\|>(?:system|user)<|<start_of_turn>user\n"
    r"|<\|(?:system|user)\|>\n|<｜User｜>|\[(?:INST|SYSTEM_PROMPT)\])"
)
_PLAIN = ("role", "content", "name", "tool_call_id")  # keys that `unread` does not check


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    next_turn: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as the tokenizer's chat template writes it, up to the start of the assistant's next turn.

    next_turn: whether to include the head of that turn. tools: JSON schemas of functions that the assistant may call.
    arguments: further variables of the template.

    Raises `BadInput` if the template raises, or takes more than ten seconds, and for a role that it does not know, but
    would write unchanged.
    """
    name = tokenizer.name_or_path
    for message in messages:
        if message["role"] not in ROLES and not reads(tokenizer, message["role"]):
            raise BadInput(
                f"role {message['role']!r}", f"the chat template of {name!r} does not know it",
                f"rename it to one of {', '.join(ROLES)}: 'human' is 'user', 'gpt' or 'bot' is 'assistant'",
            )  # fmt: skip
    try:
        with time_limit(TIMEOUT_S):
            return str(
                tokenizer.apply_chat_template(
                    list(messages),  # type: ignore[arg-type]
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=next_turn,
                    tokenize=False,
                    **(arguments or {}),
                )
            )
    except TooLong:
        raise BadInput(
            f"the chat template of {name!r} took more than {TIMEOUT_S:g} s for {unmarked(shown(messages, 80))}",
            "a template usually renders a conversation in less than a millisecond",
            "check chat_template in the model's folder for an endless loop, or set tokenizer.chat_template",
        ) from None
    except Exception as error:  # templates may raise anything
        words = f"{type(error).__name__}: {unmarked(said(error, 400))}"
        raise BadInput(
            f"messages {unmarked(shown(messages, 80))}", f"the chat template of {name!r} rejects them: {words}",
            "write them as the template requires, or set tokenizer.chat_template",
        ) from error  # fmt: skip


def reads(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the chat template contains a name, as a variable or in a text."""
    return re.search(rf"\b{re.escape(name)}\b", template_text(tokenizer)) is not None


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template as one text, of several named ones all; "" if there is none."""
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else " ".join(template.values())


def unread(tokenizer: PreTrainedTokenizerBase, messages: Iterable[Mapping[str, Any]], tools: Sequence[Any]) -> set[str]:
    """Return the further keys of messages, and "tools" if there are tools, that the chat template ignores."""
    there = {"tools"} if tools else set[str]()
    for message in messages:
        there |= {key for key, value in message.items() if value and key not in _PLAIN}
    return {name for name in there if not reads(tokenizer, name)}


def warn_if_rendered(texts: Iterable[str], place: str) -> bool:
    """Whether one of the texts, to which a chat template will be applied, has gone through one already; then warn."""
    found = next(filter(None, map(_BEGUN.match, texts)), None)
    if found:
        warnings.warn(
            f"{place} has {found[1]!r}: this text went through a chat template already, and now goes through the "
            "model's as plain text. Give chat=False for texts in the model's own template; convert others to messages",
            stacklevel=2,
        )
    return found is not None
