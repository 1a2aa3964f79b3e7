"""Steps that, half done, could not be gone back on: an interrupt of the cell waits until they are over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, an interrupt is kept until the end, and raised there. Also a decorator."""
    if threading.current_thread() is not threading.main_thread():  # others are never interrupted
        yield
        return
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
