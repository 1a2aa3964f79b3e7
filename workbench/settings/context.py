"""The setting that limits how much of a long conversation the policy reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from workbench.errors import BadInput
from workbench.support.validation import PositiveInt, Whole, settings


@settings()
class Context:
    """A limit of the tokens that the policy reads before a turn, in conversations with an environment.

        wb.Sampling(environment=Teacher, max_new_tokens=2048, context=wb.Context(max_tokens=512))

    max_tokens: of a context: prompt, turns, answers, and the turn that is sampled next.
    turn_tokens: the tokens that a turn needs at least. If fewer are left, a new context begins before the turn: the
        prompt, then the newest turns with their answers, as the same tokens. Older turns are left out.
    keep_turns: how many of the newest turns are kept; fewer if they do not fit. If even the newest turn does not fit,
        the conversation ends with "max_tokens". A prompt that is longer than max_tokens is read completely.
    summary: a request to the policy before a new context begins, for example "Summarize what you know so far.": its
        answer comes after the prompt, instead of the turns that are left out. The answer may have turn_tokens, in
        addition to max_tokens. It is a turn of the policy without a reward, in the columns and in training, and does
        not count in max_turns. None: no summary.

    In training, each context is a separate sequence, see `context_starts`: a token is trained in the context in which
    it was sampled, and tokens that a later context repeats are outside the mask there. `max_new_tokens` does not count
    repeated tokens.
    """

    max_tokens: Annotated[Whole, Field(ge=2)]
    turn_tokens: PositiveInt = 64
    keep_turns: PositiveInt = 2
    summary: Annotated[str, Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.turn_tokens >= self.max_tokens:
            raise BadInput(
                f"Context(max_tokens={self.max_tokens}, turn_tokens={self.turn_tokens})",
                "a context must have room for the prompt and a turn after it",
                "raise max_tokens, or lower turn_tokens",
            )


def _of_fields(value: Any) -> Any:
    known = {field.name for field in fields(Context)}
    return Context(**value) if isinstance(value, Mapping) and set(value) == known else value


# algorithms pass `asdict` of a `Sampling` to `generate_sequences`, which turns its context into a dict of fields
GivenContext = Annotated[Context, BeforeValidator(_of_fields)]
