"""Settings as plain values by name, for records and tables: `{"actor/training/learning_rate": 1e-05}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from workbench.errors.plain_text import shown

LONGEST, DEEPEST = 500, 6


def flat(value: Any, name: str = "", depth: int = 0) -> dict[str, Any]:
    """Return a value as numbers and texts by name; parts of dataclasses and mappings have names of their own. A
    function counts by its name."""
    if value is None or isinstance(value, bool | int | float):
        return {name: value}
    if isinstance(value, str | Path):
        return {name: str(value)[:LONGEST]}
    if depth < DEEPEST and is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif depth < DEEPEST and isinstance(value, Mapping):
        parts = {str(key): item for key, item in value.items()}
    elif callable(value):
        return {name: f"function {getattr(value, '__qualname__', type(value).__qualname__)}"[:LONGEST]}
    else:  # the repr of other values may have an address
        plain = isinstance(value, list | tuple | set | frozenset) or type(value).__module__ == "numpy"
        return {name: shown(value, LONGEST) if plain else f"<{type(value).__name__}>"}
    found: dict[str, Any] = {}
    for part, item in parts.items():
        found |= flat(item, f"{name}/{part}" if name else part, depth + 1)
    return found
