"""Environments for multi-turn rollouts: written by the user, one for each sample, run in the actor's processes.

    class Calculator:
        def reset(self, prompt, **row):               # optional: messages, a text before the first turn, or None
            self.left = 3

        def step(self, response):                     # the text of one turn
            ...
            return "= 42\\n", 0.5, False              # observation, reward of this turn, whether it is over

The text of a turn has no special tokens. A `step` that needs them, such as marks of tool calls, has a further
parameter: `def step(self, response, raw_response)` gets the text with its special tokens, and
`def step(self, response, response_ids)` its token ids. `def step(self, message)` gets the turn as a message, with
reasoning and tool calls parsed (`workbench.models.turn_messages`); the class attribute `tool_format` names the format
of tool calls, if it differs from the tokenizer's. Functions, or JSON schemas, in the class attribute `tools` are shown
to the model in a prompt of messages. `wb.Tools` is an environment that executes the calls.

`generate_sequences(batch, environment=Calculator, max_turns=4, stop=("=",))` makes one for each sample. A turn ends
like a response: at EOS or at a stop string. The observation's tokens are appended to the response, and the policy
continues from there, until the environment says that it is over, or turns, tokens, seconds or tool calls run out
(`Sampling`). While an environment answers, other conversations continue. `reset` gets `prompt`, the other columns of
the row for which it has parameters, and `sample_seed`, a number of this sample for random choices. Both methods may be
coroutines; all coroutines of a rank share one event loop. An environment's `close()`, if it has one, is called at the
end; an error there becomes a warning, and the rollout is kept.

Messages that `reset` returns replace the row's prompt: the chat template renders them, and the column `prompt_ids` has
the result. A text is appended to the row's prompt, and the policy continues from it.

observation: a text, inserted unchanged; or messages such as [{"role": "tool", "content": "42"}], which the chat
template renders with everything between two turns; or None. Special tokens that they spell, such as "<|im_end|>", are
text, unless the class has `control_tokens = True`: then the environment may write turns itself.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from workbench.data import conversation_turns, user_functions
from workbench.data.conversation_turns import AnsweredTurn, ReplayedTurn, Reply, Turn
from workbench.data.user_functions import failure_of
from workbench.errors import BadInput, RolloutError
from workbench.errors.plain_text import plain_text
from workbench.models.control_tokens import Value, encoded, escape
from workbench.models.tokenizers import render_reply
from workbench.models.turn_messages import TurnReader, check_template, response_template, schema_of, with_tools
from workbench.settings.engines import Sampling
from workbench.support.calls.pickling import name_of
from workbench.support.calls.server import CallFailed
from workbench.support.calls.sessions import Session, UserCalls
from workbench.support.validation import checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Observation = str | list[dict[str, Any]] | None
RULES = {
    "reset": "it must return a text, messages or None",
    "step": "step must return (observation, reward, done): a text, messages or None; a finite number; True or False",
    "close": "",
}
LOOK_S = 0.002  # the time between polls of several processes, while nothing is decoded


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A running call of an environment. room: see `Environments.begin`. last: the last token of the answered turn."""

    method: str
    room: int = 0
    last: int = 0


@dataclass(kw_only=True)
class _Process:
    """The environments in one process. made: the rows of these environments. open: the running calls, by row."""

    calls: UserCalls
    concurrency: int
    made: set[int] = field(default_factory=set)
    open: dict[int, _Call] = field(default_factory=dict)
    session: Session = field(init=False)


