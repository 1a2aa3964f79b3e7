"""Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691): fine-tuning and preferences in one stage."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import ExampleStream, Pairs
from workbench.support.validation import PositiveInt


@dataclass
class ORPO(Algorithm):
    """`ORPO(lab, lab.pairs("pairs.jsonl")).run(n)`: n batches of pairs learned by the actor, without a reference.

    rows: pairs per batch, which takes `Training.minibatches` optimizer steps. beta: the paper's lambda, the weight of
    the odds ratio loss, which is added to fine-tuning on the chosen answers. epochs: over each batch.
    """

    lab: Lab
    pairs: Pairs
    rows: PositiveInt = 64
    beta: float = 0.1
    epochs: PositiveInt = 1

    def __post_init__(self) -> None:
        ExampleStream.check(self.pairs, "pairs", self.rows)
        self.need("actor")

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.pairs.next, n=self.rows)
        lab.actor.update_orpo(batch, beta=self.beta, epochs=self.epochs)
