"""Calls of a user's functions in their host: for a debugger, and for functions that cannot leave it."""

from __future__ import annotations

import asyncio
import copy
import queue
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from workbench.errors.plain_text import said
from workbench.support.calls.server import Calls, Work, WrongValue


class InHost:
    """Takes the place of a `CallProcess`. A call past its time limit is given up: Python cannot end a thread, and
    another takes its place.

    threads: False makes the calls in the thread that receives, and raises what they raise. raises: does so with one
    thread, without a time limit.
    """

    def __init__(self, function: Any, loop: asyncio.AbstractEventLoop, *, threads: bool, raises: bool) -> None:
        self._told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._calls = Calls(function, lambda *message: self._told.put(message), loop)
        self._threads, self.raises = threads, raises
        self._work: deque[Work] = deque()
        self._told.put(("ready",))

    def add(self, work: Sequence[Work], concurrency: int | None, name: str) -> None:
        """Begin calls, each with values of its own: a function may change them, and be called again."""
        work = [(*how, [_copied(value) for value in arguments]) for *how, arguments in work]  # type: ignore[misc]
        if self._threads:
            self._calls.add(work, 1 if self.raises else concurrency)
        else:
            self._work.extend(work)

    def end(self) -> None:
        """Begin no further call, and tell nothing more of those under way."""
        self._work.clear()
        self._calls.stop()
        self._calls.give_up()
        self._told = queue.SimpleQueue()

    def give_up(self, calls: Collection[int]) -> list[int]:
        """See `Calls.give_up`."""
        return self._calls.give_up(calls)

    def receive(self, wait_s: float) -> tuple[Any, ...] | None:
        """The next message; None where none has come in this time."""
        if self._work:
            work = self._work.popleft()
            try:
                return "done", work[0], self._calls.make(work)
            except WrongValue as problem:
                return "wrong", work[0], str(problem)
        try:
            name, *rest = self._told.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None
        if name == "raised":
            i, error = rest
            if self.raises:
                raise error
            rest = [i, (f"{type(error).__name__}: {said(error)}", error, False)]
        return name, *rest


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # it holds what cannot be copied, such as a lock
        return value
