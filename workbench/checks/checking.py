"""`lab.check()`: run checks on the live system, and leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from workbench.checks import CHECKS, UPDATING
from workbench.checks.report import CheckReport, Finding, NotApplicable
from workbench.checks.subject import UPDATES, Subject
from workbench.checks.updates import FROZEN
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, HostDied, StageError, StageInterrupted, WorkbenchError
from workbench.stages.isolated import isolated

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab


@stoppable("lab.check()", ("the system is as before", "the same call again checks it"))
def check(lab: Lab, names: Sequence[str]) -> CheckReport:
    """The report of `Workbench.check`."""
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise BadInput(f"check {unknown[0]!r}", f"there are {', '.join(CHECKS)}", "lab.check() runs all of them")
    chosen = [name for name in CHECKS if not names or name in names]
    with ExitStack() as stack:
        stack.enter_context(isolated(lab.runner, "check"))
        go_back: Callable[[], None] = lambda: None  # noqa: E731 (replaced below where there is something to undo)
        if any(name in UPDATING for name in chosen):
            # what is restored leaves the engine behind the trainer: give it the weights that it had
            stack.callback(_sync, lab)
            go_back = stack.enter_context(lab.kept(*(role for role in lab.groups if role in (*UPDATES, *FROZEN))))
        subject = Subject(lab, go_back)
        return CheckReport(tuple(_run(subject, name) for name in chosen))


def _run(subject: Subject, name: str) -> Finding:
    subject.check = name
    try:
        return CHECKS[name](subject)
    except NotApplicable as reason:
        return Finding(check=name, verdict="not applicable", about=str(reason))
    except (HostDied, StageInterrupted):
        raise
    except WorkbenchError as error:  # a stage that does not run is a finding too
        return Finding(check=name, verdict="failed", culprit=str(error), about="a stage that it needs failed")


def _sync(lab: Lab) -> None:
    if "actor" not in lab.groups or "sync_weights" not in lab.actor.operations:
        return
    with suppress(StageError):  # the check of the weights has said so, or the next rollout will
        lab.actor.sync_weights()
