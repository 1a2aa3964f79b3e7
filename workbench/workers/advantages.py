"""Advantages of the rows of one rank, from rewards or costs: one method per family of estimators.

Suffixes: N rows of the whole batch, B rows of a rank, T response tokens of the longest, G groups (prompts).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.batches.turns import answer_lengths, contexts_of, ends_of_turns
from workbench.engines.communicator import Communicator
from workbench.errors import BadInput
from workbench.messages.metrics import Max, Mean, Metrics
from workbench.messages.shards import Shard
from workbench.objectives.correction import Correction, raw_weights
from workbench.objectives.estimators import (
    explained_variance,
    gae,
    moments,
    overlong_penalty,
    reinforce,
    response_scores,
    score_mask,
    token_rewards,
)
from workbench.objectives.groups import (
    group_deviation,
    group_mean,
    grpo,
    grpo_batch_std,
    off_policy_baseline,
    process_advantages,
    rloo,
    step_scores,
    with_variance,
)
from workbench.objectives.kl import KLKind
from workbench.objectives.turns import fixed_ends, macro_gae, perplexity_ends, random_ends, turn_gae, turn_reinforce
from workbench.support.calls.pickling import name_of
from workbench.support.seeds import derive_seed
from workbench.support.validation import PositiveInt
from workbench.workers.sampling_mask import check_correctable
from workbench.workers.user_estimator import REWARD, Signal, estimated, reads_greedy
from workbench.workers.user_loss import UserFunction, notes_on_state, own_state, reads

Estimator = Literal[
    "gae", "gae_turn", "grpo", "grpo_batch_std", "grpo_process", "dr_grpo", "rloo", "off_policy_baseline", "remax",
    "reinforce_pp", "reinforce_pp_baseline", "reinforce_turn", "reinforce_turn_baseline",
]  # fmt: skip
MacroTokens = PositiveInt | Literal["random", "perplexity", "steps"]
# the samples of a prompt are each other's baseline: one response per prompt teaches nothing
GROUPED = (
    "grpo", "grpo_batch_std", "grpo_process", "dr_grpo", "rloo", "off_policy_baseline", "reinforce_pp_baseline",
    "reinforce_turn_baseline",
)  # fmt: skip
WITH_CRITIC = ("gae", "gae_turn")
BY_TURN = ("gae_turn", "reinforce_turn", "reinforce_turn_baseline")
REWARD_TO_GO = ("reinforce_pp", "reinforce_pp_baseline", "reinforce_turn", "reinforce_turn_baseline")
WHITENED = (*WITH_CRITIC, *REWARD_TO_GO)


def _note_on_equal_scores(temperature: float | None) -> str:
    """Return the note for batches in which no response is better than the others of its prompt."""
    remedy = "Draw more samples per prompt, use prompts that it sometimes gets right, or score parts of an answer too"
    if temperature == 0:
        remedy = "At temperature 0 they are the same text: set wb.Sampling(temperature=1.0)"
    said = "all advantages are 0, and an update learns nothing from them: the samples of each prompt have equal scores"
    return f"{said}. {remedy}"


def _macro_ends(batch: Shard, mask_BT: Tensor, tokens: MacroTokens) -> Tensor:
    if tokens == "random":
        return random_ends(mask_BT, [derive_seed(*batch.meta["seed"], "macro actions", int(row)) for row in batch.rows])
    if tokens == "perplexity":
        return perplexity_ends(batch.ragged("ref_log_prob").pad(), mask_BT)
    if tokens == "steps":
        return batch.ragged("step_ends").pad().bool()
    return fixed_ends(mask_BT, tokens)


def with_baselines(
    batch: Shard, estimator: Estimator | UserFunction, count_invalid: bool, communicator: Communicator, metrics: Metrics
) -> Shard:
    """Return the shard with a new column `counted`: valid rows that have a baseline. A row has no baseline if its
    greedy response failed, or if it is the only valid row of a prompt whose rows are each other's baseline."""
    stale = "counted" in batch.columns
    unread = {"counted", *(("valid", "baseline_valid") if count_invalid else ())}
    batch = replace(batch, columns={name: column for name, column in batch.columns.items() if name not in unread})
    valid_B = batch.valid
    if "baseline_valid" in batch.columns and reads_greedy(estimator):
        valid_B = valid_B & batch.numbers("baseline_valid").bool()
    elif "valid" not in batch.columns and not stale:
        return batch
    if estimator in GROUPED:
        groups_B = batch.numbers("prompt_uid")
        every_N, left_N = communicator.gathered(groups_B), communicator.gathered(groups_B[valid_B])
        enough_G, counts_G = torch.unique(left_N, return_counts=True)
        enough_G = enough_G[counts_G > 1]
        valid_B = valid_B & torch.isin(groups_B, enough_G)
        metrics["dropped_groups"] = Max(value=float(len(torch.unique(every_N)) - len(enough_G)))
    return replace(batch, columns={**batch.columns, "counted": valid_B})


