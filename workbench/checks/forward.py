"""Does a forward pass say the same of a row whenever it is asked: in an update, and in any company."""

from __future__ import annotations

import math

import numpy as np
import torch

from workbench.batches.columns import Ragged, Table, rows_at
from workbench.checks.report import Finding, NotApplicable, finding
from workbench.checks.subject import FORWARD, Subject, row_gaps, worst

RATIO = "first_minibatch/ratio/max_deviation"


def check_dropout(subject: Subject) -> Finding:
    """Every model is in evaluation mode: dropout acts nowhere."""
    found = []
    for role, group in subject.lab.groups.items():
        if "training_modules" in group.operations:
            found += [(role, rank, modules) for rank, modules in enumerate(group.training_modules()) if modules]
    culprit = "; ".join(f"{role}, rank {rank}: {modules[0] or 'the module itself'}" for role, rank, modules in found)
    count = sum(len(modules) for _, _, modules in found)
    return finding(count, 0, culprit, "modules in training mode")


def check_ratio(subject: Subject) -> Finding:
    """Before the first step of an update the ratio against `old_log_prob` is 1."""
    if "actor" not in subject.updated_roles():
        raise NotApplicable("the actor does not train with workbench's own update loop")

    def deviations(table: Table) -> list[float]:
        ranks = subject.measure("actor", table)
        seen = [rank.metrics.get(RATIO, math.nan) if rank.counts else 0.0 for rank in ranks]
        return [math.inf if math.isnan(value) else value for value in seen]

    ones = torch.ones(len(subject.old_log_prob.values))  # a row without advantage would be skipped
    table = {
        **subject.training_table,
        "response_mask": subject.ragged("response_mask"),
        "advantages": subject.old_log_prob.like(ones),
    }
    deviation, rank = worst(deviations(table))
    limit = subject.by_dtype("actor", 1e-6, 1e-2)
    culprit = ""
    if not deviation <= limit:
        mask = subject.ragged("response_mask")
        of_row = [
            max(deviations({**table, "response_mask": mask.like(_only(mask, row))})) for row in range(subject.rows)
        ]
        culprit = f"actor, rank {rank}; row {worst(of_row)[1]} most"
    return finding(deviation, limit, culprit, "largest |ratio - 1| in the first minibatch")


def check_invariance(subject: Subject) -> Finding:
    """A row's numbers depend neither on the order of rows nor on what shares its micro-batch."""
    rows = np.arange(subject.rows)
    found: list[tuple[float, str]] = []
    for role in subject.forward_roles():
        expected, _ = subject.forward(role, subject.table)
        limit = subject.by_dtype(role, 1e-4, 0.1)
        if not FORWARD[role][1].endswith("log_prob"):  # scores and values have a scale of their own
            limit *= max(1.0, float(expected.values.abs().max()))
        variants = {
            "in reverse order": [rows[::-1]],
            "three times, in larger micro-batches": [np.concatenate([rows, rows[::-1], rows])],
            # as many rows as each rank and minibatch has one of: none has a neighbour
            "alone in its micro-batch": np.split(rows, len(rows) // subject.unit(role)),
        }
        for name, parts in variants.items():
            for part in parts:
                values, batch = subject.forward(role, rows_at(subject.table, part))
                gap, i = worst(row_gaps(values, expected.take(part.tolist())))
                where = subject.rank_of(batch, FORWARD[role][1], i)
                found.append((gap / limit, f"{role}, row {part[i]} on {where}, {name}"))
    if not found:
        raise NotApplicable("no role here has a forward stage of workbench's own")
    figure, culprit = max(found)
    about = "largest change of a log-probability, value or score, in units of what rounding may do"
    return finding(figure, 1.0, culprit, about)


def _only(mask: Ragged, row: int) -> torch.Tensor:
    """The mask with all rows but one taken out."""
    rows = torch.repeat_interleave(torch.arange(len(mask)), mask.lengths)
    return mask.values.bool() & (rows == row)
