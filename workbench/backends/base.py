"""What the controller asks of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workbench.messages.calls import Call, HostInfo

Progress = Callable[[int, int, int], None]


class Pending(ABC):
    """The answer of one host, under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` returns at once."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the answer; raises what the host raised."""


def failure(pending: Pending) -> Exception | None:
    """What a host has raised; None: it has done what it was asked, or has not answered yet."""
    if pending.done():
        try:
            pending.result()
        except Exception as error:
            return error
    return None


class Backend(ABC):
    """Starts hosts and carries calls to them."""

    name: str

    @abstractmethod
    def start(self, infos: Sequence[HostInfo]) -> None:
        """Start one host for each description, beside those that run; process groups are joined by the controller."""

    @abstractmethod
    def check_free(self, pools: Sequence[str], gpus: float) -> None:
        """Raise `BadInput` where processes of these pools, one each, with so many GPUs each, cannot be started beside
        those that run."""

    @abstractmethod
    def end(self, infos: Sequence[HostInfo]) -> None:
        """End all hosts of some pools, and free what they hold; those that have ended are no error."""

    @abstractmethod
    def execute(self, hosts: Sequence[str], calls: Sequence[Call], progress: Progress) -> Iterator[Pending]:
        """A call for each of some hosts, sent when its answer is taken; calls to one host run one at a time, in order.

        progress(done, total, tokens) is for backends whose calls are finished when this returns; of the others, ask
        `status` meanwhile.
        """

    @abstractmethod
    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """A short question, answered while a stage computes (status, describe, fetch, lengths, put, release)."""

    @abstractmethod
    def work(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Set-up work, in order with stages (join, build)."""

    @abstractmethod
    def wait(self, pending: Sequence[Pending], timeout_s: float, count: int | None = None) -> list[Pending]:
        """The answers that have come, as soon as `count` of them (None: all) are, or the time is over."""

    def machines(self, infos: Sequence[HostInfo]) -> list[str]:
        """The machine on which each of these hosts would be started; empty where that cannot be told. Raises `BadInput`
        where a tensor group would lie over several."""
        return []

    def machines_now(self) -> dict[str, str]:
        """The machine of each host; none is asked."""
        return {}

    def racks(self) -> dict[str, str]:
        """The rack of each machine that says which it is in."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the hosts and free what they hold."""
