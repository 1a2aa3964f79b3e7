"""Is the gradient that of the loss: nothing outside the mask in it, the right denominator, and finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.batches.columns import rows_at
from workbench.checks.report import Finding, finding
from workbench.checks.subject import MeasuredUpdate, Subject, and_more, dealt_otherwise
from workbench.workers.gradients import GradientReport

# Relative differences that rounding makes of sums in another order.
ROUNDING = (1e-4, 0.1)  # float32, bfloat16
NUMBERS = (
    *("old_log_prob", "ref_log_prob", "rollout_log_prob", "advantages"),
    *("values", "returns", "cost_values", "cost_returns"),
)
# So small a bonus changes no bit that counts, but with a bonus no row is skipped.
HARDLY_ANY = 1e-9


def check_masks(subject: Subject) -> Finding:
    """Tokens outside the mask change neither loss nor gradient, whatever their values."""
    every = range(subject.rows)

    def change(update: MeasuredUpdate, rows: Sequence[int]) -> tuple[float, str]:
        table = subject.spoilt(subject.training_table, NUMBERS, rows)
        spoilt = subject.measure(update.role, table, subject.all_tokens, **update.arguments)
        return relative_difference(update.ranks, spoilt)

    found = []
    for update in subject.measured:
        difference, what = change(update, every)
        difference, culprit = difference / subject.by_dtype(update.role, *ROUNDING), f"{update.name}: {what}"
        if difference > 1:
            of_row = [change(update, [row])[0] for row in every]
            culprit += f"; row {of_row.index(max(of_row))} most"
        found.append((difference, culprit))
    figure, culprit = max(found)
    about = "relative change of loss or gradient by garbage outside the mask, in units of what rounding may do"
    return finding(figure, 1.0, culprit, about)


def check_denominators(subject: Subject) -> Finding:
    """Loss and gradient of a minibatch depend neither on how it is cut into micro-batches, nor on which rank has which
    of its rows, nor on whether rows without advantage are skipped."""
    found, table, tokens = [], subject.training_table, subject.all_tokens
    for role, form, name, ranks in subject.measured:
        others = {"between one micro-batch and one a row": subject.measure(role, table, 1, **form)}
        if subject.lab.groups[role].layout.d > 1:
            dealt = rows_at(table, dealt_otherwise(subject.lab, role, subject.rows))
            others["between two ways to deal rows to ranks"] = subject.measure(role, dealt, tokens, **form)
        if role == "actor" and not {"entropy_coefficient", "kl_coefficient"} & set(form):
            others["between rows without advantage skipped and not"] = subject.measure(
                role, table, tokens, **form, entropy_coefficient=HARDLY_ANY
            )
        for between, other in others.items():
            difference, what = relative_difference(ranks, other)
            found.append((difference / subject.by_dtype(role, *ROUNDING), f"{name}: {what}, {between}"))
    figure, culprit = max(found)
    about = "relative change of loss or gradient with micro-batches, ranks or skips, in units of what rounding may do"
    return finding(figure, 1.0, culprit, about)


def check_gradients(subject: Subject) -> Finding:
    """Gradients are finite, not all 0, and the same on every rank."""
    bad: dict[str, None] = {}
    for update in subject.measured:
        for rank, report in enumerate(update.ranks):
            for minibatch, first in zip(report.minibatches, update.ranks[0].minibatches, strict=True):
                for name, sketch in minibatch.sketches.items():
                    if not math.isfinite(sketch.norm):
                        bad[f"{update.role}, rank {rank}: the gradient of {name} is not finite"] = None
                    elif sketch != first.sketches[name]:
                        bad[f"{update.role}, rank {rank}: the gradient of {name} is another than on rank 0"] = None
                if minibatch.norm == 0:
                    bad[f"{update.role}, rank {rank}: every gradient is 0"] = None
    return finding(len(bad), 0, and_more([*bad]), "gradients that are not finite, all 0, or unequal over ranks")


def relative_difference(one: list[GradientReport], two: list[GradientReport]) -> tuple[float, str]:
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
