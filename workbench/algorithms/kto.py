"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306): a policy from answers rated good or bad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import ExampleStream, Feedback
from workbench.support.validation import PositiveInt, Whole


@dataclass
class KTO(Algorithm):
    """`KTO(lab, lab.feedback("rated.jsonl")).run(n)`: n batches of rated answers learned by the actor.

    rows: answers per batch, which takes `Training.minibatches` optimizer steps; at least 2, because the reference point
    comes from answers to the other prompts. beta: how strongly the actor is kept near the reference. desirable_weight,
    undesirable_weight: loss weights of good and bad answers; if one kind is rarer, the authors raise its weight until
    the ratio (weight x number) of good to bad answers is between 1 and 4/3. epochs: over each batch.
    """

    lab: Lab
    feedback: Feedback
    rows: Annotated[Whole, Field(ge=2)] = 64
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    epochs: PositiveInt = 1

    def __post_init__(self) -> None:
        ExampleStream.check(self.feedback, "feedback", self.rows)
        self.need("actor", "reference")

    def define(self, lab: Lab) -> None:
        batch = lab.apply(self.feedback.next, n=self.rows)
        batch = lab.reference.compute_ref_feedback_log_prob(batch)
        lab.actor.update_kto(
            batch,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
            epochs=self.epochs,
        )
