"""How much has moved in all: sums that grow as transfers are recorded, so that asking costs what is new."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from workbench.telemetry.spans import union_s

if TYPE_CHECKING:
    import pandas as pd

    from workbench.telemetry.store import Follower

SUM_COLUMNS = {
    "kind": "str", "stage": "str", "source": "str", "destination": "str", "columns": "str", "transfers": "int64",
    "moved_bytes": "int64", "duration_s": "float64",
}  # fmt: skip
# So many of the last moves say how fast the next one will be, those of at least so many bytes.
MOVES, LARGE_BYTES = 4, 2**24


class TransferSums:
    """Sums of the transfers of one workbench, which may be asked for from any thread."""

    def __init__(self, transfers: Follower) -> None:
        self._transfers = transfers
        self._sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self._runs: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self._moves: dict[int, list[tuple[float, float, int]]] = {}
        self._lock = threading.Lock()

    def _read(self) -> None:
        """Take in what was recorded since the last time."""
        for row in self._transfers.new():
            try:
                duration_s, moved = row["end_s"] - row["start_s"], int(row["moved_bytes"])
                key = tuple(str(row[name]) for name in ("kind", "stage", "source", "destination", "columns"))
                int(row["run"])
            except (KeyError, TypeError, ValueError):  # a damaged line
                continue
            found = self._sums[key]
            found[0] += 1
            found[1] += moved
            found[2] += duration_s
            self._runs[row["kind"], row["stage"]].add(row["run"])
            if row["kind"] == "move":
                self._moves.setdefault(row["run"], []).append((row["start_s"], row["end_s"], moved))
                if len(self._moves) > MOVES:
                    self._moves.pop(min(self._moves))

    def frame(self, kind: str | None = None) -> pd.DataFrame:
        """One row for each kind, stage, pair of ends and columns that moved: `SUM_COLUMNS`. kind: only these."""
        import pandas as pd

        with self._lock:
            self._read()
            rows = [(*key, *sums) for key, sums in self._sums.items() if kind in (None, key[0])]
        return pd.DataFrame(rows, columns=list(SUM_COLUMNS)).astype(SUM_COLUMNS)

    def runs(self, kind: str) -> dict[str, frozenset[int]]:
        """The stage calls for which something of a kind moved, by stage."""
        with self._lock:
            self._read()
            return {stage: frozenset(runs) for (of, stage), runs in self._runs.items() if of == kind}

    def moves(self) -> tuple[int, int, float]:
        """Of the last large moves: how many, their bytes, and for how many seconds some of these were on their way."""
        with self._lock:
            self._read()
            moves = [move for move in self._moves.values() if sum(nbytes for *_, nbytes in move) >= LARGE_BYTES]
            seconds = sum(union_s((start, end) for start, end, _ in move) for move in moves)
            return len(moves), sum(nbytes for move in moves for *_, nbytes in move), seconds
