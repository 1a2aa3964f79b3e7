"""Turns of a policy and of its environments: tokens in, tokens out, nothing is tokenized twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.data.environment import Environments, Turn
from workbench.engines.generation import Ending, GenerationEngine
from workbench.errors import RolloutError
from workbench.settings.engines import Sampling
from workbench.support.seeds import turn_seed

# As `Ending`; or the environment ended it; or max_turns were taken; or the environment failed.
ConversationEnding = Ending | Literal["done", "turns", "failed"]
Share = Callable[[Callable[[], list[Any]]], list[Any]]


@dataclass(kw_only=True)
class Conversation:
    """A response of several turns, one entry a token in all lists.

    mask: False on the environment's tokens, whose log_probs are 0. rewards: each turn's on the turn's last token.
    failure: of its environment, where that ended it.
    """

    prompt_ids: list[int]
    seed: int
    response_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    ending: ConversationEnding | None = None
    failure: RolloutError | None = None

    def begin_again(self) -> None:
        """Forget what was said: from the same seed, a new environment is told the same as long as it answers alike."""
        self.response_ids, self.mask, self.log_probs, self.rewards, self.turns = [], [], [], [], 0

    def fail(self, error: RolloutError) -> None:
        self.failure, self.ending = error, "failed"

    def add_turn(self, token_ids: list[int], log_probs: list[float]) -> None:
        self._append(token_ids, log_probs, True)
        self.turns += 1

    def add_observation(self, token_ids: list[int]) -> None:
        self._append(token_ids, [0.0] * len(token_ids), False)

    def _append(self, token_ids: list[int], log_probs: list[float], mine: bool) -> None:
        self.response_ids += token_ids
        self.log_probs += log_probs
        self.mask += [mine] * len(token_ids)
        self.rewards += [0.0] * len(token_ids)


def converse(
    engine: GenerationEngine,
    conversations: Sequence[Conversation],
    sampling: Sampling,
    environments: Environments,
    *,
    mine: slice,
    max_model_tokens: int,
    share: Share,
    any_rank: Callable[[bool], bool],
    progress: Callable[[int, int, int], None],
) -> None:
    """Let the policy and the environments take turns until each conversation has its ending.

    All open conversations take their turns together: generation of one turn, then the environments' replies. A turn
    that is cut for want of room ends the response without a reply; so does an observation that leaves no room for
    another token, which is not appended. The last token is always the policy's. A conversation whose environment fails
    ends there, or begins again, as the environments say.

    conversations: those of all ranks of a tensor group, in rank order; `mine` are this rank's, whose environments run
    here. share(make): the lists that these ranks make, end to end. any_rank: whether it is true on any rank.
    """

    def room(conversation: Conversation) -> int:
        left = max_model_tokens - len(conversation.prompt_ids) - len(conversation.response_ids)
        return min(left, sampling.max_new_tokens - len(conversation.response_ids))

    own = {id(conversation): row for row, conversation in enumerate(conversations[mine])}
    new, continued = {id(conversation) for conversation in conversations}, False

    def begin() -> None:
        """Reset the environments of new conversations. Those that fail and are to begin again stay new."""
        beginning = [conversation for conversation in conversations if id(conversation) in new]
        here = [(own[id(one)], room(one)) for one in beginning if id(one) in own]
        replies = share(lambda: environments.reset(here))
        new.clear()
        for conversation, reply in zip(beginning, replies, strict=True):
            if reply.again:
                new.add(id(conversation))
            elif reply.failure is not None:
                conversation.fail(reply.failure)
            else:
                conversation.add_observation(reply.observation_ids)

    while any_rank(any(conversation.ending is None for conversation in conversations)):
        if any_rank(bool(new)):
            begin()
        speaking = [one for one in conversations if one.ending is None and id(one) not in new]
        closed, said = len(conversations) - len(speaking), sum(sum(c.mask) for c in conversations)
        rollout = engine.generate(
            [conversation.prompt_ids + conversation.response_ids for conversation in speaking],
            sampling,
            [turn_seed(conversation.seed, conversation.turns) for conversation in speaking],
            lambda done, total, tokens: progress(closed, len(conversations), said + tokens),  # noqa: B023
            [room(conversation) for conversation in speaking],
            continued=continued,
        )
        continued = True
        asked: list[tuple[Conversation, Turn]] = []
        for conversation, ids, log_probs, ending in zip(
            speaking, rollout.response_ids, rollout.log_probs, rollout.endings, strict=True
        ):
            conversation.add_turn(ids, log_probs)
            if ending == "length":
                conversation.ending = ending
            else:
                row = own.get(id(conversation), -1)
                asked.append((conversation, Turn(row=row, response_ids=ids)))
        here = [turn for _, turn in asked if turn.row >= 0]
        replies = share(lambda: environments.step(here))  # noqa: B023
        for (conversation, _), reply in zip(asked, replies, strict=True):
            if reply.again:
                conversation.begin_again()
                new.add(id(conversation))
                continue
            if reply.failure is not None:
                conversation.fail(reply.failure)
                continue
            conversation.rewards[-1] = reply.reward
            if reply.done:
                conversation.ending = "done"
            elif conversation.turns == sampling.max_turns:
                conversation.ending = "turns"
            elif len(reply.observation_ids) >= room(conversation):
                conversation.ending = "length"
            else:
                conversation.add_observation(reply.observation_ids)
