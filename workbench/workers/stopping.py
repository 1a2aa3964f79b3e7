"""How ranks stop a stage together: all at the same point, between two complete units of work.

A stage passes stopping points: between micro-batches of a pass, between tokens of a generation, between optimizer
steps. Ranks that compute together pass the same points in the same order. To stop a stage,

    controller                                   each rank
    stop_point(run)  ───────────────────────>    will wait at its next point for further word
                     <───────────────────────    answers at once: that point, and the ranks in step with it
    stop_at(run, the furthest point)  ───────>   continues to that point, and stops there

so no rank stops while another still needs it: all ranks do the work before that point.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from workbench.errors.containing import Signal
from workbench.messages.calls import UpdatePart
from workbench.messages.metrics import Metric

# A rank that waits this long without an answer, as after the controller's death, continues with its stage.
PATIENCE_S = 20.0


class StageStopped(Signal):
    """Raised at a stopping point; workers' own handlers of errors let it through."""

    def __init__(self, part: UpdatePart) -> None:
        super().__init__(f"after optimizer step {part.steps} of {part.of}" if part.of else "as before the stage")
        self.part = part


@dataclass(frozen=True)
class StopPoint:
    """point: the first one at which a rank can stop. together: the ranks that pass the same points in step with it."""

    point: int
    together: tuple[int, ...]


class Stopping:
    """The stopping points of the stage that a host runs. ranks: of the pool; they are in step, unless `with only(...)`
    says otherwise."""

    def __init__(self, ranks: int) -> None:
        self._everyone = self._together = tuple(range(ranks))
        self._changed = threading.Condition()
        self._run = self._passed = 0  # run 0: none
        self._updates = False
        self._asked_of, self._round = 0, 0
        self._waits_at = 0
        self._stop_at: int | None = None
        self.resume_from: UpdatePart | None = None

    # --- for the stage ------------------------------------------------------------------------------------------------

    def begin(self, run: int, resume_from: UpdatePart | None = None, *, updates: bool = False) -> None:
        """A stage begins. resume_from: where an interrupted update goes on. updates: it is left between optimizer steps
        only, at points that say how many it has taken."""
        with self._changed:
            self._run, self._passed, self._together = run, 0, self._everyone
            self.resume_from, self._updates = resume_from, updates

    def end(self) -> None:
        with self._changed:
            self._run, self.resume_from = 0, None

    def point(self, steps: int = 0, of: int = 0, metrics: Mapping[str, Metric] | None = None) -> None:
        """A point at which the stage can be stopped: all ranks that compute together call it at the same place. steps,
        of, metrics: what an update has done so far."""
        if not self._run or (self._updates and not of):
            return
        with self._changed:
            self._passed += 1
            if self._asked_of != self._run:
                return
            if self._passed >= self._waits_at:
                self._changed.wait_for(lambda: self._stop_at is not None, PATIENCE_S)
                if self._stop_at is None:  # no answer
                    self._asked_of = 0
                    return
            if self._stop_at is not None and self._passed >= self._stop_at:
                raise StageStopped(UpdatePart(steps=steps, of=of, metrics=dict(metrics or {})))

    @contextmanager
    def only(self, ranks: tuple[int, ...]) -> Iterator[None]:
        """Inside, only these ranks pass points in step with this one."""
        self._together, before = ranks, self._together
        try:
            yield
        finally:
            self._together = before

    # --- for the controller, while the stage computes -----------------------------------------------------------------

    def stop_point(self, run: int, round: int) -> StopPoint:
        """Wait at the next point of a run, and name it. round: how often the controller has asked; what belongs to an
        earlier round is ignored."""
        with self._changed:
            if (self._asked_of, self._round) != (run, round):
                passed = self._passed if self._run == run else 0
                waiting = self._asked_of == self._run == run and self._stop_at is None and passed >= self._waits_at
                self._asked_of, self._round, self._stop_at = run, round, None
                self._waits_at = passed if waiting else passed + 1
            return StopPoint(self._waits_at, self._together)

    def stop_alone(self, run: int) -> None:
        """Stop a run at its next point: for a rank that no other one is in step with."""
        with self._changed:
            self._asked_of, self._waits_at, self._stop_at = run, 0, 0
            self._changed.notify_all()

    def stop_at(self, run: int, round: int, point: int) -> None:
        """Stop a run at this point, or the first one behind it."""
        with self._changed:
            if (self._asked_of, self._round) == (run, round):
                self._stop_at = point
                self._changed.notify_all()
