"""A run folder as data: what it was opened with, its algorithm's settings, its metrics. Nothing in it is executed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.errors import BadInput, NotFound
from workbench.session.run_record import RunRecord, read_run_record
from workbench.support import files
from workbench.support.files import path_of
from workbench.telemetry.store import json_rows

METRICS, SETTINGS, EVENTS = Path("metrics.jsonl"), Path("settings.jsonl"), Path("events.jsonl")
LIMIT_BYTES = 512 * 2**20  # of a file
TAIL_BYTES = 256 * 2**10  # of the metrics and events, from their end: the last iteration lies in it
X = ("samples", "tokens", "seconds")  # columns of `RunFolder.series` that count up
ROWS, TIME, ITERATION = "rows", "time_s", "iteration"
BACK = ("recovered", "restored")  # events after which a run is at an earlier iteration


@dataclass(frozen=True)
class RunFolder:
    """One run. name: of its workbench and its moment, "NAME/DATE"."""

    folder: Path

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @cached_property
    def record(self) -> RunRecord:
        """What it was opened with; empty where nothing tells it."""
        return read_run_record(self.folder) or RunRecord(name=self.folder.parent.name, opened_s=0.0)

    def code(self, part: str) -> dict[str, Any]:
        """A part of what is recorded of its code, such as "versions"; empty where there is none, or it is damaged."""
        found = self.record.code.get(part)
        return found if isinstance(found, dict) else {}

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """By role, its function: name, digest and source."""
        return {role: one for role, one in self.code("functions").items() if isinstance(one, dict)}

    @cached_property
    def algorithms(self) -> dict[str, dict[str, Any]]:
        """The settings with which each algorithm began, by the name of its class."""
        found: dict[str, dict[str, Any]] = {}
        for row in self._rows(SETTINGS):
            if isinstance(row.get("values"), dict):
                found.setdefault(str(row.get("algorithm")), dict(row["values"]))
        return found

    def changed_settings(self, algorithm: str) -> dict[int, dict[str, Any]]:
        """By iteration, the settings with which an algorithm began, and those that were others from then on."""
        found: dict[int, dict[str, Any]] = {}
        rows = (row for row in self._rows(SETTINGS) if _is_whole(row.get(ITERATION)) and TIME in row)
        for row, changed in _changed(filter(self._counts(), rows)):
            if row["algorithm"] == algorithm:
                found.setdefault(row[ITERATION], {}).update(changed)
        return found

    def draws(self) -> dict[int, tuple[Any, Any]]:
        """By iteration that drew from the buffer: the prompts, and the versions of the weights that drew them."""
        counts, events = self._counts(), filter(_is_event_of_iteration, self._rows(EVENTS))
        return {
            int(row["details"][ITERATION]): (row["details"].get("prompts"), row["details"].get("weights_versions"))
            for row in events
            if row.get("event") == "drawn from the buffer" and counts({TIME: row[TIME], **row["details"]})
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the opening, and those of algorithms as "PPO/clip"."""
        algorithms = {f"{algorithm}/{name}": value for algorithm, values in self.algorithms.items()
                      for name, value in values.items()}  # fmt: skip
        return {**self.record.settings, **algorithms}

    def changes(self) -> list[dict[str, Any]]:
        """What was changed while the run lived, in order: settings of algorithms and roles, edited code, placements."""
        found, seen, fields = [], set(), set[str]()
        for row, values in _changed(self._rows(SETTINGS)):
            algorithm = str(row.get("algorithm"))
            if algorithm in seen and values:
                changed = ", ".join(f"{algorithm}/{name}={value}" for name, value in values.items())
                found.append({TIME: row.get(TIME), ITERATION: row.get(ITERATION), "change": changed})
            seen.add(algorithm)
            fields |= {f"{algorithm}.{name.partition('/')[0]}" for name in values}
        for row in self._rows(EVENTS):
            said, kind = row.get("details"), row.get("event")
            setting = str(said.get("setting")).split(".") if isinstance(said, dict) else []
            noted = kind == "setting" and ".".join(setting[:2]) in fields
            if isinstance(said, dict) and kind in ("reload", "move", "setting") and not noted:
                words = {"reload": f"edited {said.get('modules')}", "move": f"placement {said.get('placement')}",
                         "setting": f"{said.get('setting')}={said.get('after')}"}[str(kind)]  # fmt: skip
                found.append({TIME: row.get(TIME), ITERATION: said.get(ITERATION), "change": words})
        return sorted(found, key=lambda row: _number(row[TIME]))

    def last_metrics(self) -> tuple[int, dict[str, float]]:
        """The last iteration that has begun and has metrics, and what it and the newest evaluation reported, as
        "stage/metric". Rollouts that were drawn ahead for later iterations do not count."""
        found: dict[str, float] = {}
        last, newest = 0, self._iteration()
        for row in _training(self._rows(METRICS, tail=TAIL_BYTES)):
            if row[ITERATION] <= newest:
                last = max(last, int(row[ITERATION]))
                found |= {f"{row['stage']}/{name}": _number(value) for name, value in row["values"].items()}
        return last, found

    def _iteration(self) -> float:
        """The iteration that began last, or to which the run went back; infinite where no event says it."""
        for tail in (TAIL_BYTES, None):
            whole = [row for row in self._rows(EVENTS, tail=tail) if row.get("event") in (ITERATION, *BACK)]
            if numbers := [int(row["details"][ITERATION]) for row in whole if _is_event_of_iteration(row)]:
                return numbers[-1]
        return math.inf

    def _counts(self) -> Callable[[dict[str, Any]], bool]:
        """Whether a row of metrics, settings or draws counts: not what was made again, since the run went back to a
        checkpoint that was saved before; evaluations are not made again."""
        saved: dict[str, float] = {}
        undone = []
        for row in self._rows(EVENTS):
            said, time_s = row.get("details"), _number(row.get(TIME))
            if row.get("event") == "saved" and isinstance(said, dict):
                saved[str(said.get("folder"))] = time_s
            elif row.get("event") in BACK and isinstance(said, dict) and _is_event_of_iteration(row):
                undone.append((saved.get(str(said.get("folder")), -math.inf), time_s, int(said[ITERATION])))

        def counts(row: dict[str, Any]) -> bool:
            time_s, number = _number(row[TIME]), row[ITERATION]
            again = any(begin < time_s < end and number >= kept for begin, end, kept in undone)
            return not again or str(row.get("stage")).startswith("evaluate")

        return counts

    def series(self) -> pd.DataFrame:
        """One row an iteration: its metrics as "stage/metric"; "samples" and "tokens" that were generated up to its
        end, and "seconds" of training, without evaluations and the time between iterations. Of iterations that were
        made again after a recovery the last one counts; an iteration that has not begun has no row."""
        table: dict[int, dict[str, float]] = {}
        made: dict[int, list[float]] = {}
        newest, counts = self._iteration(), self._counts()
        for row in filter(counts, _training(self._rows(METRICS))):
            number = int(row[ITERATION])
            if number > newest:
                continue
            values = {f"{row['stage']}/{name}": _number(value) for name, value in row["values"].items()}
            table.setdefault(number, {}).update(values)
            one = made.setdefault(number, [0.0, 0.0, 0.0])
            if row["stage"] == "generate_sequences":
                of = "generate_sequences/{}".format
                rows, mean = _number(row.get(ROWS, 0)), values.get(of("response_tokens/mean"), math.nan)
                # of responses in parts, what was drawn in this one
                one[0] += rows * values.get(of("ended/fraction"), 1.0)
                one[1] += rows * values.get(of("drawn_tokens/mean"), mean)
            if not str(row["stage"]).startswith("evaluate"):
                one[2] = _number(row[TIME])
        begun = {int(row["details"][ITERATION]): _number(row[TIME]) for row in self._rows(EVENTS)
                 if row.get("event") == ITERATION and _is_event_of_iteration(row)}  # fmt: skip
        frame = pd.DataFrame.from_dict(table, orient="index").rename_axis(ITERATION).sort_index()
        numbers = list(frame.index)
        frame["samples"] = pd.Series([made[n][0] for n in numbers], numbers, dtype=float).cumsum()
        frame["tokens"] = pd.Series([made[n][1] for n in numbers], numbers, dtype=float).cumsum()
        took = [max(0.0, made[n][2] - begun[n]) if n in begun else math.nan for n in numbers]
        frame["seconds"] = pd.Series(took, numbers, dtype=float).cumsum()
        return frame

    def _rows(self, name: Path, *, tail: int | None = None) -> list[dict[str, Any]]:
        """The rows of a file; lines that hold no row are left out."""
        try:
            with files.opened(self.folder / name, limit=LIMIT_BYTES) as file:
                size = os.fstat(file.fileno()).st_size
                skipped = max(0, size - tail) if tail is not None else 0
                file.seek(skipped)
                text = file.read()
        except FileNotFoundError:
            return []
        return json_rows(text.partition(b"\n")[2] if skipped else text)


