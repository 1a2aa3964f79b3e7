"""A run whose ranks disagree: how long those that still compute are waited for after another has failed."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.stages.runs import group_of, runner_of
from workbench.backends.base import Pending
from workbench.errors import BadInput, StageError
from workbench.messages.calls import Failure, Reply
from workbench.stages import stage as stage_module
from workbench.stages.stage import StageRun

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

    def execute(self, hosts: Sequence[str], calls: Any, progress: Any) -> Iterator[Answer]:
        return (Answer(FAILED if host == "a-0" else None) for host in hosts)

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> list[Pending]:
        return [answer for answer in pending if answer.done()]

    def ask(self, host: str, method: str) -> Answer:
        return Answer(None)


class Sent(StageRun):
    """Of a call that is not planned."""

    def plan(self) -> list[Any]:
        return [object() for _ in self.group.hosts]


def test_a_rank_is_given_the_grace_from_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    called = types.SimpleNamespace(operation=types.SimpleNamespace(updates=False))
    group = group_of("reward", ("a-0", "a-1"), compute_reward=called)
    run = Sent(runner_of(OneFails()), group, "compute_reward")
    monkeypatch.setattr(stage_module, "GRACE_S", 0.2)
    run.send()
    run.poll()
    assert run.state == "running" and not run.stuck
    began = time.monotonic()
    while run.state == "running":
        run.poll()
    assert 0.1 < time.monotonic() - began < 60.0
    assert run.state == "failed" and run.stuck
    with pytest.raises(StageError, match=r"bad row.*lab\.recover\(\) restarts them"):
        run.result()
    with pytest.raises(BadInput, match=r"run\.get\(\)"):
        run.get()
