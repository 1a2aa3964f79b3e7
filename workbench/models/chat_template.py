"""Chat templates: programs that come with a model, so that they are rendered with a time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput
from workbench.errors.plain_text import said, shown
from workbench.models.control_tokens import unmarked
from workbench.support.time_limit import TooLong, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIMEOUT_S = 10.0


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    next_turn: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as the tokenizer's chat template writes it, up to where the assistant's next turn begins.

    next_turn: whether that turn's head is written. tools: JSON schemas of functions that the assistant may call.
    arguments: further variables of the template.

    Raises `BadInput` where the template raises, or takes more than ten seconds.
    """
    name = tokenizer.name_or_path
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
            "a template writes a conversation in less than a millisecond",
            "look at chat_template in the model's folder: it may loop; or set tokenizer.chat_template",
        ) from None
    except Exception as error:  # templates raise what they like
        words = f"{type(error).__name__}: {unmarked(said(error, 400))}"
        raise BadInput(
            f"messages {unmarked(shown(messages, 80))}", f"the chat template of {name!r} refuses them: {words}",
            "write them as the template asks for, or set tokenizer.chat_template",
        ) from error  # fmt: skip
