"""The counters of a workbench, the record of which kernel drives it, and the journal for a later kernel."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from workbench.backends import registry
from workbench.batches.location import Column
from workbench.batches.store import Weights
from workbench.config.description import Description
from workbench.errors import NotDriving, NotFound
from workbench.messages.calls import Call, UpdatePart
from workbench.messages.metrics import MetricValues, merge_metrics


class Counters:
    """run, batch, iteration: how many there were. draws: by iteration, the number of the last draw of samples. weights:
    the current weights of each role whose weights may change. last_metrics: by stage, of this iteration. metrics_ahead:
    by stage, of the iteration for which the actor generates ahead; None when it does not. iterations_to_skip:
    iterations that a resumed script must not repeat. refused: whether a stage was refused in this iteration and none
    has run: the next iteration then reuses its number."""

    def __init__(self) -> None:
        self.run = self.batch = self.iteration = self.iterations_to_skip = 0
        self.draws: dict[int, int] = {}
        self.weights: dict[str, Weights] = {}
        self.last_metrics: dict[str, MetricValues] = {}
        self.metrics_ahead: dict[str, MetricValues] | None = None
        self.refused = False
        self._runs_before = 0  # when this iteration began

    @property
    def reported(self) -> dict[str, MetricValues]:
        """The metrics by stage to which a stage that is called now adds its own."""
        return self.last_metrics if self.metrics_ahead is None else self.metrics_ahead

    @property
    def next_iteration(self) -> int:
        """The number of the iteration that the next draw begins."""
        return self.iteration + (not self.refused)

    def begin_iteration(self, *, ahead: bool) -> None:
        """Count the next iteration. ahead: its prompts were drawn earlier, for its number."""
        self.iteration += ahead or not self.refused
        self.last_metrics = {}
        self.refused, self._runs_before = False, self.run

    def note_refused(self) -> None:
        """Note that a stage was refused before it was sent."""
        self.refused = self.iteration > 0 and self.run == self._runs_before

    def next_run(self) -> int:
        self.run += 1
        self.refused = False
        return self.run

    def next_draw(self, iteration: int) -> int:
        draw = self.draws[iteration] = self.draws.get(iteration, -1) + 1
        return draw

    def draw_again(self, iteration: int, draw: int) -> None:
        """Give the next draw of samples this number again, if there was no later draw."""
        if self.draws.get(iteration) == draw:
            self.draws[iteration] -= 1

    def state(self) -> dict[str, Any]:
        """Return the values, for a checkpoint or a later kernel."""
        return {
            "run": self.run,
            "iteration": self.iteration,
            "weights": {role: asdict(weights) for role, weights in self.weights.items()},
            "draws": self.draws.get(self.iteration, -1),
            "draws_ahead": [[number, draw] for number, draw in self.draws.items() if number > self.iteration],
        }

    def take_draws(self, state: Mapping[str, Any]) -> None:
        """Continue with the draws of a state that `state` returned."""
        self.draws = {state["iteration"]: state["draws"], **dict(state["draws_ahead"])}


@dataclass(frozen=True, kw_only=True)
class SentRun:
    """A stage that was sent to hosts and whose caller does not have the result yet: a record in the journal.

    read: the columns that an update read. drawn: (iteration, draw), if it drew samples. For an update that has ended:
    parts: how far each rank came, if it stopped or failed between two of its steps; result: its metrics, if it is
    complete; weights: those after it. The same call again continues from there.
    """

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
    parts: tuple[UpdatePart, ...] = ()
    result: Any = None
    weights: Weights | None = None
    failed: bool = False

    def is_same_call(self, later: SentRun, weights: Weights | None) -> bool:
        """Whether a later run is the same call, on the same rows, of a role that has the weights after this run."""
        same = (self.name, self.code, self.weights) == (later.name, later.code, weights)
        return same and self.read.keys() == later.read.keys() and all(
            column.location.same(later.read[name].location) for name, column in self.read.items()
        )  # fmt: skip

    def resumed(self, calls: Sequence[Call], layout: str, result_ranks: Sequence[int]) -> list[Call]:
        """Return calls that continue with the next step. layout, result_ranks: the present ones."""
        parts = self.parts
        if layout != self.layout:  # the role has moved since: give the metrics so far to one rank whose metrics count
            metrics = merge_metrics({}, *(parts[rank].metrics for rank in self.result_ranks))
            empty = replace(parts[0], metrics={})
            parts = tuple(
                replace(empty, metrics=metrics) if rank == result_ranks[0] else empty for rank in range(len(calls))
            )
        return [replace(call, resume_from=part) for call, part in zip(calls, parts, strict=True)]


class Ownership:
    """One handle of a workbench, and whether this handle drives it.

    controller: names this handle; two handles never give shards the same name. drives: whether this kernel drives the
    workbench, as of the last `notice_takeover`. journal: a `SessionJournal`, from which a later kernel continues; None
    on the inline backend, and where this kernel has never driven the workbench. closed: whether the handle was closed.
    """

    def __init__(self, description: Description) -> None:
        self.controller = secrets.token_hex(4)
        self.closed, self.drives = False, True
        self.journal: Any = None
        self._name, self._id = description.name, description.id
        self._entry_threads: list[int] = []  # the threads that are inside `one_entry`
        self.has_position = False  # whether an algorithm's position gets the results of stages called now
        self._over: list[int] = []  # still to be appended
        self._lock = threading.Lock()
        self._owner_stamp: int | None = None  # of the registry's owner file, when it was last read

    def take(self) -> None:
        """Record that this kernel drives the workbench."""
        registry.own(self._id, self.controller)

    def notice_takeover(self) -> None:
        """Ask the registry whether another kernel has taken over; then this kernel never drives the workbench again."""
        if self.journal is None or not self.drives:
            return
        stamp = registry.owner_stamp(self._id)
        if stamp != self._owner_stamp:
            owner, self._owner_stamp = registry.owner(self._id), stamp
            self.drives = owner is None or owner.controller == self.controller

    def record(self, *, sent: SentRun | None = None, over: Collection[int] = ()) -> None:
        """Append the changes to the journal, if this kernel drives. sent: a stage that now goes to its hosts, or news
        of one. over: numbers of stages whose results their callers have, or that left nothing."""
        if self.journal is None:
            return
        with self._lock:
            self._over.extend(over)
            inside = self._entry_threads  # of `one_entry`
            if inside and sent is None and (over or threading.get_ident() in inside):
                return
            gathered: list[int] = []
            if not inside:
                gathered, self._over = self._over, gathered
        self.notice_takeover()
        if self.drives:
            self.journal.append(sent=sent, over=gathered)

    def keep_open(self, run: int) -> None:
        """Keep this run open in the journal, although `one_entry` was going to append at its end that it is over."""
        with self._lock:
            self._over = [number for number in self._over if number != run]

    @contextmanager
    def one_entry(self, *, has_position: bool = True) -> Iterator[None]:
        """Append the changes made inside, and the ends of stages, at the end as one entry: a kernel that ends in
        between leaves none of them. The sending of a stage, and changes by other threads, are appended at once.
        has_position: whether the entry has the results of the stages called inside; False for stages that a function
        calls."""
        thread, before = threading.get_ident(), self.has_position
        self._entry_threads.append(thread)
        self.has_position = has_position
        try:
            yield
        finally:
            self.has_position = before
            self._entry_threads.remove(thread)
            self.record()

    def check_open(self) -> None:
        """Raise `NotFound` where the workbench is closed."""
        if self.closed and not self.drives:
            again = f"wb.attach({self._name!r}) reads it again, wb.attach({self._name!r}, take_over=True) takes it over"
            raise NotFound(f"this notebook has left {self._name!r}", "another kernel drives it", again)
        if self.closed:
            raise NotFound(f"workbench {self._name!r} is closed", "", "open it again with wb.open(...)")

    def check_drives(self) -> None:
        """Raise `NotFound` where the workbench is closed, `NotDriving` where another kernel drives it."""
        self.check_open()
        self.notice_takeover()
        if not self.drives:
            owner = registry.owner(self._id)
            who = "another kernel" if owner is None else f"process {owner.process.pid} on {owner.process.machine}"
            raise NotDriving(
                f"this notebook can only read {self._name!r}", f"{who} drives it, and only one kernel may",
                f"wb.attach({self._name!r}, take_over=True) takes it over",
            )  # fmt: skip
