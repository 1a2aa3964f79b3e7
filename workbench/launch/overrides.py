"""Arguments of `wb.open` from outside the code that calls it: they override the arguments in the code.

The command line of a script gives them (see `workbench.launch.script`), or the environment variable WORKBENCH_OPEN, a
JSON object by argument, for example for a notebook that runs headless:
WORKBENCH_OPEN='{"runs": "/tmp/x", "backend": "inline", "seed": 3}'. The command line overrides the variable.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

from workbench.display import progress
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.launch.arguments import ARGUMENTS
from workbench.session.checkpoint import find_checkpoint
from workbench.support.named_fields import check_names, meant
from workbench.support.validation import checked

if TYPE_CHECKING:
    from workbench.controller import Workbench

VARIABLE, COMMAND_LINE = "WORKBENCH_OPEN", "the command line"
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Script:
    """The script that this process runs.

    command: its words. options: of its `main`. opening: arguments of `wb.open` that its command line gives. keep:
    whether workbenches live on when it closes them. labs: those that it has opened so far.
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


class Setting(NamedTuple):
    """The value of an argument, and who gave it."""

    value: Any
    giver: str


def check(name: str, value: Any, giver: str) -> None:
    """Raise `BadInput`, or `MissingDependency` of a tracker, for a value that an argument does not take."""
    try:
        checked(name, value, ARGUMENTS[name].hint)
        if name == "resume" and value is not None:
            find_checkpoint(value)
    except WorkbenchError as error:
        raise type(error)(f"{error.value} from {giver}", error.rule, error.remedy) from None


def settings() -> dict[str, Setting]:
    """The arguments that are given from outside, by name. Raises `BadInput` for a wrong WORKBENCH_OPEN."""
    found = {name: Setting(value, VARIABLE) for name, value in _from_environment().items()}
    if running is not None:
        found |= {name: Setting(value, COMMAND_LINE) for name, value in running.opening.items()}
    return found


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
        changed = {name: setting for name, setting in settings().items() if setting.value != said[name]}
        if said["resume"] is not None or given_again:  # the checkpoint is of what the script opens first
            changed.pop("resume", None)
        given = said | {name: setting.value for name, setting in changed.items()}
        if running is not None and running.keep and given["backend"] == "inline":
            raise BadInput(
                "--keep with backend='inline'", "an inline workbench ends with its process", "use --backend ray"
            )
        if changed and not progress.is_quiet():
            print(f"wb.open: {_sentence(changed, said)}", file=sys.stderr)
        call.arguments.update({name: checked(name, value, ARGUMENTS[name].hint) if name in ARGUMENTS else value
                               for name, value in given.items()})  # fmt: skip
        lab = opens(*call.args, **call.kwargs)
        if trial is not None:
            trial.opened(lab)
        recorded = lab.description.record
        if changed and recorded:
            lab.telemetry.append_event(
                "overridden",
                arguments={
                    name: {"value": setting.value, "instead_of": _plain(said[name]), "given_by": setting.giver}
                    for name, setting in changed.items()
                },
            )
        if running is not None:
            lab.stays = running.keep
            if lab not in running.labs:
                running.labs.append(lab)
            if recorded:
                options = {name: _plain(value) for name, value in running.options.items()}
                lab.telemetry.append_event("script", command=list(running.command), options=options)
        return lab

    return open


def _sentence(changed: Mapping[str, Setting], said: Mapping[str, Any]) -> str:
    parts = []
    for giver in dict.fromkeys(setting.giver for setting in changed.values()):
        mine = [f"{n}={s.value!r} (not {shown(_plain(said[n]))})" for n, s in changed.items() if s.giver == giver]
        parts.append(f"{', '.join(mine)} from {giver}")
    return "; ".join(parts)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    return json.loads(json.dumps(value, default=str))


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return {}
    example = f"""{VARIABLE}='{{"backend": "inline", "seed": 3}}'"""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{VARIABLE}={shown(text, 80)}", f"is no JSON: {error}", example) from None
    if not isinstance(values, dict):
        raise BadInput(f"{VARIABLE}={shown(text, 80)}", "must be a JSON object by argument of wb.open", example)
    for name, value in values.items():
        if name not in ARGUMENTS:
            rule = f"it gives where and how a workbench runs: {', '.join(ARGUMENTS)}"
            raise BadInput(f"{VARIABLE} with {name!r}", rule, meant(name, ARGUMENTS, repr))
        check(name, value, VARIABLE)
    return values
