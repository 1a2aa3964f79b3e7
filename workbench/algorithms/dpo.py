"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): a policy straight from pairs."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import ExampleStream, Pairs
from workbench.support.validation import PositiveInt


@dataclass
class DPO(Algorithm):
    """`DPO(lab, lab.pairs("pairs.jsonl")).run(n)`: n batches of pairs learned by the actor.

    rows: pairs per batch, which takes `Training.minibatches` optimizer steps. beta: how strongly the actor is kept near
    the reference. label_smoothing: the assumed share of pairs with a wrong label. epochs: over each batch.
    """

    lab: Lab
    pairs: Pairs
    rows: PositiveInt = 64
    beta: float = 0.1
    label_smoothing: float = 0.0
    epochs: PositiveInt = 1

    def __post_init__(self) -> None:
        ExampleStream.check(self.pairs, "pairs", self.rows)
        self.need("actor", "reference")

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.pairs.next, n=self.rows)
        batch = lab.reference.compute_ref_pair_log_prob(batch)
        lab.actor.update_dpo(batch, beta=self.beta, label_smoothing=self.label_smoothing, epochs=self.epochs)
