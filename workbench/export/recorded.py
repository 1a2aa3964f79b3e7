"""Find out which cells were run, and when, from a workbench's record or from the cells' execution counts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.export.cells import Cell, Notebook, python_of
from workbench.export.interrupted import NO_STAGES, Made, MadeCall, done_of, expression, position_of, written
from workbench.export.statements import Statement, statements_of
from workbench.session.run_record import RunCell
from workbench.telemetry.store import TelemetryStore

ALGORITHM, EVENT = "algorithm", "setting"  # events of calls of algorithms, and of settings that changed


@dataclass(frozen=True)
class Record:
    """runs: cells in execution order. placements: name of a workbench -> its last placement. settings: a sentence for
    each setting that a panel changed. made: calls of each cell, by its place in `runs`. elsewhere: calls made by a
    panel, with the place of the last cell that had ended, and whether the workbench was reopened since. lost: a
    sentence for each cell that never ended."""

    runs: tuple[RunCell, ...]
    placements: dict[str, str]
    settings: tuple[str, ...] = ()
    made: Mapping[int, Made] = field(default_factory=dict)
    elsewhere: tuple[tuple[int, MadeCall, bool], ...] = ()
    lost: tuple[str, ...] = ()

    def run_of(self, cell: Cell) -> list[RunCell]:
        """All runs of a page cell, found by its id, else by its text."""
        by_id = [run for run in self.runs if run.id and run.id == cell.id]
        return by_id or [run for run in self.runs if not run.id and run.digest == cell.digest]


def read_record(folders: Iterable[Path]) -> Record:
    """Read the record from run folders of one notebook's workbenches, earliest first. placements: where they moved."""
    runs: list[RunCell] = []
    places: dict[tuple[str, int, str], int] = {}  # of a run in `runs`, by kernel, number and digest
    placements: dict[str, str] = {}
    settings: list[str] = []
    made: dict[int, Made] = {}
    elsewhere: list[tuple[int, MadeCall, str, int]] = []
    opened: dict[str, int] = {}
    lost: list[str] = []
    latest: dict[str, MadeCall] = {}  # of each algorithm
    for folder in folders:
        name, last, open_cells = "", -1, dict[int, Made]()
        for kind, details in _events(folder):
            if kind == "cell":
                try:
                    run = RunCell(**{**details, "failed": position_of(details.get("failed"))})
                    last = places.setdefault((run.kernel, run.number, run.digest), len(runs))
                except TypeError:  # a damaged line
                    continue
                if last == len(runs):
                    runs.append(run)
                elif not runs[last].id:
                    runs[last] = run
                made.setdefault(last, Made()).add(open_cells.pop(run.number, Made()))
            elif kind == EVENT and details.get("by"):
                settings.append(
                    f"{details.get('setting')!s:.80} was set to {shown(details.get('after'))} "
                    f"by {details['by']!s:.20}, "
                    f"after iteration {details.get('iteration')!s:.9} began: neither a cell nor the script does that; "
                    "write it into a cell"
                )
            elif kind == "run" and isinstance(details.get("cell"), int) and details["cell"]:
                at = position_of(details.get("at"))
                open_cells.setdefault(details["cell"], Made()).stages.append((at, str(details.get("stage", ""))))
            elif kind in ("opened", "attached"):
                name = str(details.get("name", ""))
                lost += [
                    f"In [{number}] was running when its kernel ended, and is not recorded as a cell that was run. It "
                    f"called {one}: a script in the order of the run does not do that"
                    for number, one in open_cells.items()
                ]
                open_cells.clear()
                if kind == "opened":
                    opened[name] = opened.get(name, 0) + 1
                    placements.pop(name, None)
            elif kind == "move" and name:
                placements.pop(name, None)
                if (target := expression(str(details.get("placement")))) is not None:
                    placements[name] = target
            if kind == ALGORITHM or (kind == "move" and "cell" in details):
                call = MadeCall.of(kind, details)
                if call.resumed and (before := latest.get(call.algorithm)) and before.under_way:
                    before.finished_later = True
                latest[call.algorithm] = call
                if not (call.iterations or call.stages or call.call in NO_STAGES):
                    continue
                if isinstance(details.get("cell"), int) and details["cell"]:
                    open_cells.setdefault(details["cell"], Made()).calls.append(call)
                else:
                    elsewhere.append((last, call, name, opened.get(name, 0)))
    called = ((place, call, opened.get(name, 0) > times) for place, call, name, times in elsewhere)
    return Record(tuple(runs), placements, tuple(settings), made, tuple(called), tuple(lost))


