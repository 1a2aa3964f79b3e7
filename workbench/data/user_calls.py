"""Calls of a user's functions: several at a time, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in its own thread. Tasks that still run at the end are cancelled."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        loop.run_forever()
        late = asyncio.all_tasks(loop)  # past their time limit: a coroutine, unlike a thread, can be ended
        for task in late:
            task.cancel()
        if late:
            loop.run_until_complete(asyncio.wait(late))
        loop.close()

    thread = threading.Thread(target=serve, daemon=True, name="event loop of user calls")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=1)


_in_place = False


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Inside, `call_each` calls functions in its own thread, one after the other, without a time limit, and what they
    raise is raised as it is: so that a debugger can stop in them."""
    global _in_place
    _in_place, before = True, _in_place
    try:
        yield
    finally:
        _in_place = before


class Fail(Protocol):
    """Makes the error for call number i: what it did, the rule, the remedy."""

    def __call__(self, i: int, what: str, rule: str = "", remedy: str = "") -> Exception: ...


def call_each(
    calls: Sequence[Callable[[], Any]],
    *,
    concurrency: int,
    timeout_s: float,
    done: Callable[[int, Any], None],
    fail: Fail,
    loop: asyncio.AbstractEventLoop,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """`calls[i]()` for each i, and `done(i, value)` in this thread as they finish, in any order.

    concurrency: calls at the same time, in threads (for functions that wait on a network or a sandbox).
    timeout_s: for one call. After it the call is abandoned, because Python cannot end a thread.
    loop: runs the coroutines that calls return, see `event_loop`. tick: called while no call finishes.
    Raises `fail(i, ...)` for the first call that raises or runs out of time; no further one is begun.
    """
    if _in_place:
        for i, call in enumerate(calls):
            value = call()
            done(i, asyncio.run_coroutine_threadsafe(value, loop).result() if inspect.iscoroutine(value) else value)
        return
    work: queue.SimpleQueue[int] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    open_since_s: dict[int, float] = {}
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
                value = calls[i]()
                if inspect.iscoroutine(value):
                    value = asyncio.run_coroutine_threadsafe(value, loop).result()
                result: tuple[int, Any, BaseException | None] = (i, value, None)
            except BaseException as error:
                result = (i, None, error)
            del open_since_s[i]
            finished.put(result)

    for _ in range(min(concurrency, len(calls))):
        threading.Thread(target=serve, daemon=True, name="user call").start()
    left = len(calls)
    try:
        while left:
            now_s = time.monotonic()
            late = next((i for i, begun_s in list(open_since_s.items()) if now_s - begun_s > timeout_s), None)
            if late is not None:
                raise fail(
                    late,
                    f"took more than {timeout_s} s",
                    "call_timeout_s is the limit of one call",
                    "raise call_timeout_s, or mend the function: until it returns it goes on taking a core of its host",
                )
            try:
                i, value, error = finished.get(timeout=0.05)
            except queue.Empty:
                tick()
                continue
            if error is not None:
                raise fail(i, f"raised {type(error).__name__}: {error}") from error
            left -= 1
            done(i, value)
    finally:
        stop.set()


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function by name; None for a callable that does not say."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Those values of a row that a function takes by name: all of them where it has **, or does not say."""
    parameters = parameters_of(function)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(row)
    return {name: value for name, value in row.items() if name in parameters}


def short(text: str, characters: int = 80) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def finite_number(value: Any) -> float:
    """`value` as a finite float; `ValueError`, which says what was returned, for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"returned {value!r:.60}") from None
    except OverflowError:
        raise ValueError("returned a number that is too large for a float") from None
    if isinstance(value, str):
        raise ValueError(f"returned {value!r:.60}")
    if not math.isfinite(number):
        raise ValueError(f"returned {number}")
    return number
