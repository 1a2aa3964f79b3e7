"""One error for all ranks that failed in a stage, and for the stages that need its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.errors import StageError, UpstreamError, WorkbenchError
from workbench.errors.frames import RankFailure, StageFailure
from workbench.errors.plain_text import said
from workbench.messages.replies import FailedRows, Failure, PeerFailed

if TYPE_CHECKING:
    from workbench.batches.batch import Batch

STUCK = "other ranks wait in a collective for a rank that failed: lab.recover() starts them again"


def one_error(
    role: str, pool: str, stage: str, run: int, failures: Mapping[int, Failure], *, stuck: bool
) -> WorkbenchError:
    """Of the first cause's own class where it is ours, else a `StageError`; equal causes are reported as one. The
    frames on the ranks are its `failure`, and a note for tracebacks. Ranks that failed with another are left out."""
    failures = {n: f for n, f in failures.items() if f.kind != PeerFailed.__name__} or failures
    alike: dict[object, list[int]] = {}
    for rank, failure in failures.items():
        alike.setdefault(failure.likeness, []).append(rank)
    groups = [_rank_failure(ranks, failures) for ranks in alike.values()]
    first, raised = groups[0], failures[groups[0].ranks[0]]
    where = f"{role}.{stage} failed on rank {', '.join(map(str, first.ranks))}"
    others = len(failures) - len(first.ranks)
    rule = f"{others} other rank(s) failed otherwise" if others else ""
    remedy = STUCK if stuck else raised.remedy
    if isinstance(raised.error, WorkbenchError):
        cause = raised.error
        error: WorkbenchError = type(cause)(f"{where}: {cause.value}", cause.rule or rule, cause.remedy or remedy)
    else:
        error = StageError(f"{where}: {raised.kind}: {raised.message}", rule, remedy)
    error.failure = StageFailure(role=role, stage=stage, pool=pool, run=run, failures=tuple(groups))
    if note := "\n".join(error.failure.lines()):
        error.add_note(note)
    error.__cause__ = raised.error
    return error


def too_many_failed(
    role: str, pool: str, stage: str, run: int, failed: Mapping[int, FailedRows], batch: Batch
) -> WorkbenchError:
    """The error of a stage for too many of whose rows a function of the user's failed.

    failed: of each rank that has such rows. batch: with the columns of all rows.
    """
    count = sum(one.count for one in failed.values())
    in_order = sorted(failed, key=lambda rank: failed[rank].row)
    error = one_error(role, pool, stage, run, {rank: failed[rank].first for rank in in_order}, stuck=False)
    most, not_asked = next(iter(failed.values())).most, sum(one.not_asked for one in failed.values())
    more = f", and {not_asked} were not asked any more" if not_asked else ""
    told = f"{count - not_asked} of {batch.rows} rows failed, where most_failed={most:g} is the share that may{more}"
    remedy = (
        f"All that was finished is kept in error.batch, which is lab.batch({batch.id!r}): mend the function, and give "
        "it that batch with only=error.batch.failed()"
    )
    again = type(error)(
        error.value, *(". ".join(filter(None, (one.rstrip("."), two))) for one, two in
                       ((error.rule, told), (error.remedy, remedy)))
    )  # fmt: skip
    again.failure, again.__cause__ = error.failure, error.__cause__
    if isinstance(again, StageError):
        again.batch = batch
    for note in getattr(error, "__notes__", ()):
        again.add_note(note)
    return again


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


def input_failed(consumer: str, producer: str, error: BaseException | None) -> UpstreamError:
    """The error of a stage that needs the result of another. error: that one's; None: it was cancelled."""
    if isinstance(error, UpstreamError):  # the first cause is further up
        cause = UpstreamError(f"{consumer} was not run", error.rule, error.remedy)
        cause.__cause__ = error.__cause__
        return cause
    words = f"{producer} was cancelled" if error is None else said(error)
    # errors of ours name their stage already
    cause = UpstreamError(f"{consumer} was not run", words if producer in words else f"{producer}: {words}")
    cause.__cause__ = error
    return cause
