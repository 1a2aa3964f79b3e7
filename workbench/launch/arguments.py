"""The arguments of `wb.open` that say where and how a workbench runs: their types, their command-line options, and
values from outside the call: a script's command line overrides the arguments in the code, a sweep's trial has defaults
for them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from pydantic import AfterValidator, Field

from workbench.backends.registry import check_name
from workbench.display import progress
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.launch.options import Option
from workbench.placement import Placement
from workbench.settings.engines import SHARE_MEMORY, DType, Generation, ShareMemory
from workbench.settings.training import Training
from workbench.support.files import path_of
from workbench.support.named_fields import check_names
from workbench.support.validation import SEQUENCE, NonNegativeInt, Number, PositiveInt, Rule, checked

if TYPE_CHECKING:
    from workbench.controller import Workbench

P = ParamSpec("P")


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
Name = Annotated[str, Field(min_length=1), AfterValidator(check_name), TEXT]
Folder = Annotated[Annotated[str, Field(min_length=1)] | Path, AfterValidator(_check_path), TEXT]
Backend = Literal["ray", "inline"]
Device = Literal["cpu", "cuda"]
IfExists = Literal["attach", "replace", "error"]
Address = Annotated[str, Field(min_length=1), TEXT]
Sharing = Annotated[ShareMemory, Rule(f"must be one of {', '.join(map(repr, SHARE_MEMORY))}")]
Trackers = Annotated[
    str | Annotated[tuple[str, ...], SEQUENCE],
    AfterValidator(_check_trackers),
    Rule("must be a tracker's name, or a list of names"),
]

OPTIONS: Mapping[str, Option] = {
    "name": Option("--name", Name, "name of the workbench", "NAME"),
    "seed": Option("--seed", NonNegativeInt, "seed of prompts, sampling and heads", "N"),
    "runs": Option("--output", Folder, "folder in which the run folder is created", "FOLDER"),
    "backend": Option("--backend", Backend, "inline: all in this process, on one device"),
    "address": Option("--address", Address | None, "a Ray cluster to join; needs --device", "HOST:PORT"),
    "device": Option("--device", Device | None, "the kind of device"),
    "devices": Option("--devices", PositiveInt | None, "number of devices; on a CPU, shares of its cores", "N"),
    "if_exists": Option("--if-exists", IfExists, "what to do if a workbench of that name runs; default: error"),
    "track": Option("--track", Trackers, "also send metrics there, see lab.track; repeatable", "TRACKER[=PROJECT]"),
    "resume": Option("--resume", Folder | None, "continue from a checkpoint, or a run folder's newest one", "PATH"),
    "save_every": Option("--save-every", PositiveInt | None, "save a checkpoint after every N iterations", "N"),
}
HINTS = {name: option.hint for name, option in OPTIONS.items()} | {
    "dtype": DType | None, "share_memory": Sharing, "record": bool,
    "placement": Placement | None, "training": Training | None, "generation": Generation | None,
    "wait_s": Annotated[Number, Field(ge=0)],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script that this process runs.

    command: its path, and the names of the options that it was given. options: of its `main`. opening: arguments of
    `wb.open` from its command line. keep: whether workbenches live on when it closes them. labs: the workbenches that
    it has opened so far.
    """

    command: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    opening: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False
    labs: list[Workbench] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial of a sweep that this process runs. opening: returns, for a workbench's name, arguments of `wb.open` that
    are used where the call does not give them. opened: called with each workbench."""

    opening: Callable[[str], Mapping[str, Any]]
    opened: Callable[[Workbench], object]


trial: Trial | None = None  # set by `wb.sweep`
running: Script | None = None  # set by `workbench.launch.script` and `.execute`


def numbers_of(values: Mapping[str, Any]) -> dict[str, int | float | bool | None]:
    """Return values as a run folder may hold them: None for all but numbers and bools; a text may be a secret."""
    return {name: value if isinstance(value, int | float) else None for name, value in values.items()}


def overridable(opens: Callable[P, Workbench]) -> Callable[P, Workbench]:
    """Add the arguments from outside to `wb.open`. Changed arguments are printed on stderr and recorded as an event."""
    signature = inspect.signature(opens)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @functools.wraps(opens)
    def open(*args: P.args, **kwargs: P.kwargs) -> Workbench:
        check_names("wb.open", signature.parameters.values(), kwargs, len(args))
        call = signature.bind(*args, **kwargs)
        said = defaults | call.arguments
        if running is not None and "if_exists" not in call.arguments:
            mine = any(lab.name == said["name"] and not lab.ownership.closed for lab in running.labs)
            said["if_exists"] = "attach" if mine else "error"  # a script starts with its models as given
        if trial is not None:
            said |= {key: value for key, value in trial.opening(said["name"]).items() if key not in call.arguments}
        given_again = running is not None and any(lab.name == said["name"] for lab in running.labs)
        opening = {} if running is None else running.opening
        changed = {name: value for name, value in opening.items() if value != said[name]}
        if said["resume"] is not None or given_again:  # the checkpoint belongs to the first workbench of the script
            changed.pop("resume", None)
        given = said | changed
        if running is not None and running.keep and given["backend"] == "inline":
            raise BadInput(
                "--keep with backend='inline'", "an inline workbench ends with its process", "use --backend ray"
            )
        if changed and not progress.is_quiet():
            parts = [f"{name}={value!r} (not {shown(said[name])})" for name, value in changed.items()]
            print(f"wb.open: {', '.join(parts)} from the command line", file=sys.stderr)
        call.arguments.update(
            {name: checked(name, value, HINTS[name]) if name in HINTS else value for name, value in given.items()}
        )
        lab = opens(*call.args, **call.kwargs)
        if trial is not None:
            trial.opened(lab)
        recorded = lab.description.record
        if changed and recorded:
            lab.telemetry.append_event("overridden", arguments=numbers_of(changed))
        if running is not None:
            lab.stays = running.keep
            if lab not in running.labs:
                running.labs.append(lab)
            if recorded:
                lab.telemetry.append_event("script", command=list(running.command), options=numbers_of(running.options))
        return lab

    return open
