"""Costs of placements, asked of a workbench in a thread of its own, because hosts may answer slowly."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.errors.plain_text import said
from workbench.placement import Placement
from workbench.placement.change import PlacementChange
from workbench_widgets.placement_plans import Plan, plans


@dataclass(frozen=True)
class Question:
    """placement: which one; live: the one that there is. state: with what else the answer would be another; offers:
    with what else the offers are asked for again."""

    placement: Placement
    live: Placement
    state: Hashable
    offers: Hashable = None


@dataclass(frozen=True)
class Answer:
    """change: what the placement would change; None where it cannot be: error says why. ranks: rows of the topology."""

    question: Question
    change: PlacementChange | None = None
    error: str = ""
    ranks: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Offer:
    """A plan and what it would change; why: the reason where it cannot be."""

    plan: Plan
    change: PlacementChange | None = None
    why: str = ""


class Costs:
    """Answers the newest question, then prices the plans on offer. count: grows with each answer."""

    def __init__(self, lab: Any) -> None:
        self._lab = lab
        self.count = 0
        self.offers: tuple[Offer, ...] = ()
        self._offered: Hashable = None
        self._answer: Answer | None = None
        self._wanted: Question | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def want(self, question: Question) -> None:
        """Begin to find out, and return at once."""
        with self._lock:
            if question == self._wanted:
                return
            self._wanted = question
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="workbench-placement-costs", daemon=True)
                self._thread.start()

    def answer(self, question: Question) -> Answer | None:
        """The answer, if it is there."""
        found = self._answer
        return found if found is not None and found.question == question else None

    def offers_are_of(self, question: Question) -> bool:
        """Whether the offers are from the placement that the question calls live."""
        return self._offered == (question.live, question.offers)

    def wait(self, timeout_s: float) -> bool:
        """Whether all is answered within the time."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return self._thread is None

    def _work(self) -> None:
        while True:
            with self._lock:
                question = self._wanted
                assert question is not None
                answered = self._answer is not None and self._answer.question == question
                if answered and self.offers_are_of(question):
                    self._thread = None
                    return
            if not answered:
                self._answer = self._ask(question)
            else:
                self.offers = self._price()
                self._offered = question.live, question.offers
            self.count += 1

    def _ask(self, question: Question) -> Answer:
        try:
            change = self._lab.diff(question.placement)
            ranks = tuple(self._lab.topology().to_dict("records"))
        except Exception as error:  # also of hosts that end meanwhile: shown where the answer would be
            return Answer(question, error=_told(error))
        return Answer(question, change, ranks=ranks)

    def _price(self) -> tuple[Offer, ...]:
        found = []
        for plan in plans(self._lab):
            if plan.placement is None:
                found.append(Offer(plan, why=plan.why))
                continue
            try:
                found.append(Offer(plan, self._lab.diff(plan.placement)))
            except Exception as error:
                found.append(Offer(plan, why=_told(error)))
        return tuple(found)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {said(error)}"
