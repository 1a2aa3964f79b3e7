"""Is the loss of an update the one that it is asked for: its formula, over whole minibatches in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workbench.batches.balance import minibatch_rows
from workbench.batches.columns import Ragged, Table
from workbench.checks.by_token import ByToken, Numbers
from workbench.checks.forms import LOSSES, form_name
from workbench.checks.gradients import ROUNDING
from workbench.checks.loss_formulas import aggregated, policy_losses, value_losses
from workbench.checks.report import Finding, NotApplicable
from workbench.checks.subject import FORWARD, SEED, UPDATES, Subject
from workbench.messages.protocols import THREE_D_PROTO
from workbench.workers.roles import ROLE_WORKERS

# How far policy and critic have moved since the rollouts, and lie from the reference: standard deviations of
# log-ratios, and of a value. So that ratios lie on both sides of 1, within every clip and outside.
MOVED = {"old_log_prob": 0.5, "ref_log_prob": 0.5, "values": 0.5, "cost_values": 0.5}


def check_losses(subject: Subject) -> Finding:
    """The loss of each minibatch is that of the formula on all of its rows at once, denominator and weights included,
    for a policy that has left the one of its rollouts.

    A wrong factor on every rank shows here, which is the same however rows are cut and dealt. Left out are updates of
    one's own, and terms whose value only the model knows: the entropy and the pretraining loss.
    """
    found, table = [], _moved(subject)
    for role in subject.updated_roles():
        group = subject.lab.groups[role]
        if getattr(group.worker_class, UPDATES[role]) is not getattr(ROLE_WORKERS[role], UPDATES[role]):
            continue
        collected = THREE_D_PROTO.collect(group.layout)
        for form in LOSSES[role]:
            arguments, _ = group.operations[UPDATES[role]].arguments((), form)
            ranks = subject.measure(role, table, subject.all_tokens, **form)
            minibatches = [rows.tolist() for rows in minibatch_rows(subject.rows, subject.minibatches(role))]
            losses = (
                _policy(subject, table, arguments, minibatches)
                if role == "actor"
                else _critic(subject, role, table, arguments)
            )
            how, longest = arguments["aggregation"], arguments["max_response_tokens"]
            for i, rows in enumerate(minibatches):
                expected = aggregated([losses[row] for row in rows], how, longest)
                said_by_ranks = sum(ranks[rank].minibatches[i].share for rank in collected)
                # tokens' losses may cancel each other, their rounding does not
                size = aggregated([[abs(loss) for loss in losses[row]] for row in rows], how, longest)
                gap = abs(said_by_ranks - expected) / max(size, 0.1) / subject.by_dtype(role, *ROUNDING)
                where = f"{role}{form_name(form)}, minibatch {i}: {said_by_ranks:.6g}, the formula gives {expected:.6g}"
                found.append((math.inf if math.isnan(gap) else gap, where))
    if not found:
        raise NotApplicable("every update here is one of your own")
    figure, culprit = max(found)
    about = "relative gap between an update's loss and its formula, in units of what rounding may do"
    return subject.finding(figure, 1.0, culprit, about)


def _moved(subject: Subject) -> Table:
    """The training table, as it would be had policy and critics taken steps since its columns were made."""
    generator, table = torch.Generator().manual_seed(SEED + 1), dict(subject.training_table)
    for name, scale in MOVED.items():
        column = table[name]
        assert isinstance(column, Ragged)
        table[name] = column.like(column.values + scale * torch.randn(len(column.values), generator=generator))
    return table


def _policy(
    subject: Subject, table: Table, arguments: Mapping[str, Any], minibatches: Sequence[Sequence[int]]
) -> list[Numbers]:
    """The actor's token losses."""
    now = ByToken({**table, "now": subject.old_log_prob}).tokens("now")
    return policy_losses(table, now, arguments, minibatches)


def _critic(subject: Subject, role: str, table: Table, arguments: Mapping[str, Any]) -> list[Numbers]:
    """A critic's token losses."""
    column = FORWARD[role][1]
    values, _ = subject.forward(role, subject.table)
    rows = ByToken({**table, "now": values})
    returns = rows.tokens(column.replace("values", "returns"))
    return value_losses(rows.tokens("now"), rows.tokens(column), returns, arguments["clip"])
