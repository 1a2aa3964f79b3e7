"""The last stage that failed: what it was given, on which ranks, with what; and to run it again where pdb works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from workbench.display.html import table
from workbench.errors import NotFound, StageInterrupted, UpstreamError, WorkbenchError
from workbench.errors.block import block, cell_names
from workbench.errors.frames import StageFailure
from workbench.errors.plain_text import shown
from workbench.messages.calls import Call
from workbench.messages.operation import Operation

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.stages.run import Run


@dataclass(frozen=True, kw_only=True, repr=False)
class FailedStage:
    """A stage that failed. `lab.last_error()`

    ranks: that failed; empty where none did: a process that ended, a deadline. batch: what the stage was given, kept on
    the hosts while this is; None for a stage without. arguments: all of them, by name. calls: what each rank was asked.
    """

    role: str
    stage: str
    pool: str
    run: int
    error: Exception
    batch: Batch | None
    arguments: Mapping[str, Any]
    operation: Operation = field(repr=False)
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        return () if self._failure is None else self._failure.ranks

    @property
    def _failure(self) -> StageFailure | None:
        return self.error.failure if isinstance(self.error, WorkbenchError) else None

    @property
    def text(self) -> str:
        """What the cell showed, without the cell's own lines."""
        said = block(self.error) if isinstance(self.error, WorkbenchError) else str(self.error)
        return f"{type(self.error).__name__}: {said}"

    def __repr__(self) -> str:
        ranks = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        batch = "" if self.batch is None else f", {self.batch.id}, {self.batch.rows} rows"
        return f"<{self.role}.{self.stage} failed{ranks}: {type(self.error).__name__}{batch}>"

    def _repr_html_(self) -> str:
        rows: list[dict[str, Any]] = [
            {"": "stage", "value": f"{self.role}.{self.stage}, run {self.run}, pool {self.pool}"},
            {"": "ranks", "value": ", ".join(map(str, self.ranks))},
            {"": "error", "value": f"{type(self.error).__name__}: {self.error}"},
            {"": "batch", "value": "" if self.batch is None else f"{self.batch.id}, {self.batch.rows} rows"},
            *({"": name, "value": f"{shown(value, 80)}"} for name, value in self.arguments.items()),
        ]
        frames = "\n".join(self._failure.lines(cell_names())) if self._failure else ""
        block = f"<pre>{escape(frames)}</pre>" if frames else ""
        return table(rows, caption=repr(self).strip("<>"), max_rows=40) + block


class Failures:
    """Keeps the last failure of a workbench. name: the workbench's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: FailedStage | None = None

    def note(
        self, run: Run, error: Exception, operation: Operation, batch: Batch | None, arguments: Mapping[str, Any]
    ) -> None:
        """Keep what a run failed with. A stage that was stopped, or whose input failed, is no failure of its own."""
        if isinstance(error, StageInterrupted | UpstreamError):
            return
        self._last = FailedStage(
            role=run.group.role,
            stage=run.stage,
            pool=run.group.pool.name,
            run=run.number,
            error=error,
            batch=batch,
            arguments=dict(arguments),
            operation=operation,
            calls=tuple(run.calls),
        )

    def last(self) -> FailedStage:
        """The last stage that failed; `NotFound` where none has."""
        if self._last is None:
            raise NotFound(f"no stage of {self._name!r} has failed", "in this kernel, or it was forgotten")
        return self._last

    def forget(self) -> None:
        """Forget the last failure, and release the batch that is kept with it."""
        self._last = None
