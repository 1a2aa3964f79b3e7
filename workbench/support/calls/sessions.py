"""Calls of a user's functions: several at a time, each with a time limit, in a process that can be killed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.errors import BadInput, StageError
from workbench.errors.frames import RaisedElsewhere
from workbench.errors.plain_text import plain_text
from workbench.support.calls.in_host import InHost
from workbench.support.calls.limits import limits_of
from workbench.support.calls.pickling import by_value, name_of, packed_rows, pickled, values_of
from workbench.support.calls.process import CallProcess, LimitPassed, ProcessEnded
from workbench.support.calls.server import event_loop, random_states, set_random_states

TICK_S = 0.05
OF_CALLS = ("begun", "done", "wrong", "raised")  # messages about one call, which is named by a number and its row
_numbers = itertools.count()  # one for the calls of each stage, so that no late answer passes for one of a later stage
GRACE_S = 2.0  # for calls under way, when others have failed
END_TIMEOUT_S = 5.0
LOAD_TIMEOUT_S = 120.0  # for the modules that a function imports
MOST_FUNCTIONS = 8  # that a process keeps
Texts = Mapping[str, tuple[str, str]]  # of modules: file, text

_in_place = False


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """Inside, functions are called in their host's own thread, one after the other, without limits, and what they
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


