"""Environments for multi-turn rollouts: written by a user, one for each sample, run in the actor's processes.

    class Calculator:
        def reset(self, prompt, **row):               # optional: a text before the first turn, or None
            self.left = 3

        def step(self, response):                     # the text of one turn
            ...
            return "= 42\\n", 0.5, False              # observation, reward of this turn, whether it is over

The text of a turn has no special tokens. A `step` that needs them, such as marks of tool calls, asks for the turn by
another name as well: `def step(self, response, raw_response)` gets the text with its special tokens,
`def step(self, response, response_ids)` its token ids.

`generate_sequences(batch, environment=Calculator, max_turns=4, stop=("=",))` makes one for each sample. A turn ends as
responses do: at EOS or at a stop. The observation's tokens are appended to the response, and the policy goes on from
there, until the environment says that it is over, or turns or tokens run out. `reset` is given `prompt`, those other
columns of the row that it takes by name, and `sample_seed`, a number of this sample's own to draw from. `async def`
works for both; all coroutines of a rank share one event loop. An environment with `close()` has it called at the end;
an error there is a warning, and the rollout is kept.

observation: a text, put in as it stands (special tokens in it count as such); or messages such as
[{"role": "tool", "content": "42"}], which the chat template renders with all that comes between two turns; or None.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.data import user_functions
from workbench.data.user_functions import short
from workbench.errors import BadInput, RolloutError
from workbench.models.tokenizers import render_reply
from workbench.settings.engines import Sampling
from workbench.support.calls.pickling import name_of
from workbench.support.calls.sessions import Session, UserCalls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Observation = str | list[dict[str, Any]] | None
RULES = {
    "reset": "it returns a text or None",
    "step": "step returns (observation, reward, done): a text, messages or None; a finite number; True or False",
    "close": "",
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What the policy said in one turn of row `row`, the ending included."""

    row: int
    response_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answered to one turn, or to `reset`: tokens of its observation, reward, whether it is over.

    again: the conversation is to begin again, with a new environment. failure: why it ends instead.
    """

    observation_ids: list[int] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    again: bool = False
    failure: RolloutError | None = None


class Environments:
    """The environments of one rank's rows, for one call of `generate_sequences`.

    rows: what each `reset` is given. calls: of the functions of this role. where, row_numbers: for messages.

    An environment that raises, runs out of time or gives something else than asked for fails alone: its reply has the
    `RolloutError`, which names row, prompt and rank, or after fewer than `retries` failures asks for a new environment.
    So do the others of a process that had to be killed, which counts as no failure of theirs.
    """

    def __init__(
        self,
        sampling: Sampling,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        calls: UserCalls,
        where: str,
        row_numbers: Sequence[int],
    ) -> None:
        assert sampling.environment is not None
        self._make: Callable[[], Any] = sampling.environment
        self._sampling, self._rows, self._tokenizer = sampling, rows, tokenizer
        self._calls, self._where, self._row_numbers = calls, where, row_numbers
        self._session: Session
        self._sessions = contextlib.ExitStack()
        self._made: set[int] = set()  # rows whose environments are in the session's process
        self._failures = Counter[int]()
        self._concurrency = sampling.concurrency

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While they are in use; at the end they are closed."""
        with self._sessions:
            self._session = self._sessions.enter_context(self._calls.session(self._make))
            try:
                yield
            except BaseException:
                self._close()  # the first error is the one to tell
                raise
            for error in self._close():  # a finished rollout is worth more than a tidy end
                warnings.warn(f"{error} The rollout is kept.", RuntimeWarning, stacklevel=2)

    def reset(self, rows: Sequence[tuple[int, int]]) -> list[Reply]:
        """Make those of some rows; the tokens of each one's first text, fewer than the response has room for.

        rows: each with the tokens that its response has room for.
        """
        numbers = [row for row, _ in rows]
        calls = [(row, self._rows[row]) for row in numbers]
        texts = self._ask("reset", numbers, user_functions.reset, user_functions.checked_text, calls)
        return [
            text if isinstance(text, Reply) else self._first(*row, text) for row, text in zip(rows, texts, strict=True)
        ]

    def _first(self, row: int, room: int, text: str | None) -> Reply:
        token_ids = self._encode(text)
        if len(token_ids) < room:
            return Reply(observation_ids=token_ids)
        error = self._error(
            "reset",
            row,
            f"returned a text of {len(token_ids)} tokens",
            f"the response has room for {room}, and the policy's turn comes after it",
            "raise max_new_tokens or Generation.max_model_tokens",
        )
        return self._failed(row, error)

    def step(self, turns: Sequence[Turn]) -> list[Reply]:
        """The replies to turns, in their order."""
        there = [turn for turn in turns if turn.row in self._made]
        texts = [self._tokenizer.decode(turn.response_ids, skip_special_tokens=True) for turn in there]
        raw = [self._tokenizer.decode(turn.response_ids) for turn in there]
        rows = [turn.row for turn in there]
        calls = list(zip(rows, texts, raw, [turn.response_ids for turn in there], strict=True))
        answers = self._ask("step", rows, user_functions.step, user_functions.checked_reply, calls)
        replies = {turn.row: self._reply(turn, answer) for turn, answer in zip(there, answers, strict=True)}
        return [replies.get(turn.row, Reply(again=True)) for turn in turns]

    def _reply(self, turn: Turn, answer: Any) -> Reply:
        if isinstance(answer, Reply):
            return answer
        observation, reward, done = answer
        if not done and turn.row not in self._made:  # it went with the process
            return Reply(again=True)
        try:
            return Reply(observation_ids=[] if done else self._tokens(turn, observation), reward=reward, done=done)
        except RolloutError as error:
            return self._failed(turn.row, error)

    def _tokens(self, turn: Turn, observation: Observation) -> list[int]:
        if not isinstance(observation, list):
            return self._encode(observation)
        if not observation:
            return []
        try:
            return render_reply(self._tokenizer, observation, after=turn.response_ids[-1])
        except BadInput as problem:
            raise self._error("step", turn.row, f"returned {problem.value}", problem.rule, problem.remedy) from problem

    def _encode(self, text: str | None) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _close(self) -> list[RolloutError]:
        """Close those that are in use; what that raised."""
        rows = sorted(self._made)
        if not rows or not self._session.alive:  # those of a process that was killed are gone
            return []
        replies = self._ask("close", rows, user_functions.close, user_functions.nothing, [(row,) for row in rows], 0)
        return [reply.failure for reply in replies if isinstance(reply, Reply) and reply.failure is not None]

    def _ask(
        self,
        method: str,
        rows: Sequence[int],
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Sequence[Sequence[Any]],
        retries: int | None = None,
    ) -> list[Any]:
        """What the environments of some rows give, or a `Reply` in its place where one failed."""
        answers: dict[int, Any] = {}

        def failed(
            i: int, what: str, rule: str = "", remedy: str = "", *, cause: BaseException | None = None, note: str = ""
        ) -> None:
            error = self._error(method, rows[i], what, rule or RULES[method] * what.startswith("returned"), remedy)
            error.__cause__ = cause
            if note:
                error.add_note(note)
            answers[i] = self._failed(rows[i], error, retries)

        self._made |= set(rows)
        left = self._session.each(
            invoke,
            finish,
            calls,
            concurrency=self._concurrency,
            timeout_s=self._sampling.call_timeout_s,
            done=answers.__setitem__,
            failed=failed,
        )
        if not self._session.alive:
            if self._concurrency == 1:
                for i in left.suspects:
                    failed(i, *left.why)
            elif left.suspects:
                self._concurrency = 1  # from here on it is known which one ends the process
            self._made.clear()
            if method != "close":
                self._session = self._sessions.enter_context(self._calls.session(self._make))
            if method == "reset":
                answers = {i: answer for i, answer in answers.items() if isinstance(answer, Reply)}
        return [answers.get(i, Reply(again=True)) for i in range(len(calls))]

    def _failed(self, row: int, error: RolloutError, retries: int | None = None) -> Reply:
        """A failure of a row: it begins again, or ends."""
        self._failures[row] += 1
        if self._failures[row] <= (self._sampling.retries if retries is None else retries):
            return Reply(again=True)
        return Reply(failure=error)

    def _error(self, method: str, row: int, what: str, rule: str = "", remedy: str = "") -> RolloutError:
        prompt = short(str(self._rows[row].get("prompt", "")))
        error = RolloutError(
            f"{method} of environment {name_of(self._make)} {what} for row {self._row_numbers[row]} on {self._where}, "
            f"prompt {prompt!r}",
            rule,
            remedy,
        )
        error.what = f"{method} {what}"
        return error
