"""Fields of an algorithm that are assigned while it runs: checked at once, recorded, kept for a later kernel."""

from __future__ import annotations

import dataclasses
import importlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from workbench.algorithms.lab import Lab
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.objectives.covariance import clips_in_effect
from workbench.support.named_fields import meant
from workbench.support.validation import LiveMapping, check_before_post_init, checked, hints_of, owned

SETTINGS = "settings"  # in what is kept of settings that were assigned whole: their class
MAPPING = "mapping"  # in what is kept of a mapping that was assigned: its values


class LiveFields:
    """Base of the algorithms. `ppo.clip = 0.1` and `ppo.sampling.temperature = 0.7` hold from the next stage on.

    A value is checked as at the algorithm's making, on a copy of it; one that is refused changes nothing. Numbers,
    texts, settings such as `wb.Correction(...)` and fields of settings are kept by checkpoints and for later kernels.
    Functions are not: the cell that assigns one has to be run again.
    """

    lab: Lab
    taken_up: bool = False  # from a checkpoint
    _live = False  # it is made, and an assignment is a change
    _changed: dict[str, Any]  # by field, a value, or a dict of the fields of settings

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the values of fields before `__post_init__`, and from its end on each assignment."""
        super().__init_subclass__(**kwargs)
        check_before_post_init(cls, then=LiveFields._go_live)

    def _go_live(self) -> None:
        """It is made: from here on an assignment is a change."""
        me: Any = self
        for field in dataclasses.fields(me):
            if isinstance(value := self.__dict__.get(field.name), Mapping):
                self.__dict__[field.name] = self._owned_mapping(field.name, value)
        self.__dict__["_live"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field; `BadInput` for a name that is none, which no stage would read, and for a value that the
        algorithm would not be made with."""
        known: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        named = {field.name: field for field in known}
        if name not in named and named and not name.startswith("_") and not hasattr(type(self), name):
            raise BadInput(
                f"{type(self).__name__}.{name} = {shown(value)}",
                f"its fields are {', '.join(named)}",
                meant(name, list(named)) or f"a field of one's own is written in the class: {name}: float = 0.0",
            )
        own = getattr(type(self), name, None)
        if name not in named and (
            (isinstance(own, property) and own.fset is None) or (callable(own) and not callable(value))
        ):
            raise BadInput(
                f"{type(self).__name__}.{name} = {shown(value)}",
                "it is a part of the algorithm, not a setting",
                f"its fields are {', '.join(named)}",
            )
        if name not in named or not self._live:
            object.__setattr__(self, name, self._owned(name, value) if name in named else value)
            return
        before, hints = getattr(self, name), hints_of(type(self))
        if name in hints and not (value is None and named[name].default is None):
            value = checked(f"{type(self).__name__}.{name}", value, hints[name], named[name].default)
        if is_same(before, value):
            return
        trial: Any = object.__new__(type(self))
        trial.__dict__.update(self.__dict__, **{name: value, "_live": False, "taken_up": True})
        trial.__post_init__()
        me: Any = self
        if self.__dict__.get("_under_way"):
            what = f"{type(self).__name__}.{name} = {shown(value)}"
            me.graph().check_open_updates(self.lab, what, me.made.keys(), trial.graph())
        self._note_change(name, before, value)
        object.__setattr__(self, name, self._owned(name, trial.__dict__[name]))

    def _owned(self, name: str, value: Any) -> Any:
        """A value that may be settings, or a mapping, which then can be assigned to."""
        if isinstance(value, Mapping):
            return self._owned_mapping(name, value)
        if isinstance(value, type) or not is_pydantic_dataclass(type(value)):
            return value

        me = weakref.ref(self)  # an algorithm, and the batches that it made, are released with the last variable

        def assign(field: str, one: Any) -> Any:
            if (algorithm := me()) is None:
                raise BadInput(f"{field} = {shown(one)}", "the algorithm of these settings is gone", "make it anew")
            now = getattr(algorithm, name)
            if field not in {known.name for known in dataclasses.fields(now)}:
                raise BadInput(
                    f"{type(algorithm).__name__}.{name}.{field} = {shown(one)}",
                    f"its fields are {', '.join(known.name for known in dataclasses.fields(now))}",
                    meant(field, [known.name for known in dataclasses.fields(now)]),
                )
            setattr(algorithm, name, dataclasses.replace(now, **{field: one}))
            return getattr(getattr(algorithm, name), field)

        return owned(value, assign)

    def _owned_mapping(self, name: str, value: Mapping[str, Any]) -> LiveMapping:
        me, called = weakref.ref(self), f"{type(self).__name__}.{name}"

        def assign(changed: dict[str, Any]) -> Any:
            if (algorithm := me()) is None:
                raise BadInput(f"{called} = {shown(changed)}", "the algorithm of this field is gone", "make it anew")
            setattr(algorithm, name, changed)
            return getattr(algorithm, name)

        return LiveMapping(value, assign)

    def _note_change(self, name: str, before: Any, after: Any) -> None:
        """Record a change, one a field of settings."""
        called, known = f"{type(self).__name__}.{name}", self._changed_fields.get(name)
        kept = MappingProxyType(dict(after)) if isinstance(after, Mapping) else after
        changes = [(called, *(value_in_effect(self.__dict__, name, value) for value in (before, after)))]
        if dataclasses.is_dataclass(after) and type(before) is type(after):
            names = [field.name for field in dataclasses.fields(after)]
            new = {
                field: getattr(after, field)
                for field in names
                if not is_same(getattr(before, field), getattr(after, field))
            }
            changes = [(f"{called}.{field}", getattr(before, field), value) for field, value in new.items()]
            if not dataclasses.is_dataclass(known):  # else they were assigned whole, and are kept whole
                kept = {**(known or {}), **new}
        self._changed_fields[name] = kept  # first: the journal's entry, which a later kernel reads, holds them
        for change in changes:
            self.lab.runner.live.note(*change)

    @property
    def _changed_fields(self) -> dict[str, Any]:
        """What was assigned while it lived: by field, the value, or a dict of those fields of settings that were. A
        value that is a mapping is kept as a `MappingProxyType`."""
        if "_changed" not in self.__dict__:
            self._changed = {}
        return self._changed

    def _is_changed(self, path: str) -> bool:
        """Whether a field, or a field of settings, was assigned while it lived."""
        owner, _, field = path.rpartition(".")
        if not owner:
            return field in self._changed_fields
        changed = self._changed_fields.get(owner, {})
        return field in changed if isinstance(changed, dict) else True

    def _kept_fields(self) -> dict[str, Any]:
        """Those of `_changed_fields` that a file can hold."""
        kept: dict[str, Any] = {}
        for name, value in self._changed_fields.items():
            if isinstance(value, dict):
                kept |= {name: plain} if (plain := as_plain(value)) else {}
            elif is_pydantic_dataclass(type(value)):
                kept |= {name: whole} if (whole := _settings_as_plain(value)) else {}
            elif isinstance(value, Mapping):
                kept |= {name: {MAPPING: dict(value)}} if _is_plain(dict(value)) else {}
            elif _is_plain(value):
                kept[name] = value
        return kept

    def _take_fields(self, kept: Mapping[str, Any]) -> None:
        """Go on with what `_kept_fields` gave; fields that were assigned since stay as they are."""
        fields = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        with self._quietly():
            for name in fields & kept.keys() - self._changed_fields.keys():
                value, now = kept[name], getattr(self, name)
                changed = value
                if isinstance(value, dict) and SETTINGS in value:
                    value = changed = _from_plain(value)
                elif isinstance(value, dict) and MAPPING in value:
                    value, changed = value[MAPPING], MappingProxyType(value[MAPPING])
                elif isinstance(value, dict):
                    if not dataclasses.is_dataclass(now) or not value.keys() <= {
                        f.name for f in dataclasses.fields(now)
                    }:
                        continue  # it was made with other settings
                    value = dataclasses.replace(now, **value)  # type: ignore[type-var]
                setattr(self, name, value)
                self._changed_fields[name] = changed

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Inside, assignments are the algorithm's own: they are part of its state, and no changes of settings."""
        live = self._live
        self.__dict__["_live"] = False
        try:
            yield
        finally:
            self.__dict__["_live"] = live


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


def _settings_as_plain(settings: Any) -> dict[str, Any]:
    """Settings as a file can hold them, with their class; empty where it cannot, or the class is a user's own."""
    made, fields = type(settings), {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if not made.__module__.startswith("workbench.") or not all(map(_is_plain, fields.values())):
        return {}
    return {SETTINGS: f"{made.__module__}:{made.__qualname__}", **fields}


def as_read(kept: Any) -> Any:
    """A value of `_kept_fields` as a user reads it."""
    return kept[MAPPING] if isinstance(kept, dict) and MAPPING in kept else kept


def _from_plain(plain: Mapping[str, Any]) -> Any:
    """What `_settings_as_plain` was given."""
    module, _, name = plain[SETTINGS].partition(":")
    made = getattr(importlib.import_module(module), name)
    return made(**{field: value for field, value in plain.items() if field != SETTINGS})


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and of one type; what cannot be compared is not."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one, other = dict(one), dict(other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return one is other
