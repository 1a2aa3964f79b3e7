"""What a workbench counts: runs, batches, iterations, drawn samples, optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from workbench.batches.store import Weights
from workbench.messages.metric_values import MetricValues


class Counters:
    """run, batch, iteration: how many there were. draws: by iteration, the number of the last drawing of samples.
    weights: of each role whose weights may change, which they are. last_metrics: by stage, of this iteration.
    iterations_to_skip: iterations that a resumed script is not to repeat. refused: whether a stage was refused in this
    iteration, and none has run: the next draw takes its number."""

    def __init__(self) -> None:
        self.run = self.batch = self.iteration = self.iterations_to_skip = 0
        self.draws: dict[int, int] = {}
        self.weights: dict[str, Weights] = {}
        self.last_metrics: dict[str, MetricValues] = {}
        self.refused = False
        self._runs_before = 0  # this iteration

    @property
    def next_iteration(self) -> int:
        """The number of the iteration that a draw begins."""
        return self.iteration + (not self.refused)

    def begin_iteration(self, *, ahead: bool) -> None:
        """Count the next iteration. ahead: its prompts were drawn before, for its number."""
        self.iteration += ahead or not self.refused
        self.last_metrics = {}
        self.refused, self._runs_before = False, self.run

    def note_refused(self) -> None:
        """A stage was refused before it was sent anywhere."""
        self.refused = self.iteration > 0 and self.run == self._runs_before

    def next_run(self) -> int:
        """The number of a new run."""
        self.run += 1
        self.refused = False
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
