"""The invariants of a live system, one function a check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from workbench.batches.columns import Ragged, Table, rows_at
from workbench.batches.store import Weights
from workbench.checks.report import Finding, NotApplicable, finding, largest
from workbench.checks.subject import (
    FORWARD,
    NEW_TOKENS,
    SEED,
    TEMPERATURE,
    UPDATES,
    MeasuredUpdate,
    Subject,
    and_more,
    dealt_otherwise,
    row_gaps,
    worst,
)
from workbench.objectives.correction import Correction
from workbench.workers.gradients import GradientReport

FROZEN = ("reference", "teacher", "reward", "cost")


def check_frozen(subject: Subject) -> Finding:
    """Reference, reward and cost models, and base weights under an adapter, do not change in forward passes and in the
    actor's update."""
    subject.need_actor(UPDATES["actor"])
    # True: compare only weights without gradient, because an adapter's weights do change
    watched = {
        role: group.spec.adapter is not None
        for role, group in subject.lab.groups.items()
        if "weight_digests" in group.operations and group.spec.name and group.worker_role == role
        if role in FROZEN or group.spec.adapter is not None
    }
    if not watched:
        raise NotApplicable("no role here has a model that is not trained")

    def digests() -> dict[str, list[dict[str, str]]]:
        groups = subject.lab.groups
        return {r: groups[r].weight_digests(**({"frozen": True} if part else {})) for r, part in watched.items()}

    before = digests()
    try:
        for role in subject.forward_roles():
            if role in FROZEN:
                subject.forward(role, subject.table)
        subject.update("actor")
        after = digests()
    finally:
        subject.go_back()
    moved = [
        f"{role}, rank {rank}: {name}"
        for role in watched
        for rank, (old, new) in enumerate(zip(before[role], after[role], strict=True))
        for name in old
        if old[name] != new.get(name)
    ]
    return finding(len(moved), 0, and_more(moved), "weights whose bits changed in forward passes and an update")


def check_replicas(subject: Subject) -> Finding:
    """After an update all replicas of a role have bit-identical weights."""
    roles = [
        role
        for role in subject.roles(UPDATES)
        if len(subject.lab.groups[role].hosts) > 1 and "weight_digests" in subject.lab.groups[role].operations
    ]
    if not roles:
        raise NotApplicable("every trained role has one rank")
    differ: list[str] = []
    try:
        for role in roles:
            group = subject.lab.groups[role]
            before = group.weight_digests()
            subject.update(role)
            ranks = group.weight_digests()
            for name in ranks[0]:
                held = [digests[name] for digests in ranks]
                common, count = Counter(held).most_common(1)[0]
                if count == len(held):
                    continue
                # if two replicas differ, the one whose weights did not change is the culprit
                odd = [r for r, text in enumerate(held) if text == before[r][name]] or [
                    r for r, text in enumerate(held) if text != common
                ]
                differ.append(f"{role}, rank {', '.join(map(str, odd))}: {name}")
    finally:
        subject.go_back()
    return finding(len(differ), 0, and_more(differ), "weights that differ between replicas after an update")


# Calls that together cover every path through `compute_advantages`.
ESTIMATES: tuple[dict[str, Any], ...] = (
    {"estimator": "gae", "gamma": 0.9, "lam": 0.8, "kl_coefficient": 0.1},
    {"estimator": "gae", "bootstrap": True, "multiplier": 0.5, "kl_coefficient": 0.1, "kl": "k2"},
    {"estimator": "gae", "gamma": 0.9, "macro_tokens": 3},
    {"estimator": "gae_turn", "gamma": 0.9, "lam": 0.8, "bootstrap": True, "kl_coefficient": 0.1},
    {"estimator": "remax", "kl_coefficient": 0.1, "kl": "k3"},
    {"estimator": "reinforce_pp", "gamma": 0.9, "kl_coefficient": 0.1},
    {"estimator": "reinforce_pp_baseline"},
    {"estimator": "reinforce_turn", "gamma": 0.9, "kl_coefficient": 0.1},
    {"estimator": "reinforce_turn_baseline"},
    {"estimator": "grpo", "overlong_buffer": 4, "max_response_tokens": NEW_TOKENS - 1},
    {"estimator": "dr_grpo"},
    {"estimator": "grpo_batch_std"},
    {"estimator": "grpo_process", "kl_coefficient": 0.1},
    {"estimator": "rloo", "kl_coefficient": 0.1},
    {"estimator": "off_policy_baseline", "correction": Correction(level="sequence")},
)
VARIANTS = ("bootstrap", "macro_tokens", "multiplier", "overlong_buffer")
SCORES = ("rewards", "costs")
TOKENS = ("values", "cost_values", "old_log_prob", "ref_log_prob", "rollout_log_prob")
OUTSIDE = 3  # tokens
FLOAT32_ROUNDING = 1e-4  # computed in float32 whatever the models are


