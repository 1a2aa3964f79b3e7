"""Hosts inside the kernel: one device, no Ray, `pdb` works in worker code. Calls finish before they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.dataflow.location import ShardId
from workbench.errors import BadInput, NotFound
from workbench.workers.backends.base import Backend, Pending
from workbench.workers.calls import Call, HostInfo
from workbench.workers.host import Host


class Finished(Pending):
    """An answer that is there, or the error that came instead."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._value, self._error = None, None
        try:
            self._value = ask()
        except Exception as error:
            self._error = error

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

    def start(self, infos: Sequence[HostInfo]) -> None:
        if len(infos) != 1:
            raise BadInput(
                f"a placement of {len(infos)} devices with backend='inline'",
                "the inline backend runs everything in the kernel, on one device",
                "use Placement.colocate(devices=1), or backend='ray'",
            )
        self._hosts = {info.name: Host(info, self) for info in infos}

    def attach(self, infos: Sequence[HostInfo]) -> None:
        raise NotFound("an inline workbench", "it lived and died with its kernel", "open it anew")

    def fetch(self, shard: ShardId, columns: tuple[str, ...], positions: Any) -> dict[str, Any]:
        """A host's view of its peers."""
        return self._hosts[shard.host].fetch(shard.key, columns, positions)

    def execute(self, host: str, call: Call, progress: Callable[[int, int, int], None]) -> Pending:
        self._hosts[host].on_progress = progress
        return Finished(lambda: self._hosts[host].execute(call))

    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        return Finished(lambda: getattr(self._hosts[host], method)(*args, **kwargs))

    work = ask

    def wait_any(self, pending: Sequence[Pending], timeout_s: float) -> None:
        return None

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()
