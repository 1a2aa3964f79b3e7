"""Is the loss of an update the one that it is asked for: its formula, over whole minibatches in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.algorithms.aggregation import aggregate, denominator
from workbench.algorithms.correction import correct
from workbench.algorithms.kl import kl_loss
from workbench.algorithms.losses import policy_loss, value_loss
from workbench.checks.forms import said
from workbench.checks.gradients import ROUNDING
from workbench.checks.report import Finding, NotApplicable
from workbench.checks.subject import FORWARD, UPDATES, Subject
from workbench.dataflow.columns import Ragged, Table
from workbench.workers.protocols import THREE_D_PROTO, minibatch_rows
from workbench.workers.roles import ROLE_WORKERS


def check_losses(subject: Subject) -> Finding:
    """The loss of each minibatch is that of the formula on all of its rows at once, denominator and weights included.

    A wrong factor on every rank shows here, which is the same however rows are cut and dealt. Left out are updates of
    one's own, and terms whose value only the model knows: the entropy and the pretraining loss.
    """
    found = []
    for role in subject.updated_roles():
        group = subject.lab.groups[role]
        if getattr(group.worker_class, UPDATES[role]) is not getattr(ROLE_WORKERS[role], UPDATES[role]):
            continue
        collected = THREE_D_PROTO.collect(group.layout)
        for number, form in enumerate(subject.forms(role)):
            arguments, _ = group.operations[UPDATES[role]].arguments((), form)
            if arguments.get("entropy_coefficient") or arguments.get("pretrain_coefficient"):
                continue
            table, ranks = subject.training_table, subject.measure_form(role, number)
            loss_BT = _policy(table, arguments) if role == "actor" else _regression(subject, role, arguments)
            mask_BT = _padded(table, "response_mask")
            how, longest = arguments["aggregation"], arguments["max_response_tokens"]
            for i, rows in enumerate(minibatch_rows(subject.rows, subject.minibatches(role))):
                expected = float(aggregate(loss_BT[rows], mask_BT[rows], how, denominator(mask_BT[rows], how, longest)))
                said_by_ranks = sum(ranks[rank].minibatches[i].share for rank in collected)
                gap = abs(said_by_ranks - expected) / max(abs(expected), 0.1) / subject.by_dtype(role, *ROUNDING)
                where = f"{role}{said(form)}, minibatch {i}: {said_by_ranks:.6g}, the formula gives {expected:.6g}"
                found.append((math.inf if math.isnan(gap) else gap, where))
    if not found:
        raise NotApplicable("every update here is one of your own")
    figure, culprit = max(found)
    about = "relative gap between an update's loss and its formula, in units of what rounding may do"
    return subject.finding(figure, 1.0, culprit, about)


def _policy(table: Table, arguments: Mapping[str, Any]) -> Tensor:
    """The actor's token losses where its policy is still the old one, [B, T]."""
    old_BT, mask_BT = _padded(table, "old_log_prob"), _padded(table, "response_mask")
    clip = arguments["clip"]
    high = clip if arguments["clip_high"] is None else arguments["clip_high"]
    loss_BT, _ = policy_loss(
        arguments["loss"], old_BT, old_BT, _padded(table, "advantages"), mask_BT, clip, high, arguments["dual_clip"]
    )
    if arguments["correction"] is not None:
        rollout_BT = _padded(table, "rollout_log_prob")
        loss_BT = loss_BT * correct(old_BT, rollout_BT, mask_BT, arguments["correction"]).weight_BT
    if arguments["kl_coefficient"]:
        kl_BT = kl_loss(old_BT, old_BT, _padded(table, "ref_log_prob"), arguments["kl"])
        loss_BT = loss_BT + arguments["kl_coefficient"] * kl_BT
    return loss_BT


def _regression(subject: Subject, role: str, arguments: Mapping[str, Any]) -> Tensor:
    """A critic's token losses at the values that it has now, [B, T]."""
    values, _ = subject.forward(role, subject.table)
    table, column = subject.training_table, FORWARD[role][1]
    returns_BT = _padded(table, column.replace("values", "returns"))
    loss_BT, _ = value_loss(values.pad(), _padded(table, column), returns_BT, clip=arguments["clip"])
    return loss_BT


def _padded(table: Table, name: str) -> Tensor:
    column = table[name]
    assert isinstance(column, Ragged)
    return column.pad().bool() if column.values.dtype == torch.bool else column.pad().float()
