"""Arguments of `wb.open` from outside the code that calls it: those that the command line of a script gives (see
`workbench.launch.script`) override the arguments in the code, those of a sweep's trial are its defaults."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec

from workbench.display import progress
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.launch.arguments import ARGUMENTS
from workbench.session.checkpoint import find_checkpoint
from workbench.support.named_fields import check_names
from workbench.support.validation import checked

if TYPE_CHECKING:
    from workbench.controller import Workbench

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script that this process runs.

    command: its path, and the names of the options that it was given. options: of its `main`. opening: arguments of
    `wb.open` that its command line gives. keep: whether workbenches live on when it closes them. labs: those that it
    has opened so far.
    """

    command: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    opening: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False
    labs: list[Workbench] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial of a sweep that this process runs. opening: arguments that a `wb.open` of a workbench of that name gets,
    where its call does not give them. opened: told of each workbench."""

    opening: Callable[[str], Mapping[str, Any]]
    opened: Callable[[Workbench], object]


trial: Trial | None = None  # what `wb.sweep` carries out
running: Script | None = None  # what `workbench.launch.script` carries out


def check(name: str, value: Any, giver: str) -> None:
    """Raise `BadInput`, or `MissingDependency` of a tracker, for a value that an argument does not take."""
    try:
        checked(name, value, ARGUMENTS[name].hint)
        if name == "resume" and value is not None:
            find_checkpoint(value)
    except WorkbenchError as error:
        raise type(error)(f"{error.value} from {giver}", error.rule, error.remedy) from None


def numbers_of(values: Mapping[str, Any]) -> dict[str, int | float | bool | None]:
    """Values by name as a run folder may hold them: None for all but numbers and bools, as a text may be a secret."""
    return {name: value if isinstance(value, int | float) else None for name, value in values.items()}


def overridable(opens: Callable[P, Workbench]) -> Callable[P, Workbench]:
    """`wb.open` with the arguments from outside. What they change is printed on stderr and recorded as an event."""
    signature = inspect.signature(opens)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @functools.wraps(opens)
    def open(*args: P.args, **kwargs: P.kwargs) -> Workbench:
        check_names("wb.open", signature.parameters.values(), kwargs, len(args))
        call = signature.bind(*args, **kwargs)
        said = defaults | call.arguments
        if running is not None and "if_exists" not in call.arguments:
            mine = any(lab.name == said["name"] and not lab.ownership.closed for lab in running.labs)
            said["if_exists"] = "attach" if mine else "error"  # a script begins with the models as they are given
        if trial is not None:
            said |= {key: value for key, value in trial.opening(said["name"]).items() if key not in call.arguments}
        given_again = running is not None and any(lab.name == said["name"] for lab in running.labs)
        opening = {} if running is None else running.opening
        changed = {name: value for name, value in opening.items() if value != said[name]}
        if said["resume"] is not None or given_again:  # the checkpoint is of what the script opens first
            changed.pop("resume", None)
        given = said | changed
        if running is not None and running.keep and given["backend"] == "inline":
            raise BadInput(
                "--keep with backend='inline'", "an inline workbench ends with its process", "use --backend ray"
            )
        if changed and not progress.is_quiet():
            parts = [f"{name}={value!r} (not {shown(said[name])})" for name, value in changed.items()]
            print(f"wb.open: {', '.join(parts)} from the command line", file=sys.stderr)
        call.arguments.update({name: checked(name, value, ARGUMENTS[name].hint) if name in ARGUMENTS else value
                               for name, value in given.items()})  # fmt: skip
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
