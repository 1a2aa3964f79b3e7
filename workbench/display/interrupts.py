"""What an interrupt of the cell does: at once what it always does, when a step is over, or what a stage makes of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.errors import StageInterrupted


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, an interrupt is kept until the end, and handled there as it would have been before; or by the first
    `on_interrupt` inside. Also a decorator.

    For steps that, half done, could not be gone back on.
    """
    if threading.current_thread() is not threading.main_thread():  # others are never interrupted
        yield
        return
    keep = _Keep()
    before = signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    for given in keep:
        if not callable(before):
            raise KeyboardInterrupt
        before(*given)


@contextmanager
def stoppable(what: str, left: Callable[[], tuple[str, str]] | tuple[str, str]) -> Iterator[None]:
    """Inside, an interrupt is raised as `StageInterrupted`. Also a decorator: every call of the user that takes long is
    in one, and an inner one, which knows more, has the word.

    what: the call. left: in which state things are, and what to do next; a function is asked when it is known.
    """
    try:
        yield
    except KeyboardInterrupt:
        rule, remedy = left() if callable(left) else left
        raise StageInterrupted(f"{what} was interrupted", rule, remedy) from None


class _Keep(list[tuple[Any, ...]]):
    """A handler that keeps the interrupts that came."""

    def __call__(self, *given: Any) -> None:
        self.append(given)


class Presses:
    """How often an interrupt came."""

    count = 0


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[Presses]:
    """Inside, the first interrupt calls `act`, in this thread, and nothing is raised; the second is an interrupt."""
    presses = Presses()
    if threading.current_thread() is not threading.main_thread():
        yield presses
        return

    def press(number: int, frame: Any) -> None:
        presses.count += 1
        if presses.count > 1:
            raise KeyboardInterrupt
        act()

    before = signal.signal(signal.SIGINT, press)
    try:
        if isinstance(before, _Keep) and before:  # it came shortly before this
            press(*before.pop())
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
