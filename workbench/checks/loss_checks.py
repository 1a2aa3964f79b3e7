"""Checks of a loss before its first step, by `lab.check(loss=, batch=)`: does it compute what its author means?

To add a check: write a function of a `LossSubject` that returns a finding, and add a line to LOSS_CHECKS.
Suffixes: N rows of the batch, B checked rows, T response tokens of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.batches.columns import Ragged, Table, numbers_in, ragged_in
from workbench.checks.invariants import ROUNDING, relative_difference
from workbench.checks.loss_inputs import Held, LossInputs, role_of
from workbench.checks.report import Finding, NotApplicable, finding, largest
from workbench.checks.subject import dealt_otherwise, measured
from workbench.errors import BadInput
from workbench.models.loading import load_config
from workbench.objectives.estimators import response_scores
from workbench.objectives.groups import with_variance
from workbench.workers.gradients import GradientReport, cosine
from workbench.workers.roles.actor import token_function
from workbench.workers.user_loss import OF_MODEL, ParameterNames, UserFunction

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab
    from workbench.batches.batch import Batch

FEW_ROWS, FEW_TOKENS = 12, 8  # the latter of each row
FEW_LOGITS = 20_000_000  # of all tokens, where a loss reads logits
MOVED = 0.3  # nats: so that ratios lie on both sides of 1, within a clip and outside
STEP, FINITE_DIFFERENCES = 1e-3, 1e-2
RATIO_ONE = 0.1
OF_ADVANTAGES = {"advantages", "returns", "rewards", "token_rewards"}  # a loss without these may point anywhere


class LossSubject:
    """A loss, and the rollouts from which it will learn. The weights stay unchanged.

    rows: indices of the `valid` rows, from which an update learns.
    """

    def __init__(self, lab: Lab, loss: str | UserFunction, batch: Batch) -> None:
        self.lab, self.loss, self.batch = lab, loss, batch
        self.function = token_function(loss, None, None, None)  # type: ignore[arg-type]
        self.role = role_of(self.function)
        self.column = "values" if self.role == "critic" else "old_log_prob"  # of the model as it is
        self.rows = list(range(batch.rows))
        if "valid" in batch.names:
            self.rows = numbers_in(batch.fetch(["valid"]), "valid").bool().nonzero()[:, 0].tolist()
        if not self.rows:
            raise BadInput(
                "a batch whose rows are all not valid",
                "a loss is checked on the rows that an update learns from",
                "give it a batch with a valid row; batch.failed() says why each row is not valid",
            )

    @cached_property
    def scored(self) -> Batch:
        """The batch with `old_log_prob` of the current policy, or `values` of the current critic."""
        if self.role == "critic":
            return self.lab.critic.compute_values(self.batch)
        return self.lab.actor.compute_log_prob(self.batch)

    @property
    def rollouts(self) -> Batch:
        """The batch with its own `old_log_prob`, or `values`, if it has them."""
        return self.batch if self.column in self.batch.names else self.scored

    @cached_property
    def inputs(self) -> LossInputs:
        """The loss on the valid rows; if it reads logits or hidden states, on the shortest of them."""
        asked, spec = ParameterNames.of(self.function).names, self.lab.groups["actor"].spec
        sizes, rows = {}, self.rows
        if set(OF_MODEL) & set(asked) and spec.name is not None:
            config = load_config(spec.name).get_text_config()
            sizes = {"logits": int(config.vocab_size), "hidden_states": int(config.hidden_size)}
            sizes = {name: size for name, size in sizes.items() if name in asked}
            lengths = self.batch.lengths("response_mask")
            rows = sorted(rows, key=lambda row: lengths[row])[:FEW_ROWS]
            while len(rows) > 2 and lengths[rows].sum() * max(sizes.values()) > FEW_LOGITS:
                rows.pop()
            rows.sort()
        names = dict.fromkeys((*asked, "response_mask", "advantages", self.column))
        table = self.rollouts.fetch([name for name in names if name in self.rollouts.names], rows=rows)
        now = ragged_in(self.scored.fetch([self.column], rows=rows), self.column)
        return LossInputs.of(self.function, table, now, rows, sizes)

    @cached_property
    def points(self) -> list[LossInputs]:
        """The loss on a few rows, at the current policy and after simulated steps."""
        few = self.inputs.take([*range(min(FEW_ROWS, len(self.inputs.rows)))])
        return [few, few.moved(MOVED)]

    @cached_property
    def repeats(self) -> tuple[float, str]:
        """The largest difference between two calls of the loss with equal inputs, and its cause."""
        if wrote := self.inputs.overwritten():
            named = ", ".join(map(repr, wrote))
            return math.inf, f"it changes its input {named}, which other code reads too: write x = x * 2, not x.mul_(2)"
        one, two = self.inputs.outcome(), self.inputs.outcome()
        gap = max(_relative(one[what] - two[what], one[what]) for what in one)
        return gap, "two calls with the same inputs give different losses or gradients, as with random numbers"

    def measure(self, batch: Batch, micro_batch_tokens: int | None = None, **arguments: Any) -> list[GradientReport]:
        """Each rank's measurements of the role's update on this batch."""
        return measured(self.lab, self.role, batch, micro_batch_tokens, **arguments)


def check_returns(subject: LossSubject) -> Finding:
    """It returns the loss of each token, with a gradient, and both are finite inside the mask."""
    bad = {what: ~torch.isfinite(x_BT) for what, x_BT in subject.inputs.outcome().items()}
    found = [f"{_where(subject.inputs, bad_BT)}: {what} is not finite" for what, bad_BT in bad.items() if bad_BT.any()]
    count = sum(int(bad_BT.sum()) for bad_BT in bad.values())
    culprit = found[0] if found else ""
    return finding(count, 0, culprit, "numbers that are not finite among losses and gradients of tokens")


def check_repeats(subject: LossSubject) -> Finding:
    """It returns equal results for equal inputs, and does not write into its inputs."""
    about = "relative change of loss or gradient from one call to the next"
    return finding(subject.repeats[0], ROUNDING[0], subject.repeats[1], about)


def check_gradient(subject: LossSubject) -> Finding:
    """Its gradient is the derivative of its value, by central differences. Deliberate `detach` calls are held fixed; a
    gradient that is lost in other ways, such as `.item()`, or a wrong autograd function, is found."""
    found, positions = [], 0
    for inputs in subject.points:
        held, weights_BT = Held(), _weights(inputs.inside_BT)
        clean = inputs.outcome(weights_BT, held)

        def slope(name: str, row: int, token: int, step: float) -> float:
            """Of the loss, by what it asks for, between here and there."""
            moved_BT = inputs.values[name].clone()  # noqa: B023 (called in this round of the loop)
            moved_BT[row, token] += step
            there = inputs.given(**{name: moved_BT}).outcome(weights_BT, Held(held.notes))  # noqa: B023
            return float(((there["the loss"] - clean["the loss"]) * weights_BT).sum()) / step  # noqa: B023

        for name in inputs.leaves:
            gradient_BT = clean[f"the gradient of {name}"]
            scale = max(float(gradient_BT.abs().max()), 1e-6)
            for row, token in _few_places(inputs.inside_BT):
                positions += 1
                up, down = (slope(name, row, token, step) for step in (STEP, -STEP))
                if abs(up - down) > 2 * FINITE_DIFFERENCES * scale:
                    continue  # at a kink, such as a clip, there are two gradients
                gap = abs((up + down) / 2 - float(gradient_BT[row, token])) / scale
                where = f"row {inputs.rows[row]}, token {token}"
                culprit = f"{where}: the gradient of {name} is not the derivative of the loss"
                found.append((math.inf if math.isnan(gap) else gap, culprit))
    if not positions:
        raise NotApplicable("no token is inside the mask")
    if not found:
        raise NotApplicable(
            f"the loss has a kink, or bends, at all {positions} positions: finite differences do not give its gradient"
        )
    about = "relative gap between gradient and central differences"
    about += f", at {len(found)} of {positions} positions" if len(found) < positions else ""
    return largest(found, FINITE_DIFFERENCES, about)


def check_mask(subject: LossSubject) -> Finding:
    """Values outside the mask, such as padding, change neither losses nor gradients inside, and get no gradient."""
    found = []
    for inputs in subject.points:
        holes_BT = inputs.inside_BT.clone()
        for row in holes_BT:
            length = int(row.sum())
            row[row.nonzero()[length // 3 : 2 * length // 3, 0]] = False
        holes_BT[-1] = False
        for base in (inputs, replace(inputs, inside_BT=holes_BT)):
            mask_BT, clean = base.inside_BT, base.outcome()
            empty_BT = ~mask_BT.any(-1, keepdim=True).expand_as(mask_BT)
            bad = {what: ~torch.isfinite(x_BT) & empty_BT for what, x_BT in clean.items()}
            if undefined := [(what, bad_BT) for what, bad_BT in bad.items() if bad_BT.any()]:
                what, bad_BT = undefined[0]
                row = _where(base, bad_BT).partition(",")[0]
                culprit = f"{row} without a token inside the mask: {what} is not finite there; divide by"
                found.append((math.inf, f"{culprit} mask.sum(-1).clamp(min=1), not by mask.sum(-1)"))
                continue
            for other, changed in (("numbers outside the mask", base.spoilt()), ("padding", base.padded())):
                for what, x_BT in changed.outcome().items():
                    one_BT, two_BT = clean[what], x_BT[:, : mask_BT.shape[1]]
                    gap_BT = torch.where(mask_BT, one_BT - two_BT, 0.0 if what == "the loss" else two_BT)
                    culprit = f"{_where(base, gap_BT)}: {what} changes with {other}"
                    found.append((_relative(gap_BT, one_BT), culprit))
    return largest(found, ROUNDING[0], "relative change from values outside the mask")


def check_rows(subject: LossSubject) -> Finding:
    """A row's loss and gradient depend on no other row, because a micro-batch holds arbitrary rows."""
    found = []
    for inputs in subject.points:
        weights_BT = _weights(inputs.inside_BT)
        together = inputs.outcome(weights_BT)
        for i, row in enumerate(inputs.rows):
            for what, x_BT in inputs.take([i]).outcome(weights_BT[i]).items():
                gap = _relative(together[what][i] - x_BT[0], together[what])
                found.append((gap, f"row {row}: {what} changes with other rows"))
    figure, culprit = max(found)
    culprit += ". Put what depends on several rows into a column, for example with compute_advantages(estimator=fn)"
    return finding(figure, ROUNDING[0], culprit, "relative change of a row's loss or gradient from other rows")


