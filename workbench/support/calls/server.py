"""The process of a user's functions: `serve`. Its host's side is `workbench.support.calls.session`.

    host -> process                                            process -> host
    load key, function, environ  forget key                    ready, or unloadable `Error`
    begin key, environ           end                           begun i                done i, value
    add [(i, invoke, finish, arguments)], concurrency          wrong i, what          raised i, `Error`
    ping                         stop                          pong                   stopped, print stream, text

One thread reads these messages, and the main thread carries them out. Calls one at a time run in the main thread, too,
between messages: only the main thread may handle signals. Other calls run in threads, and coroutines in one event loop
per session. This module imports little, so that a process starts in a twentieth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import inspect
import io
import os
import pickle
import queue
import resource
import signal
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from workbench.errors.frames import RaisedElsewhere, chain_of
from workbench.errors.plain_text import plain_text, said
from workbench.support.calls.needs import check_needs
from workbench.support.process_environment import ProcessEnvironment, apply_changes
from workbench.support.replaced import replaced

HEAD = struct.Struct("<Q")  # of a message: its length
PR_SET_CHILD_SUBREAPER = 36

Work = tuple[int, Callable[..., Any], Callable[..., Any], Sequence[Any]]  # number, invoke, finish, arguments
Error = tuple[str, BaseException, bool]  # class and message, the exception, whether memory ran out


class CallFailed(NamedTuple):
    """Why a call has failed. what: the event, as a text that follows the function's name."""

    what: str
    rule: str = ""
    remedy: str = ""
    cause: BaseException | None = None


class WrongValue(ValueError):
    """A function returned a wrong value; the message begins with "returned"."""


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in its own thread. Tasks that still run at the end are cancelled."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            while True:
                # SystemExit of a task is the task's result, but is raised here as well: the other tasks go on
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    return runner.get_loop().run_forever()

    thread = threading.Thread(target=serve, daemon=True, name="event loop of user calls")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=1)


# of the current call: [True] after it has asked for an alarm's handler outside the main thread
_wants_alarm: ContextVar[list[bool] | None] = ContextVar("wants_alarm", default=None)


@contextlib.contextmanager
def noting_alarms() -> Iterator[None]:
    """Inside, note if a call asks for an alarm's handler outside the main thread, which Python refuses, even if the
    call catches the error: it would score without the time limit that it wanted."""
    set_handler = signal.signal

    def noted(signalnum: Any, handler: Any) -> Any:
        wants = _wants_alarm.get()
        if wants is not None and signalnum == signal.SIGALRM:
            wants[:] = [threading.current_thread() is not threading.main_thread()]
        return set_handler(signalnum, handler)

    with replaced(signal, "signal", noted):
        yield


# message about a call, its rule and its remedy
NO_HANDLER = "sets a handler for signal.alarm outside the main thread"
HANDLERS = (
    "Python allows handlers only in the main thread, in which plain functions are called one at a time",
    "set concurrency=1, leave out async and own_process=False, or limit its time in another way",
)
COROUTINES = 8  # at the same time, where no number was given


