"""Every error that workbench raises on purpose.

    WorkbenchError
    ├── BadInput            (ValueError)    a value that cannot be right; nothing was started
    │   └── DevicesTaken                    devices, or their memory, that others hold; the message says who
    ├── UnknownColumn       (KeyError)      a batch lacks a column that an operation reads
    ├── MissingDependency   (ImportError)   an engine or tracker that is not installed
    ├── ModelUnavailable    (OSError)       a model that is neither here nor reachable
    ├── WriteFailed         (OSError)       a file that cannot be written; the message says what is free
    ├── NameTaken           (ValueError)    a workbench of that name lives and differs
    ├── NotFound            (LookupError)   no workbench of that name
    ├── NotDriving          (RuntimeError)  another kernel drives the workbench; this one may only read
    ├── StageError          (RuntimeError)  a stage failed on one or more ranks
    │   ├── RewardError                     the user's reward function raised or gave a wrong value
    │   ├── RolloutError                    the user's environment raised or gave a wrong value
    │   ├── SyncError                       the generation engine does not hold the trainer's weights
    │   ├── StageInterrupted                the user stopped a call; the message says what was done
    │   ├── StageTimeout                    a stage took longer than its `timeout_s`
    │   └── UpstreamError                   a stage was not run because one that it needs failed or was cancelled
    ├── ReloadError         (RuntimeError)  living processes cannot take edited code; the old code goes on
    ├── CheckFailed         (RuntimeError)  a check of the live system failed
    └── HostDied            (RuntimeError)  a host process is gone

Each message says the value, the rule and the remedy. In a notebook an error is shown as one block: the user's lines,
the message, the frames on the ranks.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

from workbench.errors.plain_text import plain_text

if TYPE_CHECKING:
    from workbench.errors import frames


LONGEST = 4000  # characters of a part of a message


class WorkbenchError(Exception):
    """Base of the tree. `value`, `rule` and `remedy` make up the message and stay readable as attributes.

    failure: where a stage failed: role, stage, ranks, and the frames on them.
    """

    failure: frames.StageFailure | None = None

    def __init__(self, value: str, rule: str = "", remedy: str = "") -> None:
        value, rule, remedy = (plain_text(part, LONGEST) for part in (value, rule, remedy))
        super().__init__(value, rule, remedy)
        self.value, self.rule, self.remedy = value, rule, remedy

    def __str__(self) -> str:
        parts = (part for part in (self.value, self.rule, self.remedy) if part)
        # a part that ends with a newline ends with code
        return " ".join(part[:-1] if part.endswith("\n") else part.rstrip(".") + "." for part in parts)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it, in place of a traceback through our code."""
        from workbench.errors.frames import rendered

        return rendered(self)


class NotDriving(WorkbenchError, RuntimeError):
    """Another kernel drives the workbench: this one may read it, or take it over."""


class BadInput(WorkbenchError, ValueError):
    """A value that cannot be right, found before any expensive work."""


class DevicesTaken(BadInput):
    """Others hold the devices, or the memory of them, that a placement needs; the message says who and since when."""


class UnknownColumn(WorkbenchError, KeyError):
    """A batch lacks a column that was asked for."""


class MissingDependency(WorkbenchError, ImportError):
    """A package that the chosen engine or option needs is not installed."""

    @classmethod
    def of(cls, package: str, rule: str, extra: str, instead: str = "") -> MissingDependency:
        """For a package of one of this project's extras. instead: what does without it."""
        install = f"pip install -e '.[{extra}]' in the checkout"
        return cls(f"{package} is not installed", rule, f"{install}, or use {instead}" if instead else install)


class ModelUnavailable(WorkbenchError, OSError):
    """A model or data set that is neither on this machine nor reachable from it."""


class WriteFailed(WorkbenchError, OSError):
    """A file or folder that cannot be written: the message has its path, the bytes it takes, and those that are
    free."""


class NameTaken(WorkbenchError, ValueError):
    """A workbench of that name lives, and its description differs from the one asked for."""


class NotFound(WorkbenchError, LookupError):
    """No workbench, batch or host of that name."""


class StageError(WorkbenchError, RuntimeError):
    """A stage failed on one or more ranks; the message names role, stage, ranks and the first cause.

    batch: where it failed because a function of the user's did for too many rows, the batch with all rows that were
    finished; else None. what: of the error of one row, what the function did.
    """

    batch: typing.Any = None
    what: str = ""


class RewardError(StageError):
    """The user's reward function raised, ran out of time, or gave a value that is no reward."""


class RolloutError(StageError):
    """The user's environment raised, ran out of time, or gave something that is no reply to a turn."""


class SyncError(StageError):
    """After a weight sync the generation engine does not give the trainer's log-probabilities."""


class StageInterrupted(StageError):
    """The user stopped a stage, or another call that takes long, such as a save or a move. The message says what was
    done and what was not, and what to do next."""


class StageTimeout(StageError):
    """A stage took longer than its `timeout_s`; the message says what each rank was at."""


class UpstreamError(StageError):
    """A stage was not run: one whose output it needs failed or was cancelled. Names the first cause."""


class ReloadError(WorkbenchError, RuntimeError):
    """Edited code that a process cannot take: it raised while it was loaded, or only a new process runs it. All go on
    with the old code. report: a `ReloadReport`."""

    report: object = None


class CheckFailed(WorkbenchError, RuntimeError):
    """Checks of the live system failed; the message names them, with figure and culprit."""


class HostDied(WorkbenchError, RuntimeError):
    """A host process of the workbench is gone."""