def check_ratio_1(subject: LossSubject) -> Finding:
    """At ratio 1 its gradient is the policy gradient: -A at each token."""
    if not {"log_prob", "advantages"} <= set(subject.inputs.values):
        raise NotApplicable("the loss does not take log_prob and advantages")
    advantages_BT = subject.inputs.values["advantages"] * subject.inputs.inside_BT
    size = float(advantages_BT.norm())
    if not size:
        raise NotApplicable("all advantages are 0")
    gradient_BT = subject.inputs.at_ratio_1().outcome()["the gradient of log_prob"]
    gap = float((gradient_BT + advantages_BT).norm()) / size
    slope = float((gradient_BT * -advantages_BT).sum()) / size**2
    near = slope * size / max(float(gradient_BT.norm()), 1e-300)
    culprit = f"it is {slope:.3g} of the policy gradient, cosine {near:.3g}"
    culprit += ": the sign is reversed" if slope < 0 else ": log_prob has no gradient there" if not slope else ""
    return finding(gap, RATIO_ONE, culprit, "relative distance of its gradient at ratio 1 from -advantages")


def check_micro_batches(subject: LossSubject) -> Finding:
    """Loss and gradient of the model do not depend on how a minibatch is split into micro-batches, nor on which rank
    gets which rows."""
    lab, batch, loss = subject.lab, subject.rollouts, subject.loss
    tokens = int(batch.rows * (batch.lengths("prompt_ids") + batch.lengths("response_ids")).max())
    others = {
        "between the micro-batches of an update and one a row": subject.measure(batch, 1, loss=loss),
        "between the micro-batches of an update and a single one": subject.measure(batch, tokens, loss=loss),
    }
    if lab.groups[subject.role].layout.d > 1:
        dealt = batch.take(dealt_otherwise(lab, subject.role, batch.rows))
        others["between two ways to deal rows to ranks"] = subject.measure(dealt, loss=loss)
    found, own = [], subject.measure(batch, loss=loss)
    for between, other in others.items():
        gap, what = relative_difference(own, other)
        found.append((gap / ROUNDING[lab.groups[subject.role].spec.dtype != "float32"], f"{what}, {between}"))
    about = "relative change of loss or gradient with micro-batches or ranks, in units of the allowed rounding"
    return largest(found, 1.0, about)


