"""The arguments of `wb.open` that say where and how a workbench runs: their types, and how scripts offer them.

`wb.open` has these types in its signature, and the command line of a script has options for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from workbench.settings.engines import SHARE_MEMORY, DType, ShareMemory
from workbench.support.files import path_of
from workbench.support.validation import SEQUENCE, NonNegativeInt, PositiveFloat, PositiveInt, Rule


def _check_name(name: str) -> str:
    from workbench.backends.registry import check_name

    return check_name(name)


def _check_path(path: str | Path) -> str | Path:
    path_of(path, "the path")
    return path


def _check_trackers(trackers: str | Sequence[str]) -> list[str]:
    from workbench.telemetry.sinks import check_tracker

    names = [trackers] if isinstance(trackers, str) else list(trackers)
    for name in names:
        check_tracker(name)
    return names


TEXT = Rule("must be a text, and not empty")
Name = Annotated[str, Field(min_length=1), AfterValidator(_check_name), TEXT]
Folder = Annotated[Annotated[str, Field(min_length=1)] | Path, AfterValidator(_check_path), TEXT]
Backend = Literal["ray", "inline"]
Device = Literal["cpu", "cuda"]
IfExists = Literal["attach", "replace", "error"]
Address = Annotated[str, Field(min_length=1), TEXT]
Sharing = Annotated[ShareMemory, Rule(f"must be one of {', '.join(map(repr, SHARE_MEMORY))}")]
IdleHours = Annotated[PositiveFloat, Rule("must be more than 0", "None for a workbench that never closes itself")]
Trackers = Annotated[
    str | Annotated[tuple[str, ...], SEQUENCE],
    AfterValidator(_check_trackers),
    Rule("must be a tracker's name, or a list of names"),
]


class Argument(NamedTuple):
    """The type of an argument, and the option that scripts have for it: its help, "" where there is none; what stands
    for its value there; and its name, where that is not the argument's."""

    hint: Any
    help: str = ""
    metavar: str | None = None
    option: str = ""


ARGUMENTS: Mapping[str, Argument] = {
    "name": Argument(Name, "of the workbench", "NAME"),
    "seed": Argument(NonNegativeInt, "of prompts, sampling and heads", "N"),
    "runs": Argument(Folder, "where the run folder is made", "FOLDER", "--output"),
    "backend": Argument(Backend, "inline: all in this process, on one device"),
    "address": Argument(Address | None, "a Ray cluster to join; needs --device", "HOST:PORT"),
    "device": Argument(Device | None, "what computes"),
    "devices": Argument(PositiveInt | None, "how many there are; of a CPU, shares of its cores", "N"),
    "if_exists": Argument(IfExists, "where a workbench of that name lives; else: error"),
    "track": Argument(Trackers, "metrics go to it too: see lab.track; repeatable", "TRACKER[=PROJECT]"),
    "resume": Argument(Folder | None, "go on from a checkpoint, or from the newest one of a run folder", "PATH"),
    "save_every": Argument(PositiveInt | None, "a checkpoint after each N iterations, in the run folder", "N"),
    "dtype": Argument(DType | None),
    "share_memory": Argument(Sharing),
    "idle_hours": Argument(IdleHours | None),
    "record": Argument(bool),
}
