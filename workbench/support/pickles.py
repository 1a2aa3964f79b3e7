"""Pickling by cloudpickle that keeps where a function's code stands, so that an error elsewhere can show its line.

Cloudpickle names the file of each code object "<dynamic-code>" from 3.1.3 on. `marshal`, Python's own format of code,
keeps the name; like cloudpickle's, it is read by the same version of Python only.

Functions under `functools.cache` and `lru_cache`, which pickle knows by name alone: those of a notebook, which no
other process can import, are sent by value, with an empty cache.
"""

from __future__ import annotations

import copyreg
import functools
import io
import marshal
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """Cloudpickle's, whose code objects keep the name of their file."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def dumps(thing: Any, pickler: type[Pickler] = Pickler) -> bytes:
    """The bytes of a thing, by value where no other process could import it; `pickle.loads` reads them."""
    pickler(file := io.BytesIO()).dump(thing)
    return file.getvalue()


CACHED: Any = type(functools.cache(lambda: None))


def cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """A function with an empty cache."""
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def _reduced(value: Any) -> Any:
    there: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        there = getattr(there, name, None)
    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    if there is value and value.__module__ not in by_value:
        return value.__qualname__
    return cached, (value.__wrapped__, *value.cache_parameters().values())


copyreg.pickle(CACHED, _reduced)
