"""What an update changes: the weights of its role, alike on all ranks, and nothing else."""

from __future__ import annotations

from collections import Counter

from workbench.checks.report import Finding, NotApplicable, finding
from workbench.checks.subject import UPDATES, Subject, and_more

FROZEN = ("reference", "teacher", "reward", "cost")


def check_frozen(subject: Subject) -> Finding:
    """Reference, reward and cost models, and what an adapter leaves alone, keep their weights through forward passes
    and the actor's update."""
    subject.need_actor(UPDATES["actor"])
    # whether those alone that require no gradient: of a role with an adapter the rest moves
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
    return finding(len(moved), 0, and_more(moved), "weights with other bits after forward passes and an update")


def check_replicas(subject: Subject) -> Finding:
    """After an update all replicas of a role hold the same bits."""
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
                # of two that differ the one that did not move is the odd one
                odd = [r for r, text in enumerate(held) if text == before[r][name]] or [
                    r for r, text in enumerate(held) if text != common
                ]
                differ.append(f"{role}, rank {', '.join(map(str, odd))}: {name}")
    finally:
        subject.go_back()
    return finding(len(differ), 0, and_more(differ), "weights that differ between replicas after an update")
