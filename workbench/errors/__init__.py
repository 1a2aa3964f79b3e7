"""Every error that workbench raises on purpose.

    WorkbenchError
    ├── BadInput            (ValueError)    a wrong value; nothing was started
    │   └── DevicesTaken                    others hold the devices or their memory; the message says who
    ├── UnknownColumn       (KeyError)      a batch lacks a column that an operation reads
    ├── MissingDependency   (ImportError)   an engine, tracker or other package that is not installed
    ├── ModelUnavailable    (OSError)       a model or data set that is neither on this machine nor reachable
    ├── WriteFailed         (OSError)       a file that cannot be written; the message gives the free space
    ├── NameTaken           (ValueError)    a workbench of that name runs, with another description
    ├── NotFound            (LookupError)   no workbench, batch or host of that name
    ├── NotDriving          (RuntimeError)  another kernel drives the workbench; this one may only read
    ├── StageError          (RuntimeError)  a stage failed on one or more ranks
    │   ├── RewardError                     the user's reward function raised or returned a wrong value
    │   ├── RolloutError                    the user's environment raised or returned a wrong value
    │   ├── SyncError                       the generation engine does not have the trainer's weights
    │   ├── StageInterrupted                the user stopped a call; the message says what was done
    │   ├── StageTimeout                    a stage took longer than its `timeout_s`
    │   └── UpstreamError                   a stage was not run because a stage that it needs failed or was cancelled
    ├── ReloadError         (RuntimeError)  running processes cannot load edited code; they keep the old code
    ├── CheckFailed         (RuntimeError)  a check of the live system failed
    └── HostDied            (RuntimeError)  a host process is gone

Each message gives the value, the rule and the remedy. A notebook shows an error as one block: the user's lines, the
message, the frames on the ranks.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

from workbench.errors.plain_text import plain_text

if TYPE_CHECKING:
    from workbench.errors import frames


LONGEST = 4000  # the most characters of each part of a message


class WorkbenchError(Exception):
    """Base class of all errors of workbench. The message consists of `value`, `rule` and `remedy`, also attributes.

    failure: where a stage failed: role, stage, ranks, and the frames on them.
    """

    failure: frames.StageFailure | None = None

    def __init__(self, value: str, rule: str = "", remedy: str = "") -> None:
        value, rule, remedy = (plain_text(part, LONGEST) for part in (value, rule, remedy))
        super().__init__(value, rule, remedy)
        self.value, self.rule, self.remedy = value, rule, remedy

    def __str__(self) -> str:
        parts = (part for part in (self.value, self.rule, self.remedy) if part)
        # a part that ends with code ends with a newline, and gets no period
        return " ".join(part[:-1] if part.endswith("\n") else part.rstrip(".") + "." for part in parts)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows in place of a traceback through our code."""
        from workbench.errors.frames import rendered

        return rendered(self)


class NotDriving(WorkbenchError, RuntimeError):
    """Another kernel drives the workbench; this kernel may read it, or take it over."""


class BadInput(WorkbenchError, ValueError):
    """A wrong value, found before any expensive work."""


class DevicesTaken(BadInput):
    """Others hold devices, or device memory, that a placement needs; the message says who holds them and since when."""


class UnknownColumn(WorkbenchError, KeyError):
    """A batch lacks a column that was asked for."""


class MissingDependency(WorkbenchError, ImportError):
    """A package that the chosen engine or option needs is not installed."""

    @classmethod
    def of(cls, package: str, rule: str, extra: str, instead: str = "") -> MissingDependency:
        """Return the error for a package of one of this project's extras. instead: an option that does not need it."""
        install = f"pip install -e '.[{extra}]' in the checkout"
        return cls(f"{package} is not installed", rule, f"{install}, or use {instead}" if instead else install)


class ModelUnavailable(WorkbenchError, OSError):
    """A model or data set that is neither on this machine nor reachable from it."""


class WriteFailed(WorkbenchError, OSError):
    """A file or folder that cannot be written: the message gives its path, the bytes it needs, and the free bytes."""


class NameTaken(WorkbenchError, ValueError):
    """A workbench of that name runs, and its description differs from the description asked for."""


class NotFound(WorkbenchError, LookupError):
    """No workbench, batch or host of that name."""


class StageError(WorkbenchError, RuntimeError):
    """A stage failed on one or more ranks; the message names role, stage, ranks and the first cause.

    batch: if a user's function failed for too many rows, the batch with all finished rows; else None.
    what: for the error of one row, what the user's function did.
    """

    batch: typing.Any = None
    what: str = ""


class RewardError(StageError):
    """The user's reward function raised, ran out of time, or returned a value that is no reward."""


class RolloutError(StageError):
    """The user's environment raised, ran out of time, or returned an invalid reply to a turn."""


class SyncError(StageError):
    """After a weight sync, the generation engine's log-probabilities differ from the trainer's."""


class StageInterrupted(StageError):
    """The user stopped a stage, or another long call, such as a save or a move. The message says which work was done,
    which was not, and how to continue."""


class StageTimeout(StageError):
    """A stage took longer than its `timeout_s`; the message says what each rank was doing."""


class UpstreamError(StageError):
    """A stage was not run, because a stage whose output it needs failed or was cancelled; names the first cause."""


class ReloadError(WorkbenchError, RuntimeError):
    """A process cannot load edited code: the code raised while it was loaded, or only a new process can run it. All
    processes keep the old code. report: a `ReloadReport`."""

    report: object = None


class CheckFailed(WorkbenchError, RuntimeError):
    """Checks of the live system failed; the message names each check, its measured value and the cause."""


class HostDied(WorkbenchError, RuntimeError):
    """A host process of the workbench is gone."""