class Calls:
    """Calls of one function, made in threads. A call that returns a coroutine continues in the event loop and holds no
    thread, so that thousands of them can wait.

    tell: called with ("begun", i), and then ("done", i, value), ("wrong", i, what) or ("raised", i, exception); in
    between with ("waits", i), and "begun" again, if no thread could start. in_main: makes the main thread call a
    function soon; calls one at a time run there. None: they run in threads as well.
    """

    def __init__(
        self, function: Any, tell: Callable[..., None], loop: asyncio.AbstractEventLoop,
        in_main: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:  # fmt: skip
        self._function, self._tell, self._loop, self._in_main = function, tell, loop, in_main
        self._state: dict[Any, Any] = {}
        self._work: deque[Work] = deque()
        self._open: dict[int, Work] = {}
        self._concurrency: int | None = None
        self._coroutines: set[Callable[..., Any]] = set()  # functions that returned coroutines: they return at once
        self._lock = threading.Lock()
        data, stack = (resource.getrlimit(one)[0] for one in (resource.RLIMIT_DATA, resource.RLIMIT_STACK))
        # stacks count as data: threads' stacks may take half of it, so that calls have memory, too
        self._most_threads = data // 2 // stack if data > 0 < stack else sys.maxsize

    @property
    def _most(self) -> int:
        """How many calls may run at once."""
        return self._concurrency or (COROUTINES if self._coroutines else 1)

    def add(self, work: Sequence[Work], concurrency: int | None) -> None:
        """Make calls, at most `concurrency` at the same time. None: eight coroutines at a time, or one other call."""
        with self._lock:
            self._work.extend(work)
            self._concurrency = concurrency
        self._begin_next()

    def make(self, work: Work) -> Any:
        """Make a call in this thread, and raise its errors."""
        _, invoke, finish, arguments = work
        value = invoke(self._function, self._state, *arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run_coroutine_threadsafe(value, self._loop).result()
        return finish(value, *arguments)

    def stop(self) -> None:
        """Begin no further call, and cancel coroutines."""
        with self._lock:
            self._work.clear()
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])

    def give_up(self, calls: Collection[int] | None = None) -> list[int]:
        """Report nothing more of these calls, or of all running ones, and let other calls take their places. Returns
        those that had not ended."""
        with self._lock:
            given_up = [i for i in list(self._open) if calls is None or i in calls]
            for i in given_up:
                del self._open[i]
        for _ in given_up:
            self._begin_next()
        return given_up

    def _begin_next(self) -> None:
        if self._in_main is not None and self._most == 1:
            self._in_main(self._serve_in_main)
        elif (work := self._take()) is not None:
            try:
                if threading.active_count() >= self._most_threads:
                    raise RuntimeError("cannot allocate memory for another thread")
                threading.Thread(target=self._serve, args=(work,), daemon=True, name="user call").start()
            except RuntimeError as error:
                with self._lock:
                    if others := len(self._open) > 1:  # a thread that runs takes this call later
                        del self._open[work[0]]
                        self._work.appendleft(work)
                        self._tell("waits", work[0])
                if not others:
                    self._end(work, error=error)

    def _take(self) -> Work | None:
        """Return the next call, if another one may begin."""
        with self._lock:
            if not self._work or len(self._open) >= self._most:
                return None
            work = self._work.popleft()
            self._open[work[0]] = work
            self._tell("begun", work[0])  # before "stopped": the host then waits for the end of this call
            return work

    def _serve_in_main(self) -> None:
        """Make one call in the main thread, which handles messages before the next one."""
        if (work := self._take()) is not None:
            self._call(work)
            self._begin_next()

    def _serve(self, work: Work | None) -> None:
        """Make calls in a thread until none may begin. Another thread begins the next call meanwhile."""
        while work is not None:
            if work[1] not in self._coroutines:
                self._begin_next()
            self._call(work)
            work = self._take()

    def _call(self, work: Work) -> None:
        _, invoke, _, arguments = work
        _wants_alarm.set([])
        try:
            try:
                value = invoke(self._function, self._state, *arguments)
            finally:
                if self._in_main is not None and threading.current_thread() is threading.main_thread():
                    signal.setitimer(signal.ITIMER_REAL, 0)  # cancel an alarm that the call left behind
        except BaseException as error:
            self._end(work, error=error)
        else:
            if inspect.iscoroutine(value):
                self._coroutines.add(invoke)
                with self._lock:  # the loop of a call that was given up may have ended
                    under_way = self._open.get(work[0]) is work
                    if under_way:
                        running = asyncio.run_coroutine_threadsafe(self._awaited(work, value), self._loop)
                if under_way:
                    running.add_done_callback(partial(self._closed, work, value))
                else:
                    value.close()
            else:
                self._coroutines.discard(invoke)
                self._end(work, value)

    async def _awaited(self, work: Work, value: Any) -> None:
        try:
            value = await value
        except BaseException as error:
            self._end(work, error=error)
        else:
            self._end(work, value)
        self._begin_next()

    def _closed(self, work: Work, coroutine: Coroutine[Any, Any, Any], _: object) -> None:
        """End a call whose coroutine was cancelled before it began; other calls have ended already."""
        coroutine.close()
        self._end(work, error=asyncio.CancelledError())

    def _end(self, work: Work, value: Any = None, error: BaseException | None = None) -> None:
        i, _, finish, arguments = work
        if _wants_alarm.get() == [True]:
            error = WrongValue(NO_HANDLER)
        if error is None:
            try:
                value = finish(value, *arguments)
            except BaseException as problem:
                error = problem
        with self._lock:
            if self._open.get(i) is not work:  # it was given up
                return
            del self._open[i]
        if error is None:
            self._tell("done", i, value)
        elif isinstance(error, WrongValue):
            self._tell("wrong", i, str(error))
        else:
            self._tell("raised", i, error)


class Output(io.TextIOBase):
    """Sends printed text to the host, which prints it."""

    def __init__(self, name: str, send: Callable[..., None]) -> None:
        self._name, self._send = name, send

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._send("print", self._name, str(text))
        return len(text)


