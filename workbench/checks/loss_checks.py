"""Is it the loss that its author means: what is asked of a loss before its first step, by `lab.check(loss=, batch=)`.

To add a check: write a function of a `LossSubject` that returns a finding, and add a line to LOSS_CHECKS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from workbench.batches.balance import minibatch_rows
from workbench.batches.columns import Ragged, Table
from workbench.checks.gradients import ROUNDING, relative_difference
from workbench.checks.loss_function import Held, Point
from workbench.checks.loss_subject import LossSubject, ragged_of, relative_gap
from workbench.checks.report import Finding, NotApplicable
from workbench.objectives.estimators import response_scores
from workbench.objectives.groups import grpo
from workbench.workers.gradients import cosine

if TYPE_CHECKING:
    pass

FEW_TOKENS = 8  # of each row
STEP, FINITE_DIFFERENCES = 1e-3, 1e-2
RATIO_ONE = 0.1


def check_returns(subject: LossSubject) -> Finding:
    """It returns the loss of each token, with a gradient, and both are finite inside the mask."""
    point = subject.point
    loss_BT, gradients = point.gradients()
    bad_BT = ~torch.isfinite(loss_BT) & point.inside_BT
    where = _place(point, bad_BT, "the loss")
    for name, gradient_BT in gradients.items():
        bad_BT = ~torch.isfinite(gradient_BT)
        where = where or _place(point, bad_BT, f"the gradient of {name}")
    count = int((~torch.isfinite(loss_BT)).sum()) + sum(int((~torch.isfinite(g)).sum()) for g in gradients.values())
    return subject.finding(count, 0, where, "numbers that are not finite among losses and gradients of tokens")


def check_repeats(subject: LossSubject) -> Finding:
    """It gives the same for the same numbers, and writes nothing into what it is given."""
    figure, culprit = subject.repeats
    return subject.finding(
        figure, ROUNDING[0], culprit, "relative change of loss or gradient from one call to the next"
    )


def check_gradient(subject: LossSubject) -> Finding:
    """Its gradient is that of its value, by central differences. What is detached on purpose is held fixed; a gradient
    that gets lost otherwise, as in `.item()`, or a wrong one of an autograd function, shows."""
    found, positions = [], 0
    for point in subject.points:
        weights_BT, held = _weights(point.inside_BT), Held()
        loss_BT, gradients = point.gradients(weights_BT, held)
        now = float((loss_BT * weights_BT).sum())

        def change(name: str, row: int, token: int, step: float) -> float:
            """Of the loss, by what it asks for, for each unit of it."""
            moved_BT = point.values[name].clone()  # noqa: B023 (called in this round of the loop)
            moved_BT[row, token] += step
            loss_BT, _ = point.given(**{name: moved_BT}).loss(Held(held.notes))  # noqa: B023
            total = torch.where(point.inside_BT, loss_BT.detach(), 0.0) * weights_BT  # noqa: B023
            return (float(total.sum()) - now) / step  # noqa: B023

        for name in point.leaves:
            scale = max(float(gradients[name].abs().max()), 1e-6)
            for row, token in _places(point.inside_BT):
                positions += 1
                up, down = (change(name, row, token, step) for step in (STEP, -STEP))
                if abs(up - down) > 2 * FINITE_DIFFERENCES * scale:
                    continue  # at a kink, such as a clip, there are two gradients
                gap = abs((up + down) / 2 - float(gradients[name][row, token])) / scale
                culprit = f"row {point.numbers[row]}, token {token}: the gradient of {name} is not that of the loss"
                found.append((math.inf if math.isnan(gap) else gap, culprit))
    if not found:
        raise NotApplicable(_why_not_compared(subject.point, positions))
    figure, culprit = max(found)
    about = "relative gap between gradient and central differences"
    about += f", at {len(found)} of {positions} positions" if len(found) < positions else ""
    return subject.finding(figure, FINITE_DIFFERENCES, culprit, about)


def _why_not_compared(point: Point, positions: int) -> str:
    """Why no gradient could be compared with differences of the loss."""
    if not positions:
        return "no token is inside the mask"
    return f"the loss has a kink, or bends, at all of the {positions} positions: differences do not give its gradient"


def check_mask(subject: LossSubject) -> Finding:
    """What is outside the mask, padding among it, changes neither losses nor gradients inside, and has no gradient."""
    found = []
    for point in subject.points:
        holes_BT = point.inside_BT.clone()
        for row in holes_BT:
            length = int(row.sum())
            row[row.nonzero()[length // 3 : 2 * length // 3, 0]] = False
        holes_BT[-1] = False
        for mask_BT in (point.inside_BT, holes_BT):
            base = point.masked(mask_BT)
            clean = base.gradients()
            if without := _without_token(base, clean):
                found.append((math.inf, without))
                continue
            for what, other in (("numbers outside the mask", base.spoilt()), ("padding", base.padded())):
                changed = [x[:, : mask_BT.shape[1]] for x in _all(other.gradients())]
                for name, one_BT, two_BT in zip(_names(point), _all(clean), changed, strict=True):
                    gap_BT = torch.where(mask_BT, one_BT - two_BT, 0.0 if name == "the loss" else two_BT)
                    found.append((relative_gap(gap_BT, one_BT), f"{_where(point, gap_BT)}: {name} changes with {what}"))
    figure, culprit = max(found)
    return subject.finding(figure, ROUNDING[0], culprit, "relative change by what is outside the mask")


def _without_token(point: Point, clean: tuple[Tensor, dict[str, Tensor]]) -> str:
    """In words, a gradient that is not finite in a row without a token inside the mask; empty where there is none."""
    empty_B = ~point.inside_BT.any(-1, keepdim=True)
    for name, x_BT in zip(_names(point), _all(clean), strict=True):
        if (bad_BT := ~torch.isfinite(x_BT) & empty_B).any():
            row = int(bad_BT.any(-1).nonzero()[0])
            return (
                f"row {point.numbers[row]} without a token inside the mask: {name} is not finite there; divide by "
                "mask.sum(-1).clamp(min=1), not by mask.sum(-1)"
            )
    return ""


def check_rows(subject: LossSubject) -> Finding:
    """A row's loss and gradient depend on no other row: a micro-batch holds any rows, and only some of a prompt's."""
    found = []
    for point in subject.points:
        company = _all(point.gradients())
        for row in range(len(point.inside_BT)):
            alone = _all(point.rows([row]).gradients())
            for name, one_BT, two_BT in zip(_names(point), company, alone, strict=True):
                gap_BT = one_BT[row : row + 1] - two_BT
                found.append(
                    (relative_gap(gap_BT, one_BT), f"row {point.numbers[row]}: {name} changes with other rows")
                )
            for name, gradient_BT in point.row_gradients(row).items():
                others_BT = gradient_BT.clone()
                others_BT[row] = 0
                other = int(others_BT.abs().nan_to_num(nan=math.inf).amax(-1).argmax())
                culprit = f"row {point.numbers[row]}: its loss has a gradient in {name} of row {point.numbers[other]}"
                found.append((relative_gap(others_BT, gradient_BT), culprit))
    figure, culprit = max(found)
    culprit += ". What a group or a batch decides belongs into a column, as compute_advantages(estimator=fn) makes one"
    return subject.finding(figure, ROUNDING[0], culprit, "relative change of a row's loss or gradient by other rows")


def check_ratio_1(subject: LossSubject) -> Finding:
    """At ratio 1 its gradient is the policy gradient: -A at each token."""
    if "log_prob" not in subject.point.values or "advantages" not in subject.point.values:
        raise NotApplicable("it does not ask for log_prob and advantages")
    point = subject.point.at_ratio_one()
    advantages_BT = point.values["advantages"] * point.inside_BT
    size = float(advantages_BT.norm())
    if not size:
        raise NotApplicable("all advantages are 0")
    gradient_BT = point.gradients()[1]["log_prob"]
    gap = float((gradient_BT + advantages_BT).norm()) / size
    slope = float(-(gradient_BT * advantages_BT).sum()) / size**2
    near = slope * size / max(float(gradient_BT.norm()), 1e-300)
    culprit = f"it is {slope:.3g} of the policy gradient, cosine {near:.3g}"
    culprit += ": the sign is turned" if slope < 0 else ": log_prob has no gradient there" if not slope else ""
    return subject.finding(gap, RATIO_ONE, culprit, "relative distance of its gradient at ratio 1 from -advantages")


def check_micro_batches(subject: LossSubject) -> Finding:
    """Loss and gradient of the actor do not depend on how a minibatch is cut into micro-batches, nor on which rank has
    which of its rows."""
    group, batch = subject.lab.groups["actor"], subject.rollouts
    others = {"between the micro-batches of an update and one a row": subject.measure(batch, 1, loss=subject.loss)}
    lengths = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    one = subject.measure(batch, int(batch.rows * lengths.max()), loss=subject.loss)
    others["between the micro-batches of an update and a single one"] = one
    if (ranks := group.layout.d) > 1:
        minibatches = minibatch_rows(batch.rows, group.spec.training.minibatches if group.spec.training else 1)
        order = np.concatenate([rows[rank::ranks] for rows in minibatches for rank in range(ranks)])
        dealt = subject.measure(batch.take(order), loss=subject.loss)
        others["between two ways to deal rows to ranks"] = dealt
    found = []
    for between, other in others.items():
        gap, what = relative_difference(subject.measured, other)
        found.append((gap / subject.rounding, f"{what}, {between}"))
    figure, culprit = max(found)
    about = "relative change of loss or gradient with micro-batches or ranks, in units of what rounding may do"
    return subject.finding(figure, 1.0, culprit, about)


def check_direction(subject: LossSubject) -> Finding:
    """A step on it goes down with PPO: the cosine of its gradient to PPO's, and to GRPO's, on the same rollouts, where
    the policy is that which `old_log_prob` is of: on a batch that was learned from, PPO's clip would leave little."""
    if "advantages" not in subject.table:
        raise NotApplicable("the batch has no advantages")
    measured = subject.measure(subject.at_ratio_1, loss=subject.loss)
    by_ppo = subject.measure(subject.at_ratio_1, loss="ppo")
    if math.isnan(cosine(by_ppo, by_ppo)):
        raise NotApplicable("PPO's gradient is 0 on this batch, as where all advantages are 0")
    ppo = cosine(measured, by_ppo)
    about = f"1 - cosine to PPO's gradient; the cosine is {ppo:.3f}"
    if (advantages := _grpo_advantages(subject)) is not None:
        batch = subject.at_ratio_1.join(subject.lab.put({"grpo_advantages": advantages}))
        batch = batch.drop("advantages").rename(grpo_advantages="advantages")
        of_grpo = subject.measure(batch, loss="ppo", aggregation="sequence-mean-token-mean")
        about += f", to GRPO's {cosine(measured, of_grpo):.3f}"
    culprit = f"the cosine to PPO's gradient is {ppo:.3f}: a step undoes PPO's"
    if math.isnan(ppo):
        culprit = "its gradient is 0: a step on it moves nothing"
    return subject.finding(1 - ppo, 1.0, culprit, about)


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


