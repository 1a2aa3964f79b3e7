"""Read a run folder: opening settings, algorithm settings, metrics. Nothing in it is executed."""

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
TAIL_BYTES = 256 * 2**10  # of the metrics and events, from their end: the last iteration lies in it
X = ("samples", "tokens", "seconds")  # columns of `RunFolder.series` that count up
Change = tuple[str, str, Any]  # of settings: the part of the row, see `note_settings`, a name in that, the value
ROWS, TIME, ITERATION = "rows", "time_s", "iteration"
BACK = ("recovered", "restored")  # events after which a run is at an earlier iteration


@dataclass(frozen=True)
class RunFolder:
    """One run. name: "NAME/DATE", of its workbench and its opening."""

    folder: Path

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @cached_property
    def record(self) -> RunRecord:
        """The settings at opening; empty if none are recorded."""
        return read_run_record(self.folder) or RunRecord(name=self.folder.parent.name, opened_s=0.0)

    def code(self, part: str) -> dict[str, Any]:
        """A part of the recorded code, such as "versions", or by role "functions": name, digest and source."""
        return dict(self.record.code.get(part, {}))

    @cached_property
    def algorithms(self) -> dict[str, dict[str, Any]]:
        """The settings with which each algorithm began, by class name."""
        found: dict[str, dict[str, Any]] = {}
        for row in self._rows(SETTINGS):
            found.setdefault(row["algorithm"], row["values"])
        return found

    def changed_settings(self, algorithm: str) -> dict[tuple[int, bool], list[tuple[dict[str, Any], list[Change]]]]:
        """By iteration, and whether it was under way: an algorithm's settings from then on, and the changes."""
        found: dict[tuple[int, bool], list[tuple[dict[str, Any], list[Change]]]] = {}
        for row, changes in self._changed(filter(self._counts(), self._rows(SETTINGS))):
            if row["algorithm"] == algorithm:
                found.setdefault((row[ITERATION], row.get("under_way", False)), []).append((row, changes))
        return found

    def _changed(self, rows: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Change]]]:
        """Rows of settings, each with its changes since the algorithm's previous row (or its beginning), and with
        everything in "once" at each iteration."""
        newest = {algorithm: {"values": values} for algorithm, values in self.algorithms.items()}
        for row in rows:
            before = newest.get(row["algorithm"], {"values": row["values"]})
            newest[row["algorithm"]] = row
            yield row, [
                (part, name, value)
                for part, values in row.items() if isinstance(values, dict)
                for name, value in values.items()
                if (part == "once" and not row["under_way"])
                or name not in (known := before.get(part, {})) or repr(known[name]) != repr(value)
            ]  # fmt: skip

    def draws(self) -> dict[int, tuple[Any, Any]]:
        """For each iteration that drew from the buffer: its prompts, and the versions of the weights that answered
        them."""
        counts = self._counts()
        return {
            row["details"][ITERATION]: (row["details"].get("prompts"), row["details"].get("weights_versions"))
            for row in self._rows(EVENTS)
            if row["event"] == "drawn from the buffer" and counts({TIME: row[TIME], **row["details"]})
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The settings at opening, and those of algorithms as "PPO/clip"."""
        algorithms = {f"{algorithm}/{name}": value for algorithm, values in self.algorithms.items()
                      for name, value in values.items()}  # fmt: skip
        return {**self.record.settings, **algorithms}

    def changes(self) -> list[dict[str, Any]]:
        """The changes made during the run, in order: settings of algorithms and roles, edited code, placements."""
        found, fields = [], set[str]()
        for row, changes in self._changed(self._rows(SETTINGS)):
            algorithm = row["algorithm"]
            fields |= {f"{algorithm}.{name.partition('/')[0]}" for name in row["values"]}
            changed = [f"{algorithm}/{name}={value}" for part, name, value in changes if part == "values"]
            # an assignment to what `finish` adapts
            own = {name for name in fields if name.startswith(f"{algorithm}.")}
            changed += [name for part, name, _ in changes if part == "others" and name.partition("=")[0] in own]
            if changed:
                found.append({TIME: row[TIME], ITERATION: row[ITERATION], "change": ", ".join(changed)})
        for row in self._rows(EVENTS):
            said, kind = row["details"], row["event"]
            noted = kind == "setting" and ".".join(said["setting"].split(".")[:2]) in fields
            if kind in ("reload", "move", "setting") and not noted:
                words = {"reload": f"edited {said.get('modules') or said.get('changed')}",
                         "move": f"placement {said.get('placement')}",
                         "setting": f"{said.get('setting')}={said.get('after')}"}[kind]  # fmt: skip
                found.append({TIME: row[TIME], ITERATION: said.get(ITERATION), "change": words})
        return sorted(found, key=lambda row: row[TIME])

    def last_metrics(self) -> tuple[int, dict[str, float]]:
        """The last iteration that has begun and has metrics, and its metrics with those of the newest evaluation, as
        "stage/metric". Rollouts that were generated ahead for later iterations do not count."""
        found: dict[str, float] = {}
        last, newest = 0, self._iteration()
        for row in _training(self._rows(METRICS, tail=TAIL_BYTES)):
            if row[ITERATION] <= newest:
                last = max(last, row[ITERATION])
                found |= _values(row)
        return last, found

    def _iteration(self) -> float:
        """The iteration that began last, or to which the run was restored; infinite if no event records it."""
        for tail in (TAIL_BYTES, None):
            rows = self._rows(EVENTS, tail=tail)
            if numbers := [row["details"][ITERATION] for row in rows if row["event"] in (ITERATION, *BACK)]:
                return float(numbers[-1])
        return math.inf

    def _counts(self) -> Callable[[dict[str, Any]], bool]:
        """Whether a row of metrics, settings or draws counts. Rows that were repeated after the run was restored from
        an earlier checkpoint do not; evaluations are never repeated."""
        saved: dict[str, float] = {}
        undone = []
        for row in self._rows(EVENTS):
            said = row["details"]
            if row["event"] == "saved":
                saved[said["folder"]] = row[TIME]
            elif row["event"] in BACK:
                undone.append((saved.get(said["folder"], -math.inf), row[TIME], said[ITERATION]))

        def counts(row: dict[str, Any]) -> bool:
            again = any(begin < row[TIME] < end and row[ITERATION] >= kept for begin, end, kept in undone)
            return not again or row.get("stage", "").startswith("evaluate")

        return counts

    def series(self) -> pd.DataFrame:
        """One row an iteration: its metrics as "stage/metric"; "samples" and "tokens" generated up to its end, and
        "seconds" of training, without evaluations and the time between iterations. Of iterations that were repeated
        after a recovery the last one counts; an iteration that has not begun has no row."""
        table: dict[int, dict[str, float]] = {}
        made: dict[int, list[float]] = {}
        newest, counts = self._iteration(), self._counts()
        for row in filter(counts, _training(self._rows(METRICS))):
            number, values = row[ITERATION], _values(row)
            if number > newest:
                continue
            table.setdefault(number, {}).update(values)
            one = made.setdefault(number, [0.0, 0.0, 0.0])
            if row["stage"] == "generate_sequences":
                of = "generate_sequences/{}".format
                rows, mean = row.get(ROWS, 0), values.get(of("response_tokens/mean"), math.nan)
                # for responses generated in parts, the tokens of this part
                one[0] += rows * values.get(of("ended/fraction"), 1.0)
                one[1] += rows * values.get(of("drawn_tokens/mean"), mean)
            if not row["stage"].startswith("evaluate"):
                one[2] = row[TIME]
        begun = {row["details"][ITERATION]: row[TIME] for row in self._rows(EVENTS) if row["event"] == ITERATION}
        frame = pd.DataFrame.from_dict(table, orient="index").rename_axis(ITERATION).sort_index()
        numbers = list(frame.index)
        frame["samples"] = pd.Series([made[n][0] for n in numbers], numbers, dtype=float).cumsum()
        frame["tokens"] = pd.Series([made[n][1] for n in numbers], numbers, dtype=float).cumsum()
        took = [max(0.0, made[n][2] - begun[n]) if n in begun else math.nan for n in numbers]
        frame["seconds"] = pd.Series(took, numbers, dtype=float).cumsum()
        return frame

    def _rows(self, name: Path, *, tail: int | None = None) -> list[dict[str, Any]]:
        """The rows of a file; damaged lines are left out."""
        try:
            with files.opened(self.folder / name) as file:
                size = os.fstat(file.fileno()).st_size
                skipped = max(0, size - tail) if tail is not None else 0
                file.seek(skipped)
                text = file.read()
        except FileNotFoundError:
            return []
        return json_rows(text.partition(b"\n")[2] if skipped else text)


def run_folders(runs: str | Path) -> list[RunFolder]:
    """The runs under a folder, oldest first; symbolic links are not followed."""
    base = path_of(runs, "folder")
    if not base.is_dir():
        raise NotFound(f"no folder {str(base)!r}", "wb.open makes run folders under runs=", "give that folder")
    found = [RunFolder(date) for name in sorted(_folders(base)) for date in _folders(name) if _is_run(date)]
    return sorted(found, key=lambda run: run.folder.name)


def run_folder(run: Any, runs: str | Path = "runs") -> RunFolder:
    """Find the run that a user names: a workbench, a run folder, or "NAME/DATE" under the folder of runs."""
    if hasattr(run, "run_folder"):
        return RunFolder(Path(run.run_folder))
    path = path_of(run, "run")
    for folder in (path, path_of(runs, "folder") / path):
        if folder.is_dir() and not folder.is_symlink() and _is_run(folder.absolute()):
            return RunFolder(folder.absolute())
    rule = "a run is a workbench, a run folder, or 'NAME/DATE' of wb.runs()"
    raise NotFound(f"no run {str(run)!r}", rule, "see wb.runs().index, or give folder=")


def _folders(folder: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (EVENTS, METRICS))


def _training(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of metrics that belong to training, or are the result of an evaluation. Comparisons, and the stages
    inside an evaluation, are left out."""
    return (row for row in rows if not row["aside"] and row["stage"] != "evaluate/stages")


def _values(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a row as "stage/metric"; the file stores NaN and infinities as texts."""
    return {f"{row['stage']}/{name}": float(value) for name, value in row["values"].items()}


def readable(run: RunFolder) -> bool:
    """Whether a run can be read completely; else warn about the unreadable part."""
    try:
        _ = run.record, run.algorithms, run.last_metrics()
    except BadInput as error:
        files.tell_once(f"run {run.name}: {error.value}; {error.rule}")
        return False
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # no rows of this version's
        files.tell_once(f"run {run.name} is damaged, or from another version: {error!r}")
        return False
    return True
