"""Which algorithms a stepper offers, how one is made for it, and the source of what its stages run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from workbench import algorithms
from workbench.algorithms import ALGORITHMS
from workbench.errors import BadInput
from workbench.errors.plain_text import shown


def algorithm_names() -> list[str]:
    return [name for name in ALGORITHMS if {"prompts", "sampling"} <= set(_fields(name))]


def _fields(name: str) -> Mapping[str, Any]:
    return inspect.signature(getattr(algorithms, name)).parameters


def make_algorithm(name: str, lab: Any, like: Any) -> Any:
    """An algorithm with its own fields, except those that say how much, which are those of the one before it; how many
    samples a prompt too, where that is more than one, which not every algorithm can do with."""
    shared = [field for field in ("prompts", "samples", "sampling") if hasattr(like, field) and field in _fields(name)]
    given = {field: getattr(like, field) for field in shared if field != "samples" or like.samples > 1}
    make: Callable[..., Any] = getattr(algorithms, name)
    return make(lab, **given)


def fits(name: str, lab: Any, like: Any) -> bool:
    try:
        make_algorithm(name, lab, like)
    except BadInput:
        return False
    return True


def code_of(stage: Any, lab: Any) -> str:
    function = getattr(stage, "function", None)
    operation = getattr(function, "operation", None)
    if function is not None and operation is not None:
        function = getattr(function.group.worker_class, operation.name, None)
    elif function is None and stage.role in getattr(lab, "groups", {}):
        function = getattr(lab.groups[stage.role].worker_class, stage.name, None)
    if function is None:
        return "no source: a method of the batch, or of the prompts"
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return f"the source of {shown(function, 80)} is not on disk"
