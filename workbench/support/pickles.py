"""Pickling by cloudpickle that keeps where a function's code stands, so that an error elsewhere can show its line.

Cloudpickle names the file of each code object "<dynamic-code>" from 3.1.3 on. `marshal`, Python's own format of code,
keeps the name; like cloudpickle's, it is read by the same version of Python only.
"""

from __future__ import annotations

import io
import marshal
from types import CodeType
from typing import Any

import cloudpickle

from workbench.support import cached_functions as cached_functions  # pickle knows these from here on


class Pickler(cloudpickle.Pickler):
    """Cloudpickle's, whose code objects keep the name of their file."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def dumps(thing: Any) -> bytes:
    """The bytes of a thing, by value where no other process could import it; `pickle.loads` reads them."""
    Pickler(file := io.BytesIO()).dump(thing)
    return file.getvalue()
