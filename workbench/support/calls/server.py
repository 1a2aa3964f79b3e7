"""The process of a user's functions: `serve`. The host's side, with the messages, is `workbench.support.calls.process`.

The main thread reads messages of the host; calls run in threads beside it, and coroutines in one event loop a session.
It imports little, so that it is there in a twentieth of a second.
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
import random
import resource
import signal
import socket
import struct
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from typing import Any

from workbench.errors.frames import chain_of
from workbench.errors.plain_text import plain_text, said
from workbench.support.calls.needs import check_needs

HEAD = struct.Struct("<Q")  # of a message: its length
PR_SET_CHILD_SUBREAPER = 36


class WrongValue(ValueError):
    """What a function returned is not what it must return; the message begins with "returned"."""


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in its own thread. Tasks that still run at the end are cancelled."""
    loop = asyncio.new_event_loop()

    def serve() -> None:
        loop.run_forever()
        cancel_tasks(loop)
        loop.run_until_complete(asyncio.sleep(0))
        if late := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.wait(late))
        loop.close()

    thread = threading.Thread(target=serve, daemon=True, name="event loop of user calls")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=1)


def cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """End the coroutines of a loop: past their time limit, a coroutine can be ended, unlike a thread."""
    for task in asyncio.all_tasks(loop):
        task.cancel()


def call(
    invoke: Callable[..., Any], finish: Callable[..., Any], function: Any, state: dict[Any, Any],
    arguments: Sequence[Any], loop: asyncio.AbstractEventLoop,
) -> Any:  # fmt: skip
    """`finish(value, *arguments)` of what `invoke(function, state, *arguments)` returns, or its coroutine."""
    value = invoke(function, state, *arguments)
    if inspect.iscoroutine(value):
        value = asyncio.run_coroutine_threadsafe(value, loop).result()
    return finish(value, *arguments)


def no_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory could not be had."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in said(error))


class Output(io.TextIOBase):
    """What is printed is sent to the host, which prints it."""

    def __init__(self, name: str, send: Callable[[Any], None]) -> None:
        self._name, self._send = name, send

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._send(("print", self._name, str(text)))
        return len(text)


