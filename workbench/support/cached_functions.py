"""Functions under `functools.cache` and `lru_cache`, which pickle knows by name alone: those of a notebook, which no
other process can import, are sent by value, with an empty cache."""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Callable
from typing import Any

CACHED: Any = type(functools.cache(lambda: None))


def cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """A function with an empty cache."""
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def _reduced(value: Any) -> Any:
    import cloudpickle

    there: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        there = getattr(there, name, None)
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if there is value and value.__module__ not in by_value:
        return value.__qualname__
    return cached, (value.__wrapped__, *value.cache_parameters().values())


copyreg.pickle(CACHED, _reduced)
