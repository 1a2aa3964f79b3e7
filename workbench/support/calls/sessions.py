"""Calls of a user's functions: several at once, each with a time limit, in a process that can be killed."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from workbench.errors import BadInput
from workbench.support.calls.limits import limits_of
from workbench.support.calls.pickling import name_of, pickled
from workbench.support.calls.server import event_loop, noting_alarms
from workbench.support.calls.session import CallProcess, CallsInHost, Session
from workbench.support.process_environment import ProcessEnvironment
from workbench.support.replaced import replaced

MOST_FUNCTIONS = 8  # how many a process keeps

_in_place = False


def in_place() -> AbstractContextManager[None]:
    """Inside, call functions in their host, one after the other, without limits, and raise their errors unchanged, so
    that a debugger can stop in them. They run in the host's own thread, unless they wait for it."""
    return replaced(sys.modules[__name__], "_in_place", True)


class UserCalls:
    """The process of the functions of one role on one host. It starts at its first use, and is kept, with the state
    that functions keep in it, until a limit is passed, edited code is loaded, or a function comes with other limits."""

    _edits = 0  # counts edits of this process's code

    def __init__(self) -> None:
        self._process: CallProcess | None = None
        self._made_for: tuple[Any, ...] = ()
        self._loaded: dict[str, None] = {}
        self._extra: list[UserCalls] = []

    def processes(self, n: int) -> list[UserCalls]:
        """Return n of these objects, each with a process; the first is this one. Ends processes beyond n."""
        for one in self._extra[n - 1 :]:
            one.close()
        del self._extra[n - 1 :]
        self._extra += [UserCalls() for _ in range(n - 1 - len(self._extra))]
        return [self, *self._extra]

    @classmethod
    def code_changed(cls) -> None:
        """End the use of every process that has imported code which its host has replaced since."""
        cls._edits += 1

    def prepare(self, function: Any) -> None:
        """Start the process and send it a function, without waiting for it."""
        if limits_of(function).own_process:
            with contextlib.suppress(BadInput):  # the first call raises the error
                self._process_for(function)

    @contextlib.contextmanager
    def session(self, function: Any, *, asks_host: bool = False) -> Iterator[Session]:
        """Yield a session for a function. asks_host: the function waits for the thread that polls, so it gets another
        thread. Raises `BadInput` for a function that cannot be sent to a process."""
        name, limits = name_of(function), limits_of(function)
        if _in_place or not limits.own_process:
            with event_loop() as loop, nullcontext() if _in_place else noting_alarms():
                yield Session(CallsInHost(function, loop, threads=asks_host or not _in_place, raises=_in_place), name)
            return
        process, key = self._process_for(function)
        session = Session(
            process, name, f"its process may take {limits.most_bytes:,} bytes (wb.limits(memory_bytes=...))"
        )
        try:
            process.send("begin", key, _environment())
            yield session
        except KeyboardInterrupt:  # half a message may have been sent, in either direction
            self._end()
            raise
        finally:
            if session.alive:
                process.send("end")

    def close(self) -> None:
        """End the process, and the additional ones."""
        for one in self._extra:
            one.close()
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _process_for(self, function: Any) -> tuple[CallProcess, str]:
        payload, limits = pickled(function), limits_of(function)
        threads = _threads()
        made_for = limits, threads, self._edits
        if self._process is None or not self._process.alive or made_for != self._made_for:
            self._end()
            self._process = CallProcess(limits, threads=threads)
            self._made_for, self._loaded = made_for, {}
        key = hashlib.blake2b(payload, digest_size=16).hexdigest()
        if key not in self._loaded:
            if len(self._loaded) == MOST_FUNCTIONS:
                self._process.send("forget", oldest := next(iter(self._loaded)))
                del self._loaded[oldest]
            self._process.send("load", key, payload, _environment())
            self._loaded[key] = None
        return self._process, key


def _environment() -> ProcessEnvironment:
    return ProcessEnvironment.here(OMP_NUM_THREADS=str(_threads()))


def _threads() -> int:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 1
