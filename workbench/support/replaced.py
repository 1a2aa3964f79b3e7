"""Replaces an attribute for the duration of a block."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner` has this value as its attribute `name`; afterwards the old value."""
    before = inspect.getattr_static(owner, name, None) or getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
