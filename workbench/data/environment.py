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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """What an environment answered to one turn: tokens of its observation, reward, whether it is over."""

    observation_ids: list[int]
    reward: float
    done: bool


class Environments:
    """The environments of one rank's rows, for one call of `generate_sequences`.

    rows: what each `reset` is given. calls: of the functions of this role. where, row_numbers: for messages.
    Every method raises `RolloutError`, naming row, prompt and rank, where an environment raises, runs out of time or
    gives something else than asked for.
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

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While they are in use; at the end they are closed."""
        with self._calls.session(self._make) as self._session:
            try:
                yield
            except BaseException:
                with contextlib.suppress(RolloutError):  # the first error is the one to tell
                    self._close()
                raise
            try:
                self._close()
            except RolloutError as error:  # a finished rollout is worth more than a tidy end
                warnings.warn(f"{error} The rollout is kept.", RuntimeWarning, stacklevel=2)

    def reset(self, room: Sequence[int]) -> list[list[int]]:
        """Make them all; the tokens of each one's first text, fewer than the response has room for."""
        rows = range(len(self._rows))
        calls = list(enumerate(self._rows))
        texts = self._ask("reset", rows, user_functions.reset, user_functions.checked_text, calls)
        first = [self._encode(text) for text in texts]
        for row, token_ids in enumerate(first):
            if len(token_ids) >= room[row]:
                raise self._error(
                    "reset",
                    row,
                    f"returned a text of {len(token_ids)} tokens",
                    f"the response has room for {room[row]}, and the policy's turn comes after it",
                    "raise max_new_tokens or Generation.max_model_tokens",
                )
        return first

    def step(self, turns: Sequence[Turn]) -> list[Reply]:
        """The replies to turns, in their order."""
        texts = [self._tokenizer.decode(turn.response_ids, skip_special_tokens=True) for turn in turns]
        rows = [turn.row for turn in turns]
        raw = [self._tokenizer.decode(turn.response_ids) for turn in turns]
        calls = list(zip(rows, texts, raw, [turn.response_ids for turn in turns], strict=True))
        replies = self._ask("step", rows, user_functions.step, user_functions.checked_reply, calls)
        return [self._reply(turn, *reply) for turn, reply in zip(turns, replies, strict=True)]

    def _reply(self, turn: Turn, observation: Observation, reward: float, done: bool) -> Reply:
        return Reply(observation_ids=[] if done else self._tokens(turn, observation), reward=reward, done=done)

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

    def _close(self) -> None:
        if self._session.alive:  # those of a process that was killed are gone
            rows = range(len(self._rows))
            self._ask("close", rows, user_functions.close, user_functions.nothing, [(row,) for row in rows])

    def _ask(
        self,
        method: str,
        rows: Sequence[int],
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Sequence[Sequence[Any]],
    ) -> list[Any]:
        answers: dict[int, Any] = {}

        def fail(i: int, what: str, rule: str = "", remedy: str = "") -> RolloutError:
            return self._error(method, rows[i], what, rule or RULES[method] * what.startswith("returned"), remedy)

        self._session.each(
            invoke,
            finish,
            calls,
            concurrency=self._sampling.concurrency,
            timeout_s=self._sampling.call_timeout_s,
            done=answers.__setitem__,
            fail=fail,
        )
        return [answers[i] for i in range(len(calls))]

    def _error(self, method: str, row: int, what: str, rule: str = "", remedy: str = "") -> RolloutError:
        prompt = short(str(self._rows[row].get("prompt", "")))
        return RolloutError(
            f"{method} of environment {name_of(self._make)} {what} for row {self._row_numbers[row]} on {self._where}, "
            f"prompt {prompt!r}",
            rule,
            remedy,
        )
