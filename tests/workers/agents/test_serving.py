"""The loop of a rank: requests of calls that were given up, and of harnesses that do not wait for their answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cases import TINY
from workbench.data.agent import Agents
from workbench.engines.generation import Response
from workbench.models import load_tokenizer
from workbench.models.tokenizers import render_prompt
from workbench.settings.engines import Sampling
from workbench.support.calls.limits import limits
from workbench.support.calls.sessions import UserCalls
from workbench.workers.agents.recording import MOST_REFUSED, Answer, Recording
from workbench.workers.agents.requests import Refused, parse
from workbench.workers.agents.server import AgentServer, Waiting
from workbench.workers.agents.serving import New, Serving
from workbench.workers.conversation import Conversation

GOOD = {"messages": [{"role": "user", "content": "1+1="}]}
TOO_LONG = {"messages": [{"role": "user", "content": "1" * 200}]}


class Rank:
    """One sample that is served, and the requests that its harness sends."""

    def __init__(self, serving: Serving, server: AgentServer, loop: asyncio.AbstractEventLoop) -> None:
        self.serving, self._server, self._loop = serving, server, loop

    def send(self, call: int, body: dict[str, Any] = GOOD) -> Waiting:
        waiting = Waiting(call, parse("chat", body, Sampling()), self._loop, self._loop.create_future())
        waiting.future.add_done_callback(asyncio.Future.exception)  # whether or not a test looks at it
        self._server.requests.put(waiting)
        return waiting

    def taken(self) -> list[New]:
        return self.serving.new(0.0)

    def decoded(self, new: New) -> None:
        self.serving.answer(Response(row=new[0], ids=[70], log_probs=[-0.5], ending="length", sets=[]))

    def got(self, waiting: Waiting) -> Answer:
        return self._loop.run_until_complete(asyncio.wait_for(waiting.future, 30))

    def is_refused(self, waiting: Waiting) -> bool:
        with pytest.raises(Refused) as caught:
            self.got(waiting)
        return caught.value.status == 401

    def row(self) -> Conversation:
        while self.serving.busy:
            self.serving.begin_more()
            self.serving.ended()
        return self.serving.rows[0]


@contextmanager
def rank(goes_on: threading.Event, *, retries: int = 0) -> Iterator[Rank]:
    """goes_on: what the harness waits for before it returns."""

    @limits(own_process=False)
    def agent(row: dict[str, Any]) -> float:
        goes_on.wait(60)
        return 1.0

    tokenizer, sampling = load_tokenizer(TINY), Sampling(max_new_tokens=100, agent=agent, retries=retries)
    prompt_ids = render_prompt(tokenizer, GOOD["messages"])
    server = AgentServer(sampling)
    agents = Agents(sampling, [{"prompt": "1+1="}], calls=UserCalls(), where="rank 0 of pool main", row_numbers=[7])
    recordings = [Recording(sampling, tokenizer, prompt_ids, seed=5, max_model_tokens=160)]
    loop = asyncio.new_event_loop()
    try:
        with agents.running():
            serving = Serving(recordings, agents, server, first=0, of=1)
            serving.begin_more()
            yield Rank(serving, server, loop)
    finally:
        goes_on.set()
        loop.close()


def test_requests_of_a_call_that_was_given_up_are_refused_and_recorded_nowhere() -> None:
    goes_on = threading.Event()
    with rank(goes_on, retries=1) as mine:
        early = mine.send(0)
        (decoding,) = mine.taken()
        for _ in range(MOST_REFUSED + 1):
            mine.send(0, TOO_LONG)
        queued = mine.send(0)
        assert mine.taken() == [] and mine.is_refused(queued)  # the call has been given up
        mine.serving.ended()  # it begins again
        late = mine.send(0)
        again = mine.send(1)
        (new,) = mine.taken()
        assert mine.is_refused(late)
        mine.decoded(decoding)
        assert mine.is_refused(early)
        assert new[1:3] == decoding[1:3]  # the same request draws the same
        mine.decoded(new)
        assert mine.got(again).tokens == 1
        goes_on.set()
        row = mine.row()
        assert row.failure is None and row.response_ids == [70]


def test_a_harness_that_waits_for_no_answer_and_asks_again_is_given_up() -> None:
    with rank(threading.Event()) as mine:
        drawn = set[tuple[Any, ...]]()
        for _ in range(MOST_REFUSED + 1):
            waiting = mine.send(0)
            (new,) = mine.taken()
            drawn.add(tuple(map(str, new[1:])))
            waiting.gone = True
        assert len(drawn) == 1  # an answer that nobody waited for changes nothing of the next one
        mine.taken()
        failure = mine.row().failure
        assert failure is not None and "refused or abandoned requests for row 7" in str(failure)


def test_a_request_after_the_function_has_returned_is_refused() -> None:
    goes_on = threading.Event()
    with rank(goes_on) as mine:
        first = mine.send(0)
        mine.decoded(*mine.taken())
        mine.got(first)
        under_way = mine.send(0)
        (new,) = mine.taken()
        goes_on.set()
        assert mine.row().response_ids == [70]
        queued = mine.send(0)
        assert mine.taken() == [] and mine.is_refused(queued)
        mine.decoded(new)
        assert mine.is_refused(under_way)
