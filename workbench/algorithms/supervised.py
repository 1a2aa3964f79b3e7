"""Algorithms that learn from examples, without rollouts: demonstrations, preference pairs, and rated answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from workbench.algorithms.lab import Lab
from workbench.algorithms.loop import Algorithm
from workbench.data.examples import Demonstrations, ExampleStream, Feedback, Pairs
from workbench.support.validation import PositiveInt, Whole


@dataclass
class SFT(Algorithm):
    """`SFT(lab, lab.demonstrations("sft.jsonl")).run(n)`: n batches of demonstrations learned by the actor.

    Supervised fine-tuning on demonstrations: the first stage of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155).

    rows: demonstrations a batch, of `Training.minibatches` optimizer steps. epochs: over each batch; the stream goes
    round by itself, `len(demonstrations) // rows` batches are one epoch of the data. Demonstrations that were held out
    are scored by `lab.actor.compute_log_prob(demonstrations.held_out)`, after which
    `lab.last_metrics["compute_log_prob"]["old_log_prob/mean"]` is the loss on them with the sign turned.
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


@dataclass
class RewardModeling(Algorithm):
    """`RewardModeling(lab, lab.pairs("pairs.jsonl", held_out=200)).run(n)`: n batches of pairs learned by a role.

    Reward and cost models from preference pairs (Stiennon et al. 2020, arXiv:2009.01325, section 3.4).

    role: "reward", or "cost" for a model that gives the chosen answer the lower score. rows: pairs a batch, of
    `Training.minibatches` optimizer steps. epochs: over each batch; `len(pairs) // rows` batches are one epoch of the
    data. Afterwards: `lab.reward.compute_pair_rewards(pairs.held_out)`, after which
    `lab.last_metrics["compute_pair_rewards"]` has the accuracy and its bounds (`lab.metrics("compute_pair_rewards")`:
    those of all calls); `center(pairs.held_out, answers="chosen_ids")` for the level of the scores; `save_model` for
    `wb.Model(path)`. For a cost, `compute_pair_costs`.
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


@dataclass
class DPO(Algorithm):
    """`DPO(lab, lab.pairs("pairs.jsonl")).run(n)`: n batches of pairs learned by the actor.

    Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): a policy straight from pairs.

    rows: pairs a batch, of `Training.minibatches` optimizer steps. beta: how strongly the actor is kept at the
    reference. label_smoothing: the share of pairs whose label is taken to be wrong. epochs: over each batch.
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


@dataclass
class IPO(Algorithm):
    """`IPO(lab, lab.pairs("pairs.jsonl")).run(n)`: n batches of pairs learned by the actor.

    Identity preference optimization (Azar et al. 2023, arXiv:2310.12036): DPO that does not overfit certain labels.

    rows: pairs a batch, of `Training.minibatches` optimizer steps. beta: the paper's tau: compared with the reference,
    the chosen answer is to become 1 / (2 beta) nats a token likelier than the rejected one, and no more. epochs: over
    each batch.
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


@dataclass
class ORPO(Algorithm):
    """`ORPO(lab, lab.pairs("pairs.jsonl")).run(n)`: n batches of pairs learned by the actor, without a reference.

    Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691): fine-tuning and preferences in one stage.

    rows: pairs a batch, of `Training.minibatches` optimizer steps. beta: the paper's lambda, the weight of the odds
    ratio beside fine-tuning on the chosen answers. epochs: over each batch.
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


@dataclass
class KTO(Algorithm):
    """`KTO(lab, lab.feedback("rated.jsonl")).run(n)`: n batches of rated answers learned by the actor.

    Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306): a policy from answers rated good or bad.

    rows: answers a batch, of `Training.minibatches` optimizer steps; at least 2, as the reference point comes from
    answers to the other prompts. beta: how strongly the actor is kept at the reference. desirable_weight,
    undesirable_weight: of good and of bad answers; where one kind is rarer, the authors raise its weight until
    (weight x number) of good over bad ones is between 1 and 4/3. epochs: over each batch.
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