class Server:
    """Carries out the messages of a host, one session at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._environment = ProcessEnvironment.here()  # as the host last sent it
        self._to_send: queue.SimpleQueue[tuple[bytes, threading.Lock]] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[bytes | Callable[[], None] | None] = queue.SimpleQueue()
        self._functions: dict[str, Any] = {}
        self._classes: dict[str, dict[str, type]] = {}  # classes that came with a function
        self._unloadable: dict[str, Error] = {}
        self._calls: Calls
        self._loop: asyncio.AbstractEventLoop
        self._session = contextlib.ExitStack()
        os.register_at_fork(after_in_child=self._leave)

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True, name="messages of the host").start()
        threading.Thread(target=self._write, daemon=True, name="messages to the host").start()
        while (received := self._received.get()) is not None:
            if callable(received):
                received()
            else:
                name, *rest = pickle.loads(received)
                getattr(self, f"_{name}")(*rest)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _load(self, key: str, payload: bytes, environment: ProcessEnvironment) -> None:
        self._adopt(environment)
        _known_classes().clear()
        try:
            self._functions[key] = function = pickle.loads(payload)
            self._classes[key] = dict(_known_classes())
            check_needs(function)  # imports its needs now, so that this takes no time of its first calls
        except BaseException as error:
            self._unloadable[key] = _sent(error)

    def _adopt(self, environment: ProcessEnvironment) -> None:
        """Take over what has changed in the host's environment; settings that functions have changed stay."""
        apply_changes(environment.since(self._environment))
        self._environment = environment

    def _forget(self, key: str) -> None:
        for kept in (self._functions, self._classes, self._unloadable):
            kept.pop(key, None)

    def _begin(self, key: str, environment: ProcessEnvironment) -> None:
        self._adopt(environment)
        (known := _known_classes()).clear()
        known.update(self._classes.get(key, {}))
        self._loop = self._session.enter_context(event_loop())
        self._calls = Calls(self._functions.get(key), self.tell, self._loop, self._received.put)
        if key in self._unloadable:
            self.tell("unloadable", self._unloadable[key])
        else:
            self.tell("ready")

    def _add(
        self, calls: Sequence[tuple[int, Callable[..., Any], Callable[..., Any], bytes]],
        concurrency: int | None,
    ) -> None:  # fmt: skip
        work: list[Work] = []
        for i, invoke, finish, packed in calls:
            try:
                work.append((i, invoke, finish, pickle.loads(packed)))
            except BaseException as error:
                self.tell("wrong", i, f"could not get its row: {_sent(error)[0]}")
        self._calls.add(work, concurrency)

    def _ping(self) -> None:
        self._loop.call_soon_threadsafe(self.tell, "pong")

    def _stop(self) -> None:
        self._calls.stop()
        self.tell("stopped")

    def _end(self) -> None:
        self._session.close()
        del self._calls, self._loop  # and the state of the calls

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        with self._connection.makefile("rb") as file:
            while len(head := file.read(HEAD.size)) == HEAD.size:
                self._received.put(file.read(HEAD.unpack(head)[0]))
        self._received.put(None)

    def _write(self) -> None:
        while True:
            packed, sent = self._to_send.get()
            with contextlib.suppress(OSError):  # the host is gone, and this process ends soon
                self._connection.sendall(HEAD.pack(len(packed)) + packed)
            sent.release()

    def tell(self, name: str, *rest: Any) -> None:
        """Send a message to the host, and wait until it is sent, because the call may end this process. A thread sends
        it, so that a signal handler in the main thread neither cuts a message nor waits for itself. A bare lock reports
        the end, because an exception of a signal handler may leave an event locked."""
        try:
            if name == "raised":
                i, error = rest
                rest = i, _sent(error)
            elif name == "wrong":
                rest = rest[0], plain_text(rest[1])
            packed = pickle.dumps((name, *rest))
        except BaseException as error:
            if name == "print":
                raise
            packed = pickle.dumps(("raised", rest[0], _sent(error)))
        if self._connection.fileno() < 0:  # a child that the function forked returned from the call
            os._exit(0)
        (sent := threading.Lock()).acquire()
        self._to_send.put((packed, sent))
        sent.acquire()

    def _leave(self) -> None:
        """In a child that the function has forked: print to this process's own output."""
        if self._connection.fileno() >= 0:
            os.close(self._connection.detach())
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _known_classes() -> MutableMapping[str, type]:
    """Return the notebook classes that cloudpickle has made here, by its names for them. When a known class comes
    again, cloudpickle overwrites its state: functions would change each other's classes."""
    module = sys.modules.get("cloudpickle.cloudpickle")
    return {} if module is None else vars(module)["_DYNAMIC_CLASS_TRACKER_BY_ID"]


def _sent(error: BaseException) -> Error:
    """Convert an error that was just caught to the form that is sent to the host."""
    try:
        chain = chain_of(error)
    except BaseException:
        chain = ()
    kind, text = type(error).__name__, said(error)
    no_memory = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in text)
    return f"{kind}: {text}", RaisedElsewhere(kind, text, chain), no_memory


def serve(connection: int, lifeline: int, most_bytes: int) -> None:
    """Carry out messages until the host closes the connection.

    lifeline: a pipe to which nobody writes; when the host ends, the system kills this process and all that it started,
    even while Python's lock is held.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=False)  # the frames of a crash go to the host's log
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of its children become its own children
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first process to be killed when memory runs out
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = min(most_bytes, hard) if (hard := resource.getrlimit(resource.RLIMIT_DATA)[1]) > 0 else most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    server = Server(socket.socket(fileno=connection))
    sys.stdout, sys.stderr = (Output(name, server.tell) for name in ("stdout", "stderr"))
    with noting_alarms():
        server.run()
