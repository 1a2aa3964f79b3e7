"""Environments of one rank in several processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from workbench.data.conversation_turns import Reply, Told, Turn
from workbench.data.environment import Environments

LOOK_S = 0.002  # between two looks at the processes, while nothing is decoded


class EnvironmentPool:
    """Used as `Environments` is: conversation i has its environment in process i modulo their number, so that the same
    seed has the same neighbours again. What ends one process is the matter of its conversations alone.

    members: of each process, for the same rows.
    """

    def __init__(self, members: Sequence[Environments]) -> None:
        self._members = members

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While they are in use; at the end they are closed."""
        with contextlib.ExitStack() as open_ones:
            for member in self._members:
                open_ones.enter_context(member.running())
            yield

    def begin(self, row: int, room: int) -> None:
        """As of `Environments`."""
        self._of(row).begin(row, room)

    def resume(self, row: int, told: Sequence[Told], began: str = "") -> None:
        """As of `Environments`."""
        self._of(row).resume(row, told, began)

    def say(self, turn: Turn) -> None:
        """As of `Environments`."""
        self._of(turn.row).say(turn)

    def summarize(self, row: int, function: Callable[..., Any], context_ids: Sequence[int]) -> None:
        """As of `Environments`."""
        self._of(row).summarize(row, function, context_ids)

    def replies(self, wait_s: float) -> list[tuple[int, Reply]]:
        """As of `Environments`: those of all processes."""
        if len(self._members) == 1:
            return self._members[0].replies(wait_s)
        until_s = time.monotonic() + wait_s
        while True:
            found = [reply for member in self._members for reply in member.replies(0.0)]
            if found or time.monotonic() >= until_s:
                return found
            time.sleep(LOOK_S)

    def _of(self, row: int) -> Environments:
        return self._members[row % len(self._members)]
