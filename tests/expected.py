"""Errors that are raised on purpose, told by their class and their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def expect_error(
    kind: type[BaseException] | tuple[type[BaseException], ...], *, value: str = "", rule: str = "", remedy: str = ""
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises an error of this class. Each pattern is looked for, as `re.search` does, in the field of its
    name: of the value that is wrong, the rule, and what to do."""
    patterns = {name: text for name, text in (("value", value), ("rule", rule), ("remedy", remedy)) if text}
    assert patterns, "say at least one pattern: the class alone is pytest.raises(...)"
    with pytest.raises(kind) as caught:
        yield caught
    for name, pattern in patterns.items():
        found = getattr(caught.value, name)
        assert re.search(pattern, found, re.DOTALL), f"{name}: {found!r} does not match {pattern!r}"
