"""Is the gradient that of the loss: nothing outside the mask in it, the right denominator, and finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.checks.report import Finding
from workbench.checks.subject import SEED, Subject, and_more
from workbench.dataflow.columns import Ragged, Table
from workbench.workers.gradients import GradientReport

# Every term of the actor's loss, so that each of them is seen.
ARGUMENTS: dict[str, dict[str, Any]] = {"actor": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}}
# Relative differences that rounding makes of sums in another order.
ROUNDING = (1e-4, 0.1)  # float32, bfloat16
GARBAGE = 30.0
NUMBERS = (
    *("old_log_prob", "ref_log_prob", "rollout_log_prob", "advantages"),
    *("values", "returns", "cost_values", "cost_returns"),
)


def check_masks(subject: Subject) -> Finding:
    """Tokens outside the mask change neither loss nor gradient, whatever stands there."""
    mask = _mask(subject)
    clean = {**subject.training_table, "response_mask": mask.like(mask.values)}

    def spoilt(rows: Sequence[int]) -> Table:
        generator = torch.Generator().manual_seed(SEED)
        here = torch.isin(torch.repeat_interleave(torch.arange(len(mask)), mask.lengths), torch.tensor(list(rows)))
        outside, table = here & ~mask.values, dict(clean)
        for name in NUMBERS:
            column = subject.training_table[name]
            assert isinstance(column, Ragged)
            noise = GARBAGE * torch.randn(len(outside), generator=generator)
            table[name] = column.like(torch.where(outside, noise, column.values))
        return table

    found = []
    for role in subject.updated_roles():
        expected = subject.measure(role, clean, **ARGUMENTS.get(role, {}))
        every = range(subject.rows)
        difference, what = _difference(expected, subject.measure(role, spoilt(every), **ARGUMENTS.get(role, {})))
        difference, culprit = difference / subject.by_dtype(role, *ROUNDING), f"{role}: {what}"
        if difference > 1:
            of_row = [
                _difference(expected, subject.measure(role, spoilt([row]), **ARGUMENTS.get(role, {})))[0]
                for row in every
            ]
            culprit += f"; row {max(every, key=lambda row: of_row[row])} most"
        found.append((difference, culprit))
    figure, culprit = max(found)
    about = "relative change of loss or gradient by garbage outside the mask, in units of what rounding may do"
    return subject.finding(figure, 1.0, culprit, about)


def check_denominators(subject: Subject) -> Finding:
    """Loss and gradient of a minibatch do not depend on how it is cut into micro-batches."""
    found = []
    longest = int(max(subject.ragged("prompt_ids").lengths + subject.ragged("response_ids").lengths))
    for role in subject.updated_roles():
        for aggregation in ("token-mean", "sequence-mean-token-mean"):
            arguments = {**ARGUMENTS.get(role, {}), "aggregation": aggregation}
            whole = subject.measure(role, subject.training_table, 8 * subject.rows * longest, **arguments)
            alone = subject.measure(role, subject.training_table, 1, **arguments)
            difference, what = _difference(whole, alone)
            culprit = f"{role}: {what}, {aggregation}, between one micro-batch and one a row"
            found.append((difference / subject.by_dtype(role, *ROUNDING), culprit))
    figure, culprit = max(found)
    about = "relative change of loss or gradient with the cut into micro-batches, in units of what rounding may do"
    return subject.finding(figure, 1.0, culprit, about)


def check_gradients(subject: Subject) -> Finding:
    """Gradients are finite, not all 0, and the same on every rank."""
    bad: list[str] = []
    for role in subject.updated_roles():
        ranks = subject.measure(role, subject.training_table, **ARGUMENTS.get(role, {}))
        for rank, report in enumerate(ranks):
            for minibatch, first in zip(report.minibatches, ranks[0].minibatches, strict=True):
                for name, sketch in minibatch.sketches.items():
                    if not math.isfinite(sketch.norm):
                        bad.append(f"{role}, rank {rank}: the gradient of {name} is not finite")
                    elif sketch != first.sketches[name]:
                        bad.append(f"{role}, rank {rank}: the gradient of {name} is another than on rank 0")
                if minibatch.norm == 0:
                    bad.append(f"{role}, rank {rank}: every gradient is 0")
    return subject.finding(len(bad), 0, and_more(bad), "gradients that are not finite, all 0, or unequal over ranks")


def _mask(subject: Subject) -> Ragged:
    """A mask with holes: the middle third of each response, and all of the last one."""
    rows: list[Tensor] = []
    for length in subject.ragged("response_ids").lengths.tolist():
        row = torch.ones(length, dtype=torch.bool)
        row[length // 3 : 2 * length // 3] = False
        rows.append(row)
    rows[-1][:] = False
    return Ragged.of(rows, torch.bool)


def _difference(one: list[GradientReport], two: list[GradientReport]) -> tuple[float, str]:
    """The largest relative difference of the losses, or of the gradients as rank 0 has them; and which it is."""
    found = []
    for number, (mine, theirs) in enumerate(zip(one[0].minibatches, two[0].minibatches, strict=True)):
        losses = [sum(rank.minibatches[number].share for rank in ranks) for ranks in (one, two)]
        # the loss may happen to lie next to 0, its tokens' losses do not
        found.append((abs(losses[0] - losses[1]) / max(abs(losses[0]), 0.1), "the loss"))
        scale = max(mine.norm, 1e-12)
        for name, sketch in mine.sketches.items():
            found.append((sketch.distance(theirs.sketches[name]) / scale, f"the gradient of {name}"))
    return max((math.inf if math.isnan(figure) else figure, what) for figure, what in found)
