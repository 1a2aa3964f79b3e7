"""Agents: functions that talk to the policy by way of an OpenAI-compatible server, one call for each sample.

    async def agent(row, client):                        # client: openai.AsyncOpenAI
        messages = [{"role": "user", "content": row["prompt"]}]
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return float("42" in answer.choices[0].message.content)     # the reward

    def agent(row, base_url, api_key):                   # any other harness, such as a program of its own
        done = subprocess.run(["harness", "--url", base_url, "--key", api_key], ...)
        return {"right": 1.0, "short": 0.5}              # or components, whose sum is the reward

A function gets what it has parameters for: `row`, a dict of the row's text columns and `sample_seed`; `client`, an
`openai.AsyncOpenAI` where it is a coroutine, else an `openai.OpenAI`; `base_url` and `api_key`. None is a reward of 0.
It runs in the process of this role's functions, as an environment does.
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

RULE = "an agent returns its reward: a finite number, a dict of them by name, or None"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the call of a row has ended. again: it is to begin again. failure: why it ends instead."""

    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    again: bool = False
    failure: RolloutError | None = None


class Agents:
    """The calls of one rank's rows, for one call of `generate_sequences`.

    rows: what each is given. calls: of the functions of this role. where, row_numbers: for messages. One that raises,
    hangs or returns something else fails its row alone, or begins again as `retries` says; so do the others of a
    process that had to be killed, which counts as no failure of theirs.
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
        self._open: dict[int, int] = {}  # calls, and their rows
        self._ready: list[tuple[int, Outcome]] = []
        self._failures = Counter[int]()
        self._concurrency = sampling.concurrency

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While they are in use."""
        with self._sessions:
            self._session = self._sessions.enter_context(self._calls.session(self._function, asks_host=True))
            try:
                yield
            finally:
                self._session.abandon()

    @property
    def open(self) -> int:
        """How many have begun and not ended."""
        return len(self._open) + len(self._ready)

    def begin(self, call: int, row: int, base_url: str, api_key: str) -> None:
        """Call the function for a row. call: a new number, since a call of before that was given up may still run."""
        self._open[call] = row
        arguments = {call: (self._rows[row], base_url, api_key)}
        self._session.submit(call_agent, checked_outcome, arguments, concurrency=self._concurrency)

    def excuse(self, calls: Sequence[int], seconds: float) -> None:
        """These waited for the server: that is no time of their own, of which `call_timeout_s` is the limit."""
        self._session.excuse(calls, seconds)

    def ended(self) -> list[tuple[int, Outcome]]:
        """The calls that have ended, by their numbers."""
        if self._open:
            self._poll()
        ended, self._ready = self._ready, []
        return ended

    def _poll(self) -> None:
        def done(call: int, value: Any) -> None:
            if call in self._open:
                del self._open[call]
                reward, components = value
                self._ready.append((call, Outcome(reward=reward, components=components)))

        self._session.poll(0.0, self._sampling.call_timeout_s, done, self.fail)
        if self._session.alive:
            return
        # where it is not known which call ended the process, the next time it is
        self._concurrency = 1 if self._session.begun else self._sampling.concurrency
        self._ready += [(call, Outcome(again=True)) for call in sorted(self._open)]
        self._open.clear()
        self._session = self._sessions.enter_context(self._calls.session(self._function, asks_host=True))

    def fail(self, call: int, why: CallFailed) -> None:
        """Give a call up, whatever it returns."""
        if call not in self._open:  # it was given up
            return
        row = self._open.pop(call)
        self._failures[row] += 1
        again = self._failures[row] <= self._sampling.retries
        self._ready.append((call, Outcome(again=True) if again else Outcome(failure=self.error(row, why))))

    def error(self, row: int, why: CallFailed) -> RolloutError:
        """What went wrong with a row."""
        function, of = f"agent {name_of(self._function)}", f"row {self._row_numbers[row]} on {self._where}"
        return failure_of(RolloutError, function, of, self._rows[row], why, RULE)
