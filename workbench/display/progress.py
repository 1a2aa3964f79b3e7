"""One line of progress while the controller waits for a stage; quick stages show nothing.

Each process has one setting for how much it shows, see `show`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from workbench.display.headlines import headlines
from workbench.display.html import seconds_text
from workbench.support.notebook_cell import in_notebook

REFRESH_S = 0.25

Shown = Literal["changing", "logged", "nothing"]
_shown: Shown = "changing"
_heading = ""  # on a terminal, the start of each line: how far the loop is


def show(what: Shown) -> Shown:
    """Set how much this process shows, and return the setting before.

    "changing": one line that is written over (the default). "logged": where no line can be written over, plain lines
    instead. "nothing": no progress at all.
    """
    global _shown
    before, _shown = _shown, what
    return before


def is_quiet() -> bool:
    """Whether this process shows nothing."""
    return _shown == "nothing"


class TerminalLine:
    """A line that is overwritten in place; on exit the terminal is clean again."""

    def show(self, text: str) -> None:
        text = "  ".join(filter(None, (_heading, text)))
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be written over
        print(f"\r{text[:width]}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.show("")

    def head(self, text: str) -> None:
        """Show `text` before everything that the line shows from now on."""
        global _heading
        _heading = text
        self.show("")


class _NotebookLine:
    """A display that is updated in place and emptied at the end, so that a saved notebook holds no unfinished bar."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        from IPython.display import display

        if self._handle is None:
            bundle = {"text/plain": text}
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call,unused-ignore]
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


class Progress:
    """Shows how far a stage is, from `after_s` seconds on, at most four times a second; leaves nothing behind.

        with Progress("update_actor") as bar:
            bar.update(done=3, total=8, tokens=5120)

    In a notebook the line is a display, in a terminal a line on stderr; if stderr is a file or a pipe there is none.
    `unit` names the counted things. Call `update` as often as you like. `ticks`: a thread refreshes the line, for calls
    that block until they are done.
    """

    def __init__(self, label: str, *, unit: str = "micro-batches", after_s: float = 2.0, ticks: bool = False) -> None:
        self.label, self.unit, self.after_s, self._noted = label, unit, after_s, ""
        self._line = line()
        self._start_s = self._shown_s = time.monotonic()
        self._is_shown, self._ended = False, threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True) if ticks and self._line is not None else None

    def __enter__(self) -> Progress:
        self._start_s = time.monotonic()
        if self._thread is not None:
            self._thread.start()
        return self

    def _tick(self) -> None:
        while not self._ended.wait(REFRESH_S):
            self.update(0, 0)

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._line is not None and self._is_shown:
            self._line.clear()
        self._line = None  # a backend that was opened with `note` calls it when it starts hosts later, in another cell

    def note(self, text: str) -> None:
        """Show what it waits for, after its title."""
        self._noted = f": {text}"
        self.update(0, 0)

    def update(self, done: int, total: int, tokens: int = 0) -> None:
        """`done` of `total` units are finished (total 0: not known) and `tokens` tokens were processed so far."""
        now_s = time.monotonic()
        if self._line is None or now_s - self._start_s < self.after_s:
            return
        if self._is_shown and now_s - self._shown_s < REFRESH_S:
            return
        self._line.show(self.text(now_s - self._start_s, done, total, tokens))
        self._is_shown, self._shown_s = True, now_s

    def text(self, elapsed_s: float, done: int, total: int, tokens: int) -> str:
        """The line. The remaining time assumes that the rest takes as long per unit as the part that is done."""
        parts = [f"{self.label}{self._noted}"]
        if total:
            parts.append(f"{done:,}/{total:,} {self.unit}")
        if tokens:
            parts.append(f"{tokens / elapsed_s:,.0f} tokens/s")
        if 0 < done < total:
            left_s = elapsed_s / done * (total - done)
            parts.append(f"~{left_s:.0f} s left" if left_s < 59.5 else f"~{seconds_text(left_s)} left")
        else:
            parts.append(f"{elapsed_s:.0f} s so far")
        return "  ".join(parts)


def note(text: str) -> None:
    """Tell the user something: below the cell of a notebook, elsewhere on stderr, because stdout is for a script's
    result."""
    print(text, file=None if in_notebook() else sys.stderr)


def line() -> TerminalLine | _NotebookLine | None:
    """The line of this thread that can be overwritten, if any."""
    if is_quiet() or threading.current_thread() is not threading.main_thread():
        return None  # what a panel's thread runs shows in the panel
    if in_notebook():
        return _NotebookLine()
    return TerminalLine() if sys.stderr.isatty() else None


class Iterations:
    """Shows the progress of a loop of `total` iterations, the remaining time, and the newest metrics.

        with Iterations("PPO", 20) as shown:
            for _ in range(20):
                shown.done(iterate())

    In a terminal the line stays after the loop. A notebook has no line, because its panel shows the progress; neither
    has a panel's thread.
    """

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.finished = label, total, 0
        self._start_s, self._values = time.monotonic(), ""
        here = line()
        self._line = here if isinstance(here, TerminalLine) else None
        self._is_logged = here is None and _shown == "logged"

    def __enter__(self) -> Iterations:
        self._start_s = time.monotonic()
        self._show()
        return self

    def __exit__(self, *error: object) -> None:
        if self._line is not None:
            self._line.head("")
            print(self.text(), file=sys.stderr, flush=True)

    def done(self, metrics: Mapping[str, float]) -> None:
        """Count an iteration, with its metrics as {"stage/metric": value}."""
        self.finished += 1
        self._values = headlines(metrics)
        self._show()
        if self._is_logged:
            print(self.text(), file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the line inside this block, so that the caller can print."""
        if self._line is not None:
            self._line.head("")
        yield
        self._show()

    def text(self) -> str:
        """The line: finished iterations of the total; elapsed or remaining time; values. The remaining time assumes a
        constant speed."""
        elapsed_s = time.monotonic() - self._start_s
        parts = [self.label, f"{self.finished}/{self.total}"]
        if 0 < self.finished < self.total:
            parts.append(f"~{seconds_text(elapsed_s / self.finished * (self.total - self.finished))} left")
        elif self.finished:
            parts.append(seconds_text(elapsed_s))
        return "  ".join(filter(None, (*parts, self._values)))

    def _show(self) -> None:
        if self._line is not None:
            self._line.head(self.text())
