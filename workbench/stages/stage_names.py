"""Names of stages that are not those of their operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class StageNames:
    """What carries out stages, or writes them down, under names that an algorithm gives them."""

    _stage_name = ""  # "" for the operation's own

    @contextlib.contextmanager
    def reported_as(self, stage: str) -> Iterator[None]:
        """Inside, calls report their metrics under a stage's own name: an algorithm may have two of one operation."""
        self._stage_name, before = stage, self._stage_name
        try:
            yield
        finally:
            self._stage_name = before