def check_advantages(subject: Subject) -> Finding:
    """Advantages and returns depend neither on values outside the mask, nor on how many tokens are outside, nor on the
    order of rows."""
    table = _table(subject)
    order = np.random.default_rng(SEED).permutation(subject.rows)
    # the score of a response counts even if no token is inside the mask
    scored = [row for row, inside in enumerate(subject.mask.rows()) if inside.any()]
    spoilt = subject.spoilt(subject.spoilt(table, TOKENS, range(subject.rows)), SCORES, scored)
    lengths = subject.mask.lengths
    longer = {
        name: Ragged.unpad(pad(column.pad(), (0, OUTSIDE)), lengths + OUTSIDE)
        if isinstance(column, Ragged) and torch.equal(column.lengths, lengths)
        else column
        for name, column in table.items()
    }
    found: list[tuple[float, str]] = []

    def made(inputs: Table, arguments: dict[str, Any]) -> dict[str, Ragged]:
        batch = subject.lab.compute_advantages(subject.put(inputs), **arguments)
        names = ["advantages", "returns", *(["cost_returns"] if "multiplier" in arguments else [])]
        return {name: column for name, column in batch.fetch(names).items() if isinstance(column, Ragged)}

    for arguments in ESTIMATES:
        variants = " and ".join(name for name in VARIANTS if name in arguments)
        called = f"{arguments['estimator']}{' with ' if variants else ''}{variants}"
        clean, dealt = made(table, arguments), made(rows_at(table, order), arguments)
        others = {
            "with garbage outside the mask": made(spoilt, arguments),
            "with its rows in another order, on other ranks": {
                name: column.take(np.argsort(order).tolist()) for name, column in dealt.items()
            },
        }
        if "overlong_buffer" not in arguments:  # it counts all tokens of a response
            others["with more tokens outside the mask"] = {
                name: Ragged.unpad(column.pad(), lengths) for name, column in made(longer, arguments).items()
            }
        for between, other in others.items():
            for name, column in clean.items():
                one, two = (torch.where(subject.mask.values, x.values, 0.0).double() for x in (column, other[name]))
                gaps = (one - two).abs().nan_to_num(nan=math.inf) / max(1.0, float(one.abs().max())) / FLOAT32_ROUNDING
                culprit = f"{name} of row {int(subject.row_of[gaps.argmax()])}, {called}, {between}"
                found.append((float(gaps.max()), culprit))
    about = "relative change of advantages or returns that must not change, in units of the allowed rounding"
    return largest(found, 1.0, about)


