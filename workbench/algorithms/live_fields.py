"""Fields of an algorithm that are assigned while it runs: checked at once, recorded, kept for a later kernel."""

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
from workbench.support.named_fields import NamedAttributes, meant
from workbench.support.notebook_cell import in_notebook, running_cell, running_position, variable_of
from workbench.support.replaced import replaced
from workbench.support.validation import check_before_post_init, checked, hints_of, is_settings, owned

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm


SETTINGS = "settings"  # in what is kept of settings that were assigned whole: their class
MAPPING = "mapping"  # in what is kept of a mapping that was assigned: its values
TRACED = "its lines are also run to see which stages they call, so it would change each time"  # of `define`
_DEFINED: ContextVar[object] = ContextVar("defined", default=None)  # the algorithm whose `define` runs


class LiveFields(NamedAttributes):
    """Base of the algorithms. `ppo.clip = 0.1` and `ppo.sampling.temperature = 0.7` hold from the next stage on.

    A value is checked as at the algorithm's making, on a copy of it; one that is refused changes nothing. Numbers,
    texts, settings such as `wb.Correction(...)` and fields of settings are kept by checkpoints and for later kernels.
    Functions are not: the cell that assigns one has to be run again.
    """

    lab: Lab
    taken_up: bool = False  # from a checkpoint
    _live = False  # it is made, and an assignment is a change
    _changed: dict[str, None]  # fields that were assigned since, and fields of settings: "clip", "sampling.temperature"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the values of fields before `__post_init__`, and from its end on each assignment."""
        super().__init_subclass__(**kwargs)
        check_before_post_init(cls, then=LiveFields._go_live)

    def _go_live(self) -> None:
        """It is made: from here on an assignment is a change."""
        for name in fields_by_name(self):
            if isinstance(value := self.__dict__.get(name), Mapping):  # a plain one, as the check of fields gave it
                self.__dict__[name] = self._owned(name, value)
        self.__dict__["_live"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; `BadInput` for a name that is none, which no stage would read, and for a value that the
        algorithm would not be made with."""
        named, title = fields_by_name(self), type(self).__name__
        rule = f"its fields are {', '.join(named)}"
        own = getattr(type(self), name, None)
        if name not in named and named and not name.startswith("_") and not hasattr(type(self), name):
            remedy = meant(name, named) or f"a field of one's own is written in the class: {name}: float = 0.0"
            raise BadInput(f"{title}.{name} = {shown(value)}", rule, remedy)
        if name not in named and (
            (isinstance(own, property) and own.fset is None) or (callable(own) and not callable(value))
        ):
            raise BadInput(f"{title}.{name} = {shown(value)}", "it is a part of the algorithm, not a setting", rule)
        if name in named and _DEFINED.get() is self:
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
        trial.__dict__.update(self.__dict__, **{name: value, "_live": False, "taken_up": True})
        trial.__post_init__()
        me: Any = self
        if me.under_way:
            what = f"{title}.{name} = {shown(value)}"
            me.graph().check_open_updates(self.lab, what, me.made.keys(), trial.graph())
        object.__setattr__(self, name, self._owned(name, trial.__dict__[name]))
        self._note_change(name, before, value)

    def _owned(self, name: str, value: Any) -> Any:
        """A value that may be settings, or a mapping, which then can be assigned to."""
        # weak: an algorithm, and the batches that it made, are released with the last variable
        me, called = weakref.ref(self), f"{type(self).__name__}.{name}"

        def owner(what: str) -> Any:
            if (algorithm := me()) is None:
                raise BadInput(what, "the algorithm of this field is gone", "make it anew")
            return algorithm

        def assign(values: dict[str, Any]) -> Any:
            algorithm = owner(f"{called} = {shown(values)}")
            setattr(algorithm, name, values)
            return getattr(algorithm, name)

        def assign_field(field: str, value: Any) -> Any:
            algorithm = owner(what := f"{called}.{field} = {shown(value)}")
            now = getattr(algorithm, name)
            if field not in (known := fields_by_name(now)):
                raise BadInput(what, f"its fields are {', '.join(known)}", meant(field, known))
            setattr(algorithm, name, dataclasses.replace(now, **{field: value}))
            return getattr(getattr(algorithm, name), field)

        if isinstance(value, Mapping):
            return LiveMapping(value, assign)
        return owned(value, assign_field) if is_settings(type(value)) else value

    def _note_change(self, name: str, before: Any, after: Any) -> None:
        """Record a change that was made, one a field of settings."""
        changes = {name: tuple(value_in_effect(self.__dict__, name, value) for value in (before, after))}
        fields = fields_by_name(after) if type(before) is type(after) else ()
        if fields:
            pairs = {f"{name}.{field}": (getattr(before, field), getattr(after, field)) for field in fields}
            changes = {path: pair for path, pair in pairs.items() if not is_same(*pair)}
        if name not in self._changed:  # else it was assigned whole, and is kept whole
            others = [path for path in self._changed if fields or not path.startswith(f"{name}.")]
            self._changed = dict.fromkeys([*others, *changes])
        for path, (old, new) in changes.items():
            mine: Any = self
            noted = not mine.ended_iterations or name not in mine.state()  # of those that adapt no row has a change
            self.lab.runner.live.note(f"{type(self).__name__}.{path}", old, new, noted=noted)

    def _is_changed(self, path: str) -> bool:
        """Whether a field, a field of its settings, or the settings that have it, was assigned while it lived."""
        return any(f"{path}.".startswith(f"{one}.") or one.startswith(f"{path}.") for one in self._changed)

    def _kept_fields(self) -> dict[str, Any]:
        """The values of fields that were assigned, as far as a file can hold them: of settings that were assigned
        whole all fields with their class, else those fields that were."""
        kept: dict[str, Any] = {}
        for path in self._changed:
            name, _, field = path.partition(".")
            value = getattr(self, name)
            if field:
                if _is_plain(one := getattr(value, field, None)):
                    kept.setdefault(name, {})[field] = one
            elif is_settings(made := type(value)):
                values = {field: getattr(value, field) for field in fields_by_name(value)}
                if made.__module__.startswith("workbench.") and _is_plain(values):  # no class of a user's own
                    kept[name] = {SETTINGS: f"{made.__module__}:{made.__qualname__}", **values}
            elif isinstance(value, Mapping):
                kept |= {name: {MAPPING: dict(value)}} if _is_plain(dict(value)) else {}
            elif _is_plain(value):
                kept[name] = value
        return kept

    def _take_fields(self, kept: Mapping[str, Any]) -> None:
        """Go on with what `_kept_fields` gave; fields that were assigned since stay as they are."""
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
                    continue  # it was made with other settings
                value, paths = dataclasses.replace(now, **value), [f"{name}.{field}" for field in value]
            with self._quietly():
                setattr(self, name, value)
            self._changed |= dict.fromkeys(paths)

    @contextmanager
    def _defining(self) -> Iterator[None]:
        """Inside, in this thread, `define` runs."""
        token = _DEFINED.set(self)
        try:
            yield
        finally:
            _DEFINED.reset(token)

    def _quietly(self) -> AbstractContextManager[None]:
        """Inside, assignments are the algorithm's own: they are part of its state, and no changes of settings."""
        return replaced(self, "_live", False)


def _changing(change: Callable[..., Any]) -> Any:
    """A method of a `LiveMapping`: as dict's, on a copy that is then assigned."""

    def changed(self: LiveMapping, *args: Any, **kwargs: Any) -> Any:
        result = change(values := dict(self), *args, **kwargs)
        taken = dict(self._assign(values))
        dict.clear(self)
        dict.update(self, taken)
        return result

    return changed


class LiveMapping(dict[str, Any]):
    """A mapping in which each change is an assignment of the whole: `assign(changed)` checks it, and returns what holds
    then. Copies of it, and what is pickled, are plain dicts."""

    def __init__(self, values: Mapping[str, Any], assign: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        super().__init__(values)
        self._assign = assign

    __setitem__, __delitem__, clear = map(_changing, (dict.__setitem__, dict.__delitem__, dict.clear))  # type: ignore[arg-type]
    update, pop, popitem, setdefault = map(_changing, (dict.update, dict.pop, dict.popitem, dict.setdefault))  # type: ignore[arg-type]

    def __ior__(self, other: Any) -> LiveMapping:  # type: ignore[misc, override]
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def fields_by_name(value: Any) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass by name; none of other values."""
    return {field.name: field for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}


def value_in_effect(values: Mapping[str, Any], name: str, value: Any) -> Any:
    """A value as a table of changes shows it: in place of a clip that is None, the one that the loss takes. values: the
    others, by name."""
    return clips_in_effect({**values, name: value}).get(name) if value is None else value


def as_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a file can hold."""
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def as_read(kept: Any) -> Any:
    """A value of `_kept_fields` as a user reads it."""
    return kept[MAPPING] if isinstance(kept, dict) and MAPPING in kept else kept


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of one type; what cannot be compared is not."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one, other = dict(one), dict(other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return one is other


EVENT = "algorithm"
_under_way: set[int] = set()  # algorithms of which a call is under way, by id


def note_settings(
    algorithm: Algorithm, of_run: Mapping[str, Any], replaced: Mapping[str, Any], once: Mapping[str, Any]
) -> None:
    """Record what the next stage takes, where it is not as it was noted last.

    The row has `values`, of fields and of those arguments of `run` that are given, or were; `training`, fields of roles
    that were assigned; `replace` and `once`, arguments that these gave; and `others`, changes that none of these can
    hold, in words. What `finish` adapts is recorded once, and nothing of an arm of a comparison, after which all is as
    before. `under_way`: whether the iteration has made something.
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
            others[f"{title}.{stage} without the {' and the '.join(sorted(gone))} of before"] = None
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
    # by repr: NaN is as itself; what holds once may hold once more
    if repr(row) != repr(noted) or (row["once"] and not algorithm.made):
        under_way = bool(algorithm.made)
        lab.telemetry.append_settings(title, lab.iteration + (not under_way), **row, under_way=under_way)
        lab.position.noted[title] = weakref.ref(algorithm), row


@contextmanager
def recording(algorithm: Algorithm, call: str, *, resumed: bool = False, **given: Any) -> Iterator[None]:
    """Inside one of an algorithm's public calls: record what it made when it is over, whether it ended or was
    interrupted. A call inside of another is a part of that. Nothing is recorded outside of notebooks, nor of what is
    put back afterwards.

    call: its name. resumed: whether it begins with the rest of an iteration that was interrupted. given: arguments.
    """
    lab = algorithm.lab
    if id(algorithm) in _under_way or not in_notebook() or lab.runner.snapshots.open:
        yield
        return
    name, cell = variable_of(algorithm), running_cell()
    made_as = "" if name else _as_written(algorithm)
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
    """The stages of an unfinished iteration that were made, up to the first that was not."""
    try:
        names = algorithm.graph().names
    except WorkbenchError:  # a field that was changed meanwhile
        names = list(algorithm.made)
    made = list(takewhile(algorithm.made.__contains__, names))
    return made if algorithm.under_way or len(made) < len(names) else []


def _as_written(value: Any) -> str:
    """An algorithm, or settings, as a call that makes it: `wb.PPO(lab, prompts=4)`; "" where it holds what cannot be
    written so, such as a function."""
    if isinstance(value, type) or not is_dataclass(value):
        plain = value is None or isinstance(value, bool | int | float | str | list | tuple | dict)
        return repr(value) if plain else ""
    made: type = type(value)
    if not made.__module__.startswith(("workbench.", "__main__")):
        return ""
    parts = []
    for field in fields(value):
        now = getattr(value, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name == "lab":
            parts.append("lab")
        elif field.init and not is_same(now, default):
            if not (text := _as_written(now)):
                return ""
            parts.append(f"{field.name}={text}")
    prefix = "" if made.__module__ == "__main__" else "wb."
    return f"{prefix}{made.__name__}({', '.join(parts)})"
