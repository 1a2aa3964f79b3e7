"""The progress of the ranks of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from workbench.backends.base import Backend, Pending
from workbench.errors import HostDied, StageTimeout, WorkbenchError
from workbench.messages.replies import Failure, Reply

ASK_S = 0.2  # between two questions to one host
STATUS_S = 1.0  # how long an error waits for ranks to say what they are at


class RankWatch:
    """The ranks of a run, from `Run.send` on.

    answers: theirs, by rank. working: the ranks that have not answered. unit: what they count, micro-batches or rows.
    """

    def __init__(self, hosts: Sequence[str], unit: str) -> None:
        self._hosts, self._unit = hosts, unit
        self.answers: list[Pending] = []
        self.working: list[int] = []
        self.counts = Counts()
        self._quiet_since = 0.0  # monotonic
        self._seen: dict[str, tuple[str, int, int, int]] = {}
        self._asked: dict[str, Pending] = {}
        self._asked_s: dict[str, float] = {}

    def begin(self) -> None:
        """All of them have their calls."""
        self.working = list(range(len(self.answers)))
        self.note_progress()

    def note_progress(self) -> None:
        """Restart the clock of `quiet_s`."""
        self._quiet_since = time.monotonic()

    @property
    def outstanding(self) -> list[Pending]:
        """Answers that are still to come."""
        return [self.answers[rank] for rank in self.working]

    @property
    def failed(self) -> list[int]:
        """The ranks that have failed so far."""
        return [rank for rank, pending in enumerate(self.answers) if _failed(pending)]

    @property
    def progressed(self) -> tuple[int, int, int]:
        """What the first rank has done, of how much, and its tokens; zeros: nothing is known."""
        status = next(iter(self._seen.values()), None)
        return status[1:] if status else (0, 0, 0)

    @property
    def counted(self) -> tuple[int, int]:
        """What the first rank has done, and of how much; (0, 0) where it is not counted."""
        return self.progressed[:2] if self._seen else self.counts.seen

    def look(self) -> bool:
        """Whether some are still at work."""
        self.working = [rank for rank in self.working if not self.answers[rank].done()]
        return bool(self.working)

    def quiet_s(self, backend: Backend, *, ending: bool) -> float:
        """For how long no rank has shown progress, where they are to end: a rank failed, or all are to stop. Asks them
        how far they are, without waiting for the answer."""
        hosts = [self._hosts[rank] for rank in self.working]
        if self._ask(backend, hosts if ending else hosts[:1]) or not ending:
            self.note_progress()
        return time.monotonic() - self._quiet_since

    def _ask(self, backend: Backend, hosts: Sequence[str]) -> bool:
        """Whether one of them has made progress."""
        got_on = False
        for host in hosts:
            asked = self._asked.get(host)
            if asked is not None and asked.done():
                del self._asked[host]
                with contextlib.suppress(WorkbenchError):
                    status = asked.result()
                    got_on |= status != self._seen.get(host)
                    self._seen[host] = status
            elif asked is None and time.monotonic() - self._asked_s.get(host, 0.0) > ASK_S:
                self._asked[host], self._asked_s[host] = backend.ask(host, "status"), time.monotonic()
        return got_on

    def at(self, backend: Backend) -> str:
        """What each rank is doing, in words."""
        asked = {rank: backend.ask(self._hosts[rank], "status") for rank in self.working}
        backend.wait(list(asked.values()), STATUS_S)
        said = []
        for rank in range(len(self.answers)):
            text = "had finished"
            if rank in asked:
                text = f"did not answer in {STATUS_S:g} s"
                with contextlib.suppress(Exception):  # of one rank: the others' answers count
                    if asked[rank].done():
                        busy, done, total, _ = asked[rank].result()
                        text = f"was at {busy or 'the end'}" + (
                            f", {done} of {total} {self._unit} done" if total else ""
                        )
            said.append(f"rank {rank} {text}")
        return "; ".join(said)

    def collect(self) -> tuple[list[Reply], dict[int, Failure], HostDied | None]:
        """The replies that are there, the failures among them by rank, and the end of a host, if one has ended."""
        replies, failures, dead = list[Reply](), dict[int, Failure](), None
        for rank, pending in enumerate(self.answers):
            if not pending.done():
                continue
            try:
                reply: Reply = pending.result()
            except HostDied as error:
                dead = dead or error
                continue
            replies.append(reply)
            if reply.failure is not None:
                failures[rank] = reply.failure
        return replies, failures, dead


class Counts:
    """Progress of the inline backend's rank. Not part of the run, because hosts keep a reference to it."""

    def __init__(self) -> None:
        self.seen = (0, 0)
        self.report: Callable[[int, int, int], None] = lambda done, total, tokens: None
        self._until, self._timeout_s = float("inf"), 0.0

    def limit(self, until: float, timeout_s: float) -> None:
        """Raise `StageTimeout` where a rank counts after `until`, monotonic."""
        self._until, self._timeout_s = until, timeout_s

    def count(self, done: int, total: int, tokens: int) -> None:
        """Called by the rank."""
        self.seen = (done, total)
        self.report(done, total, tokens)
        if time.monotonic() > self._until:  # here a stage can be left: between micro-batches, between rows
            self._until = float("inf")
            raise StageTimeout(f"it took longer than timeout_s={self._timeout_s:g}", f"it had done {done} of {total}")


def _failed(pending: Pending) -> bool:
    if not pending.done():
        return False
    try:
        return pending.result().failure is not None
    except Exception:  # a host that is gone, an answer that cannot be read
        return True
