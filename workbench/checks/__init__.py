"""Is it right: invariants that are tested on the live system, by `lab.check()`.

A check is a function of a `Subject`, which offers a small batch and the means to run stages on variants of it. It
returns `finding(figure, threshold, culprit, about)`, or raises `NotApplicable(why)`. To add one: write it in a
file here, with a first line of docstring that says what holds, and add a line to CHECKS. A check that takes steps is in
UPDATING: it runs inside `lab.kept(...)` and calls `subject.go_back()` when it is done.
"""

from collections.abc import Callable

from workbench.checks import invariants
from workbench.checks.report import CheckReport, Finding
from workbench.checks.subject import Subject

CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "dropout": invariants.check_dropout,
    "ratio": invariants.check_ratio,
    "rollout": invariants.check_rollout,
    "weights": invariants.check_weights,
    "kl": invariants.check_kl,
    "invariance": invariants.check_invariance,
    "advantages": invariants.check_advantages,
    "masks": invariants.check_masks,
    "denominators": invariants.check_denominators,
    "gradients": invariants.check_gradients,
    "frozen": invariants.check_frozen,
    "replicas": invariants.check_replicas,
}
UPDATING = ("frozen", "replicas")

__all__ = ["CHECKS", "UPDATING", "CheckReport", "Finding", "Subject"]
