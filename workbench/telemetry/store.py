"""Telemetry on disk: append-only JSON lines, read as pandas frames whose column names carry units.

Each workbench has one folder: spans.jsonl, transfers.jsonl, syncs.jsonl, changed.jsonl, metrics.jsonl, settings.jsonl,
events.jsonl, memory.jsonl. Any process may read while another writes. A line is written at once and never changed, so a
process killed in the middle of one costs that line only.

A failed write, as on a full disk, does not end a stage: the rows are kept in memory, up to a limit, and written when
there is room; `unwritten` counts them, and one warning is given.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from workbench.errors import BadInput, WriteFailed
from workbench.support import files
from workbench.support.validation import NonNegativeInt
from workbench.telemetry.memory import MemoryReading
from workbench.telemetry.sinks import Sinks
from workbench.telemetry.spans import Span, Transfer, trace_events, union_s
from workbench.telemetry.syncs import Sync, changed_frame, sync_frame

if TYPE_CHECKING:
    import pandas


SUMMED_BY = ("kind", "stage", "source", "destination", "columns")
SUM_COLUMNS = {
    **dict.fromkeys(SUMMED_BY, "str"), "transfers": "int64", "moved_bytes": "int64", "duration_s": "float64",
}  # fmt: skip
# The speed of the next move is estimated from the last MOVES moves, those of at least LARGE_BYTES bytes.
MOVES, LARGE_BYTES = 4, 2**24


class TransferSums:
    """Sums of the transfers of one workbench. Any thread may read them."""

    def __init__(self, transfers: Follower) -> None:
        self._transfers = transfers
        self._sums: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self._runs: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self._moves: dict[int, list[tuple[float, float, int]]] = {}
        self._lock = threading.Lock()

    def _read(self) -> None:
        """Add the transfers that were recorded since the last call."""
        for row in self._transfers.new():
            moved, found = row["moved_bytes"], self._sums[tuple(row[name] for name in SUMMED_BY)]
            found[0] += 1
            found[1] += moved
            found[2] += row["end_s"] - row["start_s"]
            self._runs[row["kind"], row["stage"]].add(row["run"])
            if row["kind"] == "move":
                self._moves.setdefault(row["run"], []).append((row["start_s"], row["end_s"], moved))
                if len(self._moves) > MOVES:
                    self._moves.pop(min(self._moves))

    def frame(self, kind: str | None = None) -> pandas.DataFrame:
        """Return one row per kind, stage, pair of ends and columns: `SUM_COLUMNS`. kind: only transfers of it."""
        with self._lock:
            self._read()
            rows = [(*key, *sums) for key, sums in self._sums.items() if kind in (None, key[0])]
        return _frame(rows, SUM_COLUMNS)

    def runs(self, kind: str) -> dict[str, frozenset[int]]:
        """Return, by stage, the numbers of the stage calls for which bytes of this kind moved."""
        with self._lock:
            self._read()
            return {stage: frozenset(runs) for (of, stage), runs in self._runs.items() if of == kind}

    def moves(self) -> tuple[int, int, float]:
        """Return the number of the last large moves, their bytes, and for how many seconds any of them were moving."""
        with self._lock:
            self._read()
            moves = [move for move in self._moves.values() if sum(nbytes for *_, nbytes in move) >= LARGE_BYTES]
            seconds = sum(union_s((start, end) for start, end, _ in move) for move in moves)
            return len(moves), sum(nbytes for move in moves for *_, nbytes in move), seconds


SPAN_COLUMNS = {
    "stage": "str", "run": "int64", "role": "str", "pool": "str", "rank": "int64", "device": "str", "kind": "str",
    "parent": "str", "start_s": "float64", "end_s": "float64", "duration_s": "float64", "moved_bytes": "int64",
    "processed_tokens": "int64", "peak_memory_bytes": "int64", "note": "str",
}  # fmt: skip
TRANSFER_COLUMNS = {
    "stage": "str", "run": "int64", "kind": "str", "source": "str", "destination": "str", "batch": "str",
    "columns": "str", "start_s": "float64", "end_s": "float64", "duration_s": "float64", "moved_bytes": "int64",
}  # fmt: skip
METRIC_COLUMNS = {"time_s": "float64", "iteration": "int64", "stage": "str", "run": "int64"}
MEMORY_COLUMNS = {
    "time_s": "float64", "iteration": "int64", "host": "str", "device": "str", "owner": "str", "use": "str",
    "held_bytes": "int64",
}  # fmt: skip
KEEP_BYTES = 32 * 2**20  # of rows that cannot be written
LINE = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
ENDED = re.compile(rb'"end_s":([\d.]+),')
EVENT_COLUMNS = {"time_s": "float64", "event": "str", "details": "object"}


class TelemetryStore:
    """The telemetry of one workbench in `folder` (created at the first write).

    aside: whether metrics come from a comparison or a check, which leave the state unchanged; stored with each row.
    sinks: the trackers that get all other metrics. transfer_sums: sums that are kept without reading all transfers
    again.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.aside = False
        self.sinks = Sinks()
        self.transfer_sums = TransferSums(self.follow("transfers"))
        self._lock = threading.RLock()  # a warning may be shown by code that writes an event
        self._waiting: dict[str, bytes] = {}  # by file, whole lines that could not be written yet
        self._dropped, self._warned = 0, False

    @property
    def unwritten(self) -> int:
        """The number of rows that are not on the disk: rows that wait for room, and rows that were dropped."""
        with self._lock:
            return self._dropped + sum(text.count(b"\n") for text in self._waiting.values())

    def flush(self) -> None:
        """Write the waiting rows, if that is possible now, and warn of those that are left."""
        with self._lock:
            for name in list(self._waiting):
                self._write(name, b"")
            if left := self.unwritten:
                warnings.warn(f"{left} rows of telemetry were not written to {str(self.folder)!r}", stacklevel=2)

    def __repr__(self) -> str:
        sizes = {path.stem: path.stat().st_size for path in sorted(self.folder.glob("*.jsonl"))}
        return f"TelemetryStore({str(self.folder)!r}, bytes={sizes})"

    def append_spans(self, spans: Iterable[Span]) -> None:
        """Add spans, as `Recorder.drain` gives them."""
        self._append("spans", [span.row() for span in spans])

    def append_transfers(self, transfers: Iterable[Transfer]) -> None:
        """Add transfers, as `Recorder.drain` gives them."""
        self._append("transfers", [transfer.row() for transfer in transfers])

    def append_syncs(self, syncs: Iterable[Sync]) -> None:
        """Add the parts of syncs, generations and changes, as `Recorder.drain` gives them."""
        rows = [sync.row() for sync in syncs]
        self._append("syncs", [row for row in rows if row["event"] != "change"])
        self._append("changed", [row for row in rows if row["event"] == "change"])

    def append_metrics(
        self, stage: str, run: int, iteration: int, values: Mapping[str, SupportsFloat], *, rows: int = 0
    ) -> None:
        """Add the metrics of one stage call. Values (numbers, arrays of one element) become floats; NaN and infinities
        are kept. rows: how many the stage worked on. Raises `BadInput` for a name in `METRIC_COLUMNS`."""
        taken = sorted(set(values) & METRIC_COLUMNS.keys())
        if taken:
            raise BadInput(f"metric {taken[0]!r}", f"{', '.join(METRIC_COLUMNS)} are taken", "choose another name")
        row = {"time_s": time.time(), "iteration": iteration, "stage": stage, "run": run, "aside": self.aside}
        numbers = {name: float(value) for name, value in values.items()}
        self._append("metrics", [{**row, "rows": rows, "values": numbers}])
        if not self.aside:
            self.sinks.log(stage, iteration, numbers)

    def reported(self, stage: str, run: int) -> bool:
        """Whether the metrics of a stage call are stored."""
        return any(row["stage"] == stage for row in self._read("metrics", b'"run":%d,' % run))

    def append_event(self, event: str, **details: Any) -> None:
        """Add an event (a placement opened, a host died), with details that JSON can hold."""
        self._append("events", [{"time_s": time.time(), "event": event, "details": details}])

    def append_settings(self, algorithm: str, iteration: int, values: Mapping[str, Any], **others: Any) -> None:
        """Add the settings of an algorithm, plain values by name, that hold from an iteration on. others: other
        settings that its stages depend on, see `note_settings`."""
        row = {"time_s": time.time(), "iteration": iteration, "algorithm": algorithm}
        self._append("settings", [{**row, "values": dict(values), **others}])

    def append_memory(self, readings: Iterable[MemoryReading]) -> None:
        """Add the memory readings of hosts, including hosts that did not answer."""
        self._append("memory", [reading.row() for reading in readings])

    def spans(self, run: NonNegativeInt | None = None, since_s: float | None = None) -> pandas.DataFrame:
        """Return every timed piece of work on every rank, one per row, ordered by start: `SPAN_COLUMNS`. Child spans
        lie inside their parents, so sum only rows with `parent == ""`.

        run: only the spans of one stage call. since_s: only spans that end at this unix time or later. Other lines are
        not parsed.
        """
        return _timed_frame(self._read("spans", b"" if run is None else b'"run":%d,' % run, since_s), SPAN_COLUMNS)

    def transfers(self) -> pandas.DataFrame:
        """Return one row per transfer, ordered by start: `TRANSFER_COLUMNS`."""
        return _timed_frame(self._read("transfers"), TRANSFER_COLUMNS)

    def syncs(self) -> pandas.DataFrame:
        """Return the ledger of weights: one row per sync and per generation, in order, with a verdict.

        version, trained_version: of the engine's and the trainer's weights, in optimizer steps. strategy: the sync
        strategy that moved slices between ranks. moved_bytes: between ranks, on all of them; taken_bytes: given to the
        engines. checksum_sent, checksum_received: of the moved weights, in the memory of the senders and of the
        receivers; computed if `Generation.check_sync` is set. verdict: "ok"; "checksum differs"; "not synced", drawn
        with other weights than the trainer had; "synced twice", the engine had these weights; "failed". With culprit
        (weight, rank) and remedy.
        """
        return sync_frame(self._read("syncs"))

    def changed(self) -> pandas.DataFrame:
        """Return the noted changes by updates. `lab.changed` also notes the latest ones."""
        return changed_frame(self._read("changed"))

    def metrics(self, stage: str | None = None) -> pandas.DataFrame:
        """Return one row per stage call, in order: time_s, iteration, stage, run, then a column for each metric.

        The frame is wide, because metrics of one call belong together: `metrics("update_actor").plot("iteration",
        "clip_fraction")`. `melt` makes it long. A metric that a call did not report is NaN. stage: only its rows and
        metrics.
        """
        rows = [row for row in self._read("metrics") if stage in (None, row["stage"])]
        names = list(dict.fromkeys(name for row in rows for name in row["values"]))
        # float() also reads the names that _strict gave to NaN and the infinities
        wide = [{**row, **{name: float(value) for name, value in row["values"].items()}} for row in rows]
        return _frame(wide, {**METRIC_COLUMNS, **dict.fromkeys(names, "float64")})

    def events(self) -> pandas.DataFrame:
        """Return one row per event, in order: time_s, event, details (a dict; NaN and infinities in it are text)."""
        return _frame(self._read("events"), EVENT_COLUMNS)

    def lives(self) -> pandas.DataFrame:
        """Return one row per period between opening, attachments and recoveries, in order: begins_s, ends_s (unix
        times; infinity for the last one), because (the event that began it). Iterations that were repeated after a
        recovery are in `metrics` twice, in two lives: `pandas.merge_asof(metrics, lives, left_on="time_s",
        right_on="begins_s")` says which."""
        import pandas

        events = self.events()
        begun = events[events["event"].isin(["opened", "attached", "recovered"])]
        ends_s = [*begun["time_s"].iloc[1:], float("inf")][: len(begun)]
        return pandas.DataFrame({"begins_s": begun["time_s"].tolist(), "ends_s": ends_s,
                                 "because": begun["event"].tolist()})  # fmt: skip

    def memory(self) -> pandas.DataFrame:
        """Return one row per owner and use in each host's answer: `MEMORY_COLUMNS`; see `MemoryReading.shares`."""
        shares = [
            {**row, "owner": owner, "use": use, "held_bytes": n}
            for row in self._read("memory")
            if not row["error"]
            for (owner, use), n in MemoryReading(**row).shares().items()
        ]
        return _frame(shares, MEMORY_COLUMNS)

    def follow(self, name: str) -> Follower:
        """Return a reader of "spans", "transfers", ...: `.new()` gives first all rows, then only new ones."""
        return Follower(self._path(name))

    def chrome_trace(self, path: str | Path) -> Path:
        """Write all spans and transfers as a Chrome trace, which Perfetto and chrome://tracing open; returns the
        path."""
        spans: list[Any] = self.spans().to_dict("records")
        transfers: list[Any] = self.transfers().to_dict("records")
        target = files.path_of(path, "path")
        trace = {"displayTimeUnit": "ms", "traceEvents": trace_events(spans, transfers)}
        files.write_bytes(target, json.dumps(_strict(trace), allow_nan=False).encode(), mode=files.SHARED)
        return target

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        try:
            text = "".join(LINE(row) + "\n" for row in rows)
        except (TypeError, ValueError):
            text = "".join(LINE(_strict(row)) + "\n" for row in rows)
        with self._lock:
            self._write(name, text.encode())

    def _write(self, name: str, new: bytes) -> None:
        """Append lines, after the waiting ones. Lines that cannot be written, for any reason, wait."""
        old = self._waiting.get(name, b"")
        text, written, descriptor = old + new, 0, -1
        try:
            files.private_folder(self.folder)
            descriptor = files.open_to_append(self._path(name))
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                os.write(descriptor, b"\n")  # half a line of a dead writer must not swallow our first line
            while written < len(text):
                written += os.write(descriptor, text[written:])
            self._waiting.pop(name, None)
        except BaseException as error:  # half a line may be in the file: readers skip it, and it is written again
            begin = text.rfind(b"\n", 0, written) + 1
            self._keep(name, text[begin : len(old)], text[max(begin, len(old)) :])
            if not isinstance(error, OSError):
                raise
            self._warn(name, len(text) - begin, error)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _keep(self, name: str, old: bytes, new: bytes) -> None:
        """Keep lines that wait: the old ones, which waited before, and the new ones if there is room."""
        self._waiting.pop(name, None)
        if sum(map(len, self._waiting.values())) + len(old) + len(new) > KEEP_BYTES:
            self._dropped += new.count(b"\n")
            new = b""
        if old + new:
            self._waiting[name] = old + new

    def _warn(self, name: str, needed: int, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            failed = error if isinstance(error, WriteFailed) else files.failed_write(error, self._path(name), needed)
            warnings.warn(
                f"telemetry: {failed.value}. {failed.rule}. The run continues; rows wait in memory for free space, "
                "and repr(lab) counts them.",
                stacklevel=2,
            )

    def _read(self, name: str, having: bytes = b"", since_s: float | None = None) -> list[dict[str, Any]]:
        """Return the rows of a file, and the waiting ones. having: only rows of lines with this text. since_s: only
        rows whose `end_s` is at least that."""
        with self._lock:
            waiting = self._waiting.get(name, b"")
            try:
                text = files.read_bytes(self._path(name)) + b"\n" * bool(waiting) + waiting
            except FileNotFoundError:
                text = waiting
        lines = [line for line in text.splitlines() if having in line]
        if since_s is not None:
            lines = [line for line in lines if (found := ENDED.search(line)) and float(found[1]) >= since_s]
        return json_rows(b"\n".join(lines))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


class Follower:
    """Reads a growing file of JSON lines step by step: each `new()` reads only what was added since the last."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    @property
    def size_bytes(self) -> int:
        """The size of the file, whether `new` has returned its rows or not."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def new(self) -> list[dict[str, Any]]:
        """Return the rows that were added, as stored; a line that is still being written comes once it is complete."""
        if self.size_bytes <= self._offset:
            return []
        with files.opened(self._path) as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return json_rows(whole)


def json_rows(text: bytes) -> list[dict[str, Any]]:
    """Parse lines of JSON into rows; skip lines that cannot be read."""
    lines = text.splitlines()
    with suppress(ValueError):  # parsing as one list takes a third of the time
        rows = json.loads(b"[" + b",".join(lines) + b"]")
        if len(rows) == len(lines) and all(type(row) is dict for row in rows):
            return rows
    return [row for row in map(_row, lines) if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if line else None
    except (ValueError, RecursionError):  # a JSON error, and half a character
        return None
    return row if isinstance(row, dict) else None


def _frame(rows: Sequence[Any], columns: Mapping[str, str]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(rows, columns=list(columns)).astype(dict(columns))


def _timed_frame(rows: list[dict[str, Any]], columns: dict[str, str]) -> pandas.DataFrame:
    for row in rows:
        row["duration_s"] = row["end_s"] - row["start_s"]
    return _frame(rows, columns).sort_values("start_s", kind="stable", ignore_index=True)


def _strict(value: Any) -> Any:
    """Replace NaN and infinities by their names, because strict JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value
