"""The stages that were called, newest last: the cell, the progress, the end. Holds no results."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.errors import StageInterrupted, UpstreamError

if TYPE_CHECKING:
    import pandas as pd

    from workbench.stages.run import Run
    from workbench.support.notebook_cell import Cell

KEPT = 1000


@dataclass(kw_only=True)
class RunRecord:
    """One stage call.

    stage: as an algorithm calls it; operation: of its role. cell: the number of the notebook's cell that called it;
    0 for none. state: waiting, running, done, failed, "from the store", "stopped" (by the user), or "not run" (what it
    needs failed or was stopped, or it had not begun when it was stopped). done_units of total_units: micro-batches, or
    rows, on one rank; 0 where they are not counted. batch: what it makes, for `lab.batch(...)`; "" for metrics. error:
    what ended it.
    aside: of a comparison or a check, after which all is as before.
    """

    run: int
    stage: str
    operation: str
    role: str
    pool: str
    iteration: int
    cell: int
    batch: str
    submitted_s: float
    started_s: float = 0.0
    ended_s: float = 0.0
    state: str = "waiting"
    done_units: int = 0
    total_units: int = 0
    error: str = ""
    aside: bool = False


@dataclass
class _Entry:
    record: RunRecord
    run: weakref.ref[Run] = field(repr=False)


def _state(run: Run) -> str:
    if run.state == "cancelled":
        return "stopped" if run.calls else "not run"
    error = run.future.exception() if run.state == "failed" else None
    if isinstance(error, StageInterrupted):
        return "stopped"
    if isinstance(error, UpstreamError):
        return "not run"
    return "from the store" if run.from_store and run.done else run.state


class RunLog:
    """The last stage calls of a workbench."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def add(self, run: Run, stage: str, iteration: int, cell: Cell | None, *, aside: bool) -> None:
        """Follow a run from now on."""
        record = RunRecord(
            run=run.number, stage=stage, operation=run.stage, role=run.group.role, pool=run.group.pool.name,
            iteration=iteration, cell=cell.number if cell else 0, batch=run.batch.id if run.batch is not None else "",
            submitted_s=run.submitted_s, aside=aside,
        )  # fmt: skip
        entry = _Entry(record, weakref.ref(run))
        with self._lock:
            self._entries.append(entry)
        run.when_over(lambda: self._look(entry))

    def _look(self, entry: _Entry) -> RunRecord:
        """Update the record from its run, unless that was garbage collected."""
        run, record = entry.run(), entry.record
        if run is None:
            return record
        if record.ended_s == 0.0:
            record.state = _state(run)
            record.done_units, record.total_units = run.ranks.counted
            record.started_s = run.started_s
            if run.done:
                record.ended_s, record.error = run.ended_s, run.error
        return record

    def records(self, iteration: int | None = None) -> list[RunRecord]:
        """Those of an iteration, or all that are kept, in call order."""
        with self._lock:
            entries = list(self._entries)
        return [self._look(e) for e in entries if iteration is None or e.record.iteration == iteration]

    def frame(self) -> pd.DataFrame:
        """One row a call, see `RunRecord`; duration_s is what it has taken so far, from where it began: 0 for one that
        has not begun, or never did."""
        import pandas as pd

        columns = [*RunRecord.__dataclass_fields__]
        rows: list[dict[str, Any]] = [asdict(record) for record in self.records()]
        frame = pd.DataFrame(rows, columns=columns)
        end_s = frame["ended_s"].where(frame["ended_s"] > 0, time.time())
        frame["duration_s"] = (end_s - frame["started_s"]).clip(lower=0.0).where(frame["started_s"] > 0, 0.0)
        return frame
