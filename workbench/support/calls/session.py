"""A function of a user in use: its calls are submitted, and polled for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.support.calls.outcomes import Failed, Left

TICK_S = 0.05


class Session(ABC):
    """A function in use, with a state that its calls share.

    A call i is `finish(invoke(function, state, *calls[i]), *calls[i])`. invoke: a function of a module; it may give a
    coroutine, which is awaited. finish: raises `WrongValue` for what must not be returned.

    alive: whether it takes further calls; not after its process was killed.
    """

    alive: bool

    @abstractmethod
    def submit(
        self,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Mapping[int, Sequence[Any]],
        *,
        concurrency: int,
    ) -> None:
        """Have calls made, under numbers that no open one has, without waiting for them.

        concurrency: calls at the same time, in threads (for functions that wait on a network or a sandbox).
        """

    @abstractmethod
    def poll(self, wait_s: float, timeout_s: float, done: Callable[[int, Any], None], failed: Failed) -> None:
        """Tell of calls that have ended, in any order and in this thread: `done(i, value)`; or `failed(i, ...)` for one
        that raised, returned a wrong value or passed a limit. Waits until one has ended, or the time is over.

        Others go on, but for those whose process had to be killed: they are `left`. timeout_s: for one call. Raises
        `BadInput`, which names the column, for arguments that cannot be sent.
        """

    @abstractmethod
    def excuse(self, calls: Iterable[int], seconds: float) -> None:
        """Count this time as none of these calls: they waited for their caller."""

    @abstractmethod
    def abandon(self, done: Callable[[int, Any], None] = lambda i, value: None) -> None:
        """Begin no further call. Those under way have two seconds to end; their process is killed where they do not."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether calls have not ended."""

    @property
    @abstractmethod
    def left(self) -> Left:
        """The calls that have not ended."""

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
        """Make calls until each has ended or is left.

        tick: called twenty times a second; it may raise, as `failed` may. Then the calls are abandoned.
        """
        self.submit(invoke, finish, dict(enumerate(calls)), concurrency=concurrency)
        next_tick_s = 0.0
        try:
            while self.busy and self.alive:
                self.poll(TICK_S, timeout_s, done, failed)
                if self.busy and self.alive and (now_s := time.monotonic()) >= next_tick_s:
                    tick()
                    next_tick_s = now_s + TICK_S
        finally:
            if self.busy and self.alive:
                self.abandon(done)
        return self.left
