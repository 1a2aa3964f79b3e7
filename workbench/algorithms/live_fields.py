"""Assign fields of an algorithm while it runs: values are checked at once, recorded, and kept for later kernels."""

from __future__ import annotations

import dataclasses
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from workbench.algorithms.lab import Lab
from workbench.display.interrupts import uninterrupted
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.objectives.losses import clips_in_effect
from workbench.support.flat_settings import flat
from workbench.support.named_fields import NamedAttributes, remedy_for
from workbench.support.notebook_cell import in_notebook, running_cell, running_position, variable_of
from workbench.support.replaced import replaced
from workbench.support.validation import check_before_post_init, checked, hints_of, is_settings, owned

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm


SETTINGS = "settings"  # key in `_kept_fields`: the class of settings that were assigned as a whole
MAPPING = "mapping"  # key in `_kept_fields`: the values of a mapping that was assigned
TRACED = "workbench also runs define to find its stages, which would change the value each time"  # about `define`
DEFINED: ContextVar[object] = ContextVar("defined", default=None)  # the algorithm whose `define` this thread runs


class LiveFields(NamedAttributes):
    """Base of the algorithms. `ppo.clip = 0.1` and `ppo.sampling.temperature = 0.7` apply from the next stage on.

    A value is checked as in the constructor, on a copy of the algorithm; a refused value changes nothing. Checkpoints
    and later kernels keep numbers, texts, settings such as `wb.Correction(...)` and fields of settings. They do not
    keep functions: run the cell that assigns the function again.
    """

    lab: Lab
    was_restored: bool = False  # from a checkpoint
    _live = False  # construction is over: an assignment is a change
    _changed: dict[str, None]  # fields, or fields of settings, assigned since then: "clip", "sampling.temperature"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the fields' values before `__post_init__`, and each assignment after it."""
        super().__init_subclass__(**kwargs)
        check_before_post_init(cls, then=LiveFields._go_live)

    def _go_live(self) -> None:
        """End the construction: from here on, each assignment is a change."""
        for name in fields_by_name(self):
            if isinstance(value := self.__dict__.get(name), Mapping):  # the check of fields made it a plain dict
                self.__dict__[name] = self._owned(name, value)
        self.__dict__["_live"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; `BadInput` for a name that is not a field, which no stage would read, and for a value that the
        constructor would refuse."""
        named, title = fields_by_name(self), type(self).__name__
        if name not in named and named and not name.startswith("_") and not hasattr(type(self), name):
            remedy = remedy_for(name, named) or f"to add a field, write it in the class: {name}: float = 0.0"
            raise BadInput(f"{title}.{name} = {shown(value)}", f"its fields are {', '.join(named)}", remedy)
        own = getattr(type(self), name, None)
        read_only = isinstance(own, property) and own.fset is None
        if name not in named and (read_only or (callable(own) and not callable(value))):
            raise BadInput(f"{title}.{name} = {shown(value)}", "it is a part of the algorithm, not a setting")
        if name in named and DEFINED.get() is self:
            raise BadInput(
                f"{title}.{name} = {shown(value)} in define",
                TRACED,
                "change fields in finish(self, metrics), or from a cell",
            )
        if name not in named or not self._live:
            object.__setattr__(self, name, self._owned(name, value) if name in named else value)
            return
        before, hints, default = getattr(self, name), hints_of(type(self)), named[name].default
        if name in hints and not (value is None and default is None):
            value = checked(f"{title}.{name}", value, hints[name], default)
        if is_same(before, value):
            return
        trial: Any = object.__new__(type(self))
        trial.__dict__.update(self.__dict__, **{name: value, "_live": False, "was_restored": True})
        trial.__post_init__()
        me: Any = self
        if me.under_way:
            what = f"{title}.{name} = {shown(value)}"
            me.graph().check_open_updates(self.lab, what, me.made.keys(), trial.graph())
        object.__setattr__(self, name, self._owned(name, trial.__dict__[name]))
        self._note_change(name, before, value)

    def _owned(self, name: str, value: Any) -> Any:
        """Return a value; settings and mappings are wrapped, so that an assignment in them assigns this field."""
        # weak: an algorithm and its batches are released when the last variable that holds the algorithm is
        me, called = weakref.ref(self), f"{type(self).__name__}.{name}"

        def owner(what: str) -> Any:
            if (algorithm := me()) is None:
                raise BadInput(what, "the algorithm of this field no longer exists", "create it again")
            return algorithm

        def assign(values: dict[str, Any]) -> Any:
            algorithm = owner(f"{called} = {shown(values)}")
            setattr(algorithm, name, values)
            return getattr(algorithm, name)

        def assign_field(field: str, value: Any) -> Any:
            algorithm = owner(what := f"{called}.{field} = {shown(value)}")
            now = getattr(algorithm, name)
            if field not in (known := fields_by_name(now)):
                raise BadInput(what, f"its fields are {', '.join(known)}", remedy_for(field, known))
            setattr(algorithm, name, dataclasses.replace(now, **{field: value}))
            return getattr(getattr(algorithm, name), field)

        if isinstance(value, Mapping):
            return LiveMapping(value, assign)
        return owned(value, assign_field) if is_settings(type(value)) else value

    def _note_change(self, name: str, before: Any, after: Any) -> None:
        """Record a change of a field; of settings, one change per field of these."""
        changes = {name: tuple(value_in_effect(self.__dict__, name, value) for value in (before, after))}
        fields = fields_by_name(after) if type(before) is type(after) else ()
        if fields:
            pairs = {f"{name}.{field}": (getattr(before, field), getattr(after, field)) for field in fields}
            changes = {path: pair for path, pair in pairs.items() if not is_same(*pair)}
        if name not in self._changed:  # else the field was assigned as a whole before, and is kept as a whole
            others = [path for path in self._changed if fields or not path.startswith(f"{name}.")]
            self._changed = dict.fromkeys([*others, *changes])
        for path, (old, new) in changes.items():
            mine: Any = self
            noted = not mine.ended_iterations or name not in mine.state()  # later rows omit what `finish` adapts
            self.lab.runner.live.note(f"{type(self).__name__}.{path}", old, new, noted=noted)

    def _is_changed(self, path: str) -> bool:
        """Whether a field, a field of its settings, or the settings it belongs to, was assigned after construction."""
        return any(f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in self._changed)

    def _kept_fields(self) -> dict[str, Any]:
        """Return the values of assigned fields, except those that a file cannot hold. For settings assigned as a whole:
        their class and all their fields; else only the settings' assigned fields."""
        kept: dict[str, Any] = {}
        for path in self._changed:
            name, _, field = path.partition(".")
            value = getattr(self, name)
            if field:
                if _is_plain(one := getattr(value, field, None)):
                    kept.setdefault(name, {})[field] = one
            elif is_settings(made := type(value)):
                values = {field: getattr(value, field) for field in fields_by_name(value)}
                if made.__module__.startswith("workbench.") and _is_plain(values):  # not a user's own class
                    kept[name] = {SETTINGS: f"{made.__module__}:{made.__qualname__}", **values}
            elif isinstance(value, Mapping):
                kept |= {name: {MAPPING: dict(value)}} if _is_plain(dict(value)) else {}
            elif _is_plain(value):
                kept[name] = value
        return kept

    def _take_fields(self, kept: Mapping[str, Any]) -> None:
        """Restore the result of `_kept_fields`; fields that were assigned since construction stay as they are."""
        since = {path.partition(".")[0] for path in self._changed}
        for name in fields_by_name(self):
            if name not in kept or name in since:
                continue
            value, now, paths = kept[name], getattr(self, name), [name]
            if isinstance(value, dict) and SETTINGS in value:
                module, _, made = value[SETTINGS].partition(":")
                fields = {field: one for field, one in value.items() if field != SETTINGS}
                value = getattr(importlib.import_module(module), made)(**fields)
            elif isinstance(value, dict) and MAPPING in value:
                value = value[MAPPING]
            elif isinstance(value, dict):
                if not value.keys() <= fields_by_name(now).keys():
                    continue  # the algorithm now has other settings in this field
                value, paths = dataclasses.replace(now, **value), [f"{name}.{field}" for field in value]
            with self._quietly():
                setattr(self, name, value)
            self._changed |= dict.fromkeys(paths)

    def _quietly(self) -> AbstractContextManager[None]:
        """Treat assignments inside the block as the algorithm's own state, not as changes of settings by the user."""
        return replaced(self, "_live", False)


def _changing(change: Callable[..., Any]) -> Any:
    """Return a method of `LiveMapping` that applies a method of dict to a copy, and then assigns the copy."""

    def changed(self: LiveMapping, *args: Any, **kwargs: Any) -> Any:
        result = change(values := dict(self), *args, **kwargs)
        taken = dict(self._assign(values))
        dict.clear(self)
        dict.update(self, taken)
        return result

    return changed


class LiveMapping(dict[str, Any]):
    """A mapping in which each change assigns the whole mapping: `assign(changed)` checks it and returns the mapping to
    use. Copies and pickles of it are plain dicts."""

    def __init__(self, values: Mapping[str, Any], assign: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        super().__init__(values)
        self._assign = assign

    __setitem__, __delitem__, clear = map(_changing, (dict.__setitem__, dict.__delitem__, dict.clear))  # type: ignore[arg-type]
    update, pop, popitem, setdefault = map(_changing, (dict.update, dict.pop, dict.popitem, dict.setdefault))  # type: ignore[arg-type]

    def __ior__(self, other: Any) -> LiveMapping:  # type: ignore[misc, override]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def fields_by_name(value: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass by name; {} for other values."""
    return {field.name: field for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def value_in_effect(values: Mapping[str, Any], name: str, value: Any) -> Any:
    """Return a value as a table of changes shows it: for a clip of None, the clip that the loss uses. values: the other
    values, by name."""
    return clips_in_effect({**values, name: value}).get(name) if value is None else value


def as_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a file can hold: None, numbers, texts, and dicts of these."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def as_read(kept: Any) -> Any:
    """Convert a value of `_kept_fields` for display to a user."""
    return kept[MAPPING] if isinstance(kept, dict) and MAPPING in kept else kept


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same type. Values that cannot be compared: whether they are identical."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one, other = dict(one), dict(other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return one is other


EVENT = "algorithm"
_under_way: set[int] = set()  # the ids of algorithms with a public call under way


def note_settings(
    algorithm: Algorithm, of_run: Mapping[str, Any], replaced: Mapping[str, Any], once: Mapping[str, Any]
) -> None:
    """Record the settings that the next stage uses, if they differ from the last recorded ones.

    The row has `values` (fields, and arguments of `run` that are or were given), `training` (assigned training fields
    of roles), `replace` and `once` (arguments given to these methods), and `others` (texts about changes that none of
    these can hold). Fields that `finish` adapts are recorded once. Arms of a comparison are not recorded, because the
    comparison restores everything. `under_way`: whether a stage of the iteration has run.
    """
    lab, title, description = algorithm.lab, type(algorithm).__name__, algorithm.lab.description
    if lab.runner.snapshots.open:
        return
    models = description.models
    by, noted = lab.position.noted.get(title, (None, {"values": {}, "replace": {}}))
    before, others, adapts = noted["values"], lab.runner.live.others, algorithm.state().keys()
    if by is not None and by() is not algorithm and adapts:
        others[f"another {title}, with a {' and a '.join(adapts)} of its own"] = None
    for stage, known in noted["replace"].items():
        if gone := known.keys() - replaced.get(stage, {}).keys():
            others[f"{title}.{stage} without its earlier {' and '.join(sorted(gone))}"] = None
    values = {name: value for name, value in of_run.items() if value or name in before}
    values |= flat({name: getattr(algorithm, name, None) for name in fields_by_name(algorithm) if name != "lab"})
    values |= {name: before[name] for name in adapts if algorithm.ended_iterations and name in before}
    training: dict[str, dict[str, Any]] = {}
    for role, name in description.changed:
        if role in models:
            training.setdefault(role, {})[name] = getattr(models[role].training, name)
    row = {
        "values": values, "training": {role: as_plain(fields) for role, fields in training.items()},
        "replace": replaced, "once": {stage: as_plain(arguments) for stage, arguments in once.items()},
        "others": dict(others),
    }  # fmt: skip
    # compare by repr, so that NaN equals itself; arguments of `once` are recorded again for each further use
    if repr(row) != repr(noted) or (row["once"] and not algorithm.made):
        under_way = bool(algorithm.made)
        lab.telemetry.append_settings(title, lab.iteration + (not under_way), **row, under_way=under_way)
        lab.position.noted[title] = weakref.ref(algorithm), row


@contextmanager
def recording(algorithm: Algorithm, call: str, *, resumed: bool = False, **given: Any) -> Iterator[None]:
    """Record one of an algorithm's public calls when it ends, also by an interrupt or an error: which stages it ran. A
    call inside another one is not recorded separately. Nothing is recorded outside notebooks, nor if everything is
    restored afterwards, as in a comparison.

    call: the method's name. resumed: whether it begins with the rest of an interrupted iteration. given: its arguments.
    """
    lab = algorithm.lab
    if id(algorithm) in _under_way or not in_notebook() or lab.runner.snapshots.open:
        yield
        return
    name, cell = variable_of(algorithm), running_cell()
    made_as = "" if name else as_written(algorithm)
    under_way, ended, iteration = algorithm.under_way, algorithm.ended_iterations, lab.iteration
    before = len(_made_in_order(algorithm)) if under_way else 0
    _under_way.add(id(algorithm))
    done = False
    try:
        yield
        done = True
    finally:
        with uninterrupted():
            _under_way.discard(id(algorithm))
            now: list[str] = []
            if algorithm.under_way or not (done or (lab.iteration == iteration and not under_way)):
                now = _made_in_order(algorithm)
            begun = call == "run" or algorithm.ended_iterations > ended or not under_way
            lab.telemetry.append_event(
                EVENT, call=call, algorithm=type(algorithm).__name__, id=id(algorithm), name=name, made_as=made_as,
                lab=variable_of(lab), cell=0 if cell is None else cell.number, at=running_position(),
                by=lab.runner.driver, iterations=algorithm.ended_iterations - ended,
                stages=now if begun else now[before:], under_way=algorithm.under_way, resumed=resumed, done=done,
                **given,
            )  # fmt: skip


def _made_in_order(algorithm: Algorithm) -> list[str]:
    """Return the stages of an unfinished iteration that have run, up to the first stage that has not."""
    try:
        names = algorithm.graph().names
    except WorkbenchError:  # a field that was changed meanwhile may make the graph invalid
        names = list(algorithm.made)
    made = list(takewhile(algorithm.made.__contains__, names))
    return made if algorithm.under_way or len(made) < len(names) else []


def as_written(value: Any) -> str:
    """Return an algorithm or settings as the text of a constructor call: `wb.PPO(lab, prompts=4)`; "" if it holds a
    value that has no such text, for example a function."""
    if isinstance(value, type) or not is_dataclass(value):
        plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict)
        return repr(value) if plain else ""
    made: type = type(value)
    if not made.__module__.startswith(("workbench.", "__main__")):
        return ""
    parts = []
    for field in fields(value):
        now = getattr(value, field.name)
        if field.name == "lab":
            parts.append("lab")
        elif field.init and not is_same(now, default_of(field)):
            if not (text := as_written(now)):
                return ""
            parts.append(f"{field.name}={text}")
    prefix = "" if made.__module__ == "__main__" else "wb."
    return f"{prefix}{made.__name__}({', '.join(parts)})"
