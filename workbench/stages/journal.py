"""What is written down for a later kernel while stages run; `workbench.session.handover` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workbench.batches.references import Column


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A stage that was sent to hosts. read: the columns that an update read. drawn: (iteration, draw), where it drew
    samples."""

    number: int
    name: str
    role: str
    hosts: tuple[str, ...]
    code: str
    updates: bool
    collecting: tuple[int, ...]
    layout: str = ""
    read: Mapping[str, Column] = field(default_factory=dict)
    drawn: tuple[int, int] | None = None


class Journal(Protocol):
    """Where it is written down."""

    def sent(self, run: OpenRun) -> None:
        """A stage goes to its hosts."""

    def over(self, number: int) -> None:
        """Its hosts are done with it, and what came of it is written down."""

    def write(self) -> None:
        """Write down how things stand."""
