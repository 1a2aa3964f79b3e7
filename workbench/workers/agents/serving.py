"""A rank's loop while agents talk to its engine: requests in, tokens out, until each function has returned."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from workbench.data.agent import Agents, Outcome
from workbench.engines.generation import GenerationEngine, Response
from workbench.settings.engines import Sampling
from workbench.support.calls.server import CallFailed
from workbench.workers.agents.recording import MOST_REFUSED, Asked, Recording
from workbench.workers.agents.requests import Refused, wrong_key
from workbench.workers.agents.server import AgentServer, Waiting
from workbench.workers.conversation import Conversation, Lockstep

WAIT_S = 0.01  # how long to wait for requests while no token is decoded
New = tuple[int, list[int], int, int, tuple[str, ...]]  # arguments of `Decoding.add`


class Serving:
    """The requests of one rank's samples, between its server and the decoding of its tensor group.

    first, of: this rank's number in the group, and the group's size: requests have different numbers over the group.
    most_open: see `Sampling`.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        agents: Agents,
        server: AgentServer,
        *,
        first: int,
        of: int,
        most_open: int | None = None,
    ) -> None:
        self._recordings, self._agents, self._server = recordings, agents, server
        self._ended: dict[int, Conversation] = {}
        self._calls, self._rows = itertools.count(), dict[int, int]()  # rows of the calls that have not ended
        self._to_begin, self._most = deque(range(len(recordings))), most_open or len(recordings)
        self._next, self._step = first, of
        self._waiting: dict[int, tuple[Waiting, Asked]] = {}
        self._looked_s = time.monotonic()

    @property
    def busy(self) -> bool:
        return bool(self._agents.open or self._to_begin)

    @property
    def rows(self) -> list[Conversation]:
        return [self._ended[i] for i in sorted(self._ended)]

    def serve(self, engine: GenerationEngine, sampling: Sampling, lockstep: Lockstep) -> None:
        """Run agents and engine until each function has returned."""
        with engine.decoding(sampling) as decoding:

            def new() -> list[New]:
                return self.new(0.0 if decoding.open else WAIT_S)

            while lockstep.any_rank(self.busy):
                self.begin_more()
                for number, prompt_ids, seed, room, stop in lockstep.shared(new):
                    decoding.add(number, prompt_ids, seed, room, stop)
                for _ in range(lockstep.steps):
                    for response in decoding.step() if decoding.open else ():
                        self.answer(response)
                self.ended()
                lockstep.progress(len(self._ended), len(self._recordings), decoding.tokens)

    def begin_more(self) -> None:
        """Begin waiting samples, up to the limit of open samples."""
        while self._to_begin and self._agents.open < self._most:
            self.begin(self._to_begin.popleft())

    def begin(self, i: int) -> None:
        call = next(self._calls)
        self._rows[call] = i
        self._recordings[i].begin_again()
        self._agents.begin(call, i, self._server.base_url, self._server.new_key(call))

    def new(self, wait_s: float) -> list[New]:
        """Return the received requests as the engine takes them; wait until one arrives, or the time is over."""
        come = list[Waiting]()
        with suppress(queue.Empty):
            while True:
                come.append(self._server.requests.get(block=wait_s > 0, timeout=wait_s or None))
                wait_s = 0.0
        # clients that no longer wait: drop their requests
        for number in [number for number, (waiting, _) in self._waiting.items() if waiting.gone]:
            self._drop(*self._waiting.pop(number))
        return [new for waiting in come for new in self._taken(waiting)]

    def _drop(self, waiting: Waiting, asked: Asked) -> None:
        if self._server.knows(waiting.call):
            self._recordings[self._rows[waiting.call]].dropped(asked)
            self._end_flood(waiting.call)

    def _taken(self, waiting: Waiting) -> list[New]:
        if not self._server.knows(waiting.call):
            waiting.answer(wrong_key())
            return []
        if waiting.gone:
            return []
        try:
            asked = self._recordings[self._rows[waiting.call]].ask(waiting.request)
        except Refused as problem:
            waiting.answer(problem)
            self._end_flood(waiting.call)
            return []
        number, self._next = self._next, self._next + self._step
        self._waiting[number] = waiting, asked
        return [(number, asked.prompt_ids, asked.seed, asked.room, asked.stop)]

    def _end_flood(self, call: int) -> None:
        """End a call that keeps sending requests that are refused or dropped."""
        if self._recordings[self._rows[call]].flooded:
            self._server.forget(call)
            self._agents.fail(call, CallFailed(
                f"continued after {MOST_REFUSED} refused or abandoned requests",
                "a refused request is refused again, and an answer takes time",
                "check the errors that it gets, and its time limits",
            ))  # fmt: skip

    def answer(self, response: Response) -> None:
        """Record a response, and send it, unless the request is another rank's or was dropped."""
        if response.row not in self._waiting:
            return
        waiting, asked = self._waiting.pop(response.row)
        if waiting.gone:
            self._drop(waiting, asked)
        elif self._server.knows(waiting.call):
            waiting.answer(self._recordings[self._rows[waiting.call]].answered(asked, response))
        else:
            waiting.answer(wrong_key())

    def ended(self) -> None:
        """Process the functions that have ended."""
        now_s = time.monotonic()
        self._agents.excuse([w.call for w, _ in self._waiting.values() if not w.gone], now_s - self._looked_s)
        self._looked_s = now_s
        for call, outcome in self._agents.ended():
            self._server.forget(call)
            i = self._rows.pop(call)
            if outcome.again:
                self.begin(i)
            else:
                self._ended[i] = self._row(i, outcome)

    def _row(self, i: int, outcome: Outcome) -> Conversation:
        recording, failure = self._recordings[i], outcome.failure
        said = recording.row()
        if failure is None and not any(segment.turn_ends for segment in recording.segments):
            failure = self._agents.error(i, CallFailed(
                "sent no request to the server", "a sample needs at least one answer to train on",
                "ask for a chat completion, or a completion, before you return",
            ))  # fmt: skip
        if failure is not None:
            said.fail(failure)
        else:
            said.rewards[-1], said.ending = outcome.reward, recording.ending
            said.components = dict(outcome.components)
        return said
