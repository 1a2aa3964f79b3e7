"""The ledger of a sweep: which trials have begun and ended, a line each, so that a later kernel goes on with it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from workbench.errors import BadInput
from workbench.support import files

LIMIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TrialKey:
    """arm, seed; digest: of the arm's settings and the function that trains, so that a trial of other code counts for
    none."""

    arm: str
    seed: int
    digest: str


@dataclass(frozen=True)
class Ended:
    """A trial that has ended. score: what it gave. run: the name of its newest run folder, "" for none."""

    score: float
    seconds: float
    run: str


class Ledger:
    """The trials of one sweep, in a file that is only added to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Inside, no other kernel adds to it. Raises `BadInput` while one does; the lock of a kernel that has ended is
        gone."""
        files.private_folder(self.path.parent)
        lock = FileLock(self.path.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            name = self.path.stem
            rule = "another kernel makes its trials, or a cell of this one that was not stopped"
            raise BadInput(f"wb.sweep({name!r})", rule, "wait for it or stop it, or choose another name") from None
        try:
            yield
        finally:
            lock.release()

    def begun(self, key: TrialKey, run_folder: Path) -> None:
        """A trial has opened a workbench."""
        self._append({"event": "begun", "folder": str(run_folder)}, key)

    def end(self, key: TrialKey, ended: Ended) -> None:
        """A trial is over."""
        self._append({"event": "ended", **vars(ended)}, key)

    def ended(self, key: TrialKey) -> Ended | None:
        """What a trial gave, if it is over."""
        rows = [row for row in self._rows(key) if row.get("event") == "ended"]
        if not rows or not isinstance(score := rows[-1].get("score"), int | float) or not math.isfinite(score):
            return None
        row = rows[-1]
        return Ended(float(row["score"]), float(row.get("seconds") or 0.0), str(row.get("run", "")))

    def left_behind(self, key: TrialKey) -> list[Path]:
        """The run folders of a trial that has begun and not ended, oldest first."""
        return [Path(str(row["folder"])) for row in self._rows(key) if row.get("event") == "begun" and "folder" in row]

    def of_other_code(self, keys: Mapping[tuple[str, int], TrialKey]) -> int:
        """Trials of these arms and seeds that ended with other settings, or another function."""
        ended = [row for row in self._all() if row["event"] == "ended"]
        found = {(str(row.get("arm")), int(row.get("seed", -1)), row.get("digest")) for row in ended}
        ours = {(key.arm, key.seed, key.digest) for key in keys.values()}
        return sum((arm, seed) in keys for arm, seed, _ in found - ours)

    def _rows(self, key: TrialKey) -> list[dict[str, Any]]:
        named = vars(key)
        return [row for row in self._all() if all(row.get(name) == value for name, value in named.items())]

    def _all(self) -> list[dict[str, Any]]:
        found = []
        try:
            lines = files.read_bytes(self.path, limit=LIMIT_BYTES)
        except FileNotFoundError:
            return []
        for line in lines.splitlines():
            try:
                row = json.loads(line) if line else None
            except (ValueError, RecursionError):  # a kernel ended while it wrote
                continue
            if isinstance(row, dict) and row.get("event") in ("begun", "ended") and type(row.get("seed")) is int:
                found.append(row)
        return found

    def _append(self, row: Mapping[str, Any], key: TrialKey) -> None:
        files.private_folder(self.path.parent)
        line = json.dumps({"time_s": time.time(), **vars(key), **row}).encode()
        with files.disk_errors(self.path, len(line)):
            descriptor = files.open_to_append(self.path)
            try:
                os.write(descriptor, b"\n" + line + b"\n")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def check_name(name: str) -> str:
    """A sweep's name is that of a file."""
    if not name or name.startswith(".") or any(c in name for c in "/\\\0") or len(name.encode()) > 200:
        raise BadInput(f"name={name!r}", "of a file: no slash, and no point in front", 'such as "kl"')
    return name
