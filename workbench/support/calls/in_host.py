"""Calls of a user's functions in their host: for a debugger, and for functions that cannot leave it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.errors.plain_text import said
from workbench.support.calls.outcomes import Failed, Left
from workbench.support.calls.server import WrongValue, call
from workbench.support.calls.session import Session

Work = tuple[int, Callable[..., Any], Callable[..., Any], Sequence[Any]]


class InHost(Session):
    """A session in threads of this process. A call past its time limit is abandoned: Python cannot end a thread, and
    another takes its place.

    threads: False calls in the thread of `poll`. raises: one call after the other, without a time limit, and what
    functions raise is raised as it is; without threads it is so too.
    """

    def __init__(
        self, function: Any, loop: asyncio.AbstractEventLoop, *, threads: bool = True, raises: bool = False
    ) -> None:
        self._function, self._loop, self._threads, self._raises = function, loop, threads, raises
        self._state: dict[Any, Any] = {}
        self.alive = True
        self._forget()

    def _forget(self) -> None:
        """Begin anew: threads of before keep what they had, and nobody reads it."""
        self._calls = _Calls(self._function, self._state, self._loop)
        self._left = set[int]()

    def submit(
        self,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Mapping[int, Sequence[Any]],
        *,
        concurrency: int,
    ) -> None:
        self._left |= calls.keys()
        self._calls.work.extend((i, invoke, finish, arguments) for i, arguments in calls.items())
        if self._threads:
            self._calls.serve(1 if self._raises else concurrency)

    def poll(self, wait_s: float, timeout_s: float, done: Callable[[int, Any], None], failed: Failed) -> None:
        if not self._threads:
            while self._calls.work:
                work = self._calls.work.popleft()
                self._left.discard(i := work[0])
                try:
                    value = self._calls.made(work)
                except WrongValue as problem:
                    failed(i, str(problem))
                else:
                    done(i, value)
            return
        for i in self._calls.late(math.inf if self._raises else timeout_s):
            self._left.discard(i)
            failed(
                i,
                f"took more than {timeout_s:g} s",
                "call_timeout_s is the limit of one call",
                "raise call_timeout_s, or mend the function: in its host (own_process=False) it goes on taking "
                "a core until it returns",
            )
        with contextlib.suppress(queue.Empty):
            while True:
                i, value, error = self._calls.finished.get(block=wait_s > 0, timeout=wait_s)
                wait_s = 0.0
                if i not in self._left:  # it ended just when its time was over
                    continue
                self._left.discard(i)
                if isinstance(error, WrongValue):
                    failed(i, str(error))
                elif error is not None and self._raises:
                    raise error
                elif error is not None:
                    failed(i, f"raised {type(error).__name__}: {said(error)}", cause=error)
                else:
                    done(i, value)

    def excuse(self, calls: Iterable[int], seconds: float) -> None:
        self._calls.excuse(calls, seconds)

    def abandon(self, done: Callable[[int, Any], None] = lambda i, value: None) -> None:
        self._calls.work.clear()
        self._forget()

    @property
    def busy(self) -> bool:
        return bool(self._left)

    @property
    def left(self) -> Left:
        return Left(tuple(sorted(self._left)))


class _Calls:
    """Calls that threads make, and what came of them."""

    def __init__(self, function: Any, state: dict[Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._with = function, state
        self._loop = loop
        self.work: deque[Work] = deque()
        self.finished: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._open_since_s: dict[int, float] = {}
        self._given_up: set[int] = set()
        self._serving, self._concurrency = 0, 0
        self._changing = threading.Lock()

    def made(self, work: Work) -> Any:
        _, invoke, finish, arguments = work
        return call(invoke, finish, *self._with, arguments, self._loop)

    def serve(self, concurrency: int) -> None:
        """Start threads that make the calls, at most `concurrency` at the same time."""
        self._concurrency = concurrency
        with self._changing:
            begin = max(0, min(concurrency - self._serving, len(self.work)))
            self._serving += begin
        for _ in range(begin):
            threading.Thread(target=self._serve, daemon=True, name="user call").start()

    def late(self, timeout_s: float) -> list[int]:
        """The calls that have run for longer than this: they are given up."""
        now_s = time.monotonic()
        with self._changing:
            late = [i for i, begun_s in self._open_since_s.items() if now_s - begun_s > timeout_s]
            for i in late:
                del self._open_since_s[i]
                self._given_up.add(i)
                self._serving -= 1
        if late:
            self.serve(self._concurrency)
        return late

    def excuse(self, calls: Iterable[int], seconds: float) -> None:
        with self._changing:
            for i in set(calls) & self._open_since_s.keys():
                self._open_since_s[i] += seconds

    def _serve(self) -> None:
        while True:
            with self._changing:
                if not self.work:
                    self._serving -= 1
                    return
                work = self.work.popleft()
                self._open_since_s[i := work[0]] = time.monotonic()
            try:
                result: tuple[int, Any, BaseException | None] = (i, self.made(work), None)
            except BaseException as error:
                result = (i, None, error)
            with self._changing:
                if i in self._given_up:  # another thread goes on in place of this one
                    self._given_up.discard(i)
                    return
                self._open_since_s.pop(i, None)
            self.finished.put(result)