@dataclass(kw_only=True)
class Estimation:
    """Estimates the signals of one shard. All ranks of the pool do this at the same time, for the same signals.

    given: the original shard, which a user's function reads. batch: the shard from `with_baselines`. metrics, notes:
    filled in for the output. The others: arguments of `compute_advantages`.
    """

    given: Shard
    batch: Shard
    communicator: Communicator
    metrics: Metrics
    estimator: Estimator | Callable[..., Any]
    gamma: float
    lam: float
    bootstrap: bool
    macro_tokens: MacroTokens
    kl_coefficient: float
    kl: KLKind
    overlong_buffer: int
    max_response_tokens: int | None
    correction: Correction | None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mask_BT, self.valid_B = self.batch.valid_mask.pad().bool(), self.batch.valid
        self.rows, self.tokens = int(self.valid_B.sum()), float(self.mask_BT.sum())

    def of(self, signal: Signal) -> tuple[Tensor, Tensor, Tensor]:
        """Return token rewards after penalties, advantages and returns of one signal, each [B, T]."""
        estimator = self.estimator
        scored = signal.scores in self.batch.columns  # a function of the user's may do without
        scores = self._scores(signal.scores, self.mask_BT) if scored else torch.zeros(len(self.batch))
        scores_B = response_scores(scores, self.mask_BT)
        if scored:
            self.note_mean(signal.scores, scores_B, self.rows)
        penalty_B = self._overlong_penalty(signal)
        rewards_BT = self._token_rewards(scores, signal)
        if penalty_B is not None:
            rewards_BT = rewards_BT + token_rewards(penalty_B, rewards_BT, None, self.mask_BT, 0.0)
        if callable(estimator):
            if reads(estimator, "old_log_prob", "rollout_log_prob"):
                check_correctable(f"estimator={name_of(estimator)}, which takes 'rollout_log_prob',", self.batch)
            before = own_state(estimator)
            advantages_BT, returned_BT = estimated(
                estimator, self.given, scores_B, rewards_BT, self.communicator, signal, self.valid_B
            )
            self.notes.extend(notes_on_state("estimator", estimator, before))
            to_go_BT = reinforce(rewards_BT, self.mask_BT, self.gamma)[1]
            both = advantages_BT, to_go_BT if returned_BT is None else returned_BT
        elif estimator in WITH_CRITIC:
            both = self._with_critic(rewards_BT, signal)
        elif estimator == "remax":
            both = self._remax(rewards_BT, signal)
        elif estimator in REWARD_TO_GO:
            both = self._reward_to_go(scores_B, rewards_BT)
        elif estimator == "grpo_process":
            advantages_BT = self._over_steps(rewards_BT, one_step=scores.ndim == 1)
            both = advantages_BT, reinforce(rewards_BT, self.mask_BT, 1.0)[0]
        else:
            both = self._of_responses(scores_B, penalty_B, signal)
        return rewards_BT, *both

    def note_mean(self, name: str, total: Tensor, count: float) -> None:
        """Add the metric `name/mean`: over the valid rows of numbers per row, or over all numbers per token."""
        counting = total[self.valid_B] if total.ndim == 1 else total
        self.metrics[f"{name}/mean"] = Mean(total=float(counting.sum()), count=count)

    # --- rewards ------------------------------------------------------------------------------------------------------

    def _scores(self, name: str, mask_BT: Tensor | None = None) -> Tensor:
        """Return scores [rows] or [rows, response tokens]: with a mask, 0 outside it in responses with tokens in it."""
        column = self.batch.columns[name]
        assert not isinstance(column, list)  # the schema has numbers
        scores = column.pad() if isinstance(column, Ragged) else column
        return torch.where(score_mask(mask_BT), scores, 0.0) if scores.ndim == 2 and mask_BT is not None else scores

    def _overlong_penalty(self, signal: Signal) -> Tensor | None:
        """Return DAPO's penalty, [B]; None if it is off, or the signal is a cost."""
        longest = self.max_response_tokens
        if not self.overlong_buffer or signal is not REWARD:
            return None
        assert longest is not None  # `_check` of the operation
        lengths_B = answer_lengths(self.batch.ragged("response_mask"), contexts_of(self.batch.columns))
        penalty_B = overlong_penalty(lengths_B, longest, self.overlong_buffer)
        self.note_mean("overlong_penalty", penalty_B, self.rows)
        return penalty_B

    def _token_rewards(self, scores: Tensor, signal: Signal) -> Tensor:
        """Return scores on tokens, minus the KL penalty, [B, T]."""
        coefficient = self.kl_coefficient
        old_BT, ref_BT = torch.zeros_like(self.mask_BT, dtype=torch.float32), None
        if coefficient:
            old_BT, ref_BT = (self.batch.ragged(name).pad() for name in ("old_log_prob", "ref_log_prob"))
        # a penalty lowers a reward but raises a cost: negate the cost before and after
        sign = signal.sign
        return sign * token_rewards(sign * scores, old_BT, ref_BT, self.mask_BT, coefficient, self.kl)

    # --- advantages and returns, by family ----------------------------------------------------------------------------

    def _with_critic(self, rewards_BT: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        mask_BT, after_B = self.mask_BT, None
        values_BT = self.batch.ragged(signal.values).pad()
        if self.bootstrap:
            finished_B = self.batch.numbers("finished").bool()
            after_B = torch.where(finished_B, 0.0, self.batch.numbers(signal.final_values))
        if self.macro_tokens != 1:
            ends_BT = _macro_ends(self.batch, mask_BT, self.macro_tokens)
            both = macro_gae(rewards_BT, values_BT, mask_BT, self.gamma, self.lam, ends_BT)
        elif self.estimator == "gae":
            both = gae(rewards_BT, values_BT, mask_BT, self.gamma, self.lam, after_B)
        else:
            ends_BT = self._ends_of_turns()
            both = turn_gae(rewards_BT, values_BT, mask_BT, ends_BT, self.gamma, self.lam, after_B)
        returns_BT = both[1]
        sums = torch.stack([moments(x_BT, mask_BT) for x_BT in (returns_BT, returns_BT - values_BT)])
        explained = explained_variance(*self.communicator.all_reduce(sums))
        if not math.isnan(explained):
            self.metrics[f"{signal.values}/explained_variance"] = Mean(total=explained, count=1)
        return both

    def _remax(self, rewards_BT: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        baseline = self._scores(signal.baseline)  # scores of other responses, whose mask is not in this batch
        baseline_B = baseline if baseline.ndim == 1 else baseline.double().sum(-1)
        self.note_mean(signal.baseline, baseline_B, self.rows)
        return reinforce(rewards_BT, self.mask_BT, self.gamma, baseline_B)

    def _reward_to_go(self, scores_B: Tensor, rewards_BT: Tensor) -> tuple[Tensor, Tensor]:
        mean_B = None
        if self.estimator in GROUPED:
            # the mean score of whole conversations is the baseline of every turn
            mean_B = scores_B - self._over_groups(scores_B, scores_B)
        if self.estimator in BY_TURN:
            return turn_reinforce(rewards_BT, self.mask_BT, self._ends_of_turns(), self.gamma, mean_B)
        return reinforce(rewards_BT, self.mask_BT, self.gamma, mean_B)

    def _of_responses(self, scores_B: Tensor, penalty_B: Tensor | None, signal: Signal) -> tuple[Tensor, Tensor]:
        """Return one advantage per response, over the samples of its prompt."""
        penalised_B = scores_B if penalty_B is None else scores_B + penalty_B
        if self.kl_coefficient:
            kl_BT = self._token_rewards(torch.zeros(len(self.batch)), signal)
            penalised_B = penalised_B + kl_BT.double().sum(-1)
        advantages_B = self._over_groups(scores_B, penalised_B)
        return advantages_B[:, None] * self.mask_BT, penalised_B[:, None] * self.mask_BT

    def _ends_of_turns(self) -> Tensor:
        return ends_of_turns(self.batch.ragged("turn_ends"), self.batch.ragged("response_mask").lengths)

    # --- over the samples of a prompt ---------------------------------------------------------------------------------

    def _over_groups(self, scores_B: Tensor, penalised_B: Tensor) -> Tensor:
        """Return the advantage of each response over the others of its prompt, [B], by penalised scores; whether a
        prompt's scores differ at all is decided without penalties."""
        # The samples of a prompt may be on several ranks: every rank sees all valid scores, one number per row.
        groups_B, valid_B, communicator = self.batch.numbers("prompt_uid"), self.valid_B, self.communicator
        every_N = communicator.gathered(groups_B)
        scores_N, mine = self._everywhere(penalised_B[valid_B])
        groups_N = communicator.gathered(groups_B[valid_B])
        if self.estimator != "rloo":
            check_groups(self.estimator, every_N)
        advantages_N = self._of_group(scores_N, groups_N)
        if len(advantages_N) and not advantages_N.any():
            self.notes.append(_note_on_equal_scores(self.batch.meta.get("temperature")))
        without = ~with_variance(communicator.gathered(scores_B[valid_B]), groups_N)[mine]
        self.metrics.setdefault("without_variance/fraction", Mean(total=float(without.sum()), count=self.rows))
        advantages_B = torch.zeros(len(self.batch))
        advantages_B[valid_B] = advantages_N[mine].float()
        return advantages_B

    def _of_group(self, scores_N: Tensor, groups_N: Tensor) -> Tensor:
        estimator = self.estimator
        if estimator == "rloo":
            return rloo(scores_N, groups_N)
        if estimator == "off_policy_baseline":
            return self._over_weighted_mean(scores_N, groups_N)
        if estimator in REWARD_TO_GO:
            return scores_N - group_mean(scores_N, groups_N)
        if estimator == "grpo_batch_std":
            return grpo_batch_std(scores_N, groups_N)
        return grpo(scores_N, groups_N, scale_by_std=estimator == "grpo")

    def _over_weighted_mean(self, scores_N: Tensor, groups_N: Tensor) -> Tensor:
        """Compute VCPO's advantages: the baseline has the least variance under the weights of the update."""
        correction, valid_B = self.correction, self.valid_B
        assert correction is not None  # `_check` of the operation
        mask_BT = self.mask_BT[valid_B]
        old_BT, rollout_BT = (self.batch.ragged(name).pad()[valid_B] for name in ("old_log_prob", "rollout_log_prob"))
        check_correctable(f"{correction}", self.batch)
        weight_BT = raw_weights(old_BT, rollout_BT, mask_BT, correction.level)
        tokens_B = mask_BT.sum(-1)
        # a response's gradient sums its tokens' gradients, each times its weight: w^2 is these weights' mean square
        weight_B = (weight_BT.square().sum(-1) / tokens_B.clamp(min=1)).sqrt()
        norm2_B = tokens_B.double()
        if "gradient_norm" in self.batch.columns:
            norm2_B = self.batch.numbers("gradient_norm")[valid_B].double().square()
        gathered = self.communicator.gathered
        baseline_N = off_policy_baseline(scores_N, groups_N, gathered(weight_B), gathered(norm2_B))
        return (scores_N - baseline_N) / group_deviation(scores_N, groups_N)

    def _over_steps(self, rewards_BT: Tensor, *, one_step: bool) -> Tensor:
        """Return the advantages of process supervision, [B, T]. one_step: each response is one step."""
        groups_B, mask_BT = self.batch.numbers("prompt_uid"), self.mask_BT
        check_groups("grpo_process", self.communicator.gathered(groups_B))
        ends_BT = mask_BT
        if one_step:
            ends_BT = mask_BT & (mask_BT.flip(-1).cumsum(-1).flip(-1) == 1)
        elif "step_ends" in self.batch.columns:
            ends_BT = mask_BT & self.batch.ragged("step_ends").pad().bool()
        steps_N, mine = self._everywhere(step_scores(rewards_BT, ends_BT))
        groups_N = self.communicator.gathered(groups_B.repeat_interleave(ends_BT.sum(-1)))
        steps = mine.stop - mine.start
        self.metrics["steps/mean"] = Mean(total=steps, count=self.rows)
        alike = steps - float(with_variance(steps_N, groups_N)[mine].sum())
        self.metrics.setdefault("without_variance/fraction", Mean(total=alike, count=steps))
        return process_advantages(grpo(steps_N, groups_N)[mine].float(), ends_BT) * mask_BT

    def _everywhere(self, numbers: Tensor) -> tuple[Tensor, slice]:
        """Return the numbers of all ranks, in rank order, and the slice of this rank's numbers."""
        shards = self.communicator.all_gather(numbers)
        before = sum(map(len, shards[: self.communicator.rank]))
        return torch.cat(shards), slice(before, before + len(numbers))


def check_groups(estimator: object, groups_N: Tensor) -> None:
    """Raise `BadInput` if no prompt has two responses."""
    if len(torch.unique(groups_N)) == len(groups_N):
        raise BadInput(
            f"estimator={estimator!r} with one response per prompt",
            "the other responses of a prompt are the baseline: without them, every advantage is 0",
            "generate with samples=2 or more",
        )
