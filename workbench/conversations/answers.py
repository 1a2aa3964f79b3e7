"""Runs the environments of a conversation by hand, and replays earlier turns to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from workbench.conversations.tree import Tree, Turn
from workbench.data import conversation_turns
from workbench.data.conversation_turns import ReplayedTurn, Reply
from workbench.data.environment import Environments
from workbench.errors import RolloutError
from workbench.settings.engines import Sampling
from workbench.support.calls.pickling import name_of
from workbench.support.calls.sessions import UserCalls

WAIT_S = 0.05

TurnHistory = tuple[tuple[int, ...], ...]  # the token ids of the turns that an environment has been given


class Answers:
    """The environments of one conversation, in a process of their own, as on a host: one for each branch that was
    continued. If a branch begins at an earlier turn, the earlier turns are replayed to a new environment, which must
    answer as the first one did: its answers may depend only on `sample_seed`, the row and the turns.

    row: the arguments of `reset`.
    """

    def __init__(
        self, sampling: Sampling, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, max_model_tokens: int
    ) -> None:
        self._sampling, self._row, self._tokenizer, self._most = sampling, row, tokenizer, max_model_tokens
        self._open = contextlib.ExitStack()
        self._lock = threading.Lock()  # held by the thread that waits for an answer
        self._forget()

    def _forget(self) -> None:
        self._environments: Environments | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._zeros: list[int] = []  # the row number of each environment's conversation, which is always 0
        self._at: dict[TurnHistory, int] = {}
        self._observed: dict[TurnHistory, str] = {}

    def close(self) -> None:
        """Close the environments and end their process. The next call starts new ones."""
        self._forget()
        self._open.close()

    def close_unless_busy(self) -> bool:
        """Close as `close` does, unless another thread waits for an answer. Returns whether it did."""
        if free := self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()
        return free

    def beginning(self) -> Reply:
        """Return the environment's reply before the first turn."""
        with self._whole():
            return self._begin()[1]

    def answer(self, tree: Tree, path: Sequence[Turn], token_ids: Sequence[int]) -> Reply:
        """Return the environment's reply to a turn that follows `path`. Raises `RolloutError` if it fails."""
        with self._whole():
            row = self._row_behind(tree, path)
            self._at = {history: other for history, other in self._at.items() if other != row}
            reply = self._send_turn(self._turn(row, tree, path, token_ids))
            history = (*_history(path), tuple(token_ids))
            self._at[history], self._observed[history] = row, reply.observed
            return reply

    @property
    def began(self) -> str:
        """The `Reply.observed` of the environment's reply before the first turn; "" if there was none."""
        return self._observed.get((), "")

    def replayed_turns(self, tree: Tree, path: Sequence[Turn]) -> list[ReplayedTurn]:
        """Return these turns in the form in which they are replayed to another environment."""
        with self._whole():
            row, found = self._row_behind(tree, path), []
            assert self._environments is not None
            for k, turn in enumerate(path):
                text, more = self._environments.arguments(self._turn(row, tree, path[:k], turn.token_ids))
                observed = self._observed.get(_history(path[: k + 1]), "")
                found.append(ReplayedTurn(text=text, more=more, reward=turn.reward, observed=observed))
            return found

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """On an error or interrupt inside the block, close all environments: one may have got a turn only partly."""
        with self._lock:
            try:
                yield
            except BaseException:
                self.close()
                raise

    def _row_behind(self, tree: Tree, path: Sequence[Turn]) -> int:
        """Return the row of an environment that has been given these turns; replay them to a new one if necessary."""
        if _history(path) in self._at:
            return self._at[_history(path)]
        row, _ = self._begin()
        for k, turn in enumerate(path):
            reply = self._send_turn(self._turn(row, tree, path[:k], turn.token_ids))
            if reply.done != turn.done or (not turn.done and list(reply.observation_ids) != list(turn.own_ids)):
                raise RolloutError(
                    f"environment {name_of(self._sampling.environment)} gave another answer to turn {k} when "
                    "it was repeated",
                    "a branch, or a conversation older than the newest eight, replays its turns: answers must follow "
                    "from sample_seed, the row and the turns",
                    "draw its random numbers from sample_seed, which reset receives",
                )
            self._observed[_history(path[: k + 1])] = reply.observed
        self._at[_history(path)] = row
        return row

    def _begin(self) -> tuple[int, Reply]:
        if self._environments is None:
            calls = UserCalls()
            self._open.callback(calls.close)
            self._environments = Environments(
                self._sampling, self._rows, self._tokenizer, max_model_tokens=self._most, calls=[calls],
                where="the notebook", row_numbers=self._zeros,
            )  # fmt: skip
            self._open.enter_context(self._environments.running())
        self._rows.append(self._row)
        self._zeros.append(0)
        row = len(self._rows) - 1
        self._environments.begin(row, self._sampling.max_new_tokens)
        reply = self._reply(row)
        self._observed[()] = reply.observed
        return row, reply

    def _send_turn(self, turn: conversation_turns.Turn) -> Reply:
        assert self._environments is not None
        self._environments.send_turn(turn)
        return self._reply(turn.row)

    @staticmethod
    def _turn(row: int, tree: Tree, path: Sequence[Turn], token_ids: Sequence[int]) -> conversation_turns.Turn:
        lead_ids = path[-1].answer_ids if path else [*tree.prompt_ids, *tree.first_ids]
        return conversation_turns.Turn(row=row, response_ids=list(token_ids), lead_ids=list(lead_ids))

    def _reply(self, row: int) -> Reply:
        """Wait for the reply of one environment. Raises `RolloutError` if it fails, or if its process has ended."""
        assert self._environments is not None
        while True:
            for other, reply in self._environments.replies(WAIT_S):
                if other == row and reply.failure is not None:
                    raise reply.failure
                if other == row and reply.again:
                    raise RolloutError(
                        f"the process of environment {name_of(self._sampling.environment)} ended", "",
                        "run the same call again: a new process receives the earlier turns",
                    )  # fmt: skip
                if other == row:
                    return reply


def _history(path: Sequence[Turn]) -> TurnHistory:
    return tuple(tuple(turn.token_ids) for turn in path)
