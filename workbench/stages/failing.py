"""The last stage that failed: what it was given, on which ranks, with what; and to run it again where pdb works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, cast

from workbench.display.html import table
from workbench.errors import NotFound, StageInterrupted, UpstreamError, WorkbenchError
from workbench.errors.block import block, cell_names
from workbench.errors.frames import StageFailure
from workbench.messages.calls import Call
from workbench.messages.operation import Operation

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.controller import Workbench
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
            *({"": name, "value": f"{value!r:.80}"} for name, value in self.arguments.items()),
        ]
        frames = "\n".join(self._failure.lines(cell_names())) if self._failure else ""
        shown = f"<pre>{escape(frames)}</pre>" if frames else ""
        return table(rows, caption=repr(self).strip("<>"), max_rows=40) + shown


class Failing:
    """The methods of a `Workbench` that keep the last failure."""

    name: str
    _failed: FailedStage | None = None

    def _note_failure(
        self, run: Run, error: Exception, operation: Operation, batch: Batch | None, arguments: Mapping[str, Any]
    ) -> None:
        """Keep what a run failed with; who stopped a stage, or a stage that it needs, is no failure of its own."""
        if isinstance(error, StageInterrupted | UpstreamError):
            return
        self._failed = FailedStage(
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

    def last_error(self) -> FailedStage:
        """The last stage that failed, whether it was waited for or not: role, stage, ranks, the error and its text, the
        arguments, and in `.batch` what it was given. That is kept on the hosts until the next stage fails, or
        `lab.forget_error()`. Raises `NotFound` where none has failed.
        """
        if self._failed is None:
            raise NotFound(f"no stage of {self.name!r} has failed", "in this kernel, or it was forgotten")
        return self._failed

    def forget_error(self) -> None:
        """Let go of the last failure, and of the batch that is kept with it."""
        self._failed = None

    def debug(self, *, rank: int | None = None, device: str | None = None, post_mortem: bool = False) -> Any:
        """Run the last stage that failed again, in this kernel, where `breakpoint()`, `%debug` and pdb work.

        A worker of the role is made here, takes the state of the live one (weights, moments, step count, random state;
        gathered where it is cut over ranks), and is called as rank `rank` was (None: the first that failed): with its
        rows of the kept batch, its arguments, its seed. The error is raised here with its real frames. Nothing of the
        workbench changes; on the inline backend the stage is run in its place, and the role's state put back.
        Functions that score are called one after the other in this thread, and without a time limit.

        device: "cpu" or "cuda"; None: as the workbench's, where this process has such a one. post_mortem: enter the
        debugger where it fails, instead of raising. Where it does not fail: says so, and returns what the rank made, an
        `Output` or a value.

        It is the state as it is now: an update that failed in its third step has taken two. One rank runs alone: sums
        over ranks are over its own rows, and a model that was cut over ranks gives the same numbers within rounding.
        Raises `NotFound` where no stage has failed, `BadInput` where this one cannot be run here.
        """
        from workbench.stages.replay import replay

        return replay(cast("Workbench", self), self.last_error(), rank=rank, device=device, post_mortem=post_mortem)
