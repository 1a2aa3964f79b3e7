"""What a stage leaves in the journal, from which a later kernel goes on; `workbench.session.journal` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workbench.batches.references import Column


@dataclass(frozen=True, kw_only=True)
class SentRun:
    """A stage that was sent to hosts. read: the columns that an update read. drawn: (iteration, draw), where it drew
    samples."""

    number: int
    name: str
    role: str
    hosts: tuple[str, ...]
    code: str
    updates: bool
    result_ranks: tuple[int, ...]
    layout: str = ""
    read: Mapping[str, Column] = field(default_factory=dict)
    drawn: tuple[int, int] | None = None


class Journal(Protocol):
    """The journal of one workbench."""

    def append(self, *, sent: SentRun | None = None, over: int | None = None) -> None:
        """Append what has changed since the last entry. sent: a stage that now goes to its hosts. over: the number of
        a stage that its hosts have ended."""
