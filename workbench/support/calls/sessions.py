"""Calls of a user's functions: several at a time, each with a time limit, in a process that can be killed."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import BadInput, StageError
from workbench.errors.frames import RaisedElsewhere
from workbench.errors.plain_text import plain_text
from workbench.support.calls.in_host import InHost
from workbench.support.calls.limits import limits_of
from workbench.support.calls.outcomes import Failed, Left
from workbench.support.calls.pickling import by_value, name_of, packed_rows, pickled, values_of
from workbench.support.calls.process import CallProcess, LimitPassed, ProcessEnded
from workbench.support.calls.server import event_loop, random_states, set_random_states
from workbench.support.calls.session import TICK_S, Session

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
    """Inside, functions are called in their host, one after the other, without limits, and what they raise is raised as
    it is: so that a debugger can stop in them. They have their host's own thread, unless they wait for it."""
    global _in_place
    _in_place, before = True, _in_place
    try:
        yield
    finally:
        _in_place = before


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
        self._beside: list[UserCalls] = []

    def processes(self, n: int) -> list[UserCalls]:
        """Calls in n processes, of which the first is this one. More that there were before end."""
        for one in self._beside[n - 1 :]:
            one.close()
        del self._beside[n - 1 :]
        self._beside += [UserCalls(self._texts) for _ in range(n - 1 - len(self._beside))]
        return [self, *self._beside]

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
    def session(self, function: Any, *, asks_host: bool = False) -> Iterator[Session]:
        """A function in use. asks_host: it waits for the thread that polls, and so has another one. Raises `BadInput`
        for one that cannot be sent to a process, `StageError` where that ends before it takes the function."""
        if _in_place or not limits_of(function).own_process:
            with event_loop() as loop:
                yield InHost(function, loop, threads=asks_host or not _in_place, raises=_in_place)
            return
        try:
            process, key = self._with(function)
            process.send("begin", key, random_states())
        except ProcessEnded as problem:
            self._end()
            raise StageError(
                f"{name_of(function)}: its process {problem}", "it imports the modules that the function uses",
                "look at what its host has printed, and mend these modules",
            ) from None  # fmt: skip
        except KeyboardInterrupt:  # half a message may be on its way
            self._end()
            raise
        session = _Isolated(process, name_of(function))
        try:
            yield session
        finally:
            if session.alive:
                session.end()

    def close(self) -> None:
        """End the process, and those beside it."""
        for one in self._beside:
            one.close()
        self._end()

    def _end(self) -> None:
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
            self._end()
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


