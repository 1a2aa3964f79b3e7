"""A run whose ranks disagree: how long those that still compute are waited for after another has failed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.stages.runs import run_of
from workbench.backends.base import Pending
from workbench.errors import StageError
from workbench.messages.replies import Failure, Reply
from workbench.stages import run as run_module

FAILED = Reply(
    rank=0, columns={}, metrics={}, meta={}, value=None, spans=[], transfers=[], syncs=[],
    failure=Failure(kind="ValueError", message="bad row", chain=(), error=None),
)  # fmt: skip


class Answer(Pending):
    """An answer that is there, or never comes."""

    def __init__(self, reply: Reply | None) -> None:
        self.reply = reply

    def done(self) -> bool:
        return self.reply is not None

    def result(self) -> Any:
        return self.reply


class OneFails:
    """Rank 0 fails at once, rank 1 computes for ever and says nothing."""

    def execute(self, host: str, call: Any, progress: Any) -> Answer:
        return Answer(FAILED if host == "a-0" else None)

    def ask(self, host: str, method: str) -> Answer:
        return Answer(None)


def test_a_rank_is_given_the_grace_from_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(1, "compute_reward", "reward", ("a-0", "a-1"), [object(), object()])
    backend: Any = OneFails()
    monkeypatch.setattr(run_module, "GRACE_S", 0.2)
    run.send(backend)
    run.poll(backend)
    assert run.state == "running" and not run.stuck
    began = time.monotonic()
    while run.state == "running":
        run.poll(backend)
    assert 0.1 < time.monotonic() - began < 60.0
    assert run.state == "failed" and run.stuck
    with pytest.raises(StageError, match="bad row"):
        run.result()
