"""Rewards of a response against the other responses to its prompt: `wb.verifiers.group_diversity`, `group_length`.

Each is called once with all responses of a prompt and returns a list with a score a response. Both take a verifier of
single responses as `right`, set with `functools.partial(wb.verifiers.group_length, right=wb.verifiers.arithmetic)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from workbench.data.batched import batched, over_of
from workbench.data.user_functions import accepted, finite_number
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.calls.server import WrongValue
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveInt

Verifier = Callable[..., Any]
Unit = Literal["words", "characters"]


@batched(over="group")
@checked_call("wb.verifiers.group_diversity")
def group_diversity(
    prompt: Sequence[str], response: Sequence[str], *, n: PositiveInt = 2, unit: Unit = "words",
    right: Verifier | None = None, **row: Any,
) -> list[float]:  # fmt: skip
    """How much a response differs from the others to its prompt, in [0, 1]: 0 where all are equal, 1 where it shares no
    n-gram with any.

        d_i = mean over j != i of 1 - |N_i & N_j| / |N_i | N_j|

    N_i: the set of n-grams of a response, of words between blanks or of characters; a response shorter than n is one
    n-gram. The mean Jaccard distance asks what Self-BLEU asks (Zhu et al. 2018, https://arxiv.org/abs/1802.01886), a
    response at a time. A response alone in its group earns 0.
    right: a verifier; a response to which it gives 0 or less earns 0, and still counts among the others.
    Raises `BadInput` where `right` is no function of one response, or arguments have unequal lengths.
    """
    _same_rows(response, {"prompt": prompt, **row})
    grams = [_grams(text.split() if unit == "words" else text, n) for text in response]
    scores = [
        sum(1 - len(one & other) / len(one | other) for j, other in enumerate(grams) if j != i) / max(len(grams) - 1, 1)
        for i, one in enumerate(grams)
    ]
    passed = _passed(right, prompt, response, row)
    return [score if good else 0.0 for score, good in zip(scores, passed, strict=True)]


@batched(over="group")
@checked_call("wb.verifiers.group_length")
def group_length(
    prompt: Sequence[str], response: Sequence[str], response_ids: Sequence[Sequence[int]], *,
    right: Verifier | None = None, **row: Any,
) -> list[float]:  # fmt: skip
    """How short a response is among those to its prompt, in tokens: 0.5 for the shortest, -0.5 for the longest.

        0.5 - (length - shortest) / (longest - shortest),     0 for all where both are equal

    Source: the length reward of Kimi k1.5, https://arxiv.org/abs/2501.12599. Tokens are those of `response_ids`, in
    an environment with its observations. To favour long responses give the component a negative weight.
    right: a verifier, as in the paper; a response to which it gives 0 or less earns min(0, that), so that a wrong
        answer is not rewarded for being short. None: all count as right.
    Raises `BadInput` where `right` is no function of one response, or arguments have unequal lengths.
    """
    _same_rows(response, {"prompt": prompt, "response_ids": response_ids, **row})
    lengths = [len(ids) for ids in response_ids]
    shortest, span = min(lengths, default=0), max(lengths, default=0) - min(lengths, default=0)
    scores = [0.5 - (length - shortest) / span if span else 0.0 for length in lengths]
    passed = _passed(right, prompt, response, {**row, "response_ids": response_ids})
    return [score if good else min(0.0, score) for score, good in zip(scores, passed, strict=True)]


def _same_rows(response: Sequence[str], columns: dict[str, Any]) -> None:
    for name, column in columns.items():
        if not isinstance(column, Sequence) or len(column) != len(response):
            raise BadInput(
                f"{name}={shown(column)} beside {len(response)} responses",
                "each argument is a list with a value a response",
                "give the function to compute_reward, which calls it so",
            )


def _grams(units: Sequence[str], n: int) -> set[tuple[str, ...]]:
    """At least one."""
    return {tuple(units[i : i + n]) for i in range(max(len(units) - n + 1, 1))}


def _passed(
    right: Verifier | None, prompt: Sequence[str], response: Sequence[str], row: dict[str, Any]
) -> list[bool]:  # fmt: skip
    """Whether the verifier gives more than 0, a response each."""
    if right is None:
        return [True] * len(response)
    if over_of(right) is not None or inspect.iscoroutinefunction(right):
        raise BadInput(
            f"right={shown(right)}",
            "must be a function of one response that is called here",
            "write right=wb.verifiers.arithmetic",
        )
    columns = {"prompt": prompt, "response": response, **row}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(response))]
    scores = [right(**accepted(right, one)) for one in rows]
    try:
        return [finite_number(score) > 0 for score in scores]
    except WrongValue as error:
        raise BadInput(
            f"right={shown(right)} {error}", "must return one finite number a response", "return 1.0 or 0.0"
        ) from None
