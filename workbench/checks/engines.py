"""Do the models that should agree agree: the engine that samples, the trainer, the reference."""

from __future__ import annotations

import torch

from workbench.batches.store import Weights
from workbench.checks.report import Finding, NotApplicable, finding
from workbench.checks.subject import TEMPERATURE, Subject, and_more, row_gaps, worst

# Mean gap in nats between two engines on the same tokens. A stale output head shows as several tenths.
ENGINES = (1e-3, 0.1)  # float32, bfloat16


def check_rollout(subject: Subject) -> Finding:
    """The log-probabilities that the engine sampled with are the trainer's, log softmax(logits / temperature)."""
    gaps = row_gaps(subject.ragged("rollout_log_prob"), subject.old_log_prob, torch.mean)
    gap, row = worst(gaps)
    where = subject.rank_of(subject.rollouts, "rollout_log_prob", row)
    return finding(
        gap, subject.by_dtype("actor", *ENGINES), f"actor, row {row}, generated on {where}",
        f"|rollout_log_prob - old_log_prob|, mean over the worst row, nats; temperature {TEMPERATURE} alone",
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
        # bits that differ are a failure whatever they do to the probe
        gap = max(seen.gap, seen.moved_gap or 0.0)
        figures.append(gap if not differ else max(gap, 2 * limit))
        if differ:
            culprit = culprit or f"{role}, rank {rank}: {and_more(differ)}"
        elif not seen.gap <= limit:
            culprit = culprit or f"{role}, rank {rank}: a weight that cannot be read in the engine"
        elif not gap <= limit:
            culprit = culprit or f"{role}, rank {rank}: output head, which does not follow the embeddings in a sync"
    read = min(seen.read for seen in ranks)
    return finding(
        max(figures), limit, culprit, f"gap on a probe, nats; {read} weights compared bit for bit in the engine"
    )


def check_kl(subject: Subject) -> Finding:
    """The actor is its reference while it has taken no step since they were equal."""
    lab = subject.lab
    if "reference" not in lab.groups:
        raise NotApplicable("there is no reference")
    subject.need_actor("compute_log_prob")
    actor, reference = lab.actor.spec, lab.reference.spec
    # without its adapter the actor is what it was at first
    untrained = lab.description.actor_is_reference
    own, theirs = lab.weights["actor"], Weights(steps=0, state="") if untrained else lab.weights["reference"]
    if own != theirs:
        raise NotApplicable("the actor has been trained since it was equal to the reference")
    if not own.state and actor.name != reference.name:
        raise NotApplicable("the reference began as another model than the actor")
    values, batch = subject.forward("reference", subject.table)
    gap, row = worst(row_gaps(values, subject.old_log_prob, torch.mean))
    same = 1e-5 if actor.dtype == reference.dtype == "float32" else 0.1
    culprit = f"reference, row {row}, on {subject.rank_of(batch, 'ref_log_prob', row)}"
    return finding(gap, same, culprit, "|old_log_prob - ref_log_prob|, mean over the worst row, nats")
