"""The ranks of a run: their progress, their replies, and one error for all ranks that failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.backends.base import Backend, Pending
from workbench.errors import HostDied, StageError, StageTimeout, UpstreamError, WorkbenchError
from workbench.errors.frames import RankFailure, StageFailure
from workbench.errors.plain_text import said
from workbench.messages.calls import FailedRows, Failure, PeerFailed, Reply

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.stages.run import Run

ASK_S = 0.2  # between two status calls to one host
STATUS_S = 1.0  # how long an error waits for the status of ranks
STUCK = (
    "other ranks wait in a collective for a rank that failed: lab.recover() restarts them; in your own operation, put "
    "code that may raise on one rank into `with self.context.communicator.all_or_none():`"
)


class RankWatch:
    """The ranks of a run, from `Run.send` on.

    answers: by rank. working: the ranks that have not answered. failed: the ranks that answered with an error. unit: of
    their progress: micro-batches or rows.
    """

    def __init__(self, hosts: Sequence[str], unit: str) -> None:
        self._hosts, self.unit = hosts, unit
        self.answers: list[Pending] = []
        self.working: list[int] = []
        self.failed: list[int] = []
        self.counts = Counts()
        self._last_progress_s = 0.0  # monotonic
        self._seen: dict[str, tuple[str, int, int, int]] = {}
        self._asked: dict[str, Pending] = {}
        self._asked_s: dict[str, float] = {}

    def begin(self) -> None:
        """Note that all ranks have their calls."""
        self.working = list(range(len(self.answers)))
        self.note_progress()

    def note_progress(self) -> None:
        """Restart the clock of `stalled_s`."""
        self._last_progress_s = time.monotonic()

    @property
    def outstanding(self) -> list[Pending]:
        """The answers that are still to come."""
        return [self.answers[rank] for rank in self.working]

    @property
    def progressed(self) -> tuple[int, int, int]:
        """The units that the first rank has done, their total, and its tokens; zeros: unknown."""
        status = next(iter(self._seen.values()), None)
        return status[1:] if status else (0, 0, 0)

    @property
    def counted(self) -> tuple[int, int]:
        """The units that the first rank has done, and their total; (0, 0) where nothing is counted."""
        return self.progressed[:2] if self._seen else self.counts.seen

    def poll(self, backend: Backend) -> bool:
        """Take in new answers, and return whether some ranks are still at work."""
        done, answers = set(backend.wait(self.outstanding, 0.0)), self.answers
        failed = [rank for rank in self.working if answers[rank] in done and _failed(answers[rank])]
        self.failed = sorted(self.failed + failed)
        self.working = [rank for rank in self.working if answers[rank] not in done]
        return bool(self.working)

    def stalled_s(self, backend: Backend, *, ending: bool) -> float:
        """Return for how many seconds no rank has made progress, while they are to end: a rank failed, or all are to
        stop. Asks ranks for their status, without waiting for the answers."""
        hosts = [self._hosts[rank] for rank in self.working]
        if self._ask(backend, hosts if ending else hosts[:1]) or not ending:
            self.note_progress()
        return time.monotonic() - self._last_progress_s

    def _ask(self, backend: Backend, hosts: Sequence[str]) -> bool:
        """Ask hosts for their status; return whether an earlier answer shows progress."""
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

    def status_text(self, backend: Backend) -> str:
        """Return what each rank is doing, in words."""
        asked = {rank: backend.ask(self._hosts[rank], "status") for rank in self.working}
        backend.wait(list(asked.values()), STATUS_S)
        said = []
        for rank in range(len(self.answers)):
            text = "had finished"
            if rank in asked:
                text = f"did not answer in {STATUS_S:g} s"
                with contextlib.suppress(Exception):  # one rank failed; the answers of the others count
                    if asked[rank].done():
                        busy, done, total, _ = asked[rank].result()
                        text = f"was at {busy or 'the end'}" + (
                            f", {done} of {total} {self.unit} done" if total else ""
                        )
            said.append(f"rank {rank} {text}")
        return "; ".join(said)

    def collect(self) -> tuple[list[Reply], dict[int, Failure], HostDied | None]:
        """Return the replies so far, the failures among them by rank, and the error of a host that has ended."""
        replies, dead = list[Reply](), None
        for pending in (pending for rank, pending in enumerate(self.answers) if rank not in self.working):
            try:
                replies.append(pending.result())
            except HostDied as error:
                dead = dead or error
        return replies, {reply.rank: reply.failure for reply in replies if reply.failure is not None}, dead


class Counts:
    """Progress of the inline backend's rank. It is not part of `Run`, because hosts keep a reference to it."""

    def __init__(self) -> None:
        self.seen = (0, 0)
        self.report: Callable[[int, int, int], None] = lambda done, total, tokens: None
        self._until, self._timeout_s = float("inf"), 0.0

    def limit(self, until: float, timeout_s: float) -> None:
        """Raise `StageTimeout` when a rank counts after `until` (monotonic seconds)."""
        self._until, self._timeout_s = until, timeout_s

    def count(self, done: int, total: int, tokens: int) -> None:
        """Note the progress; the rank calls this."""
        self.seen = (done, total)
        self.report(done, total, tokens)
        if time.monotonic() > self._until:  # a stage can stop here: between micro-batches, between rows
            self._until = float("inf")
            raise StageTimeout(f"it took longer than timeout_s={self._timeout_s:g}", f"it had done {done} of {total}")


