"""The interface between the controller and a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workbench.messages.calls import Call, HostInfo

Progress = Callable[[int, int, int], None]


class Pending(ABC):
    """The answer of one host, which may still be under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` returns immediately."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the answer and return it; raise the host's error."""


def failure(pending: Pending) -> Exception | None:
    """Return the error that a host raised; None: it succeeded, or has not answered yet."""
    if pending.done():
        try:
            pending.result()
        except Exception as error:
            return error
    return None


class Backend(ABC):
    """Starts hosts and sends calls to them."""

    name: str

    @abstractmethod
    def start(self, infos: Sequence[HostInfo]) -> None:
        """Start one host for each description, beside the running ones; the controller joins process groups later."""

    @abstractmethod
    def check_free(self, pools: Sequence[str], gpus: float) -> None:
        """Raise `BadInput` where processes of these pools, one per entry, each with `gpus` GPUs, cannot be started
        beside the running ones."""

    @abstractmethod
    def end(self, infos: Sequence[HostInfo]) -> None:
        """End all hosts of some pools, and free what they hold; hosts that have ended already are no error."""

    @abstractmethod
    def execute(self, hosts: Sequence[str], calls: Sequence[Call], progress: Progress) -> Iterator[Pending]:
        """Yield one answer per host; taking it sends the call. A host runs its calls one by one, in order.

        progress(done, total, tokens) is for backends whose calls have finished when this returns; with other backends,
        ask `status` meanwhile.
        """

    @abstractmethod
    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Ask a short question, answered while a stage computes (status, describe, fetch, lengths, put, release)."""

    @abstractmethod
    def work(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Do set-up work, in order with stages (join, build)."""

    @abstractmethod
    def wait(self, pending: Sequence[Pending], timeout_s: float, count: int | None = None) -> list[Pending]:
        """Return the answers that have come, once `count` of them (None: all) have, or the time is over."""

    def machines(self, infos: Sequence[HostInfo]) -> list[str]:
        """Return the machine on which each of these hosts would be started; empty where that is unknown. Raises
        `BadInput` where a tensor group would span several machines."""
        return []

    def machines_now(self) -> dict[str, str]:
        """Return the machine of each host, without a call to the hosts."""
        return {}

    def racks(self) -> dict[str, str]:
        """Return the rack of each machine that has a rack label."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the hosts and free what they hold."""
