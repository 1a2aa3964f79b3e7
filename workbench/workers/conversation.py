"""Conversations of a policy with environments, turn by turn: tokens in, tokens out, no text is tokenized twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from workbench.data.conversation_turns import AnsweredTurn, Reply, Turn
from workbench.data.environment import Environments
from workbench.engines.generation import Decoding, GenerationEngine, Response
from workbench.errors import RolloutError
from workbench.models.tokenizers import render_reply, turn_end
from workbench.settings.context import Context
from workbench.settings.engines import Sampling
from workbench.support.seeds import turn_seed
from workbench.workers.worker import Context as WorkerContext

GO_ON = "Go on."  # what stands between a summary and the turns that come behind it


class Compaction:
    """Begins new contexts of conversations by the rules of a `Context`."""

    def __init__(self, context: Context, tokenizer: PreTrainedTokenizerBase) -> None:
        self._context, self._tokenizer = context, tokenizer
        self.summary_room = context.turn_tokens

    def room(self, context_tokens: int) -> int:
        """Return how many tokens a turn may have after `context_tokens` tokens."""
        return max(self._context.max_tokens - context_tokens, self._context.turn_tokens)

    def remember(self, conversation: Conversation, answer_ids: Sequence[int]) -> None:
        """Note the newest turn and its answer; forget turns that no context will begin with."""
        said = conversation.response_ids[conversation.turn_starts[-1] : conversation.turn_ends[-1]]
        conversation.exchanges.append([*said, *answer_ids])
        del conversation.exchanges[: -self._context.keep_turns]

    def is_due(self, conversation: Conversation, answer_ids: Sequence[int]) -> bool:
        """Return whether a new context begins before the turn that follows an answer."""
        read = len(conversation.context_ids) + len(answer_ids)
        return conversation.turns > 0 and read + self._context.turn_tokens > self._context.max_tokens

    def question(self, conversation: Conversation, max_model_tokens: int) -> list[int]:
        """Return the tokens that ask the policy for a summary; empty if it is not asked, or has no room for one."""
        if self._context.summary is None:
            return []
        asked = self._written(self._context.summary, conversation.response_ids[-1])
        room = max_model_tokens - len(conversation.context_ids) - len(asked)
        return asked if room >= self._context.turn_tokens else []

    def begins_with(self, conversation: Conversation, summary_ids: Sequence[int] = ()) -> list[int] | None:
        """Return the tokens of the next context, up to the policy's turn; None if not even the newest turn fits."""
        most = self._context.max_tokens - self._context.turn_tokens
        head = [*conversation.prompt_ids, *conversation.response_ids[: conversation.turn_starts[0]]]
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
        """Return a user's text as tokens, up to the policy's next turn. after: the last token of the turn before it."""
        if self._tokenizer.chat_template:
            return render_reply(self._tokenizer, [{"role": "user", "content": text}], after=after)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


# Endings: "done" (by the environment), a limit, or "failed" (the environment failed). "max_tokens": no room for more.
ConversationEnding = Literal["done", "max_turns", "max_tokens", "max_seconds", "max_calls", "failed"]
WAIT_S = 0.05  # how long to wait for replies while no turn is decoded
STEPS_TOGETHER = 8  # tokens that ranks of tensor groups decode between two exchanges of replies or requests