class Environments:
    """The environments of one rank's rows, for one call of `generate_sequences`.

    rows: the arguments of each `reset`. max_model_tokens: the longest prompt and response together. calls: the user
    calls of each process of this role's functions. Row i has its environment in process i modulo their number, so that
    the same seed gives it the same neighbours. where, row_numbers: for messages.

    An environment that raises, runs out of time or returns a wrong value fails alone: its reply has the `RolloutError`,
    which names row, prompt and rank; up to `retries` failures of a row instead ask for a new environment
    (`Reply.again`). After a process had to be killed, its other rows also begin again, without counting a failure.
    """

    def __init__(
        self,
        sampling: Sampling,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_model_tokens: int,
        calls: Sequence[UserCalls],
        where: str,
        row_numbers: Sequence[int],
    ) -> None:
        assert sampling.environment is not None
        self._make: Callable[[], Any] = sampling.environment
        self._sampling, self._rows, self._tokenizer = sampling, rows, tokenizer
        self._max_model_tokens = max_model_tokens
        self._where, self._row_numbers = where, row_numbers
        self._processes = [_Process(calls=one, concurrency=sampling.concurrency) for one in calls]
        self._wants_messages: set[int] = set()  # rows whose environments take turns as messages
        self._sessions = contextlib.ExitStack()
        self._given_up: set[int] = set()  # rows that ended while their environment was still answering
        self._begun_s: dict[int, float] = {}
        self._calls_made = Counter[int]()  # tool calls of each row
        self._ready: list[tuple[int, Reply]] = []
        self._failures = Counter[int]()
        self._form = getattr(self._make, "tool_format", None)
        if self._form is not None:
            check_template(response_template(tokenizer, self._form))
        self._tools = [schema_of(tool) for tool in getattr(self._make, "tools", ())]
        self._shown = getattr(self._make, "shows_tools", False)
        self._control = checked("control_tokens", getattr(self._make, "control_tokens", False), bool)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Keep the environments' processes open inside the block; close the environments at its end."""
        with self._sessions:
            for process in self._processes:
                self._enter(process)
            try:
                yield
            except BaseException:
                self._close()  # ignores its errors: the first error is reported
                raise
            for error in self._close():  # only warnings, so that a finished rollout is kept
                warnings.warn(f"{error} The rollout is kept.", RuntimeWarning, stacklevel=2)

    def _enter(self, process: _Process) -> None:
        process.session = self._sessions.enter_context(process.calls.session(self._make))

    def _of(self, row: int) -> _Process:
        return self._processes[row % len(self._processes)]

    def begin(self, row: int, room: int) -> None:
        """Make the environment of a row; the reply will have the tokens of its first text.

        room: the number of tokens that the response may have; the first text must leave at least one.
        """
        self._of(row).made.add(row)
        self._begun_s[row], self._calls_made[row] = time.monotonic(), 0
        call = _Call(method="reset", room=room)
        self._submit(row, call, user_functions.reset, user_functions.checked_beginning, self._rows[row])

    def resume(self, row: int, turns: Sequence[AnsweredTurn], began: str = "") -> None:
        """Make the environment of a row, and replay earlier turns to it; its reply is empty, or has `again` if it
        answers differently than before. began: `observed` of the reply to its first `reset`."""
        with contextlib.suppress(BadInput):  # if the tokenizer's tool calls cannot be read, turns have no messages
            self._reader  # noqa: B018
            self._wants_messages.add(row)
        replayed = []
        for turn in turns:
            text, more = self.arguments(Turn(row=row, response_ids=turn.ids, lead_ids=turn.lead_ids))
            replayed.append(ReplayedTurn(text=text, more=more, reward=turn.reward, observed=turn.observed))
        self._of(row).made.add(row)
        self._begun_s[row] = time.monotonic()
        calls = (turn.more.get(user_functions.MESSAGE, {}).get("tool_calls", ()) for turn in replayed)
        self._calls_made[row] = sum(map(len, calls))
        call = _Call(method="resume")
        self._submit(
            row, call, conversation_turns.resume, user_functions.checked_beginning, self._rows[row], replayed, began
        )

    def send_turn(self, turn: Turn) -> None:
        """Give the environment of a row the policy's turn."""
        row = turn.row
        if row not in self._of(row).made:  # the environment was lost with its process
            self._ready.append((row, Reply(again=True)))
            return
        text, more = self.arguments(turn)
        if self._sampling.max_calls is not None:
            self._calls_made[row] += len(more[user_functions.MESSAGE].get("tool_calls", ()))
        if limit := self._limit(row):
            self._ready.append((row, Reply(limit=limit)))
            return
        call = _Call(method="step", last=turn.response_ids[-1])
        self._submit(row, call, user_functions.step, user_functions.checked_reply, text, more)

    def arguments(self, turn: Turn) -> tuple[str, dict[str, Any]]:
        """Return the arguments of `step` for a turn: its text, and further values by parameter name."""
        ids = turn.response_ids
        more: dict[str, Any] = dict(zip(user_functions.RAW_RESPONSE, (self._tokenizer.decode(ids), ids), strict=True))
        if turn.row in self._wants_messages or self._sampling.max_calls is not None:
            more[user_functions.MESSAGE] = self._reader.message(ids, lead_ids=turn.lead_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)), more

    def replies(self, wait_s: float) -> list[tuple[int, Reply]]:
        """Return the replies that have come, as (row, reply); wait for the first one, at most `wait_s`."""
        alone, until_s = len(self._processes) == 1, time.monotonic() + wait_s
        while True:
            for process in self._processes:
                if process.open:
                    self._poll(process, wait_s if alone and not self._ready else 0.0)
                if self._sampling.max_seconds is not None:  # else skip the scan: thousands of calls may be open
                    self._give_up_late(process)
            if self._ready or alone or time.monotonic() >= until_s:
                replies, self._ready = self._ready, []
                return replies
            time.sleep(LOOK_S)

    def _give_up_late(self, process: _Process) -> None:
        for row in [row for row, call in process.open.items() if call.method == "step" and self._is_late(row)]:
            del process.open[row]
            self._given_up.add(row)
            self._ready.append((row, Reply(limit="max_seconds")))

    def _limit(self, row: int) -> Literal["max_seconds", "max_calls"] | None:
        if self._is_late(row):
            return "max_seconds"
        most = self._sampling.max_calls
        return "max_calls" if most is not None and self._calls_made[row] > most else None

    def _is_late(self, row: int) -> bool:
        most_s = self._sampling.max_seconds
        return most_s is not None and time.monotonic() - self._begun_s[row] > most_s

    def _submit(
        self, row: int, call: _Call, invoke: Callable[..., Any], finish: Callable[..., Any], *arguments: Any
    ) -> None:
        process = self._of(row)
        process.open[row] = call
        process.session.submit(invoke, finish, {row: (row, *arguments)}, concurrency=process.concurrency)

    def _poll(self, process: _Process, wait_s: float) -> None:
        """Collect the results of calls. If their process was killed, start a new one, and let its rows begin again."""

        def done(row: int, value: Any) -> None:
            if row in self._given_up:
                return
            self._ready.append((row, self._reply(row, process.open.pop(row), value)))

        process.session.poll(wait_s, self._sampling.call_timeout_s, done, self._call_failed)
        if process.session.alive:
            return
        # if it is unknown which call ended the process, make one call at a time, so that it is known next time
        process.concurrency = 1 if process.session.begun else self._sampling.concurrency
        self._ready += [(row, Reply(again=True)) for row in process.open]
        process.open.clear()
        process.made.clear()
        self._enter(process)

    def _call_failed(self, i: int, why: CallFailed) -> None:
        if i in self._given_up:
            return
        method = self._of(i).open.pop(i).method
        if method == "resume":
            self._ready.append((i, Reply(again=True)))
            return
        self._ready.append((i, self._failed(i, self._error(method, i, why))))

    def _reply(self, row: int, call: _Call, answer: Any) -> Reply:
        try:
            if call.method != "step":
                first, asks = answer
                (self._wants_messages.add if asks else self._wants_messages.discard)(row)
                if call.method == "resume":
                    return Reply()
                reply = self._opening(row, first) if isinstance(first, list) else self._first(row, call.room, first)
                return replace(reply, observed=conversation_turns.digest(first))
            observation, reward, done = answer
            if done or (limit := self._limit(row)):
                return Reply(reward=reward, done=done, limit=None if done else limit)
            answer_ids = self._tokens(row, call, observation)
            return Reply(observation_ids=answer_ids, reward=reward, observed=conversation_turns.digest(observation))
        except RolloutError as error:
            return self._failed(row, error)

    def _first(self, row: int, room: int, text: str | None) -> Reply:
        token_ids = self._encode(text)
        if len(token_ids) < room:
            return Reply(observation_ids=token_ids)
        why = CallFailed(
            f"returned a text of {len(token_ids)} tokens",
            f"the response has room for {room} tokens, and the policy's turn comes after it",
            "raise max_new_tokens or Generation.max_model_tokens",
        )
        raise self._error("reset", row, why)

    def _opening(self, row: int, messages: list[dict[str, Any]]) -> Reply:
        with self._as_failure("reset", row):
            marked, tools = self._escape((messages, [] if self._shown else self._tools))
            prompt_ids = encoded(self._tokenizer, with_tools(self._tokenizer, marked, tools, self._form))
        if len(prompt_ids) < self._max_model_tokens:
            return Reply(prompt_ids=prompt_ids)
        why = CallFailed(
            f"returned messages of {len(prompt_ids)} tokens",
            f"prompt and response share Generation.max_model_tokens={self._max_model_tokens}",
            "raise it, or shorten them",
        )
        raise self._error("reset", row, why)

    @functools.cached_property
    def _reader(self) -> TurnReader:
        return TurnReader(self._tokenizer, self._form, self._tools)

    def _tokens(self, row: int, call: _Call, observation: Observation) -> list[int]:
        if not isinstance(observation, list):
            return self._encode(observation)
        if not observation:
            return []
        with self._as_failure("step", row):
            return render_reply(self._tokenizer, self._escape(observation), after=call.last)

    @contextlib.contextmanager
    def _as_failure(self, method: str, row: int) -> Iterator[None]:
        """Inside the block, turn errors of chat template and tokenizer into a failure of this row alone."""
        try:
            yield
        except BadInput as problem:
            why = CallFailed(f"returned {problem.value}", problem.rule, problem.remedy)
            raise self._error(method, row, why) from problem
        except Exception as problem:
            said = f"{type(problem).__name__}: {plain_text(str(problem), 200)}"
            why = CallFailed(f"returned messages that cannot be rendered: {said}")
            raise self._error(method, row, why) from problem

    def _encode(self, text: str | None) -> list[int]:
        return encoded(self._tokenizer, self._escape(text)) if text else []

    def _escape(self, value: Value) -> Value:
        """Mark control tokens in an environment's text or messages as text, unless its class has `control_tokens`."""
        return value if self._control else escape(self._tokenizer, value)

    def _close(self) -> list[RolloutError]:
        errors = list[RolloutError]()

        def failed(row: int, why: CallFailed) -> None:
            errors.append(self._error("close", row, why))

        for process in self._processes:
            process.session.abandon()
            if process.made and process.session.alive:  # environments of a killed process are gone
                process.session.each(
                    user_functions.close, user_functions.nothing, {row: (row,) for row in sorted(process.made)},
                    concurrency=process.concurrency, timeout_s=self._sampling.call_timeout_s,
                    done=lambda row, value: None, failed=failed,
                )  # fmt: skip
        return errors

    def _failed(self, row: int, error: RolloutError) -> Reply:
        """Count a failure of a row; return the reply that begins the row again or ends it."""
        self._failures[row] += 1
        if self._failures[row] <= self._sampling.retries:
            return Reply(again=True)
        return Reply(failure=error)

    def _error(self, method: str, row: int, why: CallFailed) -> RolloutError:
        function = f"{method} of environment {name_of(self._make)}"
        of = f"row {self._row_numbers[row]} on {self._where}"
        error = failure_of(RolloutError, function, of, self._rows[row], why, RULES[method])
        error.what = f"{method} {why.what}"
        return error
