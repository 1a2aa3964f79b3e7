"""A function of a user in use: its calls are submitted, and polled for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from workbench.support.calls.in_host import InHost
from workbench.support.calls.process import CallProcess, ProcessEnded
from workbench.support.calls.server import HANDLERS, NO_HANDLER

TICK_S = 0.05
GRACE_S = 2.0  # for calls under way, when others have failed
ANSWER_S = 1.0  # for a process in which a call is late
LOAD_TIMEOUT_S = 120.0  # for the modules that a function imports


# failed(i, what, rule="", remedy="", *, cause=None): call i failed. It may raise: then no further call is begun.
Failed = Callable[..., None]
Done = Callable[[int, Any], None]


class Session:
    """A function in use, with a state that its calls share.

    A call i is `finish(invoke(function, state, *calls[i]), *calls[i])`. invoke: a function of a module; it may give a
    coroutine, which is awaited. finish: raises `WrongValue` for what must not be returned.

    alive: False once its process was killed; then it takes no further calls. begun: the calls that were under way at
    that time, where any of them may be the cause. Make them again one at a time: then the cause fails, and it alone.
    memory_rule: the limit that a `MemoryError` is about.
    """

    def __init__(self, peer: CallProcess | InHost, name: str, memory_rule: str = "") -> None:
        self._peer, self._name, self._memory_rule = peer, name, memory_rule
        self._calls: dict[int, Sequence[Any]] = {}  # those that have not ended
        self._new: list[tuple[int, Callable[..., Any], Callable[..., Any]]] = []
        self._open: dict[int, float] = {}  # those under way, and since when
        self._concurrency: int | None = 1
        self._heard_s = time.monotonic()
        self._asked_s: float | None = None  # when the process was asked whether it answers
        self._answered = self._ready = self._stopped = False
        self.alive = True
        self.begun: tuple[int, ...] = ()

    def submit(
        self, invoke: Callable[..., Any], finish: Callable[..., Any], calls: Mapping[int, Sequence[Any]], *,
        concurrency: int | None,
    ) -> None:  # fmt: skip
        """Have calls made, under numbers that no open one has, without waiting for them.

        concurrency: calls at the same time, in threads (for functions that wait on a network or a sandbox); one at a
        time, in the main thread of the process. None: `async def` functions eight at a time, others one.
        """
        if not self._calls:
            self._heard_s = time.monotonic()
        self._calls.update(calls)
        self._new += [(i, invoke, finish) for i in calls]
        self._concurrency = concurrency

    def poll(self, wait_s: float, timeout_s: float, done: Done, failed: Failed) -> None:
        """Tell of calls that have ended, in any order and in this thread: `done(i, value)`; or `failed(i, ...)` for one
        that raised, returned a wrong value or passed a limit. Waits until one has ended, or the time is over.

        timeout_s: for one call. Where the process had to be killed, `alive` is false. Raises `BadInput`, which names
        the column, for arguments that cannot be sent.
        """
        self._send_new()
        until_s = time.monotonic() + wait_s + TICK_S
        try:
            while self.alive and (message := self._peer.receive(wait_s)) is not None:
                self._handle(message, done, failed)
                wait_s = 0.0
                if time.monotonic() > until_s:
                    break
            if self._calls and self.alive:
                self._check_time(timeout_s, failed)
        except ProcessEnded as problem:
            self._kill()
            if not self._ready:
                self._fail_all(failed, f"cannot be loaded: its process {problem}")
            else:
                self._blame(failed, str(problem), "a function raises, or returns its value", "mend the function")

    def _send_new(self) -> None:
        if self._new:
            new, self._new = self._new, []
            self._peer.add([(*how, self._calls[how[0]]) for how in new], self._concurrency, self._name)

    def _handle(self, message: tuple[Any, ...], done: Done, failed: Failed) -> None:
        name, *rest = message
        self._heard_s = time.monotonic()
        if name == "begun":
            self._open[rest[0]] = self._heard_s
        elif name == "done":
            self._drop(rest[:1])
            done(*rest)
        elif name == "wrong":
            self._drop(rest[:1])
            failed(*rest, *(HANDLERS if rest[1] == NO_HANDLER else ()))
        elif name == "raised":
            i, (text, cause, no_memory) = rest
            if no_memory:  # others may have taken it
                self._kill()
                remedy = "raise the limit, or mend the function"
                self._blame(failed, f"raised {text}", self._memory_rule, remedy, cause)
            else:
                self._drop([i])
                failed(i, f"raised {text}", cause=cause)
        elif name == "print":
            print(rest[1], end="", file=getattr(sys, rest[0]))
        elif name == "ready":
            self._ready = True
        elif name == "pong":
            self._answered = True
        elif name == "stopped":
            self._stopped = True
        elif name == "unloadable":
            self._kill()
            text, cause, _ = rest[0]
            self._fail_all(failed, f"cannot be loaded in its process: {text}", cause)

    def _check_time(self, timeout_s: float, failed: Failed) -> None:
        now_s = time.monotonic()
        if not self._open and now_s - self._heard_s > LOAD_TIMEOUT_S:
            self._kill()
            self._fail_all(failed, f"was not loaded in its process within {LOAD_TIMEOUT_S:g} s")
            return
        late = [i for i, begun_s in self._open.items() if now_s - begun_s > timeout_s]
        if not late:
            self._asked_s = None
            return
        what, rule = f"took more than {timeout_s:g} s", "call_timeout_s is the limit of one call"
        remedy = "write compute_reward(..., call_timeout_s=60), or wb.Sampling(call_timeout_s=60); or mend the function"
        if isinstance(self._peer, InHost):
            if not self._peer.raises:
                remedy += ": in its host (own_process=False) it goes on taking a core until it returns"
                self._fail(self._peer.give_up(late), failed, what, rule, remedy)
            return
        if self._asked_s is None:
            self._asked_s, self._answered = now_s, False
            self._peer.send("ping")
        answers = self._answered or len(self._open) == 1
        if answers or now_s - self._asked_s > ANSWER_S:
            self._kill()
            remedy += "; its process was killed"
            if answers:  # the other calls could go on, so each late one waits for something of its own
                self._fail(late, failed, what, rule, remedy)
            else:  # one of the calls holds Python's lock or the event loop
                self._blame(failed, what, rule, remedy)

    def _blame(self, failed: Failed, what: str, rule: str, remedy: str, cause: BaseException | None = None) -> None:
        """The process was killed for one of the calls under way: it fails where it was the only one. Where there was
        none, ended calls left the cause behind: the first that waits fails, so that each process ends a call."""
        if len(self._open) > 1:
            self.begun = tuple(self._open)
        else:
            self._fail(list(self._open) or sorted(self._calls)[:1], failed, what, rule, remedy, cause)

    def _fail_all(self, failed: Failed, what: str, cause: BaseException | None = None) -> None:
        rule, remedy = "its process imports the modules that it uses", "mend what they do when they are imported"
        self._fail(sorted(self._calls), failed, what, rule, remedy, cause)

    def _fail(
        self, calls: Sequence[int], failed: Failed, what: str, rule: str, remedy: str,
        cause: BaseException | None = None,
    ) -> None:  # fmt: skip
        self._drop(calls)
        for i in calls:
            failed(i, what, rule, remedy, cause=cause)

    def _drop(self, calls: Iterable[int]) -> None:
        """These calls have ended."""
        for i in calls:
            self._calls.pop(i, None)
            self._open.pop(i, None)

    def excuse(self, calls: Iterable[int], seconds: float) -> None:
        """Count this time as none of these calls: they waited for their caller."""
        for i in set(calls) & self._open.keys():
            self._open[i] += seconds

    def abandon(self, done: Done = lambda i, value: None) -> None:
        """Begin no further call. Those under way have two seconds to end; their process is killed where they do not."""
        self._new = []
        try:
            if isinstance(self._peer, InHost):
                self._peer.end()
            else:
                self._wait_for_end(self._peer, done)
        finally:
            self._calls, self._open = {}, {}

    def _wait_for_end(self, process: CallProcess, done: Done) -> None:
        self._stopped, deadline_s = False, time.monotonic() + GRACE_S
        try:
            process.send("stop")
            while self.alive and (self._open or not self._stopped) and time.monotonic() < deadline_s:
                if (message := process.receive(0.01)) is not None:
                    self._handle(message, done, lambda *what, **more: None)
        except ProcessEnded:
            pass
        finally:
            if self._open or not self._stopped:
                self._kill()

    def _kill(self) -> None:
        self.alive = False
        self._peer.end()

    def each(
        self, invoke: Callable[..., Any], finish: Callable[..., Any], calls: Mapping[int, Sequence[Any]], *,
        concurrency: int | None, timeout_s: float, done: Done, failed: Failed, tick: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Make calls until each has ended. Where the process is killed: `begun`, and the other calls that are left.

        tick: called twenty times a second; it may raise, as `failed` may. Then the calls are abandoned.
        """
        self.submit(invoke, finish, calls, concurrency=concurrency)
        next_tick_s = 0.0
        try:
            while self._calls and self.alive:
                self.poll(TICK_S, timeout_s, done, failed)
                if self._calls and self.alive and (now_s := time.monotonic()) >= next_tick_s:
                    tick()
                    next_tick_s = now_s + TICK_S
        finally:
            if self._calls and self.alive:
                self.abandon(done)
        return list(self.begun), sorted(self._calls.keys() - set(self.begun))
