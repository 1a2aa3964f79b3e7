"""Threads of panels: run what buttons start, decide when panels draw, and test whether the kernel can react."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import said
from workbench.support.notebook_cell import in_notebook

FOLDER = Path(__file__).parent / "static"
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)


@cache
def module(name: str) -> str:
    """A file of `static/`, preceded by the files that it imports, because Jupyter loads a widget's script as one
    module.

    Each file is an ES module that a browser or a linter can read. Concatenated, they share one scope: no two files
    define the same top-level name (a test checks this).
    """
    texts: dict[str, str] = {}

    def put(name: str) -> None:
        text = (FOLDER / name).read_text()
        for imported in IMPORT.findall(text):
            if imported not in texts:
                put(imported)
        texts[name] = IMPORT.sub("", text)  # behind what it imports

    put(name)
    main = texts.pop(name)
    inner = [re.sub(r"^export (?=function|const|class|async)", "", text, flags=re.MULTILINE) for text in texts.values()]
    return "\n".join([*inner, main])


def style() -> str:
    """The style sheet of all views."""
    return (FOLDER / "panel.css").read_text()


REST = 150  # times as long as the drawings of a round took, until the next round: less than 1 % of the kernel's time
LEAST_REST_S, MOST_REST_S = 0.3, 5.0
SLOW_S = 0.35  # without an answer of its event loop the kernel counts as blocked


class Driver:
    """Runs one piece of work at a time, in a thread: `driver.start("an iteration of PPO", algorithm.iterate)`.

    busy: the work under way; "" for none. error: of the last work that failed. outcome: its result, in a line. pace:
    when the panels of this workbench draw. While it is busy, cells that call stages are refused (`lab.driving`); cells
    that only display are not.
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
        """Whether `stop` was called; loops check it between two steps."""
        return self._stopping.is_set()

    def start(self, what: str, work: Callable[[], object]) -> None:
        """Start work; raises `BadInput` while other work runs. The result of `work` is shown if it is text, else
        dropped."""
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
        """Stop: running stages are left at a consistent point, as after an interrupt of a cell; waiting stages are
        cancelled, and no further stage is called."""
        if not self.busy:
            return
        self._stopping.set()
        for run in self._lab.open_runs():
            if run not in self._others:
                run.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no work is under way; returns whether that happened within the time."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return not self.busy


class Pace:
    """Draws the panels of a workbench in rounds, each panel once a round, so that none gets far ahead of the others.

    A panel that notices a change begins a round; after the round all panels pause. Actions of the page are drawn at
    once, outside any round.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round, self._spent_s = 0, 0.0  # the latter processor time
        self._rest_until_s = self._began_s = 0.0  # monotonic

    def round(self) -> int:
        """The number of the current round. A new round begins once the pause after the previous one is over."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._rest_until_s:
                self._round, self._began_s, self._spent_s = self._round + 1, now_s, 0.0
                self._rest_until_s = now_s + LEAST_REST_S
            return self._round

    def took(self, processor_s: float) -> None:
        """Record the processor time of a drawing in this round."""
        with self._lock:
            self._spent_s += processor_s
            self._rest_until_s = self._began_s + min(max(REST * self._spent_s, LEAST_REST_S), MOST_REST_S)


class Pulse:
    """Pings the kernel's event loop, which also handles buttons. While a cell blocks the kernel, no answer comes."""

    def __init__(self) -> None:
        # outside a kernel there are no buttons, even if there is an event loop
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop() if in_notebook() else None
        self._asked_s = 0.0

    def _answer(self) -> None:
        self._asked_s = 0.0

    def blocked(self, slow_s: float = SLOW_S) -> bool:
        """Whether the loop has not answered for `slow_s` seconds. Called repeatedly, from another thread."""
        if self._loop is None or self._loop.is_closed():
            return False
        if self._asked_s == 0.0:
            self._asked_s = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
            return False
        return time.monotonic() - self._asked_s > slow_s
