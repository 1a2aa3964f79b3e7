"""Reward and cost models from preference pairs (Stiennon et al. 2020, arXiv:2009.01325, section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import ExampleStream, Pairs
from workbench.support.validation import PositiveInt


@dataclass
class RewardModeling(Algorithm):
    """`RewardModeling(lab, lab.pairs("pairs.jsonl", held_out=200)).run(n)`: n batches of pairs learned by a role.

    role: "reward", or "cost" for a model that gives the chosen answer the lower score. rows: pairs per batch, which
    takes `Training.minibatches` optimizer steps. epochs: over each batch; `len(pairs) // rows` batches are one epoch of
    the data. Afterwards: `lab.reward.compute_pair_rewards(pairs.held_out)` puts the accuracy and its bounds into
    `lab.last_metrics["compute_pair_rewards"]` (`lab.metrics("compute_pair_rewards")`: of all calls);
    `center(pairs.held_out, answers="chosen_ids")` shifts the level of the scores; `save_model` writes the model for
    `wb.Model(path)`. For a cost model, use `compute_pair_costs`.
    """

    lab: Lab
    pairs: Pairs
    role: Literal["reward", "cost"] = "reward"
    rows: PositiveInt = 64
    epochs: PositiveInt = 1

    def __post_init__(self) -> None:
        ExampleStream.check(self.pairs, "pairs", self.rows)
        self.need(self.role)

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.pairs.next, n=self.rows)
        if self.role == "reward":
            lab.reward.update_reward(batch, epochs=self.epochs)
        else:
            lab.cost.update_cost(batch, epochs=self.epochs)
