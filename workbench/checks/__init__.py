"""Invariants that `lab.check()` tests on the live system.

A check is a function of a `Subject`, which offers a small batch and runs stages on variants of it. It returns
`finding(figure, threshold, culprit, about)`, or raises `NotApplicable(why)`. To add one: write it in a file here; the
first line of its docstring states the invariant; add a line to CHECKS. A check that takes optimizer steps belongs in
UPDATING: it runs inside `lab.kept(...)` and calls `subject.go_back()` at its end.
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
