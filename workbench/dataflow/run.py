"""One execution of a stage: what was sent to the ranks, and how the controller waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.display.progress import Progress
from workbench.errors import HostDied, StageError, StageInterrupted, WorkbenchError
from workbench.workers.backends.base import Backend, Pending
from workbench.workers.calls import Failure, Reply

POLL_S = 0.2
# A rank that failed leaves the others waiting in a collective: they get this long to finish.
GRACE_S = 20.0


@dataclass(kw_only=True)
class Run:
    """A stage under way on the hosts of one group; `replies` once it is over."""

    number: int
    stage: str
    role: str
    hosts: Sequence[str]
    pending: Sequence[Pending]
    replies: list[Reply] = field(default_factory=list)
    stuck: bool = False

    def wait(self, backend: Backend) -> list[Reply]:
        """Wait for every rank, with a progress line after two seconds. An interrupt stops the waiting only.

        Raises `StageError` (of the kind of the first cause) when ranks failed, `HostDied` when a process ended.
        """
        try:
            unit = "rows" if self.stage in ("generate_sequences", "compute_reward", "compute_cost") else "micro-batches"
            with Progress(f"{self.role}.{self.stage}", unit=unit) as bar:
                failed_s: float | None = None
                while not backend.wait(self.pending, POLL_S):
                    self._show(backend, bar)
                    if failed_s is None and any(self._failed(p) for p in self.pending):
                        failed_s = time.monotonic()
                    if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
                        self.stuck = True
                        break
        except KeyboardInterrupt:
            raise StageInterrupted(
                f"{self.role}.{self.stage} was interrupted in the notebook",
                "its ranks finish what they began, and the result is dropped",
                "the next call waits for them; an update that was under way has been applied when it ends",
            ) from None
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

    def _show(self, backend: Backend, bar: Progress) -> None:
        try:
            _, done, total, tokens = backend.ask(self.hosts[0], "status").result()
        except WorkbenchError:
            return
        bar.update(done, total, tokens)

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
        where = f"{self.role}.{self.stage} failed on rank {ranks}"
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