def _failed(pending: Pending) -> bool:
    try:
        return pending.result().failure is not None
    except Exception:  # the host is gone, or its answer cannot be read
        return True


# --- one error for all ---------------------------------------------------------------------------------------------


def one_error(run: Run, failures: Mapping[int, Failure]) -> WorkbenchError:
    """Return one error for all failed ranks, of the first cause's class if it is ours, else a `StageError`. Equal
    causes count once. Its `failure` and a note have the frames. Ranks that failed because a peer did are left out."""
    failures = {n: f for n, f in failures.items() if f.kind != PeerFailed.__name__} or failures
    alike: dict[object, list[int]] = {}
    for rank, failure in failures.items():
        alike.setdefault(failure.merge_key, []).append(rank)
    groups = [_rank_failure(ranks, failures) for ranks in alike.values()]
    first, raised = groups[0], failures[groups[0].ranks[0]]
    where = f"{run.name} failed on rank {', '.join(map(str, first.ranks))}"
    others = len(failures) - len(first.ranks)
    rule = f"{others} other rank(s) failed with other errors" if others else ""
    cause = raised.error if isinstance(raised.error, WorkbenchError) else None
    remedy = "; ".join(filter(None, ((cause and cause.remedy) or raised.remedy, STUCK if run.stuck else "")))
    if cause is not None:
        error: WorkbenchError = type(cause)(f"{where}: {cause.value}", cause.rule or rule, remedy)
    else:
        error = StageError(f"{where}: {raised.kind}: {raised.message}", rule, remedy)
    error.failure = StageFailure(
        role=run.group.role, stage=run.stage, pool=run.group.pool.name, run=run.number, failures=tuple(groups)
    )
    if note := "\n".join(error.failure.lines()):
        error.add_note(note)
    error.__cause__ = raised.error
    return error


def too_many_failed(run: Run, failed: Mapping[int, FailedRows], batch: Batch) -> WorkbenchError:
    """Return the error of a stage in which the user's function failed for too many rows.

    failed: by rank, the failed rows of the ranks that have some. batch: with the columns of all rows.
    """
    count = sum(one.count for one in failed.values())
    in_order = sorted(failed, key=lambda rank: failed[rank].row)
    error = one_error(run, {rank: failed[rank].first for rank in in_order})
    most, not_asked = next(iter(failed.values())).most, sum(one.not_asked for one in failed.values())
    more = f"; {not_asked} more rows were not tried" if not_asked else ""
    told = f"{count - not_asked} of {batch.rows} rows failed, more than most_failed={most:g} allows{more}"
    remedy = (
        f"All finished rows are in error.batch, which is lab.batch({batch.id!r}): correct the function, and run the "
        "stage on that batch with only=error.batch.failed()"
    )
    error.rule, error.remedy = (
        ". ".join(filter(None, (one.rstrip("."), two))) for one, two in ((error.rule, told), (error.remedy, remedy))
    )
    if isinstance(error, StageError):
        error.batch = batch
    return error


def _rank_failure(ranks: list[int], failures: Mapping[int, Failure]) -> RankFailure:
    first = failures[ranks[0]]
    others = ((rank, failures[rank].message) for rank in ranks[1:])
    return RankFailure(
        ranks=tuple(ranks),
        kind=first.kind,
        message=first.message,
        chain=() if first.says_all else first.chain,
        messages=tuple((rank, message) for rank, message in others if message != first.message),
    )


def input_failed(consumer: str, producer: str, error: BaseException | None) -> WorkbenchError:
    """Return the error of a stage that needs the result of another. error: of that stage; None: it was cancelled."""
    if isinstance(error, HostDied):
        return HostDied(f"{consumer} was not run: {error.value}", error.rule, error.remedy)
    if isinstance(error, UpstreamError):  # the first cause is further up
        cause = UpstreamError(f"{consumer} was not run", error.rule, error.remedy)
        cause.__cause__ = error.__cause__
        return cause
    words = f"{producer} was cancelled" if error is None else said(error)
    # workbench errors name their stage already
    cause = UpstreamError(f"{consumer} was not run", words if producer in words else f"{producer}: {words}")
    cause.__cause__ = error
    return cause
