"""What advantages are of: rewards, and the costs of Safe-RLHF, each with columns of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal to raise or lower, by its columns: scores, a critic's values of them, scores of greedy responses.

    sign: 1 for rewards; -1 for costs, to which the KL penalty is added.
    """

    scores: str
    values: str
    baseline: str
    sign: int

    @property
    def final_values(self) -> str:
        return f"final_{self.values}"

    def column(self, name: str) -> str:
        """The column of this signal that an estimator asks for by the name that it has for rewards."""
        own = {"values": self.values, "final_values": self.final_values, "baseline_rewards": self.baseline}
        return own.get(name, name)


REWARD = Signal(scores="rewards", values="values", baseline="baseline_rewards", sign=1)
COST = Signal(scores="costs", values="cost_values", baseline="baseline_costs", sign=-1)
