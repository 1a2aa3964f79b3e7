"""The host's side of a process for calls of a user's functions. It can be killed, with all processes it started.

It protects against mistakes, but is no sandbox: a function runs as the user who started the host, and can read and
write what that user can. For programs that a model wrote, use `workbench.data.sandbox`. A process that the function put
into a session of its own survives when the host is killed with SIGKILL, or the function crashes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import psutil

from workbench.errors.plain_text import said
from workbench.support.calls.limits import Limits
from workbench.support.calls.pickling import packed_rows
from workbench.support.calls.server import HANDLERS, HEAD, NO_HANDLER, CallFailed, Calls, Work, WrongValue


class CallsInHost:
    """Makes calls in the host, in place of a `CallProcess`. A call past its time limit is given up: Python cannot end
    its thread, and another thread takes its place.

    threads: False: calls run in the thread that receives, which raises their errors. raises: errors are raised with one
    thread, too, and there is no time limit.
    """

    def __init__(self, function: Any, loop: asyncio.AbstractEventLoop, *, threads: bool, raises: bool) -> None:
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._calls = Calls(function, lambda *message: self._messages.put(message), loop)
        self._threads, self.raises = threads, raises
        self._work: deque[Work] = deque()
        self._messages.put(("ready",))

    def add(self, work: Sequence[Work], concurrency: int | None, name: str) -> None:
        """Begin calls, each with its own copy of its values, because a function may change them and be called again."""
        work = [(*how, [_copied(value) for value in arguments]) for *how, arguments in work]  # type: ignore[misc]
        if self._threads:
            self._calls.add(work, 1 if self.raises else concurrency)
        else:
            self._work.extend(work)

    def end(self) -> None:
        """Begin no further call, and report nothing more of the running ones."""
        self._work.clear()
        self._calls.stop()
        self._calls.give_up()
        self._messages = queue.SimpleQueue()

    def give_up(self, calls: Collection[int]) -> list[int]:
        return self._calls.give_up(calls)

    def receive(self, wait_s: float) -> tuple[Any, ...] | None:
        """Return the next message; None where none comes in this time."""
        if self._work:
            work = self._work.popleft()
            try:
                return "done", work[0], self._calls.make(work)
            except WrongValue as problem:
                return "wrong", work[0], str(problem)
        try:
            name, *rest = self._messages.get(block=wait_s > 0, timeout=wait_s or None)
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
    except Exception:  # it holds something that cannot be copied, such as a lock
        return value


SEND_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0


class ProcessEnded(Exception):
    """The process of the calls has ended; the message says how."""


class CallProcess:
    """One process, started at once in the background; `send` does not wait for it. The messages: see `server`."""

    def __init__(self, limits: Limits, *, threads: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SEND_TIMEOUT_S)
        lifeline, ours = os.pipe()
        self._received = bytearray()
        self._stuck = ""
        arguments = f"{theirs.fileno()}, {lifeline}, {limits.most_bytes}"
        folders = [folder for folder in sys.path if isinstance(folder, str)]  # Python ignores others, such as Paths
        code = f"import sys; sys.path[:] = {folders!r}; from workbench.support.calls.server import serve; "
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", f"{code}serve({arguments})"],
                pass_fds=(theirs.fileno(), lifeline), stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
        finally:
            theirs.close()
            os.close(lifeline)
        self.end = weakref.finalize(self, _end, os.getpid(), self._popen, ours, self._socket)

    @property
    def alive(self) -> bool:
        return bool(self.end.alive) and self._popen.poll() is None

    def send(self, *message: Any) -> None:
        """Send a message. A process that does not take it is killed; `receive` then says how it ended."""
        packed = pickle.dumps(message)
        try:
            self._socket.sendall(HEAD.pack(len(packed)) + packed)
        except TimeoutError:
            self._stuck = f"accepted no message for {SEND_TIMEOUT_S:.0f} s"
            self._popen.kill()
        except OSError:  # `receive` finds the end after the earlier messages
            pass
        except BaseException:  # an interrupt: half a message may have been sent
            self._popen.kill()
            raise

    def add(self, work: Sequence[Work], concurrency: int | None, name: str) -> None:
        """Send calls of the function `name`. Raises `BadInput` if a value cannot be sent."""
        packed = packed_rows([arguments for *_, arguments in work], name)
        self.send("add", [(*how, row) for (*how, _), row in zip(work, packed, strict=True)], concurrency)

    def receive(self, wait_s: float) -> tuple[Any, ...] | None:
        """Return the next message; None where none comes in this time. Raises `ProcessEnded`."""
        while (message := self._message()) is None:
            if not select.select([self._socket], [], [], wait_s)[0]:
                if self._popen.poll() is not None:  # its children may hold the connection open
                    raise ProcessEnded(self._how_it_ended())
                return None
            try:
                part = self._socket.recv(2**20)
            except OSError:
                part = b""
            if not part:
                raise ProcessEnded(self._how_it_ended())
            self._received += part
            wait_s = 0.0
        return message

    def _message(self) -> tuple[Any, ...] | None:
        if len(self._received) < HEAD.size:
            return None
        end = HEAD.size + HEAD.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        packed = bytes(self._received[HEAD.size : end])
        del self._received[:end]
        return tuple(pickle.loads(packed))

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        code = self._popen.returncode
        if self._stuck or code is None:
            return self._stuck or "closed its connection to the host"
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name
        killed = " (the system kills a process when memory runs out)" if name == "SIGKILL" else ""
        return f"crashed its process with {name}{killed}"


def _end(host: int, popen: subprocess.Popen[bytes], lifeline: int, connection: socket.socket) -> None:
    """Kill a process and all that it started, including those that left its group, or whose parents have ended."""
    if os.getpid() != host:  # this is a fork of the host, which ends
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGSTOP)  # stop the whole group at once, so that none of it starts another process
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    try:
        popen.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # it waits on a device or a network disk
        warnings.warn(f"process {popen.pid} of user functions does not end; the system ends it later", stacklevel=2)
    os.close(lifeline)
    connection.close()


TICK_S = 0.05
GRACE_S = 2.0  # for running calls to end, when others have failed
ANSWER_S = 1.0  # for the answer of a process in which a call is late
LOAD_TIMEOUT_S = 120.0  # for the modules that a function imports


Failed = Callable[[int, CallFailed], None]  # it may raise: then no further call begins
Done = Callable[[int, Any], None]


class Session:
    """A function in use, with a state that its calls share.

    A call i is `finish(invoke(function, state, *calls[i]), *calls[i])`. invoke: a function of a module; if it returns a
    coroutine, that is awaited. finish: raises `WrongValue` for a wrong value.

    alive: False once its process was killed; then it takes no further calls. begun: the calls that ran at that time, if
    any of them may be the cause. Make them again one at a time: then only the cause fails. memory_rule: the limit that
    a `MemoryError` message names.
    """

    def __init__(self, peer: CallProcess | CallsInHost, name: str, memory_rule: str = "") -> None:
        self._peer, self._name, self._memory_rule = peer, name, memory_rule
        self._calls: dict[int, Sequence[Any]] = {}  # that have not ended
        self._new: list[tuple[int, Callable[..., Any], Callable[..., Any]]] = []
        self._open: dict[int, float] = {}  # running calls, and their start times
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
        """Submit calls, under numbers that no open call has, without waiting for them.

        concurrency: how many calls run at the same time, in threads (for functions that wait on a network or a
        sandbox); 1: in the main thread of the process. None: eight for `async def` functions, one for others.
        """
        if not self._calls:
            self._heard_s = time.monotonic()
        self._calls.update(calls)
        self._new += [(i, invoke, finish) for i in calls]
        self._concurrency = concurrency

    def poll(self, wait_s: float, timeout_s: float, done: Done, failed: Failed) -> None:
        """Report calls that have ended, in any order and in this thread: `done(i, value)`, or `failed(i, why)` for a
        call that raised, returned a wrong value or passed a limit. Waits until a call has ended, or `wait_s` is over.

        timeout_s: for one call. If the process had to be killed, `alive` is False. Raises `BadInput` for arguments that
        cannot be sent.
        """
        if self._new:
            new, self._new = self._new, []
            self._peer.add([(*how, self._calls[how[0]]) for how in new], self._concurrency, self._name)
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
                why = CallFailed(str(problem), "a function must return or raise", "correct the function")
                self._blame(failed, why)

    def _handle(self, message: tuple[Any, ...], done: Done, failed: Failed) -> None:
        name, *rest = message
        self._heard_s = time.monotonic()
        if name == "begun":
            self._open[rest[0]] = self._heard_s
        elif name == "waits":
            self._open.pop(rest[0], None)
        elif name == "done":
            self._drop(rest[:1])
            done(*rest)
        elif name == "wrong":
            self._drop(rest[:1])
            failed(rest[0], CallFailed(rest[1], *(HANDLERS if rest[1] == NO_HANDLER else ())))
        elif name == "raised":
            i, (text, cause, no_memory) = rest
            if no_memory:  # other calls may have taken the memory
                self._kill()
                remedy = "raise the limit, or correct the function"
                self._blame(failed, CallFailed(f"raised {text}", self._memory_rule, remedy, cause))
            else:
                self._drop([i])
                failed(i, CallFailed(f"raised {text}", cause=cause))
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
        remedy = "write compute_reward(..., call_timeout_s=60), or wb.Sampling(call_timeout_s=60); or speed it up"
        if isinstance(self._peer, CallsInHost):
            if not self._peer.raises:
                remedy += ": in its host (own_process=False) it continues to use a core until it returns"
                self._fail(self._peer.give_up(late), failed, CallFailed(what, rule, remedy))
            return
        if self._asked_s is None:
            self._asked_s, self._answered = now_s, False
            self._peer.send("ping")
        answers = self._answered or len(self._open) == 1
        if answers or now_s - self._asked_s > ANSWER_S:
            self._kill()
            why = CallFailed(what, rule, f"{remedy}; its process was killed")
            if answers:  # the other calls can go on, so each late call is its own cause
                self._fail(late, failed, why)
            else:  # one of the calls holds Python's lock or the event loop
                self._blame(failed, why)

    def _blame(self, failed: Failed, why: CallFailed) -> None:
        """Blame the running call for the killed process, if there was only one: it fails. If there was none, earlier
        calls left the cause behind: the first waiting call fails, so that each process ends at least one call."""
        if len(self._open) > 1:
            self.begun = tuple(self._open)
        else:
            self._fail(list(self._open) or sorted(self._calls)[:1], failed, why)

    def _fail_all(self, failed: Failed, what: str, cause: BaseException | None = None) -> None:
        rule, remedy = "its process imports the modules that it uses", "correct the code that runs at their import"
        self._fail(sorted(self._calls), failed, CallFailed(what, rule, remedy, cause))

    def _fail(self, calls: Sequence[int], failed: Failed, why: CallFailed) -> None:
        self._drop(calls)
        for i in calls:
            failed(i, why)

    def _drop(self, calls: Iterable[int]) -> None:
        for i in calls:
            self._calls.pop(i, None)
            self._open.pop(i, None)

    def excuse(self, calls: Iterable[int], seconds: float) -> None:
        """Do not count this time for these calls: they waited for their caller."""
        for i in set(calls) & self._open.keys():
            self._open[i] += seconds

    def abandon(self, done: Done = lambda i, value: None) -> None:
        """Begin no further call. Running calls have two seconds to end; otherwise their process is killed."""
        self._new = []
        try:
            if isinstance(self._peer, CallsInHost):
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
                    self._handle(message, done, lambda i, why: None)
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
        """Make calls until each has ended. If the process is killed, return `begun`, and the other calls that are left.

        tick: called twenty times a second. If it or `failed` raises, the calls are abandoned.
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