def run_folders(runs: str | Path) -> list[RunFolder]:
    """The runs under a folder, oldest first; links are not followed."""
    base = path_of(runs, "folder")
    if not base.is_dir():
        raise NotFound(f"a folder {str(base)!r} of runs", "wb.open makes a run folder under runs=", "name that folder")
    found = []
    for name in sorted(_folders(base)):
        found += [RunFolder(date) for date in _folders(name) if _is_run(date)]
    return sorted(found, key=lambda run: run.folder.name)


def run_folder(run: Any, runs: str | Path = "runs") -> RunFolder:
    """A run that a user names: a workbench, a run folder, or "NAME/DATE" under the folder of runs."""
    if hasattr(run, "run_folder"):
        return RunFolder(Path(run.run_folder))
    path = path_of(run, "run")
    for folder in (path, path_of(runs, "folder") / path):
        if folder.is_dir() and not folder.is_symlink() and _is_run(folder.absolute()):
            return RunFolder(folder.absolute())
    rule = "a run is a workbench, a run folder, or 'NAME/DATE' of wb.runs()"
    raise NotFound(f"a run {str(run)!r}", rule, "see wb.runs().index, or give folder=")


def _folders(folder: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (EVENTS, METRICS))


def _training(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of metrics that belong to training or are an evaluation's result. Comparisons, and the stages inside an
    evaluation, are left out."""
    for row in rows:
        whole = isinstance(row.get("values"), dict) and isinstance(row.get("stage"), str)
        counts = whole and not row.get("aside") and row["stage"] != "evaluate/stages"
        if counts and _is_whole(row.get(ITERATION)) and TIME in row:
            yield row


def _changed(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of settings, each with those of its values that are not as earlier rows of its algorithm had them."""
    known: dict[str, dict[str, Any]] = {}
    for row in rows:
        if isinstance(values := row.get("values"), dict):
            before = known.setdefault(str(row.get("algorithm")), {})
            yield row, {name: value for name, value in values.items() if name not in before or before[name] != value}
            before |= values


def _is_event_of_iteration(row: dict[str, Any]) -> bool:
    """It says which iteration, and when."""
    details = row.get("details")
    whole = isinstance(details, dict) and _is_whole(details.get(ITERATION))
    return whole and math.isfinite(_number(row.get(TIME)))


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _number(value: Any) -> float:
    """A value as a float; NaN if it cannot be one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def readable(run: RunFolder) -> bool:
    """Whether all of a run can be read; else a warning says what cannot."""
    try:
        _ = run.record, run.algorithms, run.last_metrics()
    except BadInput as error:
        files.tell_once(f"run {run.name}: {error.value}; {error.rule}")
        return False
    return True
