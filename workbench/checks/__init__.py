"""Is it right: invariants that are tested on the live system, by `lab.check()`.

A check is a function of a `Subject`, which offers a small batch and the means to run stages on variants of it. It
returns `finding(figure, threshold, culprit, about)`, or raises `NotApplicable(why)`. To add one: write it in a
file here, with a first line of docstring that says what holds, and add a line to CHECKS. A check that takes steps is in
UPDATING: it runs inside `lab.kept(...)` and calls `subject.go_back()` when it is done.
"""

from collections.abc import Callable

from workbench.checks.invariants import (
    check_advantages,
    check_denominators,
    check_dropout,
    check_frozen,
    check_gradients,
    check_invariance,
    check_kl,
    check_masks,
    check_ratio,
    check_replicas,
    check_rollout,
    check_weights,
)
from workbench.checks.report import CheckReport, Finding
from workbench.checks.subject import Subject

CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "dropout": check_dropout,
    "ratio": check_ratio,
    "rollout": check_rollout,
    "weights": check_weights,
    "kl": check_kl,
    "invariance": check_invariance,
    "advantages": check_advantages,
    "masks": check_masks,
    "denominators": check_denominators,
    "gradients": check_gradients,
    "frozen": check_frozen,
    "replicas": check_replicas,
}
UPDATING = ("frozen", "replicas")

__all__ = ["CHECKS", "UPDATING", "CheckReport", "Finding", "Subject"]
