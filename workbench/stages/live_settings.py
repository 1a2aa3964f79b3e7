"""Settings that change while a workbench lives: checked, recorded, and kept for a later kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from workbench.errors import BadInput, NotFound
from workbench.errors.plain_text import shown
from workbench.settings.training import LIVE, Training
from workbench.support.named_fields import remedy_for
from workbench.support.notebook_cell import running_cell

if TYPE_CHECKING:
    from workbench.stages.runner import StageRunner

EVENT = "setting"
_by: ContextVar[str] = ContextVar("_by", default="")


@contextmanager
def changed_by(what: str) -> Iterator[None]:
    """Inside, record that settings are changed by `what`, such as "the panel", and not by a cell."""
    token = _by.set(what)
    try:
        yield
    finally:
        _by.reset(token)


class LiveSettings:
    """Carries out assignments to `lab.<role>.training`, and records assignments to the fields of algorithms.

    A role's settings are part of the workbench's description: checkpoints, moves and later kernels read them there, and
    each update sends them to its ranks.
    """

    def __init__(self, runner: StageRunner) -> None:
        self._runner, self._hosts = runner, runner.hosts
        self.count = 0  # of changes, for displays of them
        self.others: dict[str, None] = {}  # changes, as texts, that no row of settings has

    def retrain(self, role: str, values: Mapping[str, Any]) -> None:
        """Change fields of a role's training. Raises `BadInput`, with nothing changed, where that is impossible."""
        self._runner.ownership.check_drives()
        with self._hosts.changing:
            description = self._hosts.description
            model = description.models.get(role)
            first = f"lab.{role}.training.{next(iter(values))} = {shown(next(iter(values.values())))}"
            if model is None or model.training is None or not model.trained:
                trained = [f"lab.{name}.training" for name, one in description.models.items() if one.trained]
                raise BadInput(first, f"the {role} is not trained", f"trained roles: {', '.join(trained)}")
            before = model.training
            _check_live(role, before, values)
            after = replace(before, **values).of_role(role)
            changed = [name for name in values if getattr(before, name) != getattr(after, name)]
            if not changed:
                return
            opened = self._runner.interrupted.open_updates()
            if "minibatches" in changed and any(run.startswith(f"{role}.") for run in opened):
                raise BadInput(
                    first, f"an interrupt left an update of the {role} between two of its minibatches",
                    "run the same call again for the remaining steps, and then change the setting",
                )  # fmt: skip
            self._hosts.set_description(description.retrained(role, after, changed))
            try:
                self._hosts.record()
            except BaseException:
                self._hosts.set_description(description)
                raise
            self._runner.groups.follow_hosts()
        for name in changed:
            value = getattr(after, name)
            self.note(f"lab.{role}.training.{name}", getattr(before, name), value, noted=_plain(value) == value)
        if "learning_rate" in changed and (doubt := after.learning_rate_warning(role)):
            print(doubt)

    def note(self, setting: str, before: Any, after: Any, *, noted: bool = False) -> None:
        """Record that a setting was changed, when, and by which cell. noted: whether `note_settings` records it."""
        cell, iteration, kept = running_cell(), self._runner.counters.iteration, _plain(after)
        self.count += 1
        if not noted:
            self.others[f"{setting}={kept}"] = None
        self._runner.telemetry.append_event(
            EVENT, setting=setting, before=_plain(before), after=kept, iteration=iteration,
            cell=None if cell is None else cell.number, cell_id="" if cell is None else cell.id, by=_by.get(),
        )  # fmt: skip
        self._runner.ownership.record()


def _check_live(role: str, training: Training, values: Mapping[str, Any]) -> None:
    """Raise for an unknown field, and for a field that is fixed when the role's engine is made."""
    known = [field.name for field in fields(training)]
    for name, value in values.items():
        where = f"lab.{role}.training.{name}"
        if name not in known:
            near = remedy_for(name, known, f"lab.{role}.training.{{}}".format)
            raise NotFound(where, f"its fields are {', '.join(known)}", near)
        if (
            name == "rates"
            and isinstance(value, Mapping | NoneType)
            and list(value or ()) != list(training.rates or ())
        ):
            raise BadInput(
                f"{where} = {shown(value)}",
                f"the role's engine has groups of weights for the patterns {list(training.rates or ())}",
                "give these patterns, in this order, with other factors; or open with others and resume=a checkpoint",
            )
        if name not in LIVE and value != getattr(training, name):
            raise BadInput(
                f"{where} = {shown(value)}",
                f"it is fixed when the role's engine is made; {', '.join(LIVE)} can be changed",
                f"save with lab.save(path), and open with wb.Training({name}={shown(value)}), resume=path",
            )


def _plain(value: Any) -> Any:
    """Return a value in the form of an event: a number, a text, a dict of these, or else its name or repr."""
    if isinstance(value, Mapping) and all(isinstance(one, bool | int | float | str) for one in value.values()):
        return {str(name): one for name, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", None) or f"{shown(value, 200)}"
