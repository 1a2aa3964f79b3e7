"""How ranks stop a stage together: all at the same point, between two complete units of work.

A stage passes stopping points: between micro-batches of a pass, between tokens of a generation, between optimizer
steps. Ranks that compute together pass the same points in the same order. To stop a stage, the controller calls
`stop(run)` on each rank, once. While its stage computes, a rank names its next point in the store of its pool; at that
point it waits until the ranks in step with it have named theirs, continues to the furthest of these points, and stops
there. So no rank stops while another still needs it: all ranks do the work before that point. Without a stop the ranks
exchange nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta

import torch.distributed as dist

from workbench.errors.containing import Signal
from workbench.messages.calls import UpdatePart
from workbench.messages.metrics import Metric
from workbench.support.replaced import replaced

# After this time ranks finish a stage if other ranks got no stop: the controller ended before it asked them.
PATIENCE = timedelta(seconds=30)
THE_END = 2**62  # a point that no stage reaches


class StageStopped(Signal):
    """Raised at a stopping point; workers' own error handlers must let it pass."""

    def __init__(self, part: UpdatePart) -> None:
        super().__init__(f"after optimizer step {part.steps} of {part.of}" if part.of else "as before the stage")
        self.part = part


class Stopping:
    """The stopping points of a host's stage. rank, ranks: of the pool; all its ranks are in step, except inside
    `in_step_with`. store: the pool's, once it is open; a single rank needs none."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.store: dist.Store | None = None
        self._rank = rank
        self._everyone = self._ranks_in_step = tuple(range(ranks))
        self._lock = threading.RLock()  # reentrant: an inline stage's interrupt asks in the computing thread
        self._run = self._passed = 0  # of the current stage, or the last one
        self._under_way = self._updates = False
        self._asked_for = self._waits_at = 0
        self._resume_from: UpdatePart | None = None
        self._times = 0  # how often the steps of an update have begun
        self.part_if_failed: UpdatePart | None = None  # progress of an update; None if something is half done

    # --- for the stage ------------------------------------------------------------------------------------------------

    def begin(self, run: int, resume_from: UpdatePart | None = None, *, updates: bool = False) -> None:
        """Begin a stage. resume_from: where an interrupted update continues. updates: stop the stage only between
        optimizer steps, at points that say how many steps were taken."""
        with self._lock:
            self._run, self._passed, self._ranks_in_step, self._under_way = run, 0, self._everyone, True
            self._resume_from, self._updates, self._times, self.part_if_failed = resume_from, updates, 0, resume_from

    def end(self) -> None:
        with self._lock:
            self._passed, self._under_way = THE_END, False

    def begin_steps(self) -> UpdatePart | None:
        """Begin the steps of an update; return the progress at which it was interrupted. An operation that takes steps
        twice cannot be interrupted from the second time on."""
        part, self._resume_from = self._resume_from, None
        self._times += 1
        if self._times > 1:
            self.part_if_failed = None
        return part

    def note(self, part: UpdatePart | None) -> None:
        """Record the progress of an update, for failures from here on; None: something is half done."""
        if self._times <= 1:
            self.part_if_failed = part

    def point(self, steps: int = 0, of: int = 0, metrics: Mapping[str, Metric] | None = None) -> None:
        """Pass a point at which the stage can be stopped: all ranks that compute together call it at the same place.
        steps, of, metrics: the update's progress so far."""
        if not self._under_way or (self._updates and (not of or self._times > 1)):
            return
        if of:
            self.note(UpdatePart(steps=steps, of=of, metrics=dict(metrics or {})))
        with self._lock:
            self._passed += 1
            may_stop = self._asked_for == self._run and self._passed >= self._waits_at
        if may_stop and self._passed >= self._agreed():
            raise StageStopped((of and self.part_if_failed) or UpdatePart(steps=steps, of=of, metrics={}))

    def in_step_with(self, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        """Inside the block, only these ranks pass points in step with this one."""
        return replaced(self, "_ranks_in_step", ranks)

    def _agreed(self) -> int:
        """Return the furthest of the points that the ranks in step have named."""
        if len(self._ranks_in_step) == 1:
            return self._passed
        assert self.store is not None
        named = [_key(self._run, rank) for rank in self._ranks_in_step]
        try:
            self.store.wait(named, PATIENCE)
            furthest = max(map(int, self.store.multi_get(named)))
        except dist.DistStoreError:
            furthest = THE_END
        # the first answer counts for all ranks: one rank may just have timed out when another did not
        agreed = int(self.store.compare_set(f"{_key(self._run, self._ranks_in_step)}/agreed", "", str(furthest)))
        if agreed >= THE_END:
            self._asked_for = 0
        return agreed

    # --- for the controller, while the stage computes -----------------------------------------------------------------

    def stop(self, run: int) -> None:
        """Stop a run that computes, is about to begin, or has just ended on this rank."""
        with self._lock:
            if run == self._asked_for:
                return
            self._asked_for, self._waits_at = run, self._passed + 1 if run == self._run else 1
            if self.store is not None:
                self.store.set(_key(run, self._rank), str(self._waits_at))


def _key(run: int, who: int | tuple[int, ...]) -> str:
    return f"stop/{run}/{who}"
