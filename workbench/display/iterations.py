"""How far a loop is: on a terminal one line before those of its stages, in a script's log a line an iteration."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TextIO

from workbench.display.headlines import headlines
from workbench.display.html import seconds_text
from workbench.display.progress import TerminalLine, is_logged, line


class Iterations:
    """Shows how far a loop of `total` iterations is, how long the rest takes, and what the newest one's metrics are.

        with Iterations("PPO", 20) as shown:
            for _ in range(20):
                shown.done(iterate())

    The line of a terminal stays when the loop is over. In a notebook, whose panel shows it, there is none, nor in a
    thread of a panel's.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.finished = label, total, 0
        self._clock, self._start_s, self._values = clock, clock(), ""
        self._stream = sys.stderr if stream is None else stream
        here = line(stream)
        self._line = here if isinstance(here, TerminalLine) else None
        self._is_logged = here is None and is_logged()

    def __enter__(self) -> Iterations:
        self._start_s = self._clock()
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.head("")
            print(self.text(), file=self._stream, flush=True)

    def done(self, metrics: Mapping[str, float]) -> None:
        """One more iteration is over, with these metrics as {"stage/metric": value}."""
        self.finished += 1
        self._values = headlines(metrics)
        self._show()
        if self._is_logged:
            print(self.text(), file=self._stream, flush=True)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, the line is away: what the caller does there may print."""
        if self._line is not None:
            self._line.head("")
        yield
        self._show()

    def text(self) -> str:
        """The line: iterations that are over, of how many; the time that it took or that is left; values. The time left
        supposes that the rest goes as fast as what is done."""
        elapsed_s = self._clock() - self._start_s
        parts = [self.label, f"{self.finished}/{self.total}"]
        if 0 < self.finished < self.total:
            parts.append(f"~{seconds_text(elapsed_s / self.finished * (self.total - self.finished))} left")
        elif self.finished:
            parts.append(seconds_text(elapsed_s))
        return "  ".join(filter(None, (*parts, self._values)))

    def _show(self) -> None:
        if self._line is not None:
            self._line.head(self.text())
