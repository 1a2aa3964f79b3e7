"""What an update's loss is to be, written from the papers, see `by_token`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.batches.columns import Table
from workbench.checks.by_token import ByToken, Numbers, importance_weights, kl, most_kept
from workbench.objectives.losses import clips


def policy_losses(
    table: Table, log_probs: list[Numbers], arguments: Mapping[str, Any], minibatches: Sequence[Sequence[int]]
) -> list[Numbers]:
    """The losses of each row's tokens inside the mask. log_probs: what the policy gives these tokens now.

    minibatches: the rows of each. arguments: all of `update_actor`'s; without entropy bonus and pretraining loss, whose
    values only the model knows.
    """
    rows = ByToken(table)
    columns: list[list[Numbers]] = [log_probs, rows.tokens("old_log_prob"), rows.tokens("advantages")]
    low, high = clips(arguments["loss"], arguments["clip"], arguments["clip_high"])

    def clipped(ratio: float) -> float:
        return min(max(ratio, 1 - low), 1 + high)

    def loss(now: float, old: float, advantage: float, of_sequence: float) -> float:
        ratio = of_sequence if arguments["loss"] == "gspo" else math.exp(now - old)
        if arguments["loss"] == "cispo":
            return -clipped(ratio) * advantage * now
        if arguments["loss"] == "sapo":
            tau = 1.0 if advantage > 0 else 1.05
            return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
        objective = min(ratio * advantage, clipped(ratio) * advantage)
        if arguments["dual_clip"] is not None and advantage < 0:
            objective = max(objective, arguments["dual_clip"] * advantage)
        return -objective

    found: list[list[float]] = []
    for now, old, advantages in zip(*columns, strict=True):
        of_sequence = math.exp((sum(now) - sum(old)) / max(1, len(now)))
        found.append([loss(*token, of_sequence) for token in zip(now, old, advantages, strict=True)])
    if arguments["correction"] is not None:
        correction, drawn = arguments["correction"], rows.tokens("rollout_log_prob")
        for minibatch in minibatches:
            most = most_kept([(columns[1][n], drawn[n]) for n in minibatch], correction)
            for n in minibatch:
                weights = importance_weights(columns[1][n], drawn[n], correction, most) if found[n] else []
                found[n] = [w * x for w, x in zip(weights, found[n], strict=True)]
    if arguments["kl_coefficient"]:
        for row, now, old, ref in zip(found, log_probs, columns[1], rows.tokens("ref_log_prob"), strict=True):
            penalties = [_kl_loss(*token, arguments["kl"]) for token in zip(now, old, ref, strict=True)]
            row[:] = [x + arguments["kl_coefficient"] * penalty for x, penalty in zip(row, penalties, strict=True)]
    return found


def _kl_loss(now: float, old: float, ref: float, kind: str) -> float:
    """One token's."""
    return math.exp(now - old) * kl(now, ref, "k3") if kind == "k3_corrected" else kl(now, ref, kind)


def value_losses(
    values: list[Numbers], old_values: list[Numbers], returns: list[Numbers], clip: float | None
) -> list[Numbers]:
    """A critic's losses of each row's tokens inside the mask. values: what the critic gives these states now."""

    def loss(value: float, old: float, target: float) -> float:
        near = value if clip is None else min(max(value, old - clip), old + clip)
        return max((value - target) ** 2, (near - target) ** 2) / 2

    rows = zip(values, old_values, returns, strict=True)
    return [[loss(*token) for token in zip(*row, strict=True)] for row in rows]


def aggregated(losses: Sequence[Numbers], how: str, longest: int | None) -> float:
    """The loss of a minibatch from those of its rows' tokens; a row without any inside the mask does not count."""
    rows = [row for row in losses if row]
    if not rows:
        return 0.0
    sums = [sum(row) for row in rows]
    if how == "token-mean":
        return sum(sums) / sum(map(len, rows))
    if how == "sequence-mean-token-mean":
        return sum(total / len(row) for total, row in zip(sums, rows, strict=True)) / len(rows)
    if how == "sequence-mean-token-sum":
        return sum(sums) / len(rows)
    assert longest is not None
    return sum(sums) / len(rows) / longest
