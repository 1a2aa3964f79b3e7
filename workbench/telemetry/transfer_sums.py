"""How much has moved in all: sums that grow as transfers are recorded, so that asking costs what is new."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from workbench.telemetry.store import Follower

SUM_COLUMNS = {
    "kind": "str", "stage": "str", "source": "str", "destination": "str", "columns": "str", "transfers": "int64",
    "moved_bytes": "int64", "duration_s": "float64",
}  # fmt: skip
LARGE_BYTES = 2**20  # transfers of at least so many bytes say how fast the machine is


class TransferSums:
    """Sums of the transfers of one workbench, which may be asked for from any thread."""

    def __init__(self, transfers: Follower) -> None:
        self._transfers = transfers
        self._sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self._runs: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self._large: tuple[int, int, float] = 0, 0, 0.0
        self._lock = threading.Lock()

    def _read(self) -> None:
        """Take in what was recorded since the last time."""
        for row in self._transfers.new():
            duration_s, moved = row["end_s"] - row["start_s"], row["moved_bytes"]
            found = self._sums[row["kind"], row["stage"], row["source"], row["destination"], row["columns"]]
            found[0] += 1
            found[1] += moved
            found[2] += duration_s
            self._runs[row["kind"], row["stage"]].add(row["run"])
            if moved >= LARGE_BYTES:
                count, large_bytes, seconds = self._large
                self._large = count + 1, large_bytes + moved, seconds + duration_s

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

    def large(self) -> tuple[int, int, float]:
        """Of the transfers of at least `LARGE_BYTES`: how many, their bytes, their seconds."""
        with self._lock:
            self._read()
            return self._large
