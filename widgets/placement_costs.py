"""Placements on offer, and what placements would cost: asked in a thread, because hosts may answer slowly."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import said
from workbench.placement import Placement
from workbench.placement.change import PlacementChange
from workbench.placement.named import named_placements

SUGGESTED = ("quickest", "second", "third")


@dataclass(frozen=True)
class Offer:
    """A placement on offer and what it would change. placement, change: None where it cannot be; why: the reason then.
    predicted_s: of an iteration; None where it is not predicted, and unpredicted says why."""

    name: str
    placement: Placement | None
    why: str = ""
    predicted_s: float | None = None
    unpredicted: str = ""
    change: PlacementChange | None = None


def offers(lab: Any) -> list[Offer]:
    """The placements with a name, then the quickest by the cost model that is fitted to this workbench, of which there
    are none before `lab.calibrate()`. Not priced yet."""
    description = lab.description
    roles = [description.lead, *(role for role in lab.placement.roles if role != description.lead)]
    devices = 1 if description.backend == "inline" else description.devices or lab.placement.devices
    found = []
    for name, placement in named_placements(roles, devices).items():
        if isinstance(placement, BadInput):
            found.append(Offer(name, None, f"{placement.value}: {placement.rule}"))
        else:
            found.append(_predicted(lab, Offer(name, placement)))
    if lab.placement.has_rollout:  # the search does not place rollout workers
        return found
    try:
        quickest = lab.suggest(devices=devices, top=len(SUGGESTED))
    except WorkbenchError:
        return found
    # by the same simulation as the others: calls of different pools overlap, which the search does not count on
    suggested = [_predicted(lab, Offer("", plan.placement)) for plan in quickest]
    suggested.sort(key=lambda offer: offer.predicted_s or 0.0)
    return found + [replace(offer, name=name) for name, offer in zip(SUGGESTED, suggested, strict=False)]


def _predicted(lab: Any, offer: Offer) -> Offer:
    try:
        return replace(offer, predicted_s=float(lab.predict(offer.placement).iteration_s))
    except WorkbenchError as error:
        return replace(offer, unpredicted=str(error))


def same(one: Placement, other: Placement) -> bool:
    """Whether two placements differ in nothing but the order of what they name."""
    pools = [{pool.name: (pool.devices, frozenset(pool.roles)) for pool in each.pools} for each in (one, other)]
    return pools[0] == pools[1] and (one.layouts, one.environments) == (other.layouts, other.environments)


class Question(NamedTuple):
    """placement: which one; live: the one from which it would be made. state: what else changes the answer; offers:
    what else changes the prices of the offers."""

    placement: Placement
    live: Placement
    state: Hashable
    offers: Hashable


class Costs:
    """Answers the newest question, then prices the placements on offer. count: grows with each answer."""

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.count = 0
        self.offers: list[Offer] = []
        self._offered: Hashable = None
        self._answer: tuple[Question, PlacementChange | str] | None = None
        self._wanted: Question | None = None
        self._thread: threading.Thread | None = None  # that of the newest question
        self._lock = threading.Lock()

    def want(self, question: Question) -> None:
        """Begin to find out, and return at once."""
        if question != self._wanted:
            self._wanted = question
            self._thread = threading.Thread(target=self._find, args=(question,), name="workbench-costs", daemon=True)
            self._thread.start()

    def answer(self, question: Question) -> PlacementChange | str | None:
        """What the placement would change, or why it cannot be; None: not known yet."""
        answered = self._answer
        return answered[1] if answered is not None and answered[0] == question else None

    def offers_are_of(self, question: Question) -> bool:
        """Whether the offers are priced from the placement that the question calls live."""
        return self._offered == (question.live, question.offers)

    def wait(self, timeout_s: float) -> bool:
        """Whether all is answered within the time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _find(self, question: Question) -> None:
        with self._lock:
            if question == self._wanted:  # else a newer one waits
                self._answer = question, self._diff(question.placement)
                self.count += 1
            if question == self._wanted and not self.offers_are_of(question):
                self.offers = [self._priced(offer) for offer in offers(self._lab)]
                self._offered = question.live, question.offers
                self.count += 1

    def _priced(self, offer: Offer) -> Offer:
        found = offer.why if offer.placement is None else self._diff(offer.placement)
        return replace(offer, why=found) if isinstance(found, str) else replace(offer, change=found)

    def _diff(self, placement: Placement) -> PlacementChange | str:
        try:
            change: PlacementChange = self._lab.diff(placement)
        except Exception as error:  # also of hosts that end meanwhile: shown where the answer would be
            return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {said(error)}"
        return change
