"""How ranks leave a stage that is to stop: all at the same place, where nothing is half done, and at no cost till then.

A stage passes stopping points: between micro-batches of a pass, between tokens of a generation, between optimizer
steps. Ranks that compute together pass the same points in the same order. When a stage is to stop,

    controller                            each rank
    standing(run)  ──────────────────>    waits at the next point that it comes to
                   <──────────────────    at point n, with these ranks
    leave(run, the furthest of them) ─>   goes on to that point, and leaves there

so that no rank leaves while another still needs it: a rank that waits at a point has done its part of all before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from workbench.workers.calls import Metric, UpdatePart

# A rank that waits for a word that never comes, of a controller that is gone, goes on with its stage.
PATIENCE_S = 20.0


class StageStopped(BaseException):
    """Raised at a stopping point of a stage that is to stop. No error: workers' own handlers let it through."""

    def __init__(self, part: UpdatePart) -> None:
        super().__init__(f"after optimizer step {part.steps} of {part.of}" if part.of else "as before the stage")
        self.part = part


@dataclass(frozen=True)
class Standing:
    """Where a rank stands in a stage that is to stop. point: the one at which it waits; None: it is on its way.
    together: the ranks that pass the same points in step with it."""

    point: int | None
    together: tuple[int, ...] = ()


class Stopping:
    """The stopping points of the stage that a host runs.

    ranks: of the pool; a stage's ranks are all in step, unless `with only(ranks)` says otherwise.
    """

    def __init__(self, ranks: int) -> None:
        self._everyone = self._together = tuple(range(ranks))
        self._changed = threading.Condition()
        self._run, self._passed = 0, 0
        self._asked_of, self._leave_at = 0, None  # type: int, int | None
        self._waits = False
        self.begun: UpdatePart | None = None

    # --- for the stage ------------------------------------------------------------------------------------------------

    def begin(self, run: int, begun: UpdatePart | None) -> None:
        """A stage begins. begun: of an update, what it goes on from."""
        with self._changed:
            self._run, self._passed, self._together, self.begun = run, 0, self._everyone, begun
            if self._asked_of != run:
                self._leave_at = None

    def end(self) -> None:
        """It is over."""
        with self._changed:
            self._run, self.begun = 0, None

    def point(self, steps: int = 0, of: int = 0, metrics: Mapping[str, Metric] | None = None) -> None:
        """A place where nothing is half done: leaves the stage, if it is to stop. All ranks that compute together call
        it at the same place. steps, of, metrics: of an update, what it has done so far."""
        self._passed += 1
        if self._asked_of != self._run:
            return
        with self._changed:
            self._waits = True
            told = self._changed.wait_for(lambda: self._leave_at is not None, PATIENCE_S)
            self._waits = False
            if not told:
                self._asked_of = 0
            elif self._leave_at is not None and self._passed >= self._leave_at:
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

    def standing(self, run: int) -> Standing:
        """Stop a run at its next point, and say where it stands."""
        with self._changed:
            if self._asked_of != run:
                self._asked_of, self._leave_at = run, None
            return Standing(self._passed if self._waits else None, self._together)

    def leave(self, run: int, point: int) -> None:
        """Let a run be left at this point, or the first one behind it."""
        with self._changed:
            self._asked_of, self._leave_at = run, point
            self._changed.notify_all()
