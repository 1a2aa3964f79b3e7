"""Which cells a notebook's kernel ran, kept beside a workbench's telemetry, without their texts.

A notebook's page can be edited, run out of order, and lose cells; this is the record that an export can go by. It finds
the texts on the page and in IPython's own history, by their digests.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.display.interrupts import uninterrupted
from workbench.support.notebook_cell import failed_cells, failed_position, ipython_shell
from workbench.support.sources import loaded
from workbench.telemetry.store import TelemetryStore


@dataclass(frozen=True)
class RunCell:
    """One execution. kernel: its process and its session in IPython's history, "4321-17". number: n of `In [n]`. id:
    the page's; "" where the front end does not say. digest: of the text, see `digest_of`. done: whether it ended
    without an error. failed: line and column of the statement that ended it with an error, where that is known."""

    kernel: str
    number: int
    id: str
    digest: str
    done: bool
    failed: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, kernel: str, number: int, id: str, text: str, done: bool, failed: tuple[int, int] | None = None
    ) -> RunCell:
        return cls(kernel, number, id, digest_of(text), done, failed)

    def text(self) -> str | None:
        """What was run, from IPython's own history; None where that does not have it."""
        with suppress(Exception):  # no IPython, no history, or one that cannot be read
            for text in _in_history(int(self.kernel.rpartition("-")[2]), self.number):
                if digest_of(text) == self.digest:
                    return text
        return None


def digest_of(text: str) -> str:
    """sha256 of a cell's text, without blank lines around it."""
    return hashlib.sha256(text.strip().encode(errors="surrogatepass")).hexdigest()


def _in_history(session: int, number: int) -> list[str]:
    """The text of `In [number]` in a session: from this kernel's history, else from the file of the default profile."""
    shell = ipython_shell()
    if shell is not None:
        return [text for _, _, text in shell.history_manager.get_range(session, number, number + 1)]
    from IPython.paths import locate_profile

    file = Path(locate_profile(), "history.sqlite").as_uri()
    with closing(sqlite3.connect(f"{file}?mode=ro", uri=True)) as history:
        query = "SELECT source_raw FROM history WHERE session = ? AND line = ?"
        return [text for (text,) in history.execute(query, (session, number))]


def record_cells(telemetry: TelemetryStore, closed: Callable[[], bool]) -> None:
    """From a notebook: add the cells that this kernel has run, and each one that it will run, as events "cell", until
    the workbench is closed; the cell that closes it is the last. Elsewhere: nothing.
    """
    shell = ipython_shell()
    if shell is None or getattr(shell, "kernel", None) is None:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    history = _History.of(shell)
    for cell in history.cells:
        telemetry.append_event("cell", **asdict(cell))
    history.followers.append((telemetry, closed))


class _History:
    """All cells of this kernel, and who wants to know of them."""

    _one: _History | None = None

    def __init__(self, shell: Any) -> None:
        self.kernel = f"{os.getpid()}-{shell.history_manager.session_number}"
        texts = list(shell.history_manager.input_hist_raw[1:-1])  # the last one is under way
        failed = failed_cells()
        self.cells = [
            RunCell.of(self.kernel, n, "", text, n not in failed, failed.get(n))
            for n, text in enumerate(texts, 1)
            if text
        ]
        self.followers: list[tuple[TelemetryStore, Callable[[], bool]]] = []
        shell.events.register("post_run_cell", self._ran)

    @classmethod
    def of(cls, shell: Any) -> _History:
        if cls._one is None:
            cls._one = cls(shell)
        return cls._one

    def _ran(self, result: Any) -> None:
        with suppress(KeyboardInterrupt), uninterrupted():  # the cell is over: there is nothing left to interrupt
            self._note(result)

    def _note(self, result: Any) -> None:
        loaded.note()
        info = result.info
        if not getattr(info, "store_history", True) or not str(info.raw_cell).strip():
            return
        cell = RunCell.of(
            self.kernel, int(result.execution_count or 0), str(info.cell_id or ""), info.raw_cell, bool(result.success),
            failed_position(result.error_in_exec),
        )  # fmt: skip
        self.cells.append(cell)
        for telemetry, _ in self.followers:
            try:
                telemetry.append_event("cell", **asdict(cell))
            except OSError:  # a run folder that was deleted
                continue
        self.followers = [follower for follower in self.followers if not follower[1]()]
