"""What passes between the loop of conversations and their environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.errors import RolloutError


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy said in one turn of row `row`, the ending included.

    lead_ids: the tokens between the policy's turn before and this one.
    """

    row: int
    response_ids: list[int]
    lead_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Told:
    """A turn that an environment has answered before, for one that is told it again. ids, lead_ids: as of `Turn`.
    reward, observed: what it gave, see `Reply`."""

    ids: list[int]
    lead_ids: Sequence[int]
    reward: float
    observed: str = ""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answered to one turn, or to `reset`: tokens of its observation, reward, whether it is over.

    prompt_ids: the prompt that `reset` made of messages, in place of the row's. limit: what the conversation ran out
    of, so that it ends, although the environment has not said so. again: the conversation is to begin again, with a new
    environment. failure: why it ends instead. observed: `resumed.digest` of the observation. summary_ids: what the
    function of `Context.summary` returned, where it was asked.
    """

    observation_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    reward: float = 0.0
    done: bool = False
    limit: Literal["max_seconds", "max_calls"] | None = None
    again: bool = False
    failure: RolloutError | None = None
    observed: str = ""
    summary_ids: list[int] | None = None