def _events(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    frame = TelemetryStore(folder).events()
    return list(zip(frame["event"], frame["details"], strict=True))


def find_record(notebook: Notebook, path: Path) -> list[Path]:
    """Run folders of this page's last run, searched under the default folders; earliest first."""
    ids = {cell.id for cell in notebook.code if cell.id}
    places = {base.resolve() for base in (Path("runs"), path.parent / "runs", path.parent.parent / "runs")}
    folders = sorted((f for place in places for f in place.glob("*/*/events.jsonl")), key=lambda f: f.parent.name)
    found: list[tuple[str, Path]] = []
    for file in folders:
        try:
            cells = [details for kind, details in _events(file.parent) if kind == "cell"]
        except BadInput:  # no record of ours
            continue
        ours = [cell for cell in cells if cell["id"] in ids]
        if ours and 2 * len(ours) >= len([cell for cell in cells if cell["id"]]):
            found.append((str(ours[-1]["kernel"]), file.parent))
    return [folder for kernel, folder in found if kernel == found[-1][0]]


def doubts(notebook: Notebook, record: Record) -> list[str]:
    """Sentences on how the execution differs from the page, each with its cells."""
    code = [cell for cell in notebook.code if cell.exported]
    last = {id(cell): _last(cell, record) for cell in code}
    told = []
    never = [cell for cell in code if last[id(cell)] is None]
    if len(never) < len(code):
        told += [f"{cell} is on the page, but was not run" for cell in never]
    if record.runs:
        told += _against_record(notebook, code, record)
    ran = [(cell, number) for cell in code if (number := last[id(cell)]) is not None]
    told += [f"{two} was run before {one}, which is above it" for (one, a), (two, b) in pairwise(ran) if b < a]
    return told + _stale(ran)


def _last(cell: Cell, record: Record) -> int | None:
    """The position of a cell's last run among all runs; None if it was not run."""
    if record.runs:
        runs = record.run_of(cell)
        return record.runs.index(runs[-1]) if runs else None
    return cell.count


def _against_record(notebook: Notebook, code: Sequence[Cell], record: Record) -> list[str]:
    told = []
    for cell in code:
        runs = record.run_of(cell)
        if runs and runs[-1].digest != cell.digest:
            told.append(f"{cell} was edited after it was run")
        if runs and not runs[-1].done:
            told.append(f"{cell} ended with an error")
        done = sum(run.done for run in runs)
        if done > 1:
            told.append(f"{cell} was run {done} times")
    ids, digests = {cell.id for cell in notebook.cells}, {cell.digest for cell in notebook.cells}
    for run in record.runs:
        if run.id not in ids and run.digest not in digests and run.done:
            first = next(iter((run.text() or "").strip().splitlines()), "")
            told.append(f"In [{run.number}] was run, but is no longer on the page" + f": {first:.60}" * bool(first))
    return told


def _stale(ran: Sequence[tuple[Cell, int]]) -> list[str]:
    """Cells that read a value which an earlier cell of the page has recomputed since."""
    told = []
    names = {id(cell): _names(cell) for cell, _ in ran}
    for place, (cell, number) in enumerate(ran):
        for maker, made in ran[:place]:
            common = sorted(names[id(maker)][0] & names[id(cell)][1])
            if made > number and common:
                told.append(f"{cell} is stale: {maker} has assigned {common[0]!r} again after it")
    return told


def _names(cell: Cell) -> tuple[set[str], set[str]]:
    """The names that a cell binds, and those it reads; both empty if the cell is not Python."""
    try:
        statements: list[Statement] = statements_of(cell)
    except BadInput:
        return set(), set()
    return {n for s in statements for n in s.names.binds}, {n for s in statements for n in s.names.uses}


def as_written(notebook: Notebook, record: Record, missing: list[str], told: list[str]) -> list[Cell]:
    """The cells of the page, each followed by the panel's calls after it. A cell that failed and had called nothing,
    such as a wrong `wb.open`, ends where it failed. told: gets a sentence for each such cell."""
    written = {cell.number: _until_failure(cell, notebook, record, told) for cell in notebook.cells}
    ends: dict[int, Cell | None] = {}
    for place, run in enumerate(record.runs):
        on_page = next((cell for cell in notebook.code if run in record.run_of(cell)), None)
        ends[place] = written[on_page.number] if on_page is not None else ends.get(place - 1)
    now = replace(record, elsewhere=tuple(one for one in record.elsewhere if not one[2]))
    known = {place: cell for place, cell in ends.items() if cell is not None}
    return with_calls(list(written.values()), now, known, missing)


def _until_failure(cell: Cell, notebook: Notebook, record: Record, told: list[str]) -> Cell:
    """A page cell without the statements that a failure skipped. It stays whole if it was edited since, if it had
    called something, or if another cell needs a name that only the skipped part defines."""
    runs = record.run_of(cell) if cell.exported else []
    if not runs or runs[-1].done or runs[-1].digest != cell.digest:
        return cell
    made = [record.made.get(place, Made()) for place, run in enumerate(record.runs) if run in runs]
    if any(one.calls or one.stages for one in made):
        return cell
    done, _ = done_of(cell, runs[-1].failed, Made())
    rest = (python_of(cell)[0] if done else cell.text)[len(done) :]
    cut = replace(cell, text=done)
    others = [cut, *(other for other in notebook.code if other is not cell and other.exported)]
    if _names(cell)[0] & _needed(others) - {name for other in others for name in _names(other)[0]}:
        return cell
    first = rest.lstrip("; \n").splitlines()[0]
    told.append(f"{cell} failed at `{first:.60}`, which is not in the script, and neither is the rest of that cell")
    return cut


def _needed(cells: Sequence[Cell]) -> set[str]:
    """Names that cells read, also inside functions."""
    found = set[str]()
    for cell in cells:
        with suppress(BadInput):
            found |= {name for statement in statements_of(cell) for name in statement.names.needs}
    return found


def with_calls(cells: Sequence[Cell], record: Record, ends: Mapping[int, Cell], missing: list[str]) -> list[Cell]:
    """The cells, with panel calls placed after the cell that had ended before them (ends: by its place in the record),
    or later if they need names of a later cell. missing: gets a sentence for each call that cannot be written."""
    groups: dict[int, list[MadeCall]] = {}
    for place, call, _ in record.elsewhere:
        groups.setdefault(place, []).append(call)
    made_names, behind = dict[str, str](), dict[int, list[Cell]]()
    bound = list(accumulate((_names(cell)[0] if cell.exported else set[str]() for cell in cells), operator.or_))
    for place, calls in groups.items():
        after = next((ends[n] for n in range(place, -1, -1) if n in ends), None)
        at = next((n for n, cell in enumerate(cells) if cell is after), 0)
        lines, needs, left = written(calls, made_names)
        where = f"after {after}" if after is not None else "before all cells"
        missing += [f"the panel, {where}: {line}" for line in left]
        if not lines:
            continue
        ready = next((n for n in range(at, len(cells)) if needs <= bound[n]), None)
        if ready is None:
            lacks = ", ".join(sorted(needs.difference(*bound[-1:])))
            missing.append(f"the panel, {where}, called {'; '.join(lines)}, but no cell assigns {lacks}")
            continue
        by = "the panel" if any(call.by_panel for call in calls) else "a button or a thread"
        text = "\n".join([f"# by {by}, not by a cell", *lines])
        behind.setdefault(ready, []).append(Cell(0, text, by=f"the panel, {where}"))
    return [one for n, cell in enumerate(cells) for one in (cell, *behind.get(n, ()))]


def as_run(notebook: Notebook, record: Record, missing: list[str]) -> list[Cell]:
    """The cells in execution order, with the text that was executed: of a cell that failed or was interrupted, the part
    that had run; panel calls included. The page's text comes before the first run of the cell below it."""
    if not record.runs:
        raise BadInput("a notebook without a record", "cells are recorded only after a workbench is opened",
                       "give the run folder with --run, or export --as-written")  # fmt: skip
    above: dict[int, list[Cell]] = {}
    waiting: list[Cell] = []
    for cell in notebook.cells:
        if cell.code and not cell.blank:
            above[cell.number], waiting = waiting, []
        elif not cell.code:
            waiting.append(cell)
    order: list[Cell] = []
    ends: dict[int, Cell] = {}
    if waiting_title := above.get(notebook.code[0].number if notebook.code else 0):
        order.append(waiting_title.pop(0))
    for place, run in enumerate(record.runs):
        on_page = next((cell for cell in notebook.code if run in record.run_of(cell)), None)
        cell = replace(on_page or Cell(0, "", id=run.id), count=run.number)
        if run.done or run.failed is not None:
            cell = replace(cell, text=_text_of(run, on_page, notebook))
        if not run.done and (on_page is None or on_page.exported):
            done, left = done_of(cell, run.failed, record.made.get(place, Made()))
            missing += [f"{cell} ended with an error: {line}" for line in left]
            cell = replace(cell, text=done)
        if not cell.blank:
            order += above.pop(on_page.number, []) if on_page is not None else []
            order.append(cell)
            ends[place] = cell
    return with_calls(order, record, ends, missing)


def _text_of(run: RunCell, on_page: Cell | None, notebook: Notebook) -> str:
    """The text that was run, from the page or from IPython's history; else raises `BadInput`."""
    if on_page is not None and not on_page.exported:
        return on_page.text
    text = next((cell.text for cell in notebook.code if cell.digest == run.digest), None) or run.text()
    if text is not None:
        return text
    where = "a deleted cell" if on_page is None else f"cell {on_page.number}, edited later,"
    raise BadInput(
        f"{where} that was run as In [{run.number}]",
        "the text that was run is neither on the page nor in the history of IPython, which exists only on "
        "the machine, and for the user, that ran the notebook",
        "restore the cell's text as it was run and save the notebook; or export --as-written",
    )
