"""What a workbench counts, which kernel drives it, and what a later kernel goes on from."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from workbench.backends import registry
from workbench.batches.references import Column
from workbench.batches.store import Weights
from workbench.config.description import Description
from workbench.errors import NotDriving, NotFound
from workbench.messages.metric_values import MetricValues


class Counters:
    """run, batch, iteration: how many there were. draws: by iteration, the number of the last drawing of samples.
    weights: of each role whose weights may change, which they are. last_metrics: by stage, of this iteration.
    iterations_to_skip: iterations that a resumed script is not to repeat."""

    def __init__(self) -> None:
        self.run = self.batch = self.iteration = self.iterations_to_skip = 0
        self.draws: dict[int, int] = {}
        self.weights: dict[str, Weights] = {}
        self.last_metrics: dict[str, MetricValues] = {}

    def next_run(self) -> int:
        """The number of a new run."""
        self.run += 1
        return self.run

    def next_draw(self, iteration: int) -> int:
        """The number of a new drawing of samples in an iteration."""
        draw = self.draws[iteration] = self.draws.get(iteration, -1) + 1
        return draw

    def draw_again(self, iteration: int, draw: int) -> None:
        """Give the next drawing this number again, if there was none since."""
        if self.draws.get(iteration) == draw:
            self.draws[iteration] -= 1

    def state(self) -> dict[str, Any]:
        """Their values, for a checkpoint or a later kernel."""
        return {
            "run": self.run,
            "iteration": self.iteration,
            "weights": {role: asdict(weights) for role, weights in self.weights.items()},
            "draws": self.draws.get(self.iteration, -1),
            "draws_ahead": [[number, draw] for number, draw in self.draws.items() if number > self.iteration],
        }

    def take_draws(self, state: Mapping[str, Any]) -> None:
        """Go on with the draws that `state` gave."""
        self.draws = {state["iteration"]: state["draws"], **dict(state["draws_ahead"])}


@dataclass(frozen=True, kw_only=True)
class SentRun:
    """A stage that was sent to hosts. read: the columns that an update read. drawn: (iteration, draw), where it drew
    samples."""

    number: int
    name: str
    role: str
    hosts: tuple[str, ...]
    code: str
    updates: bool
    result_ranks: tuple[int, ...]
    layout: str = ""
    read: Mapping[str, Column] = field(default_factory=dict)
    drawn: tuple[int, int] | None = None


class Journal(Protocol):
    """The journal of one workbench."""

    def append(self, *, sent: SentRun | None = None, over: int | None = None) -> None:
        """Append what has changed since the last entry. sent: a stage that now goes to its hosts. over: the number of
        a stage that its hosts have ended."""


class Ownership:
    """One handle of a workbench, and whether this handle drives it.

    controller: names this handle: two handles never give a shard the same name. drives: whether this kernel drives the
    workbench, as of the last `notice_takeover`. journal: what a later kernel goes on from; None on the inline backend,
    and where this kernel has only ever looked. closed: the handle was closed.
    """

    def __init__(self, description: Description) -> None:
        self.controller = secrets.token_hex(4)
        self.closed, self.drives = False, True
        self.journal: Journal | None = None
        self._name, self._id = description.name, description.id
        self._together = False
        self._owner_stamp: int | None = None  # of the registry's owner file, when it was last read

    def take(self) -> None:
        """Record that this kernel drives it."""
        registry.own(self._id, self.controller)

    def notice_takeover(self) -> None:
        """Ask the registry whether another kernel has taken the workbench over; then this one never drives it again."""
        if self.journal is None or not self.drives:
            return
        stamp = registry.owner_stamp(self._id)
        if stamp != self._owner_stamp:
            owner, self._owner_stamp = registry.owner(self._id), stamp
            self.drives = owner is None or owner.controller == self.controller

    def record(self, *, sent: SentRun | None = None, over: int | None = None) -> None:
        """Append what has changed to the journal, if this kernel drives; see `Journal.append`."""
        if self._together and sent is None and over is None:
            return
        self.notice_takeover()
        if self.journal is not None and self.drives:
            self.journal.append(sent=sent, over=over)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, changes are appended at the end, as one entry: a kernel that ends in between leaves none of them. For
        what no hosts take part in: the entries of stages are appended at once."""
        before, self._together = self._together, True
        try:
            yield
        finally:
            self._together = before
            self.record()

    def check_open(self) -> None:
        """Raise `NotFound` where it is closed."""
        if self.closed and not self.drives:
            again = (
                f"wb.attach({self._name!r}) looks again, wb.attach({self._name!r}, take_over=True) drives it from here"
            )
            raise NotFound(f"this notebook has left {self._name!r}", "another kernel drives it", again)
        if self.closed:
            raise NotFound(f"workbench {self._name!r} is closed", "", "open it again with wb.open(...)")

    def check_drives(self) -> None:
        """Raise `NotFound` where it is closed, `NotDriving` where another kernel drives it."""
        self.check_open()
        self.notice_takeover()
        if not self.drives:
            owner = registry.owner(self._id)
            who = "another kernel" if owner is None else f"process {owner.process.pid} on {owner.process.machine}"
            raise NotDriving(
                f"this notebook looks at {self._name!r}", f"{who} drives it, and the steps of two would mix",
                f"wb.attach({self._name!r}, take_over=True) drives it from here",
            )  # fmt: skip