def check_direction(subject: LossSubject) -> Finding:
    """A step along its gradient also lowers PPO's loss: the cosine with PPO's gradient, and with GRPO's, on the same
    rollouts at the policy of `old_log_prob`, because after learning from a batch PPO's clip removes most of its
    gradient. For a critic, the cosine with the squared error's gradient."""
    batch, critic = subject.scored, subject.role == "critic"
    column, known = ("returns", "the squared error") if critic else ("advantages", "PPO")
    if column not in batch.names:
        raise NotApplicable(f"the batch has no {column}")
    own, by_ppo = subject.measure(batch, loss=subject.loss), subject.measure(batch, loss=None if critic else "ppo")
    if math.isnan(cosine(by_ppo, by_ppo)):
        why = "" if critic else ", for example because all advantages are 0"
        raise NotApplicable(f"{known}'s gradient is 0 on this batch{why}")
    ppo = cosine(own, by_ppo)
    if not critic and not math.isnan(ppo) and not OF_ADVANTAGES & set(ParameterNames.of(subject.function).names):
        raise NotApplicable(f"the loss takes neither advantages nor rewards; its cosine to PPO's gradient is {ppo:.3f}")
    about = f"1 - cosine to {known}'s gradient; the cosine is {ppo:.3f}"
    if not critic and {"rewards", "prompt_uid"} <= set(batch.names):
        table = batch.fetch(["rewards", "prompt_uid", "response_mask"], rows=subject.rows)
        rewards = table["rewards"].pad() if isinstance(table["rewards"], Ragged) else numbers_in(table, "rewards")
        scores_N = response_scores(rewards, ragged_in(table, "response_mask").pad())
        if with_variance(scores_N, numbers_in(table, "prompt_uid")).any():
            of_grpo = subject.lab.compute_advantages(batch, estimator="grpo")
            by_grpo = subject.measure(of_grpo, loss="ppo", aggregation="sequence-mean-token-mean")
            about += f", to GRPO's {cosine(own, by_grpo):.3f}"
    culprit = f"the cosine to {known}'s gradient is {ppo:.3f}: a step undoes {known}'s"
    if math.isnan(ppo):
        culprit = "its gradient is 0: a step changes nothing"
    return finding(1 - ppo, 1.0, culprit, about)


