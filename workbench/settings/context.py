"""How much of a long conversation the policy reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.validation import PositiveInt, Whole, settings


def _check_summary(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        inspect.signature(function).bind("text")
    except TypeError as error:
        raise BadInput(
            f"Context.summary={shown(function)}: {error}",
            "it is called with one text: what the policy has read",
            "def summary(context): return context[-200:]",
        ) from None
    except ValueError:  # one that does not say what it takes
        pass
    return function


Summarizes = Annotated[Callable[..., Any], AfterValidator(_check_summary)]


@settings()
class Context:
    """A bound of the tokens that the policy reads before a turn, in conversations with an environment.

        wb.Sampling(environment=Teacher, max_new_tokens=2048, context=wb.Context(max_tokens=512))

    max_tokens: of a context: prompt, turns and answers, and the turn that is sampled behind them.
    turn_tokens: room that a turn has at least. Where less is left, a new context begins before the turn: the prompt,
        then the newest turns with their answers, in the tokens that they have. What came between them is left out.
    keep_turns: how many turns these are; fewer where they do not fit. Where the newest one alone does not fit, the
        conversation ends with "max_tokens". A prompt that is longer than max_tokens is read whole.
    summary: what the policy is asked before a new context begins, such as "Summarize what you know so far.": its answer
        then stands behind the prompt, in place of what is left out. It may have turn_tokens, beyond max_tokens. It is a
        turn of the policy without a reward, in the columns and in training, and does not count in max_turns. Or a
        function of yours, which summarizes in its place: it gets the text that the policy has read, without special
        tokens, and returns a text, of which turn_tokens tokens stand behind the prompt, outside the mask. It may be
        `async`, and runs in the process of the environment, under its limits. None: nothing stands there.

    Each context is a sequence of its own for training, see `context_starts`: a token is trained in the context that it
    was sampled in, and tokens that a later context repeats are outside its mask. `max_new_tokens` counts no token that
    is repeated.
    """

    max_tokens: Annotated[Whole, Field(ge=2)]
    turn_tokens: PositiveInt = 64
    keep_turns: PositiveInt = 2
    summary: Annotated[str, Field(min_length=1)] | Summarizes | None = None

    def __post_init__(self) -> None:
        if self.turn_tokens >= self.max_tokens:
            raise BadInput(
                f"Context(max_tokens={self.max_tokens}, turn_tokens={self.turn_tokens})",
                "a context has room for the prompt, and for a turn behind it",
                "raise max_tokens, or lower turn_tokens",
            )


def _of_fields(value: Any) -> Any:
    known = {field.name for field in fields(Context)}
    return Context(**value) if isinstance(value, Mapping) and set(value) == known else value


# `asdict` of a `Sampling`, which algorithms hand to `generate_sequences`, gives the fields of its context
GivenContext = Annotated[Context, BeforeValidator(_of_fields)]
