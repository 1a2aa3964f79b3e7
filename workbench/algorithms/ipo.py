"""Identity preference optimization (Azar et al. 2023, arXiv:2310.12036): DPO that does not overfit certain labels."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import ExampleStream, Pairs
from workbench.support.validation import PositiveInt


@dataclass
class IPO(Algorithm):
    """`IPO(lab, lab.pairs("pairs.jsonl")).run(n)`: n batches of pairs learned by the actor.

    rows: pairs per batch, which takes `Training.minibatches` optimizer steps. beta: the paper's tau: relative to the
    reference, the target for the chosen answer's log-probability is 1 / (2 beta) nats per token above the rejected
    one's. epochs: over each batch.
    """

    lab: Lab
    pairs: Pairs
    rows: PositiveInt = 64
    beta: float = 0.1
    epochs: PositiveInt = 1

    def __post_init__(self) -> None:
        ExampleStream.check(self.pairs, "pairs", self.rows)
        self.need("actor", "reference")

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.pairs.next, n=self.rows)
        batch = lab.reference.compute_ref_pair_log_prob(batch)
        lab.actor.update_ipo(batch, beta=self.beta, epochs=self.epochs)
