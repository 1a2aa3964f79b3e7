"""The settings of an algorithm in the record of its run, as they are when an iteration begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from workbench.support.flat_settings import flat

if TYPE_CHECKING:
    from workbench.algorithms.loop import Algorithm


def note_settings(algorithm: Algorithm, noted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Record the fields of an algorithm that are not as they were noted before; what is noted now. What `finish` adapts
    is recorded once, and nothing of an arm of a comparison, after which all is as before."""
    lab, settings = algorithm.lab, settings_of(algorithm)
    adapted = algorithm.state().keys() if noted else ()
    changed = {name: value for name, value in settings.items() if name not in adapted and differ(value, noted, name)}
    if not changed or lab.runner.snapshots.open:
        return noted
    lab.telemetry.append_settings(type(algorithm).__name__, lab.iteration + 1, changed)
    return settings


def differ(value: Any, noted: Mapping[str, Any], name: str) -> bool:
    """Whether a value is another than the one that was noted; NaN is as itself."""
    return name not in noted or repr(noted[name]) != repr(value)


def settings_of(algorithm: Algorithm) -> dict[str, Any]:
    """The fields of an algorithm as plain values by name. Stages that `replace` edited are among the run's changes."""
    names: list[str] = []
    if is_dataclass(algorithm):
        names = [field.name for field in fields(algorithm) if field.name != "lab"]
    return flat({name: getattr(algorithm, name, None) for name in names})
