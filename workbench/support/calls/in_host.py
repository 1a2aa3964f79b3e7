"""Calls of a user's functions in their host: for a debugger, and for functions that cannot leave it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.errors.plain_text import plain_text
from workbench.support.calls.outcomes import Failed, Left
from workbench.support.calls.server import WrongValue, call


class InHost:
    """A session, see `workbench.support.calls.sessions.Session`, in threads of this process. A call past its time limit
    is abandoned: Python cannot end a thread, and another takes its place.

    threads: False calls in the thread of `each`, one after the other, without a time limit, and what functions raise is
    raised as it is.
    """

    alive = True

    def __init__(self, function: Any, loop: asyncio.AbstractEventLoop, *, threads: bool) -> None:
        self._function, self._loop, self._threads = function, loop, threads
        self._state: dict[Any, Any] = {}

    def each(
        self,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Sequence[Sequence[Any]],
        *,
        concurrency: int,
        timeout_s: float,
        done: Callable[[int, Any], None],
        failed: Failed,
        tick: Callable[[], None] = lambda: None,
    ) -> Left:
        call_one = partial(call, invoke, finish, self._function, self._state)
        if not self._threads:
            for i, arguments in enumerate(calls):
                try:
                    done(i, call_one(arguments, self._loop))
                except WrongValue as problem:
                    failed(i, str(problem))
            return Left()
        work: queue.SimpleQueue[int] = queue.SimpleQueue()
        finished: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        open_since_s: dict[int, float] = {}
        late: set[int] = set()
        stop = threading.Event()
        for i in range(len(calls)):
            work.put(i)

        def serve() -> None:
            while not stop.is_set():
                try:
                    i = work.get_nowait()
                except queue.Empty:
                    return
                open_since_s[i] = time.monotonic()
                try:
                    result: tuple[int, Any, BaseException | None] = (i, call_one(calls[i], self._loop), None)
                except BaseException as error:
                    result = (i, None, error)
                open_since_s.pop(i, None)
                if i in late:  # another thread goes on in place of this one
                    return
                finished.put(result)

        def begin() -> None:
            threading.Thread(target=serve, daemon=True, name="user call").start()

        for _ in range(min(concurrency, len(calls))):
            begin()
        left = set(range(len(calls)))
        try:
            while left:
                now_s = time.monotonic()
                for i in [i for i, begun_s in list(open_since_s.items()) if now_s - begun_s > timeout_s]:
                    late.add(i)
                    open_since_s.pop(i, None)
                    left.discard(i)
                    failed(
                        i,
                        f"took more than {timeout_s:g} s",
                        "call_timeout_s is the limit of one call",
                        "raise call_timeout_s, or mend the function: in its host (own_process=False) it goes on taking "
                        "a core until it returns",
                    )
                    begin()
                try:
                    i, value, error = finished.get(timeout=0.05)
                except queue.Empty:
                    tick()
                    continue
                if i not in left:  # it ended just when its time was over
                    continue
                left.discard(i)
                if isinstance(error, WrongValue):
                    failed(i, str(error))
                elif error is not None:
                    failed(i, f"raised {type(error).__name__}: {plain_text(str(error))}", cause=error)
                else:
                    done(i, value)
        finally:
            stop.set()
        return Left()