class _Isolated(Session):
    """A session in a process."""

    def __init__(self, process: CallProcess, name: str) -> None:
        self._process, self._name = process, name
        self._open: dict[int, _Call] = {}
        self._calls: dict[int, Sequence[Any]] = {}  # those that have not ended
        self._new: list[tuple[int, Callable[..., Any], Callable[..., Any]]] = []
        self._packed: list[tuple[Any, bytes, int]] = []
        self._suspects: list[int] = []
        self._why = ("", "", "")
        self._number, self._unread = next(_numbers), deque[tuple[Any, ...]]()
        self._heard_s, self._next_check_s = time.monotonic(), 0.0
        self._ready = False  # it has loaded the function, which may import much
        self.alive = True

    def submit(
        self,
        invoke: Callable[..., Any],
        finish: Callable[..., Any],
        calls: Mapping[int, Sequence[Any]],
        *,
        concurrency: int,
    ) -> None:
        if not self._calls:
            self._heard_s = time.monotonic()
        self._calls.update(calls)
        self._new += [(i, invoke, finish) for i in calls]
        self._concurrency = concurrency

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    @property
    def left(self) -> Left:
        return Left(tuple(sorted(self._calls)), tuple(self._suspects), self._why)

    def poll(self, wait_s: float, timeout_s: float, done: Callable[[int, Any], None], failed: Failed) -> None:
        gone: ProcessEnded | None = None
        try:
            try:
                self._send_new()
            except ProcessEnded as problem:  # what it said before tells which call ended it
                gone = problem
            while self.alive and (messages := self._process.receive(wait_s)):
                self._unread.extend(messages)
                while self._unread:
                    self._handle(self._unread.popleft(), done, failed)
                wait_s = 0.0
            if gone is not None:
                raise gone
            if self._calls and self.alive and (now_s := time.monotonic()) >= self._next_check_s:
                self._process.watch()
                self._check_time(timeout_s, failed)
                self._next_check_s = now_s + TICK_S
        except ProcessEnded as problem:
            thread, frames = self._process.crashed_in()
            self._kill()
            culprit = next((i for i, call in self._open.items() if call.ident == thread), None)
            self._blame(culprit, failed, str(problem), "a function raises, or returns its value", "mend the function",
                        plain_text(frames))  # fmt: skip
        except LimitPassed as problem:
            self._kill()
            if self._open or not self._process.ended_calls:  # else what calls left behind: a new process goes on
                self._blame(
                    None, failed, f"is over a limit: its process {problem.what}", problem.rule,
                    "raise the limit, or mend the function; its process was killed",
                    alone=not self._process.ended_calls,
                )  # fmt: skip
        if self._suspects and self.alive:
            self._kill()

    def _send_new(self) -> None:
        """Send the calls that were submitted, once there is a function to make them."""
        if self._new:
            packed = packed_rows([self._calls[i] for i, _, _ in self._new], self._name)
            self._packed.append((self._new, packed, self._concurrency))
            self._new = []
        while self._ready and self._packed:
            self._process.send("calls", self._number, *self._packed.pop(0))

    def _blame(
        self,
        culprit: int | None,
        failed: Failed,
        what: str,
        rule: str,
        remedy: str,
        note: str = "",
        *,
        alone: bool = True,
    ) -> None:
        """Say which call ended the process: `culprit`, or else the only call under way. Where several calls were under
        way, or calls that ended may have left something behind (`alone` is False), all under way are suspects, and none
        fails yet. Where no call was under way, the first of those that wait fails, so that each process ends a call."""
        under_way = list(self._open)
        if culprit is None and (len(under_way) > 1 or not alone):
            self._why = what, rule, remedy
            self._suspects += under_way
            self._drop(under_way)
            return
        culprit = (under_way or sorted(self._calls))[0] if culprit is None else culprit
        self._drop([culprit])
        failed(culprit, what, rule, remedy, note=note)

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

    def _handle(self, message: tuple[Any, ...], done: Callable[[int, Any], None], failed: Failed) -> None:
        """Take in a message."""
        name, *rest = message
        self._heard_s = time.monotonic()
        if name == "unreadable" and not rest:  # which of the values is it
            numbers = list(self._calls)
            values = [(numbers[n], column, by_value(v)) for n, column, v in values_of(list(self._calls.values()))]
            self._process.send("find_unreadable", values)
            return
        if name in OF_CALLS:
            (number, i), *rest = rest
            if number != self._number:  # of a call of before, which was given up
                return
            rest = [i, *rest]
        if name == "begun":
            i, thread, ident = rest
            self._open[i] = _Call(time.monotonic(), thread, ident)
            return
        if name == "ready":
            self._ready = True
            return
        if name == "print":
            print(rest[1], end="", file=getattr(sys, rest[0]))
            return
        if name == "unloadable":
            kind, said, chain, _ = rest
            self._kill()
            what = f"cannot be loaded in its process: {kind}: {said}"
            self._all_failed(
                failed, what, "its process imports the modules that it uses", RaisedElsewhere(kind, said, chain)
            )
            return
        i, *rest = rest
        if name == "unreadable":
            column, kind, said, chain, _ = rest
            self._kill()
            self._drop([i])
            failed(
                i, f"could not be given {column}: {kind}: {said}", "a row is sent to the function's process, pickled",
                "give it texts, numbers, lists, dicts, or objects whose modules its process can import",
                cause=RaisedElsewhere(kind, said, chain),
            )  # fmt: skip
            return
        del self._open[i]
        self._drop([i])
        self._process.ended_calls += 1
        if name == "done":
            done(i, rest[0])
        elif name == "wrong":
            failed(i, rest[0])
        elif name == "raised":
            kind, said, chain, no_memory = rest
            if no_memory and (self._open or self._process.ended_calls > 1):  # another may have taken it
                self._suspects.append(i)
                self._why = f"raised {kind}: {said}", self._process.memory_rule, "raise the limit, or mend the function"
                return
            rule = self._process.memory_rule if no_memory else ""
            remedy = "raise the limit, or mend the function" if no_memory else ""
            failed(i, f"raised {kind}: {said}", rule, remedy, cause=RaisedElsewhere(kind, said, chain))

    def _all_failed(self, failed: Failed, what: str, rule: str, cause: BaseException | None = None) -> None:
        """None of the calls can be made."""
        for i in sorted(self._calls):
            self._drop([i])
            failed(i, what, rule, "mend what they do when they are imported", cause=cause)

    def _check_time(self, timeout_s: float, failed: Failed) -> None:
        now_s = time.monotonic()
        if not self._open and now_s - self._heard_s > LOAD_TIMEOUT_S:
            self._kill()
            what = f"was not loaded in its process within {LOAD_TIMEOUT_S:g} s"
            self._all_failed(failed, what, "its process imports the modules that it uses")
            return
        late = {i: call.thread for i, call in self._open.items() if now_s - call.begun_s > timeout_s}
        if late:
            # one that computes may keep the others from going on; where none does, each waits for something of its own
            late = self._process.computing(late) or late
            self._kill()
            self._drop(late)
            for i in late:
                failed(
                    i, f"took more than {timeout_s:g} s", "call_timeout_s is the limit of one call",
                    "raise call_timeout_s, or mend the function; its process was killed",
                )  # fmt: skip

    def excuse(self, calls: Iterable[int], seconds: float) -> None:
        for i in set(calls) & self._open.keys():
            self._open[i].begun_s += seconds

    def abandon(self, done: Callable[[int, Any], None] = lambda i, value: None) -> None:
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
                    elif self._open.pop(rest[0][1], None) and name == "done":
                        self._drop([rest[0][1]])
                        done(rest[0][1], rest[1])
        except (ProcessEnded, LimitPassed):
            pass
        finally:
            if self._open or not stopped:
                self._kill()
            self._number, self._new, self._packed, self._calls = next(_numbers), [], [], {}

    def _drop(self, numbers: Iterable[int]) -> None:
        """These calls have ended, or are suspects."""
        for i in numbers:
            del self._calls[i]

    def _kill(self) -> None:
        self.alive = False
        self._process.end()