def contributions(subject: LossSubject) -> Table:
    """What each token adds to the loss of the batch, aggregated as token-mean, and to its gradient in log_prob; 0 in
    rows that are not valid. Nothing for a loss that reads the model's logits or hidden states, which are not here."""
    if subject.sizes:
        return {}
    point, lengths = subject.point, ragged_of(subject.whole, "response_mask").lengths
    loss_BT, gradients = point.gradients()
    tokens = max(1, int(point.inside_BT.sum()))
    found = {
        "loss_contribution": loss_BT,
        "gradient_contribution": gradients.get("log_prob", torch.zeros_like(loss_BT)),
    }
    columns: Table = {}
    for name, x_BT in found.items():
        whole_NT = torch.zeros(len(lengths), int(lengths.max()))
        whole_NT[subject.valid, : x_BT.shape[1]] = (x_BT / tokens).float()
        columns[name] = Ragged.unpad(whole_NT, lengths)
    return columns


def _places(inside_BT: Tensor) -> list[tuple[int, int]]:
    """Row and token of a few tokens inside the mask, spread over each row."""
    found = []
    for row, inside_T in enumerate(inside_BT):
        tokens = inside_T.nonzero()[:, 0]
        spread = torch.linspace(0, len(tokens) - 1, min(FEW_TOKENS, len(tokens))).long()
        found += [(row, int(token)) for token in tokens[spread]]
    return found


