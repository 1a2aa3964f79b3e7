"""Hosts inside the kernel: one device, no Ray, `pdb` works in worker code. Calls finish before they return."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.base import Backend, Pending, Progress
from workbench.errors import BadInput
from workbench.errors.containing import as_exception, must_propagate
from workbench.messages.calls import Call, HostInfo
from workbench.support.process_environment import set_variables
from workbench.workers.host import Host

# Variables that a host's `join` sets and DeepSpeed reads, and the folder of compiled layers.
CACHE = "TORCHINDUCTOR_CACHE_DIR"
VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", CACHE,
    "DS_ACCELERATOR",
)  # fmt: skip


class _Kernel:
    """State that inline workbenches share because a process has only one of each: default process group, rank
    variables, threads, filters of warnings.

    The first workbench to open saves this state, and the last one to close restores it; an earlier process group stays.
    """

    def __init__(self) -> None:
        self._open = 0
        self._filters = list[Any]()

    @contextlib.contextmanager
    def left_as_found(self) -> Iterator[None]:
        """Around work of hosts and their imports: undo torch's hook, which writes the rank before each line of a
        traceback, changes to transformers' logging, and, without open workbenches, the cache folder that torch sets at
        its import. New filters of warnings stay until the last workbench is closed."""
        hook, filters, logger = sys.excepthook, list(warnings.filters), logging.getLogger("transformers")
        level, had_cache = logger.level, self._open or CACHE in os.environ
        try:
            yield
        finally:
            sys.excepthook = hook
            if logger.level != level:  # only if needed: setLevel clears the caches of all loggers of the process
                logger.setLevel(level)
            if not had_cache:
                os.environ.pop(CACHE, None)
            self._filters += [one for one in warnings.filters if one not in filters]

    def enter(self) -> None:
        """Count one more workbench; save the state before the first."""
        if not self._open:
            self._variables = {name: os.environ.get(name) for name in VARIABLES}
            self._threads = torch.get_num_threads()
            self._had_group = dist.is_initialized()
        self._open += 1

    def leave(self) -> None:
        """Count one workbench less; restore the state after the last."""
        self._open -= 1
        if self._open:
            return
        if dist.is_initialized() and not self._had_group:
            dist.destroy_process_group()
        set_variables(self._variables)
        torch.set_num_threads(self._threads)
        warnings.filters[:] = [one for one in warnings.filters if one not in self._filters]  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001 (caches of past warnings)
        self._filters.clear()


KERNEL = _Kernel()


def _keep_groups() -> None:
    """In a process that was forked from the kernel, never free process groups: freeing would wait for a thread that
    this process does not have."""
    for group in dist.distributed_c10d._world.pg_map:  # noqa: SLF001
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)


class Finished(Pending):
    """An answer or error that is already there. An interrupt of the kernel is raised at once."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        try:
            with KERNEL.left_as_found():
                self._value = ask()
        except BaseException as error:
            if must_propagate(error):
                raise
            self._error = as_exception(error)

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class InlineBackend(Backend):
    """One host, in this process."""

    name = "inline"

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._in_kernel = False

    def start(self, infos: Sequence[HostInfo]) -> None:
        if not self._in_kernel:  # otherwise it is a restart
            KERNEL.enter()
        self._in_kernel = True
        with KERNEL.left_as_found():
            self._hosts = {info.name: Host(info, self.call) for info in infos}

    def host(self, name: str) -> Host:
        return self._hosts[name]

    def check_free(self, pools: Sequence[str], gpus: float) -> None:
        if pools:
            raise BadInput(
                f"new processes for {', '.join(dict.fromkeys(pools))} with backend='inline'",
                "the inline backend has one process, the kernel",
                "open the workbench with backend='ray', or keep the pool's name and its one device",
            )

    def end(self, infos: Sequence[HostInfo]) -> None:
        for info in infos:
            self._hosts.pop(info.name).close()

    def call(self, host: str, method: str, *args: Any) -> Any:
        """Call a peer, for a host."""
        return getattr(self._hosts[host], method)(*args)

    def execute(self, hosts: Sequence[str], calls: Sequence[Call], progress: Progress) -> Iterator[Pending]:
        for host, call in zip(hosts, calls, strict=True):
            self._hosts[host].on_progress = progress
            yield self.work(host, "execute", call)

    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        return Finished(lambda: getattr(self._hosts[host], method)(*args, **kwargs))

    work = ask

    def wait(self, pending: Sequence[Pending], timeout_s: float, count: int | None = None) -> list[Pending]:
        return list(pending)

    def close(self) -> None:
        try:
            for host in self._hosts.values():
                host.close()
        finally:
            self._hosts.clear()
            if self._in_kernel:
                self._in_kernel = False
                KERNEL.leave()