class HostTexts:
    """Imports modules as the host runs them, though their files may have been edited since."""

    def __init__(self, texts: Mapping[str, tuple[str, str]]) -> None:
        self._texts = texts

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._texts:
            return None
        file, text = self._texts[name]

        class Loader(SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return self.source_to_code(text.encode(), file)

        folder = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return spec_from_file_location(name, file, loader=Loader(name, file), submodule_search_locations=folder)


class Server:
    """Carries out the messages of a host, one session at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._functions: dict[str, Any] = {}
        self._function: Any = None
        self._state: dict[Any, Any] = {}
        self._work: deque[tuple[Any, ...]] = deque()
        self._under_way = 0  # calls, in threads or in the event loop
        self._concurrency = 0
        self._starting = False  # a thread that has not taken a call yet
        self._coroutines: set[Callable[..., Any]] = set()  # what gave coroutines: it returns at once
        self._beginning = threading.Lock()  # held while a call is taken from `_work`, and told of
        self._session = contextlib.ExitStack()
        self._loop: asyncio.AbstractEventLoop
        self._forked = False
        os.register_at_fork(after_in_child=self._leave)

    def run(self) -> None:
        while (message := self._read()) is not None:
            name, *rest = message
            getattr(self, f"_{name}")(*rest)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _texts(self, texts: Mapping[str, tuple[str, str]]) -> None:
        sys.meta_path.insert(0, HostTexts(texts))

    def _load(self, key: str, payload: bytes) -> None:
        try:
            function = pickle.loads(payload)
            check_needs(function)  # imports what it needs, which is no part of its first calls' time
            self._functions[key] = function
        except BaseException as error:
            self._functions.pop(key, None)
            self.send(("unloadable", *_told(error)))

    def _forget(self, key: str) -> None:
        self._functions.pop(key, None)

    def _begin(self, key: str, states: Mapping[str, bytes]) -> None:
        self._function, self._state = self._functions.get(key), {}
        self._coroutines.clear()
        self._loop = self._session.enter_context(event_loop())
        set_random_states(states)
        _waiting.clear()
        _waiting.update({name: state for name, state in states.items() if name not in (*sys.modules, "random")})
        self.send(("ready",))

    def _calls(
        self, number: int, heads: Sequence[tuple[int, Callable[..., Any], Callable[..., Any]]], packed: bytes,
        concurrency: int,
    ) -> None:  # fmt: skip
        if self._function is None:
            return
        try:
            calls: Sequence[Sequence[Any]] = pickle.loads(packed)
        except BaseException:
            self.send(("unreadable",))
            return
        with self._beginning:
            self._work.extend(((number, i), *how, arguments) for (i, *how), arguments in zip(heads, calls, strict=True))
            self._concurrency = concurrency
        self._serve_work()

    def _serve_work(self) -> None:
        """Have another thread begin calls, if one may begin."""
        with self._beginning:
            if self._starting or not self._work or self._under_way >= self._concurrency:
                return
            self._starting = True
        threading.Thread(target=self._make_calls, daemon=True, name="user call").start()

    def _make_calls(self) -> None:
        """Make calls, in a thread, until none may begin. Another thread begins the next one meanwhile; a call that goes
        on as a coroutine holds no thread, so that thousands of them can wait."""
        started = True
        while True:
            with self._beginning:
                self._starting, started = self._starting and not started, False
                if not self._work or self._under_way >= self._concurrency:
                    return
                self._under_way += 1
                key, invoke, finish, arguments = self._work.popleft()
                self.send(("begun", key, threading.get_native_id(), threading.get_ident()))
            if invoke not in self._coroutines:
                self._serve_work()
            try:
                value = invoke(self._function, self._state, *arguments)
            except BaseException as error:
                self._end_call(self._answer_of(key, error))
                continue
            if inspect.iscoroutine(value):
                self._coroutines.add(invoke)
                self.send(("begun", key, 0, 0))  # of the loop's thread, which is nobody's own
                asyncio.run_coroutine_threadsafe(self._awaited(key, value, finish, arguments), self._loop)
                continue
            self._coroutines.discard(invoke)
            self._end_call(self._finished(key, value, finish, arguments))

    async def _awaited(self, key: Any, value: Any, finish: Callable[..., Any], arguments: Sequence[Any]) -> None:
        try:
            answer = self._finished(key, await value, finish, arguments)
        except BaseException as error:
            answer = self._answer_of(key, error)
        self._end_call(answer)
        self._serve_work()

    def _end_call(self, answer: bytes) -> None:
        with self._beginning:
            self._under_way -= 1
        self._write(answer)

    def _finished(self, key: Any, value: Any, finish: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
        try:
            return pickle.dumps(("done", key, finish(value, *arguments)))
        except BaseException as error:
            return self._answer_of(key, error)

    @staticmethod
    def _answer_of(key: Any, error: BaseException) -> bytes:
        if isinstance(error, WrongValue):
            return pickle.dumps(("wrong", key, plain_text(str(error))))
        return pickle.dumps(("raised", key, *_told(error)))

    def _find_unreadable(self, values: Sequence[tuple[int, str, bytes]]) -> None:
        for i, column, packed in values:
            try:
                pickle.loads(packed)
            except BaseException as error:
                self.send(("unreadable", i, column, *_told(error)))
                return
        self.send(("unreadable", 0, "its rows", "UnpicklingError", "no value alone is the cause", (), False))

    def _stop(self) -> None:
        with self._beginning:
            self._work.clear()
        self._loop.call_soon_threadsafe(cancel_tasks, self._loop)
        self.send(("stopped",))

    def _end(self) -> None:
        self._session.close()
        self._state = {}
        self.send(("ended", random_states()))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _read(self) -> Any:
        head = self._exactly(HEAD.size)
        return None if head is None else pickle.loads(self._exactly(HEAD.unpack(head)[0]) or b"")

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._connection.recv(min(count - len(parts), 2**20))
            if not part:
                return None
            parts += part
        return bytes(parts)

    def send(self, message: Any) -> None:
        self._write(pickle.dumps(message))

    def _write(self, packed: bytes) -> None:
        if self._forked:  # a child that the function forked came back from the call: only its parent answers
            os._exit(0)
        with self._sending:
            self._connection.sendall(HEAD.pack(len(packed)) + packed)

    def _leave(self) -> None:
        """In a child that the function has forked: what it prints goes where this process's output goes."""
        self._forked = True
        self._connection.close()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _told(error: BaseException) -> tuple[str, str, Any, bool]:
    """An error that was just caught, in words: class, message, frames, and whether memory ran out."""
    try:
        chain = chain_of(error)
    except BaseException:
        chain = ()
    return type(error).__name__, said(error), chain, no_memory(error)


def random_states() -> dict[str, bytes]:
    """The states of the global random generators of those libraries that this process has imported."""
    found = {"random": pickle.dumps(random.getstate())}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        found["numpy"] = pickle.dumps(numpy.random.get_state())
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = bytes(torch.get_rng_state().numpy())
    return found


def set_random_states(states: Mapping[str, bytes]) -> None:
    """Go on drawing where another process stands."""
    random.setstate(pickle.loads(states["random"]))
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        _SETTERS["numpy"](numpy.random, states["numpy"])
    if "torch" in states and (torch := sys.modules.get("torch")) is not None:
        _SETTERS["torch"](torch, states["torch"])


_SETTERS: Mapping[str, Callable[[Any, bytes], None]] = {
    "numpy": lambda numpy_random, state: numpy_random.set_state(pickle.loads(state)),
    "torch": lambda torch, state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
}


_waiting: dict[str, bytes] = {}  # states of libraries that this process has not imported


class _SetsStates(MetaPathFinder):
    """Has a library that a function imports draw where the host stands, from its first draw on."""

    LIBRARIES = types.MappingProxyType({"numpy.random": "numpy", "torch": "torch"})

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if self.LIBRARIES.get(name) not in _waiting:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_set(module: types.ModuleType) -> None:
                execute(module)
                library = self.LIBRARIES[name]
                if (state := _waiting.pop(library, None)) is not None:
                    _SETTERS[library](module, state)

            spec.loader.exec_module = execute_and_set  # type: ignore[method-assign]
        return spec


def serve(connection: int, lifeline: int, crash: int, most_bytes: int) -> None:
    """Carry out messages until the host closes the connection.

    lifeline: a pipe to which nobody writes; when the host ends, the system kills this process and those that it
    started, also while Python's lock is held. crash: file for the frames of a crash.
    """
    sys.meta_path.insert(0, _SetsStates())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(file=crash)
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what its children leave behind stays below it
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first to go where memory runs out
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = min(most_bytes, hard) if (hard := resource.getrlimit(resource.RLIMIT_DATA)[1]) > 0 else most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    server = Server(socket.socket(fileno=connection))
    sys.stdout, sys.stderr = (Output(name, server.send) for name in ("stdout", "stderr"))
    server.run()
