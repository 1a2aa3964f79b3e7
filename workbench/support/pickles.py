"""Pickles with cloudpickle, and keeps the file name of a function's code, so that an error elsewhere can show its line.

From 3.1.3 on, cloudpickle names the file of each code object "<dynamic-code>". `marshal`, Python's own format of code,
keeps the name. As with cloudpickle, only the same version of Python can read it.

Pickle sends functions with `functools.cache` or `lru_cache` by name only. Here, those of a notebook, which no other
process can import, are sent by value, with an empty cache.
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
    """Cloudpickle's pickler, but code objects keep the name of their file."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def dumps(thing: Any, pickler: type[Pickler] = Pickler) -> bytes:
    """Pickle an object, by value where no other process could import it; `pickle.loads` reads the bytes."""
    pickler(file := io.BytesIO()).dump(thing)
    return file.getvalue()


CACHED: Any = type(functools.cache(lambda: None))


def cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    """Return the function with an empty cache."""
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
