"""Environments for multi-turn rollouts: written by a user, one for each sample, run in the actor's processes.

    class Calculator:
        def reset(self, prompt, **row):               # optional: a text before the first turn, or None
            self.left = 3

        def step(self, response):                     # the text of one turn
            ...
            return "= 42\\n", 0.5, False              # observation, reward of this turn, whether it is over

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

import asyncio
import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.data.user_calls import accepted, call_each, event_loop, finite_number, short
from workbench.errors import BadInput, RolloutError
from workbench.models.tokenizers import is_text, render_reply
from workbench.settings.engines import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Observation = str | list[dict[str, Any]] | None
REPLY = "step returns (observation, reward, done): a text, messages or None; a finite number; True or False"


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

    rows: what each `reset` is given. where, row_numbers: for messages.
    Every method raises `RolloutError`, naming row, prompt and rank, where an environment raises, runs out of time or
    gives something else than asked for.
    """

    def __init__(
        self,
        sampling: Sampling,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        where: str,
        row_numbers: Sequence[int],
    ) -> None:
        assert sampling.environment is not None
        self._make: Callable[[], Any] = sampling.environment
        self._sampling, self._rows, self._tokenizer = sampling, rows, tokenizer
        self._where, self._row_numbers = where, row_numbers
        self._made: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While they are in use; at the end they are closed."""
        with event_loop() as self._loop:
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

        def begin(row: int) -> Any:
            environment = self._made[row] = self._make()
            reset = getattr(environment, "reset", None)
            return None if reset is None else reset(**self._arguments(reset, row))

        rows = range(len(self._rows))
        texts = self._ask("reset", rows, [partial(begin, row) for row in rows])
        for row, text in enumerate(texts):
            if text is not None and not is_text(text):
                raise self._error("reset", row, f"returned {text!r:.60}", "it returns a text or None")
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

    def _arguments(self, reset: Callable[..., Any], row: int) -> dict[str, Any]:
        """What `reset` is given; `TypeError` where it needs something that the row does not have."""
        given = accepted(reset, self._rows[row])
        try:
            inspect.signature(reset).bind(**given)
        except TypeError as error:
            columns = ", ".join(self._rows[row])
            raise TypeError(f"reset{inspect.signature(reset)}: {error}; the row has {columns}") from None
        except ValueError:  # one that does not say what it takes
            pass
        return given

    def step(self, turns: Sequence[Turn]) -> list[Reply]:
        """The replies to turns, in their order."""
        texts = [self._tokenizer.decode(turn.response_ids, skip_special_tokens=True) for turn in turns]
        rows = [turn.row for turn in turns]
        calls = [partial(self._step, row, text) for row, text in zip(rows, texts, strict=True)]
        replies = self._ask("step", rows, calls)
        return [self._reply(turn, reply) for turn, reply in zip(turns, replies, strict=True)]

    def _step(self, row: int, text: Any) -> Any:
        return self._made[row].step(text)

    def _reply(self, turn: Turn, reply: Any) -> Reply:
        try:
            observation, reward, done = reply
            number = finite_number(reward)
        except (TypeError, ValueError):
            raise self._error("step", turn.row, f"returned {reply!r:.60}", REPLY) from None
        messages = isinstance(observation, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and is_text(message.get("content", ""))
            for message in observation
        )
        if not (messages or observation is None or is_text(observation)) or done not in (True, False):
            raise self._error("step", turn.row, f"returned {reply!r:.60}", REPLY)
        ids = [] if done else self._tokens(turn, observation)
        return Reply(observation_ids=ids, reward=number, done=bool(done))

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
        rows = [row for row, environment in self._made.items() if callable(getattr(environment, "close", None))]
        self._ask("close", rows, [self._made[row].close for row in rows])

    def _ask(self, method: str, rows: Sequence[int], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        answers: dict[int, Any] = {}

        def fail(i: int, what: str, rule: str = "", remedy: str = "") -> RolloutError:
            return self._error(method, rows[i], what, rule, remedy)

        call_each(
            calls,
            concurrency=self._sampling.concurrency,
            timeout_s=self._sampling.call_timeout_s,
            done=answers.__setitem__,
            fail=fail,
            loop=self._loop,
        )
        return [answers[i] for i in range(len(calls))]

    def _error(self, method: str, row: int, what: str, rule: str = "", remedy: str = "") -> RolloutError:
        name = getattr(self._make, "__name__", None) or getattr(self._make, "func", self._make)
        prompt = short(str(self._rows[row].get("prompt", "")))
        return RolloutError(
            f"{method} of environment {getattr(name, '__name__', name)} {what} for row {self._row_numbers[row]} on "
            f"{self._where}, prompt {prompt!r}",
            rule,
            remedy,
        )
