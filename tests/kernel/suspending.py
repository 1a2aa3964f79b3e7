"""A host that suspends itself in the middle of a stage, so that what happens to its kernel meanwhile is no matter of
luck."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import workbench as wb
from tests.cases import TINY, vowels
from workbench.models.spec import Model
from workbench.support.files import home
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CriticWorker
from workbench.workers.worker import Context


def suspend_in(process: int, stage: str) -> None:
    """Have a host suspend itself once, after the first step of the stage."""
    _asked(process, stage).touch()


def _asked(process: int, stage: str) -> Path:
    return home() / f"suspend-{process}-{stage}"


def _suspending(context: Context, stage: str) -> Context:
    def progress(*numbers: int) -> None:
        context.progress(*numbers)
        if numbers[0] >= 1 and (asked := _asked(os.getpid(), stage)).exists():
            asked.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)

    return replace(context, progress=progress)


class SuspendingActor(ActorWorker):
    def __init__(self, spec: Model, context: Context) -> None:
        super().__init__(spec, _suspending(context, "update_actor"))


class SuspendingCritic(CriticWorker):
    def __init__(self, spec: Model, context: Context) -> None:
        super().__init__(spec, _suspending(context, "update_critic"))


SUSPENDING = {
    "actor": wb.Model(TINY, worker=SuspendingActor),
    "critic": wb.Model(TINY, worker=SuspendingCritic),
    "reference": TINY,
    "reward": vowels,
}
