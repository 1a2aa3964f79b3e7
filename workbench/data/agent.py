"""Agents: functions that talk to the policy through an OpenAI-compatible server, one call for each sample.

    async def agent(row, client):                        # client: openai.AsyncOpenAI
        messages = [{"role": "user", "content": row["prompt"]}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return float("42" in answer.choices[0].message.content)     # the reward

    def agent(row, base_url, api_key):                   # any other harness, such as a program of its own
        done = subprocess.run(["harness", "--url", base_url, "--key", api_key], ...)
        return {"right": 1.0, "short": 0.5}              # or components, whose sum is the reward

A function gets the arguments for which it has parameters: `row`, a dict of the row's text columns and `sample_seed`;
`client`, an `openai.AsyncOpenAI` if it is a coroutine function, else an `openai.OpenAI`; `base_url` and `api_key`. A
result of None is a reward of 0. It runs in the process of this role's functions, like an environment.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.data.agent_calls import Harness, call_agent, checked_outcome
from workbench.data.user_functions import failure_of
from workbench.errors import RolloutError
from workbench.settings.engines import Sampling
from workbench.support.calls.limits import limits, limits_of
from workbench.support.calls.pickling import name_of
from workbench.support.calls.server import CallFailed
from workbench.support.calls.sessions import Session, UserCalls

RULE = "an agent must return its reward: a finite number, a dict of names to numbers, or None"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a row's call. again: the call must begin again. failure: the error with which it has failed."""

    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    again: bool = False
    failure: RolloutError | None = None


class Agents:
    """The agent calls of one rank's rows, for one call of `generate_sequences`.

    rows: the argument `row` of each call. calls: the user calls of this role's functions. where, row_numbers: for
    messages. A call that raises, hangs or returns a wrong value fails its row alone, or begins again up to `retries`
    times. Other calls in a process that had to be killed begin again, without counting a failure.
    """

    def __init__(
        self,
        sampling: Sampling,
        rows: Sequence[Mapping[str, Any]],
        *,
        calls: UserCalls,
        where: str,
        row_numbers: Sequence[int],
    ) -> None:
        assert sampling.agent is not None
        harness = Harness(sampling.agent, name_of(sampling.agent))
        self._function = limits(**asdict(limits_of(sampling.agent)))(harness)
        self._sampling, self._rows = sampling, rows
        self._calls, self._where, self._row_numbers = calls, where, row_numbers
        self._session: Session
        self._sessions = contextlib.ExitStack()
        self._open: dict[int, int] = {}  # the row of each open call
        self._ready: list[tuple[int, Outcome]] = []
        self._failures = Counter[int]()
        self._concurrency = sampling.concurrency

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._sessions:
            self._session = self._sessions.enter_context(self._calls.session(self._function, asks_host=True))
            try:
                yield
            finally:
                self._session.abandon()

    @property
    def open(self) -> int:
        """The number of calls that have begun and whose result was not yet taken."""
        return len(self._open) + len(self._ready)

    def begin(self, call: int, row: int, base_url: str, api_key: str) -> None:
        """Call the function for a row. call: a new number, because an earlier abandoned call may still run."""
        self._open[call] = row
        arguments = {call: (self._rows[row], base_url, api_key)}
        self._session.submit(call_agent, checked_outcome, arguments, concurrency=self._concurrency)

    def excuse(self, calls: Sequence[int], seconds: float) -> None:
        """Do not count seconds in which these calls waited for the server against their `call_timeout_s`."""
        self._session.excuse(calls, seconds)

    def ended(self) -> list[tuple[int, Outcome]]:
        """Return (number, outcome) of the calls that have ended since the last time."""

        def done(call: int, value: Any) -> None:
            if call in self._open:
                del self._open[call]
                reward, components = value
                self._ready.append((call, Outcome(reward=reward, components=components)))

        if self._open:
            self._session.poll(0.0, self._sampling.call_timeout_s, done, self.fail)
            if not self._session.alive:
                # if it is unknown which call ended the process, make one call at a time, so that it is known next time
                self._concurrency = 1 if self._session.begun else self._sampling.concurrency
                self._ready += [(call, Outcome(again=True)) for call in sorted(self._open)]
                self._open.clear()
                self._session = self._sessions.enter_context(self._calls.session(self._function, asks_host=True))
        ended, self._ready = self._ready, []
        return ended

    def fail(self, call: int, why: CallFailed) -> None:
        if call not in self._open:  # the call was already abandoned
            return
        row = self._open.pop(call)
        self._failures[row] += 1
        again = self._failures[row] <= self._sampling.retries
        self._ready.append((call, Outcome(again=True) if again else Outcome(failure=self.error(row, why))))

    def error(self, row: int, why: CallFailed) -> RolloutError:
        function, of = f"agent {name_of(self._function)}", f"row {self._row_numbers[row]} on {self._where}"
        return failure_of(RolloutError, function, of, self._rows[row], why, RULE)
