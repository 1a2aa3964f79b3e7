"""What called the stages, and when the workbench itself was at work: what idle time is told from, beside spans."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.display.idle import Life

ACTS = ("move", "saved", "recovered")  # events with the seconds that they took until then


@dataclass
class Callers:
    """Who called what, from the events of a run.

    of_run: by run, the cell that called it, or the button of a panel ("" and a number), and in which session of a
    kernel. acts: from when to when roles were moved, a checkpoint was written, or hosts were started again.
    """

    of_run: dict[int, tuple[Hashable, int]] = field(default_factory=dict)
    acts: list[Life] = field(default_factory=list)
    session: int = 0

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Callers:
        found = cls()
        for event in events:
            found.add(event)
        return found

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        name, details = event["event"], event["details"]
        if name == "run":
            cell = int(details["cell"])
            self.of_run[int(details["run"])] = cell or ("", details["drive"]), self.session
        elif name in ACTS:
            self.acts.append((float(event["time_s"]) - float(details["seconds"]), float(event["time_s"])))
        elif name == "attached":
            self.session += 1
