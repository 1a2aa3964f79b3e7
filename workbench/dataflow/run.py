"""One execution of a stage: what was sent to the ranks, and how the controller waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.display.progress import Progress
from workbench.errors import HostDied, StageError, StageInterrupted, WorkbenchError
from workbench.workers.backends.base import Backend, Pending
from workbench.workers.calls import Call, Failure, Reply

if TYPE_CHECKING:
    from workbench.workers.group import WorkerGroup

POLL_S = 0.2
# A rank that failed leaves those that step with it waiting in a collective. Ranks that show no progress for this long
# after a failure are taken to be stuck there; one that computes, or scores with a function, is waited for.
GRACE_S = 60.0


@dataclass(kw_only=True)
class Run:
    """One call a rank of one group, sent and waited for; `replies` once it is over."""

    group: WorkerGroup
    calls: Sequence[Call]
    grace_s: float = field(default_factory=lambda: GRACE_S)
    pending: list[Pending] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    stuck: bool = False

    @property
    def number(self) -> int:
        return self.calls[0].run

    @property
    def _name(self) -> str:
        return f"{self.group.role}.{self.calls[0].stage}"

    @property
    def _in_step(self) -> bool:
        """Whether a rank may wait for another: those that score with a function never do."""
        return self.group.spec.name is not None and self.calls[0].kwargs.get("function") is None

    def wait(self, backend: Backend) -> list[Reply]:
        """Send the calls and wait for every rank, with a progress line after two seconds.

        An interrupt stops the waiting only. Raises `StageError` (of the kind of the first cause) when ranks failed,
        `HostDied` when a process ended.
        """
        counted = ("generate_sequences", "compute_reward", "compute_cost")
        try:
            with Progress(self._name, unit="rows" if self.calls[0].stage in counted else "micro-batches") as bar:
                for host, call in zip(self.group.hosts, self.calls, strict=True):
                    self.pending.append(backend.execute(host, call, bar.update))
                self._wait(backend, bar)
        except KeyboardInterrupt:
            raise StageInterrupted(
                f"{self._name} was interrupted in the notebook",
                "its ranks finish what they began, and the result is dropped",
                "the next call waits for them; an update that was under way has been applied when it ends",
            ) from None
        return self._collect()

    def _wait(self, backend: Backend, bar: Progress) -> None:
        seen: dict[str, Any] = {}
        quiet_since = time.monotonic()
        while not backend.wait(self.pending, POLL_S):
            failed = [str(rank) for rank, p in enumerate(self.pending) if self._failed(p)]
            if failed:
                bar.label = f"{self._name}: rank {', '.join(failed)} failed, waiting for the others"
            waiting = [host for host, p in zip(self.group.hosts, self.pending, strict=True) if not p.done()]
            status = {host: self._status(backend, host) for host in (waiting if failed else waiting[:1])}
            for _, done, total, tokens in filter(None, list(status.values())[:1]):
                bar.update(done, total, tokens)
            if not failed or status != seen or not self._in_step:
                seen, quiet_since = status, time.monotonic()
            elif time.monotonic() - quiet_since > self.grace_s:
                self.stuck = True
                return

    def _collect(self) -> list[Reply]:
        failures: dict[int, Failure] = {}
        dead: HostDied | None = None
        for rank, pending in enumerate(self.pending):
            if not pending.done():
                continue
            try:
                reply: Reply = pending.result()
            except HostDied as error:
                dead = dead or error
                continue
            self.replies.append(reply)
            if reply.failure is not None:
                failures[rank] = reply.failure
        if dead is not None:  # what other ranks ran into follows from it
            self.stuck = True
            raise dead
        if failures:
            raise self._error(failures)
        return self.replies

    @staticmethod
    def _status(backend: Backend, host: str) -> tuple[str, int, int, int] | None:
        try:
            status: tuple[str, int, int, int] = backend.ask(host, "status").result()
            return status
        except WorkbenchError:
            return None

    @staticmethod
    def _failed(pending: Pending) -> bool:
        if not pending.done():
            return False
        try:
            return pending.result().failure is not None
        except HostDied:
            return True

    def _error(self, failures: dict[int, Failure]) -> WorkbenchError:
        """One error for all ranks: of the first cause's own class where it is ours, equal causes grouped."""
        first = next(iter(failures.values()))
        ranks = ", ".join(
            str(rank) for rank, f in failures.items() if (f.kind, f.message) == (first.kind, first.message)
        )
        where = f"{self._name} failed on rank {ranks}"
        others = sum((f.kind, f.message) != (first.kind, first.message) for f in failures.values())
        rule = f"{others} other rank(s) failed otherwise" if others else ""
        remedy = (
            "other ranks wait in a collective for a rank that failed: open the workbench again with if_exists='replace'"
            if self.stuck
            else ""
        )
        if isinstance(first.error, WorkbenchError):
            error: WorkbenchError = type(first.error)(
                f"{where}: {first.error.value}", first.error.rule or rule, first.error.remedy or remedy
            )
        else:
            error = StageError(f"{where}: {first.kind}: {first.message}", rule, remedy)
            error.add_note(f"on rank {ranks}:\n{first.traceback}")
        error.__cause__ = first.error
        return error


class MetricValues(dict[str, float]):
    """What an update reports: metrics by name, with a table for a repr."""

    def _repr_html_(self) -> str:
        from workbench.display.html import table

        return table([{"metric": name, "value": f"{value:.6g}"} for name, value in self.items()], max_rows=60)
