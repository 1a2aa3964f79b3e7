"""Runs what a panel's buttons start, in a thread of its own, so that the notebook stays responsive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import said
from workbench_widgets.pace import Pace


class Driver:
    """One thing at a time, in a thread: `driver.start("an iteration of PPO", algorithm.iterate)`.

    busy: what is under way; "" for nothing. error: how the last one failed. outcome: how it ended, in a line. pace:
    when the panels of this workbench draw.
    While it is busy, cells that call stages are refused (`lab.driving`), and cells that look are not.
    """

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.busy = self.error = self.outcome = ""
        self.pace = Pace()
        self._stopping = threading.Event()
        self._others: set[Any] = set()  # runs that were open before
        self._thread: threading.Thread | None = None

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called; loops end between two steps."""
        return self._stopping.is_set()

    def start(self, what: str, work: Callable[[], object]) -> None:
        """Begin; `BadInput` while something else is running. work: its result is shown if it is text, else dropped."""
        if self.busy:
            raise BadInput(f"{what} now", f"{self.busy} is under way", "wait, or press Stop")
        self._lab.check_driver()
        self.busy, self.error, self.outcome = what, "", ""
        self._stopping.clear()
        self._others = set(self._lab.open_runs())
        self._thread = threading.Thread(target=self._work, args=(what, work), name="workbench-panel", daemon=True)
        self._thread.start()

    def _work(self, what: str, work: Callable[[], object]) -> None:
        try:
            with self._lab.driving(f"{what} (started in the panel)", self._stopping.is_set):
                result = work()
            self.outcome = result if isinstance(result, str) else f"{what}: done"
        except Exception as error:
            stopped = self.stopping and isinstance(error, WorkbenchError)
            self.outcome = f"{what}: stopped. {error}" if stopped else ""
            self.error = "" if stopped else f"{what}: {type(error).__name__}: {said(error)}"
        finally:
            self.busy = ""

    def stop(self) -> None:
        """Stop: stages that are under way are left where nothing is half done, as an interrupt of a cell leaves them;
        what has not begun is not begun, and no more is called."""
        if not self.busy:
            return
        self._stopping.set()
        for run in self._lab.open_runs():
            if run not in self._others:
                run.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is under way; whether that came within the time."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return not self.busy
