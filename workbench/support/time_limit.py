"""A time limit for code that runs in this process, such as a chat template or a tool."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import time
from collections.abc import Iterator

TICK_S = 0.25


class TooLong(BaseException):
    """Raised in a thread whose time is over. The thread's code does not catch it with `except Exception`."""


class _TimeLimit:
    """Limits Python code in this process. It cannot stop code that does not return to Python, such as one power of huge
    numbers. One thread watches all limits, so that a limit costs a microsecond."""

    def __init__(self) -> None:
        # by thread, because a new thread may get the number of an ended one
        self._deadlines: dict[threading.Thread, float] = {}
        self._passed: set[threading.Thread] = set()
        self._changing, self._used = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def __call__(self, seconds: float) -> Iterator[None]:
        """Inside, raise `TooLong` in this thread after `seconds`. Limits do not nest."""
        thread = threading.current_thread()
        with self._changing:
            self._deadlines[thread] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, daemon=True, name="time limits")
                self._thread.start()
        self._used.set()
        try:
            yield
        finally:
            with self._changing:
                self._deadlines.pop(thread, None)
                late = thread in self._passed
                self._passed.discard(thread)
            for _ in range(1000 * late):  # a pending exception is raised at a jump backwards: here, and not later
                pass

    def end(self, thread: threading.Thread) -> None:
        """Raise `TooLong` in that thread now, if it has a limit."""
        with self._changing:
            if thread in self._deadlines:
                self._deadlines[thread] = -math.inf

    def _watch(self) -> None:
        while True:
            self._used.wait()
            time.sleep(TICK_S)
            with self._changing:
                now_s = time.monotonic()
                for thread in [thread for thread, end_s in self._deadlines.items() if now_s > end_s]:
                    del self._deadlines[thread]
                    self._passed.add(thread)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TooLong)
                    )
                if not self._deadlines:
                    self._used.clear()


time_limit = _TimeLimit()
