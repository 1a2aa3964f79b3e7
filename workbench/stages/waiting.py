"""Waiting for a run: with a progress line, so that an interrupt stops the run, or without blocking the notebook."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from workbench.display.interrupts import Presses, on_interrupt
from workbench.display.progress import Progress
from workbench.errors import UpstreamError, WorkbenchError
from workbench.stages import interruptions

if TYPE_CHECKING:
    from workbench.stages.run import Run

SHOW_S = 0.2


@contextlib.contextmanager
def interruptible(run: Run) -> Iterator[Presses]:
    """Inside, the first interrupt asks the run to stop; the second raises `StageInterrupted`."""
    with on_interrupt(run.leave_if_inline) as presses:
        try:
            yield presses
        except KeyboardInterrupt:
            raise interruptions.left_alone(run.name) from None


def wait_for(run: Run, bar: Progress, presses: Presses) -> Any:
    """The result of a run, or its error. After an interrupt: when its ranks have left it, `StageInterrupted`."""
    while not (run.future.done() and (run.over or not presses.count)):
        if presses.count:
            run.cancel()
            run.join(SHOW_S)
        else:
            wait([run.future], timeout=SHOW_S)
        _show(run, bar, stopping=presses.count > 0)
    if presses.count:
        raise interrupted(run)
    return _outcome(run)


async def wait_async(run: Run) -> Any:
    """The result of a run. Where the task is cancelled, the run is cancelled too, and the task ends when the ranks have
    left it: the next call waits for nothing."""
    waited = asyncio.wrap_future(run.future)
    waited.add_done_callback(lambda future: future.cancelled() or future.exception())  # read here, in any case
    try:
        while not waited.done():  # an interrupt of a notebook is handled when its loop wakes
            await asyncio.wait([waited], timeout=SHOW_S)
    except asyncio.CancelledError as cancelled:
        run.cancel()
        while not run.over:
            await asyncio.sleep(SHOW_S / 4)
        error = interrupted(run)
        cancelled._render_traceback_ = error._render_traceback_  # type: ignore[attr-defined]  # for IPython
        raise cancelled from error
    result = _outcome(run)
    run.received()
    return result


def _outcome(run: Run) -> Any:
    if run.future.cancelled():
        raise UpstreamError(f"{run.name} was not run: it was cancelled")
    error = run.future.exception()
    if error is not None:
        raise error.with_traceback(None)  # it may be raised again, elsewhere
    return run.future.result()


def interrupted(run: Run) -> Exception:
    """What an interrupt made of a run that is over: as before, or after which optimizer step. Where the run failed, its
    own error."""
    if run.state == "cancelled":
        return interruptions.before_it_began(run.name)
    if run.state == "done":
        run.not_received()
        return interruptions.after_all_steps(run.name) if run.updates else interruptions.as_before(run.name)
    error = run.future.exception()
    if isinstance(error, WorkbenchError) and not isinstance(error, UpstreamError):
        return error.with_traceback(None)
    return interruptions.as_before(run.name)


def _show(run: Run, bar: Progress, *, stopping: bool) -> None:
    shown = run.waits_for or run
    bar.label = shown.name if shown is run else f"{run.name} waits for {shown.name}"
    if stopping:
        bar.label = f"{run.name}: stopping where nothing is half done (interrupt again to leave it behind)"
    if failed := shown.ranks.failed:
        bar.label = f"{shown.name}: rank {', '.join(map(str, failed))} failed, waiting for the others"
    bar.update(*shown.ranks.progressed)