class Session(Protocol):
    """A function in use, with a state that its calls share.

    alive: whether it takes further calls; not after its process was killed.
    """

    alive: bool

    def each(
        self,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Sequence[Sequence[Any]],
        *,
        concurrency: int,
        timeout_s: float,
        done: Callable[[int, Any], None],
        fail: Fail,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`finish(invoke(function, state, *calls[i]), *calls[i])` for each i, and `done(i, value)` in this thread as
        they finish, in any order.

        invoke: a function of a module; it may give a coroutine, which is awaited. finish: raises `WrongValue` for what
        must not be returned. concurrency: calls at the same time, in threads (for functions that wait on a network or a
        sandbox). timeout_s: for one call. tick: called twenty times a second.
        Raises `fail(i, ...)` for the first call that raises, returns a wrong value, or passes a limit; no further one
        is begun. Those under way have half a second to end; then, as where a limit is passed, the process is killed.
        """
        ...


class UserCalls:
    """The process of the functions of one role on one host. It starts when it is needed, and is kept with what the
    functions keep in it, until a limit is passed, edited code is loaded, or a function comes with other limits.

    texts: of modules that the host runs and that are no longer what their files say.
    """

    _edits = 0  # of this process's code

    def __init__(self, texts: Callable[[], Texts] = dict) -> None:
        self._texts = texts
        self._process: CallProcess | None = None
        self._made_for: tuple[Any, ...] = ()
        self._loaded: dict[str, None] = {}

    @classmethod
    def code_changed(cls) -> None:
        """Let no process go on that has imported code which its host has replaced since."""
        cls._edits += 1

    def prepare(self, function: Any) -> None:
        """Start the process and send it a function, without waiting for it."""
        if limits_of(function).own_process:
            with contextlib.suppress(BadInput, ProcessEnded):  # the first call says what is wrong
                self._with(function)

    @contextlib.contextmanager
    def session(self, function: Any) -> Iterator[Session]:
        """A function in use. Raises `BadInput` for one that cannot be sent to a process, `StageError` where that ends
        before it takes the function."""
        if _in_place or not limits_of(function).own_process:
            with event_loop() as loop:
                yield InHost(function, loop, threads=not _in_place)
            return
        try:
            process, key = self._with(function)
            process.send("begin", key, random_states())
        except ProcessEnded as problem:
            self.close()
            raise StageError(
                f"{name_of(function)}: its process {problem}", "it imports the modules that the function uses",
                "look at what its host has printed, and mend these modules",
            ) from None  # fmt: skip
        except KeyboardInterrupt:  # half a message may be on its way
            self.close()
            raise
        session = _Isolated(process, name_of(function))
        try:
            yield session
        finally:
            if session.alive:
                session.end()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _with(self, function: Any) -> tuple[CallProcess, str]:
        """A process that has a function, and its key there."""
        payload, limits = pickled(function), limits_of(function)
        torch = sys.modules.get("torch")
        threads = torch.get_num_threads() if torch is not None else 1
        made_for = limits, threads, self._edits
        if self._process is None or not self._process.alive or made_for != self._made_for:
            self.close()
            self._process = CallProcess(limits, threads=threads, texts=self._texts())
            self._made_for, self._loaded = made_for, {}
        key = hashlib.blake2b(payload, digest_size=16).hexdigest()
        if key not in self._loaded:
            if len(self._loaded) == MOST_FUNCTIONS:
                self._process.send("forget", oldest := next(iter(self._loaded)))
                del self._loaded[oldest]
            self._process.send("load", key, payload)
            self._loaded[key] = None
        return self._process, key


@dataclass
class _Call:
    """One that is under way. thread: for the system; ident: for Python."""

    begun_s: float
    thread: int
    ident: int


class _Isolated:
    """A session in a process."""

    def __init__(self, process: CallProcess, name: str) -> None:
        self._process, self._name = process, name
        self._open: dict[int, _Call] = {}
        self._number, self._unread = -1, deque[tuple[Any, ...]]()
        self._heard_s = time.monotonic()
        self._ready = False  # it has loaded the function, which may import much
        self.alive = True

    def each(
        self,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Sequence[Sequence[Any]],
        *,
        concurrency: int,
        timeout_s: float,
        done: Callable[[int, Any], None],
        fail: Fail,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        left, next_tick_s, self._heard_s = len(calls), 0.0, time.monotonic()
        self._number = next(_numbers)
        try:
            packed, sent = packed_rows(calls, self._name), False
            while left:
                if self._ready and not sent:
                    self._process.send("calls", invoke, finish, packed, concurrency, self._number)
                    sent = True
                self._unread.extend(self._process.receive(TICK_S))
                while self._unread:
                    message = self._unread.popleft()
                    if message[0] == "unreadable" and len(message) == 1:  # which of the values is it
                        values = [(i, column, by_value(value)) for i, column, value in values_of(calls)]
                        self._process.send("find_unreadable", values)
                    else:
                        left -= self._handle(message, done, fail)
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    tick()
                    self._process.watch()
                    self._check_time(timeout_s, fail)
                    next_tick_s = now_s + TICK_S
        except ProcessEnded as problem:
            raise self._ended(problem, fail) from None
        except LimitPassed as problem:
            self._kill()
            raise fail(
                next(iter(self._open), 0), f"is over a limit: its process {problem.what}", problem.rule,
                "raise the limit, or mend the function; its process was killed",
            ) from None  # fmt: skip
        finally:
            if left and self.alive:
                self._abandon()

    def end(self) -> None:
        """Let the process forget the state of the calls, and draw on where they have drawn."""
        deadline_s, ended = time.monotonic() + END_TIMEOUT_S, False
        try:
            self._process.send("end")
            while not ended and time.monotonic() < deadline_s:
                for name, *rest in self._process.receive(TICK_S):
                    if name == "ended":
                        set_random_states(rest[0])
                        ended = True
        except (ProcessEnded, LimitPassed):
            pass
        finally:  # an interrupt too: the next session must not get the answer to this one
            if not ended:
                self._kill()

    def _handle(self, message: tuple[Any, ...], done: Callable[[int, Any], None], fail: Fail) -> int:
        """Take in a message; how many calls it ends."""
        name, *rest = message
        self._heard_s = time.monotonic()
        if name in OF_CALLS:
            (number, i), *rest = rest
            if number != self._number:  # of a call of before, which was given up
                return 0
            rest = [i, *rest]
        if name == "begun":
            i, thread, ident = rest
            self._open[i] = _Call(time.monotonic(), thread, ident)
            return 0
        if name == "ready":
            self._ready = True
            return 0
        if name == "print":
            print(rest[1], end="", file=getattr(sys, rest[0]))
            return 0
        if name == "unloadable":
            kind, said, chain, _ = rest
            self._kill()
            raise fail(
                0, f"cannot be loaded in its process: {kind}: {said}", "its process imports the modules that it uses"
            ) from RaisedElsewhere(kind, said, chain)
        i, *rest = rest
        if name == "unreadable":
            column, kind, said, chain, _ = rest
            self._kill()
            raise fail(
                i, f"could not be given {column}: {kind}: {said}", "a row is sent to the function's process, pickled",
                "give it texts, numbers, lists, dicts, or objects whose modules its process can import",
            ) from RaisedElsewhere(kind, said, chain)  # fmt: skip
        del self._open[i]
        if name == "done":
            done(i, rest[0])
        elif name == "wrong":
            raise fail(i, rest[0])
        elif name == "raised":
            kind, said, chain, no_memory = rest
            rule = self._process.memory_rule if no_memory else ""
            remedy = "raise the limit, or mend the function" if no_memory else ""
            raise fail(i, f"raised {kind}: {said}", rule, remedy) from RaisedElsewhere(kind, said, chain)
        return 1

    def _check_time(self, timeout_s: float, fail: Fail) -> None:
        now_s = time.monotonic()
        if not self._open and now_s - self._heard_s > LOAD_TIMEOUT_S:
            self._kill()
            raise fail(
                0, f"was not loaded in its process within {LOAD_TIMEOUT_S:g} s",
                "its process imports the modules that it uses", "mend what they do when they are imported",
            )  # fmt: skip
        late = {i: call.thread for i, call in self._open.items() if now_s - call.begun_s > timeout_s}
        if late:
            i = self._process.busiest(late)
            self._kill()
            raise fail(
                i, f"took more than {timeout_s:g} s", "call_timeout_s is the limit of one call",
                "raise call_timeout_s, or mend the function; its process was killed",
            )  # fmt: skip

    def _ended(self, problem: ProcessEnded, fail: Fail) -> Exception:
        """The error for a process that is gone."""
        thread, frames = self._process.crashed_in()
        self._kill()
        under_way = list(self._open)
        i = next((i for i in under_way if self._open[i].ident == thread), next(iter(under_way), 0))
        others = len(under_way) - 1
        told = f", with {others} other calls under way," if thread is None and others > 0 else ""
        error = fail(i, f"{problem}{told}", "a function raises, or returns its value", "mend the function")
        if frames:
            error.add_note(plain_text(frames))
        return error

    def _abandon(self) -> None:
        """Begin no further call, and give those under way a moment to end; then kill the process."""
        stopped, deadline_s = False, time.monotonic() + GRACE_S
        try:
            self._process.send("stop")
            while (self._open or not stopped) and time.monotonic() < deadline_s:
                self._unread.extend(self._process.receive(0.01))
                while self._unread:
                    name, *rest = self._unread.popleft()
                    stopped = stopped or name == "stopped"
                    if name not in OF_CALLS or rest[0][0] != self._number:
                        continue
                    if name == "begun":
                        self._open[rest[0][1]] = _Call(time.monotonic(), *rest[1:])
                    else:
                        self._open.pop(rest[0][1], None)
        except (ProcessEnded, LimitPassed):
            pass
        finally:
            if self._open or not stopped:
                self._kill()

    def _kill(self) -> None:
        self.alive = False
        self._process.end()
