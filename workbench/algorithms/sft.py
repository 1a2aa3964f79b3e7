"""Supervised fine-tuning on demonstrations: the first stage of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155)."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import Demonstrations, ExampleStream
from workbench.support.validation import PositiveInt


@dataclass
class SFT(Algorithm):
    """`SFT(lab, lab.demonstrations("sft.jsonl")).run(n)`: n batches of demonstrations learned by the actor.

    rows: demonstrations per batch, which takes `Training.minibatches` optimizer steps. epochs: over each batch; the
    stream repeats the data, `len(demonstrations) // rows` batches are one epoch of it. To score the held-out data, call
    `lab.actor.compute_log_prob(demonstrations.held_out)`; the loss on them is then the negative of
    `lab.last_metrics["compute_log_prob"]["old_log_prob/mean"]`.
    """

    lab: Lab
    demonstrations: Demonstrations
    rows: PositiveInt = 64
    epochs: PositiveInt = 1

    def __post_init__(self) -> None:
        ExampleStream.check(self.demonstrations, "demonstrations", self.rows)
        self.need("actor")

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.demonstrations.next, n=self.rows)
        lab.actor.update_sft(batch, epochs=self.epochs)