def _table(subject: Subject) -> Table:
    """The columns that `compute_advantages` reads, from a fixed seed; two responses a prompt."""
    generator = torch.Generator().manual_seed(SEED)
    table, rows = dict(subject.training_table), subject.rows
    for name in SCORES:
        table[name] = subject.mask.like(torch.randn(len(subject.mask.values), generator=generator))
    for name in ("baseline_rewards", "final_values", "final_cost_values"):
        table[name] = torch.randn(rows, generator=generator)
    steps = subject.mask.like(torch.rand(len(subject.mask.values), generator=generator) < 0.4)
    table["step_ends"] = steps
    turns = [row.nonzero()[:, 0].add(1).tolist() for row in steps.rows()]
    lengths = subject.mask.lengths.tolist()
    turns = [sorted({*ends, length} - {0}) for ends, length in zip(turns, lengths, strict=True)]
    table["turn_ends"] = Ragged.of(turns, torch.int64)
    table["finished"] = torch.arange(rows) % 3 > 0
    table["prompt_uid"] = (torch.arange(rows) // 2).clamp(max=rows // 2 - 1)
    table["gradient_norm"] = 0.5 + torch.rand(rows, generator=generator)
    return table


# Mean gap in nats between two engines on the same tokens. A stale output head shows as several tenths.
ENGINES = (1e-3, 0.1)  # float32, bfloat16


def check_rollout(subject: Subject) -> Finding:
    """The log-probabilities that the engine sampled with are the trainer's, log softmax(logits / temperature)."""
    gap, row = worst(row_gaps(subject.ragged("rollout_log_prob"), subject.old_log_prob, torch.mean))
    where = subject.rank_of(subject.rollouts, "rollout_log_prob", row)
    return finding(
        gap, subject.by_dtype("actor", *ENGINES), f"actor, row {row}, generated on {where}",
        f"|rollout_log_prob - old_log_prob|, mean over the worst row, nats; at temperature {TEMPERATURE} only",
    )  # fmt: skip


def check_weights(subject: Subject) -> Finding:
    """After a sync the generation engine has the trainer's weights, its output head among them."""
    subject.need_actor("compare_weights")
    compare = subject.lab.actor.operations["compare_weights"]
    role, ranks = compare.group.role, compare()
    limit = subject.by_dtype("actor", *ENGINES)
    figures, culprit = [], ""
    for rank, seen in enumerate(ranks):
        differ = (*seen.differ, *(name for name in seen.moved_differ if name not in seen.differ))
        # differing bits are a failure, however small their effect on the probe
        gap = max(seen.gap, seen.moved_gap or 0.0)
        figures.append(gap if not differ else max(gap, 2 * limit))
        if differ:
            culprit = culprit or f"{role}, rank {rank}: {and_more(differ)}"
        elif not seen.gap <= limit:
            culprit = culprit or f"{role}, rank {rank}: a weight that cannot be read in the engine"
        elif not gap <= limit:
            culprit = culprit or f"{role}, rank {rank}: output head, which a sync did not update with the embeddings"
    read = min(seen.read for seen in ranks)
    return finding(
        max(figures), limit, culprit, f"gap on a probe, nats; {read} weights compared bit for bit in the engine"
    )


def check_kl(subject: Subject) -> Finding:
    """The actor equals its reference until its first step."""
    lab = subject.lab
    if "reference" not in lab.groups:
        raise NotApplicable("there is no reference")
    subject.need_actor("compute_log_prob")
    actor, reference = lab.actor.spec, lab.reference.spec
    # without its adapter the actor has its initial weights
    untrained = lab.description.actor_is_reference
    own, theirs = lab.weights["actor"], Weights(steps=0, state="") if untrained else lab.weights["reference"]
    if own != theirs:
        raise NotApplicable("the actor has been trained since it was equal to the reference")
    if not own.state and actor.name != reference.name:
        raise NotApplicable("the reference started from another model than the actor")
    values, batch = subject.forward("reference", subject.table)
    gap, row = worst(row_gaps(values, subject.old_log_prob, torch.mean))
    same = 1e-5 if actor.dtype == reference.dtype == "float32" else 0.1
    culprit = f"reference, row {row}, on {subject.rank_of(batch, 'ref_log_prob', row)}"
    return finding(gap, same, culprit, "|old_log_prob - ref_log_prob|, mean over the worst row, nats")


RATIO = "first_minibatch/ratio/max_deviation"


def check_dropout(subject: Subject) -> Finding:
    """Every model is in evaluation mode: dropout acts nowhere."""
    found = []
    for role, group in subject.lab.groups.items():
        if "training_modules" in group.operations:
            found += [(role, rank, modules) for rank, modules in enumerate(group.training_modules()) if modules]
    culprit = "; ".join(f"{role}, rank {rank}: {modules[0] or 'the module itself'}" for role, rank, modules in found)
    return finding(sum(len(modules) for _, _, modules in found), 0, culprit, "modules in training mode")


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
        single = (mask.like(mask.values.bool() & (subject.row_of == row)) for row in range(subject.rows))
        of_row = [max(deviations({**table, "response_mask": one})) for one in single]
        culprit = f"actor, rank {rank}; row {worst(of_row)[1]} most"
    return finding(deviation, limit, culprit, "largest |ratio - 1| in the first minibatch")


def check_invariance(subject: Subject) -> Finding:
    """A row's numbers depend neither on the order of rows nor on the other rows of its micro-batch."""
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
            # one row per rank and minibatch, so that no row has a neighbour
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
    return largest(found, 1.0, "largest change of a log-probability, value or score, in units of the allowed rounding")


# Relative differences caused by rounding, because sums are taken in another order.
ROUNDING = (1e-4, 0.1)  # float32, bfloat16
NUMBERS = (
    *("old_log_prob", "ref_log_prob", "rollout_log_prob", "advantages"),
    *("values", "returns", "cost_values", "cost_returns"),
)
# The bonus is too small to change the comparison; but with a bonus no row is skipped.
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
    about = "relative change of loss or gradient from garbage outside the mask, in units of the allowed rounding"
    return largest(found, 1.0, about)


def check_denominators(subject: Subject) -> Finding:
    """Loss and gradient of a minibatch depend neither on the micro-batches, nor on which rank gets which rows, nor on
    whether rows without advantage are skipped."""
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
    about = "relative change of loss or gradient with micro-batches, ranks or skips, in units of the allowed rounding"
    return largest(found, 1.0, about)


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
                        bad[f"{update.role}, rank {rank}: the gradient of {name} differs from that on rank 0"] = None
                if minibatch.norm == 0:
                    bad[f"{update.role}, rank {rank}: every gradient is 0"] = None
    return finding(len(bad), 0, and_more([*bad]), "gradients that are not finite, all 0, or unequal over ranks")


def relative_difference(one: list[GradientReport], two: list[GradientReport]) -> tuple[float, str]:
    """The largest relative difference of the losses, or of rank 0's gradients; and which of the two it is."""
    found = []
    for number, (mine, theirs) in enumerate(zip(one[0].minibatches, two[0].minibatches, strict=True)):
        losses = [sum(rank.minibatches[number].share for rank in ranks) for ranks in (one, two)]
        # the loss may be close to 0 by chance; its tokens' losses are not
        found.append((abs(losses[0] - losses[1]) / max(abs(losses[0]), 0.1), "the loss"))
        scale = max(mine.norm, 1e-12)
        for name, sketch in mine.sketches.items():
            found.append((sketch.distance(theirs.sketches[name]) / scale, f"the gradient of {name}"))
    return max((math.inf if math.isnan(figure) else figure, what) for figure, what in found)