def _weights(inside_BT: Tensor) -> Tensor:
    """Of tokens, unequal, so that their gradients do not cancel each other."""
    draws = torch.Generator().manual_seed(3)
    return 0.5 + torch.rand(inside_BT.shape, generator=draws, dtype=torch.float64)


def _names(point: Point) -> list[str]:
    return ["the loss", *(f"the gradient of {name}" for name in point.leaves)]


def _all(found: tuple[Tensor, dict[str, Tensor]]) -> list[Tensor]:
    return [found[0], *found[1].values()]


def _where(point: Point, gap_BT: Tensor) -> str:
    at = int(gap_BT.abs().nan_to_num(nan=math.inf).argmax())
    return f"row {point.numbers[at // gap_BT.shape[1]]}, token {at % gap_BT.shape[1]}"


def _place(point: Point, bad_BT: Tensor, what: str) -> str:
    return f"{_where(point, bad_BT.double())}: {what} is not finite" if bad_BT.any() else ""


def _grpo_advantages(subject: LossSubject) -> Ragged | None:
    """GRPO's, of the rewards of valid rows, and 0 in the others; None where no prompt has several such rows."""
    table, lengths = subject.table, ragged_of(subject.whole, "response_mask").lengths
    rewards, groups = table.get("rewards"), table.get("prompt_uid")
    if rewards is None or not isinstance(groups, Tensor) or len(torch.unique(groups)) == len(groups):
        return None
    scores = rewards.pad() if isinstance(rewards, Ragged) else rewards
    assert isinstance(scores, Tensor)
    advantages_N = torch.zeros(len(lengths))
    inside_BT = ragged_of(table, "response_mask").pad().bool()
    advantages_N[subject.valid] = grpo(response_scores(scores, inside_BT), groups).float()
    return Ragged(torch.repeat_interleave(advantages_N, lengths), lengths)