@dataclass(kw_only=True)
class Conversation:
    """A response of several turns; the per-token lists have one entry per token.

    mask: False on the environment's tokens, whose log_probs are 0. sets: see `Rollout`; empty on the environment's
    tokens. rewards: each turn's reward is on its last token. turn_starts, turn_ends: each turn's tokens, as in a slice.
    prompt_ids: the row's, until the environment's messages replace them. context_starts: the tokens at which contexts
    after the first begin, see `Context`. exchanges: the newest turns with their answers, as many as a context may begin
    with. repeated: how many tokens later contexts repeat from earlier ones. held_ids: an answer to show once the
    policy has summarized. summaries: the numbers of the turns that are summaries. observed: a record of
    each environment answer, see `Reply`; the first is of its start. resumes: continue where the conversation stopped,
    with a new environment that is told the turns so far.
    failure: the environment's error, if it ended the conversation. components: of an agent's reward, by name.
    """

    prompt_ids: list[int]
    seed: int
    response_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sets: list[Sequence[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    ending: ConversationEnding | None = None
    failure: RolloutError | None = None
    context_starts: list[int] = field(default_factory=list)
    exchanges: list[list[int]] = field(default_factory=list)
    repeated: int = 0
    held_ids: list[int] | None = None
    summaries: list[int] = field(default_factory=list)
    observed: list[str] = field(default_factory=list)
    resumes: bool = False
    components: dict[str, float] = field(default_factory=dict)
    _leads: list[int] = field(default_factory=list)  # for each turn, where the tokens begin that the turn answers
    _lead_start: int = 0

    def __post_init__(self) -> None:
        self._row_prompt_ids = self.prompt_ids

    @property
    def turns(self) -> int:
        return len(self.turn_ends)

    @property
    def lead_ids(self) -> list[int]:
        """The tokens since the policy's last turn; read when it is the policy's turn."""
        return self.response_ids[self._lead_start :] if self.turns else self.prompt_ids + self.response_ids

    @property
    def context_ids(self) -> list[int]:
        """The tokens that the policy reads."""
        if self.context_starts:
            return self.response_ids[self.context_starts[-1] :]
        return self.prompt_ids + self.response_ids

    def begin_again(self) -> None:
        """Forget all turns. With the same seed, a new environment sees the same turns as long as it answers alike."""
        vars(self).update(vars(Conversation(prompt_ids=self._row_prompt_ids, seed=self.seed)))

    def go_back(self) -> bool:
        """Go back to the newest answered turn, from which a new environment can continue. Returns False if no turn was
        answered, or the environment failed. A conversation with an ending stays unchanged."""
        if self.ending is not None:
            return self.ending != "failed"
        if self.turns and self.held_ids is None and len(self.response_ids) == self.turn_ends[-1]:
            start = self.turn_starts.pop()
            self.turn_ends.pop()
            self._leads.pop()
            for column in (self.response_ids, self.mask, self.log_probs, self.sets, self.rewards):
                del column[start:]
        self.resumes = self.turns > 0
        return self.resumes

    @property
    def answered_turns(self) -> list[AnsweredTurn]:
        """The turns that the environment has answered."""
        found: list[AnsweredTurn] = []
        for k, (lead, start, end) in enumerate(zip(self._leads, self.turn_starts, self.turn_ends, strict=True)):
            if k not in self.summaries:
                before = self.response_ids[lead:start] if k else self.prompt_ids + self.response_ids[:start]
                observed = self.observed[len(found) + 1]
                found.append(AnsweredTurn(
                    ids=self.response_ids[start:end], lead_ids=before, reward=self.rewards[end - 1], observed=observed
                ))  # fmt: skip
        return found

    @property
    def state(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return {**vars(self), "failure": None}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Conversation:
        found = cls(prompt_ids=[], seed=0)
        vars(found).update(state)
        return found

    def fail(self, error: RolloutError) -> None:
        self.failure, self.ending = error, "failed"

    def add_turn(self, token_ids: list[int], log_probs: list[float], sets: Sequence[Sequence[int]]) -> None:
        self._leads.append(self._lead_start)
        self.turn_starts.append(len(self.response_ids))
        self._append(token_ids, log_probs, True)
        self.sets += sets or [()] * len(token_ids)
        self.turn_ends.append(len(self.response_ids))

    def add_observation(self, token_ids: list[int]) -> None:
        self._lead_start = len(self.response_ids)
        self._append(token_ids, [0.0] * len(token_ids), False)
        self.sets += [()] * len(token_ids)

    def begin_context(self, token_ids: list[int], answer_tokens: int) -> None:
        """Continue in a new context that begins with these tokens. answer_tokens: how many at its end are new."""
        self.context_starts.append(len(self.response_ids))
        self.add_observation(token_ids)
        self._lead_start = len(self.response_ids) - answer_tokens
        self.repeated += len(token_ids) - answer_tokens

    def _append(self, token_ids: list[int], log_probs: list[float], mine: bool) -> None:
        self.response_ids += token_ids
        self.log_probs += log_probs
        self.mask += [mine] * len(token_ids)
        self.rewards += [0.0] * len(token_ids)


class Lockstep:
    """Keeps the ranks of a tensor group in step while functions of users run beside the engine.

    steps: of the engine between two exchanges. progress(done, total, tokens): see `WorkerContext`.
    """

    def __init__(self, context: WorkerContext, ranks: int) -> None:
        self._context, self._ranks = context, ranks
        self.progress = context.advance if ranks == 1 else context.progress
        self.steps = 1 if ranks == 1 else STEPS_TOGETHER

    def shared(self, make: Callable[[], list[Any]]) -> list[Any]:
        """Concatenate the lists that these ranks make."""
        return self._context.communicator.shared_by_group(self._ranks, make)

    def any_rank(self, here: bool) -> bool:
        """Return whether this is true on any rank; a point at which the stage can be stopped."""
        if self._ranks == 1:  # `progress` has the point
            return here
        found = bool(self._context.communicator.all_reduce_max(torch.tensor([int(here)])).item())
        self._context.stopping.point()
        return found


class Turns:
    """The policy and the environments take turns until each conversation has an ending.

    Conversations advance independently: while one waits for its environment, the engine decodes turns of the others. A
    turn that is cut for lack of room ends the response without a reply; so does an observation that leaves no room for
    another token, and it is not appended. The last token is always the policy's. A conversation whose environment fails
    ends there, or begins again, as the environments decide.

    conversations: of all ranks of a tensor group, in rank order; those with an ending stay unchanged. `mine` are this
    rank's, whose environments run here. compaction: begins new contexts when conversations are too long.
    """

    _decoding: Decoding

    def __init__(
        self, conversations: Sequence[Conversation], sampling: Sampling, environments: Environments, *,
        mine: slice, max_model_tokens: int, compaction: Compaction | None,
    ) -> None:  # fmt: skip
        self._conversations, self._sampling, self._environments = conversations, sampling, environments
        self._max_model_tokens, self._compaction = max_model_tokens, compaction
        self._first, self._last, _ = mine.indices(len(conversations))
        self._ended = [conversation.ending is not None for conversation in conversations]
        self._to_begin = deque(i for i in range(self._first, self._last) if not self._ended[i])
        self._most, self._open_here = sampling.most_open or len(conversations), 0
        self._left = self._ended.count(False)  # a counter: thousands must not be searched at each token

    def take_all(self, engine: GenerationEngine, lockstep: Lockstep) -> None:
        """Decode turns and take replies until no conversation is left."""
        with engine.decoding(self._sampling) as decoding:
            self._decoding = decoding
            while lockstep.any_rank(self._left > 0):
                while self._to_begin and self._open_here < self._most:
                    self._begin(self._to_begin.popleft())
                    self._open_here += 1
                for _ in range(lockstep.steps):
                    for turn in decoding.step() if decoding.open else ():
                        self._take_turn(turn)
                for i, reply in lockstep.shared(self._replies):
                    self._take_reply(i, reply)
                lockstep.progress(len(self._conversations) - self._left, len(self._conversations), decoding.tokens)

    def _is_mine(self, i: int) -> bool:
        return self._first <= i < self._last

    def _replies(self) -> list[tuple[int, Reply]]:
        """Return the replies of this rank's environments, with their conversations' numbers."""
        wait_s = 0.0 if self._decoding.open else WAIT_S
        return [(row + self._first, reply) for row, reply in self._environments.replies(wait_s)]

    def _take_turn(self, turn: Response) -> None:
        """Record a turn of the policy, and ask the environment to answer it."""
        i, conversation = turn.row, self._conversations[turn.row]
        lead_ids = conversation.lead_ids
        conversation.add_turn(turn.ids, turn.log_probs, turn.sets)
        if conversation.held_ids is not None:
            conversation.summaries.append(conversation.turns - 1)
            self._begin_context(i, turn.ids)
        elif turn.ending == "length":
            conversation.ending = "max_tokens"
        elif self._is_mine(i):
            self._environments.send_turn(Turn(row=i - self._first, response_ids=turn.ids, lead_ids=lead_ids))
        self._count(i)

    def _take_reply(self, i: int, reply: Reply) -> None:
        """Record an environment's reply, and let the policy continue."""
        conversation = self._conversations[i]
        if reply.again:
            conversation.begin_again()
            self._begin(i)
            return
        if reply.failure is not None:
            conversation.fail(reply.failure)
        elif conversation.resumes:
            self._resume(i)
        else:
            self._answer(i, reply)
        self._count(i)

    def _answer(self, i: int, reply: Reply) -> None:
        conversation = self._conversations[i]
        if reply.prompt_ids is not None:
            conversation.prompt_ids = reply.prompt_ids
        if conversation.turns:
            conversation.rewards[-1] = reply.reward
        conversation.observed.append(reply.observed)
        if reply.done:
            conversation.ending = "done"
        elif reply.limit is not None:
            conversation.ending = reply.limit
        elif conversation.turns - len(conversation.summaries) == self._sampling.max_turns:
            conversation.ending = "max_turns"
        else:
            self._show(i, reply.observation_ids)

    def _show(self, i: int, answer_ids: list[int]) -> None:
        """Show the policy an answer, in a new context if the old one is full."""
        conversation, compaction = self._conversations[i], self._compaction
        if compaction is not None and conversation.turns:
            compaction.remember(conversation, answer_ids)
            if compaction.is_due(conversation, answer_ids):
                conversation.held_ids = answer_ids
                question = compaction.question(conversation, self._max_model_tokens)
                room = min(compaction.summary_room, self._new_tokens_left(conversation) - len(question))
                if question and room > 0:
                    conversation.add_observation(question)
                    self._go_on(i, room)
                else:
                    self._begin_context(i)
                return
        if conversation.turns and len(answer_ids) >= self._room(conversation):
            conversation.ending = "max_tokens"
            return
        conversation.add_observation(answer_ids)
        self._go_on(i, self._room(conversation))

    def _begin_context(self, i: int, summary_ids: Sequence[int] = ()) -> None:
        """Begin the next context of a conversation, and let the policy continue there; end it if there is no room."""
        conversation = self._conversations[i]
        answer_ids, conversation.held_ids = conversation.held_ids or [], None
        assert self._compaction is not None
        begins = self._compaction.begins_with(conversation, summary_ids)
        has_room = len(answer_ids) < self._new_tokens_left(conversation)
        if begins is None or len(begins) >= self._max_model_tokens or not has_room:
            conversation.ending = "max_tokens"
            return
        conversation.begin_context(begins, len(answer_ids))
        self._go_on(i, self._room(conversation))

    def _go_on(self, i: int, tokens: int) -> None:
        """Let the policy take a turn of at most `tokens` tokens."""
        conversation = self._conversations[i]
        seed = turn_seed(conversation.seed, conversation.turns)
        self._decoding.add(i, conversation.context_ids, seed, tokens)

    def _begin(self, i: int) -> None:
        if not self._is_mine(i):
            return
        conversation = self._conversations[i]
        if conversation.resumes:
            self._environments.resume(i - self._first, conversation.answered_turns, conversation.observed[0])
        else:
            self._environments.begin(i - self._first, self._room(conversation))

    def _resume(self, i: int) -> None:
        """Let the policy continue where its conversation was interrupted."""
        conversation = self._conversations[i]
        conversation.resumes = False
        if conversation.held_ids is None or self._compaction is None:
            self._go_on(i, self._room(conversation))
        else:
            self._go_on(i, min(self._compaction.summary_room, self._new_tokens_left(conversation)))

    def _room(self, conversation: Conversation) -> int:
        """Return how many tokens the next turn or observation may have."""
        read = len(conversation.context_ids)
        left = self._max_model_tokens - read
        if self._compaction is not None:
            left = min(left, self._compaction.room(read))
        return min(left, self._new_tokens_left(conversation))

    def _new_tokens_left(self, conversation: Conversation) -> int:
        return self._sampling.max_new_tokens - len(conversation.response_ids) + conversation.repeated

    def _count(self, i: int) -> None:
        if self._conversations[i].ending is not None and not self._ended[i]:
            self._ended[i] = True
            self._left -= 1
            self._open_here -= self._is_mine(i)
