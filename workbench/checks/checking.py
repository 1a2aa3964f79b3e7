"""`lab.check()`: run checks on the live system, and restore its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.batches.batch import Batch
from workbench.checks import CHECKS, UPDATING
from workbench.checks.invariants import FROZEN, ROUNDING
from workbench.checks.loss_checks import COMPARING, LOSS_CHECKS, LossSubject, contributions
from workbench.checks.loss_inputs import role_of
from workbench.checks.report import CheckReport, Finding, NotApplicable
from workbench.checks.subject import UPDATES, Subject
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, HostDied, StageError, StageInterrupted, WorkbenchError
from workbench.errors.containing import must_propagate
from workbench.errors.plain_text import shown
from workbench.objectives.losses import CovarianceLoss
from workbench.support.calls.pickling import name_of
from workbench.workers.user_loss import error_with_line

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab


@stoppable("lab.check()", ("the system is as before", "run the same call again"))
def check(lab: Lab, *names: str, loss: Any = None, batch: Any = None) -> CheckReport:
    """Run checks on the live system, all of them or those named, on a small batch of their own: is the ratio 1 before
    the first step, does the engine have the trainer's weights, does nothing outside the mask reach the gradient
    (`workbench.checks.CHECKS`). Afterwards the system is as before. `.raise_if_failed()` is for scripts.

    loss, batch: check a loss for the actor's or the critic's update instead, on rollouts from which it will learn,
    before the first step: is its gradient the derivative of its value, does anything leak through the mask or between
    rows, does it depend on micro-batches or ranks, what is its gradient at ratio 1, and how does its direction compare
    with PPO's and GRPO's, or with the squared error's (`workbench.checks.loss_checks.LOSS_CHECKS`). The report's
    `.batch` has each token's share of the loss, `loss_contribution`, and of its gradient, `gradient_contribution`, as
    columns for the samples view.
    """
    known: Sequence[str] = tuple(CHECKS if loss is None else LOSS_CHECKS)
    unknown = [name for name in names if name not in known]
    if unknown:
        call = "lab.check()" if loss is None else "lab.check(loss=, batch=)"
        raise BadInput(f"check {unknown[0]!r}", f"there are {', '.join(known)}", f"{call} runs all of them")
    chosen = [name for name in known if not names or name in names]
    if loss is not None or batch is not None:
        return _check_loss(lab, chosen, loss, batch)
    with ExitStack() as stack:
        stack.enter_context(lab.runner.isolated("check"))
        go_back: Callable[[], None] = lambda: None  # noqa: E731 (replaced below where there is something to undo)
        if any(name in UPDATING for name in chosen):
            # the restored trainer differs from the engine: sync the engine again
            stack.callback(_sync, lab)
            go_back = stack.enter_context(lab.kept(*(role for role in lab.groups if role in (*UPDATES, *FROZEN))))
        subject = Subject(lab, go_back)
        return CheckReport(tuple(_run(CHECKS, subject, name) for name in chosen))


def _check_loss(lab: Lab, chosen: Sequence[str], loss: Any, batch: Any) -> CheckReport:
    if loss is None or batch is None:
        raise BadInput(
            f"lab.check({'batch' if loss is None else 'loss'}=...) alone",
            "a loss is checked on rollouts that it would train on",
            "write lab.check(loss=fn, batch=batch), with a batch for lab.actor.update_actor(batch, loss=fn)",
        )
    role = role_of(loss) if callable(loss) else "actor"
    if role not in lab.groups or "measure_gradient" not in lab.groups[role].operations:
        rule = f"this loss is for update_{role}, and this workbench has no {role} whose gradient it can measure"
        raise BadInput(f"lab.check(loss=...) without {role}", rule, f"open one with models={{{role!r}: ...}}")
    if isinstance(loss, CovarianceLoss):
        raise BadInput(
            f"lab.check(loss={loss!r})",
            "it chooses tokens over a whole minibatch, and the checks see only rows and micro-batches",
            "check the loss that it is based on: loss='ppo'",
        )
    update = lab.groups[role].operations[UPDATES[role]]
    arguments, _ = update.arguments((), {"loss": loss})
    if not isinstance(batch, Batch) or not batch.is_of(lab.runner.batches):
        raise BadInput(f"batch={shown(batch, 80)}", "must be a batch of this workbench", "see lab.batches()")
    made = "values" if role == "critic" else "old_log_prob"
    update.check_columns(arguments, (*batch.names, made))
    needed = (name for name in update.operation.needed(arguments) if name != made)
    batch.need(needed, f"lab.check(loss={name_of(loss) if callable(loss) else loss})")
    subject = LossSubject(lab, loss, batch)
    findings: list[Finding] = []
    with lab.runner.isolated("check"):
        for name in chosen:
            findings.append(_run(LOSS_CHECKS, subject, name))
            if name == "returns" and findings[0].verdict == "failed":
                about = "not checked, because 'returns' failed"
                findings += [Finding(check=other, verdict="not applicable", about=about) for other in chosen[1:]]
                return CheckReport(tuple(findings))
        added = contributions(subject)
    if not added:
        return CheckReport(tuple(findings), batch)
    earlier = [name for name in added if name in batch.names]  # of a check before this one
    return CheckReport(tuple(findings), (batch.drop(*earlier) if earlier else batch).join(lab.put(added)))


def _run(checks: Mapping[str, Callable[[Any], Finding]], subject: Any, name: str) -> Finding:
    try:
        if isinstance(subject, LossSubject) and name in COMPARING and not subject.repeats[0] <= ROUNDING[0]:
            raise NotApplicable(f"{subject.repeats[1]}: nothing can be compared")
        found = checks[name](subject)
    except NotApplicable as reason:
        found = Finding(verdict="not applicable", about=str(reason))
    except (HostDied, StageInterrupted):
        raise
    except WorkbenchError as error:  # a stage that does not run is a finding too
        found = Finding(verdict="failed", culprit=str(error), about="a stage that it needs failed")
    except BaseException as error:
        if must_propagate(error) or not isinstance(subject, LossSubject):
            raise
        found = Finding(verdict="failed", culprit=error_with_line(error), about="the loss raised")
    return replace(found, check=name)


def _sync(lab: Lab) -> None:
    if "actor" not in lab.groups or "sync_weights" not in lab.actor.operations:
        return
    with suppress(StageError):  # the check of the weights has said so, or the next rollout will
        lab.actor.sync_weights()