LOSS_CHECKS: dict[str, Callable[[LossSubject], Finding]] = {
    "returns": check_returns,
    "repeats": check_repeats,
    "gradient": check_gradient,
    "mask": check_mask,
    "rows": check_rows,
    "ratio_1": check_ratio_1,
    "micro_batches": check_micro_batches,
    "direction": check_direction,
}
COMPARING = tuple(name for name in LOSS_CHECKS if name not in ("returns", "repeats"))


def contributions(subject: LossSubject) -> Table:
    """Each token's contribution to the batch's loss, aggregated as token-mean, and to its gradient with respect to
    log_prob or values; 0 in invalid rows. Empty for a loss that reads the model's logits or hidden states, because the
    kernel does not have them."""
    if subject.inputs.sizes:
        return {}
    outcome, lengths = subject.inputs.outcome(), torch.from_numpy(subject.batch.lengths("response_mask"))
    loss_BT, tokens = outcome["the loss"], max(1, int(subject.inputs.inside_BT.sum()))
    leaf = "values" if subject.role == "critic" else "log_prob"
    gradient_BT = outcome.get(f"the gradient of {leaf}", torch.zeros_like(loss_BT))
    columns: Table = {}
    for name, x_BT in (("loss_contribution", loss_BT), ("gradient_contribution", gradient_BT)):
        whole_NT = torch.zeros(len(lengths), int(lengths.max()))
        whole_NT[subject.rows, : x_BT.shape[1]] = (x_BT / tokens).float()
        columns[name] = Ragged.unpad(whole_NT, lengths)
    return columns


def _few_places(inside_BT: Tensor) -> list[tuple[int, int]]:
    """Row and token of a few tokens inside the mask, spread over each row."""
    found = []
    for row, inside_T in enumerate(inside_BT):
        tokens = inside_T.nonzero()[:, 0]
        spread = torch.linspace(0, len(tokens) - 1, min(FEW_TOKENS, len(tokens))).long()
        found += [(row, int(token)) for token in tokens[spread]]
    return found


def _weights(inside_BT: Tensor) -> Tensor:
    """Unequal weights of tokens, so that their gradients do not cancel."""
    draws = torch.Generator().manual_seed(3)
    return 0.5 + torch.rand(inside_BT.shape, generator=draws, dtype=torch.float64)


def _relative(gap_BT: Tensor, of_BT: Tensor) -> float:
    """The largest gap, relative to the largest number."""
    scale = max(float(of_BT.abs().nan_to_num(nan=0.0, posinf=0.0).max()), 1e-6)
    return float(gap_BT.abs().nan_to_num(nan=math.inf).max()) / scale if gap_BT.numel() else 0.0


def _where(inputs: LossInputs, gap_BT: Tensor) -> str:
    """Row and token of the largest gap."""
    at = int(gap_BT.double().abs().nan_to_num(nan=math.inf).argmax())
    return f"row {inputs.rows[at // gap_BT.shape[1]]}, token {at % gap_BT.shape[1]}"
