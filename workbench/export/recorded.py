"""Which cells were run, and when, compared with the page: from the record of a workbench, or from the cells'
execution numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.export.cells import Cell, Notebook
from workbench.export.statements import Statement, statements_of
from workbench.session.cell_history import RunCell
from workbench.support.secrets import MASK, masked
from workbench.telemetry.store import TelemetryStore

ASIDE = "skip-export"


@dataclass(frozen=True)
class Record:
    """runs: cells in the order in which they were run. placements: name of a workbench -> where it ended."""

    runs: tuple[RunCell, ...]
    placements: dict[str, str]

    def run_of(self, cell: Cell) -> list[RunCell]:
        """The times that a cell of the page was run: by its id, else by its text."""
        by_id = [run for run in self.runs if run.id and run.id == cell.id]
        return by_id or [run for run in self.runs if not run.id and run.text.strip() == _as_recorded(cell)]


@lru_cache(maxsize=1024)
def _masked(text: str) -> str:
    return str(masked(text)).strip()


def _as_recorded(cell: Cell) -> str:
    """The text with which a record holds a cell of the page."""
    return _masked(cell.text)


def read_record(folders: Iterable[Path]) -> Record:
    """The record in run folders of one notebook's workbenches, earliest first. placements: of those that were moved."""
    runs: dict[tuple[str, int, str], RunCell] = {}
    placements: dict[str, str] = {}
    for folder in folders:
        name = ""
        for kind, details in _events(folder):
            if kind == "cell":
                try:
                    run = RunCell(**{"masked": MASK in details["text"], **details})
                    hash((run.kernel, run.number, run.text))
                except (KeyError, TypeError):  # a damaged line
                    continue
                before = runs.get((run.kernel, run.number, run.text))
                runs[run.kernel, run.number, run.text] = before if before is not None and before.id else run
            elif kind in ("opened", "attached"):
                name = str(details.get("name", ""))
                if kind == "opened":
                    placements.pop(name, None)
            elif kind == "move" and name:
                placements.pop(name, None)
                if (expression := _expression(str(details.get("placement")))) is not None:
                    placements[name] = expression
    return Record(tuple(runs.values()), placements)


def _events(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    frame = TelemetryStore(folder).events()
    return list(zip(frame["event"], frame["details"], strict=True))


def _expression(placement: str) -> str | None:
    """A recorded placement as a script writes it; None for another text: a record may come from a stranger."""
    try:
        tree = ast.parse(placement, mode="eval")
    except (SyntaxError, ValueError):
        return None
    allowed = ast.Expression | ast.Constant | ast.Dict | ast.List | ast.Tuple | ast.keyword | ast.Load
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) not in ("Placement.of", "Layout"):
                return None
        elif isinstance(node, ast.Name | ast.Attribute):
            if ast.unparse(node) not in ("Placement.of", "Placement", "Layout"):
                return None
        elif not isinstance(node, allowed):
            return None
    return ast.unparse(tree).replace("Placement.of(", "wb.Placement.of(").replace("Layout(", "wb.Layout(")


def find_record(notebook: Notebook, path: Path) -> list[Path]:
    """Run folders of the last run of this page, under the folders where they are kept by default; earliest first."""
    ids = {cell.id for cell in notebook.code if cell.id}
    places = {base.resolve() for base in (Path("runs"), path.parent / "runs", path.parent.parent / "runs")}
    folders = sorted((f for place in places for f in place.glob("*/*/events.jsonl")), key=lambda f: f.parent.name)
    found: list[tuple[str, Path]] = []
    for file in folders:
        try:
            cells = [details for kind, details in _events(file.parent) if kind == "cell"]
        except BadInput:  # no record of ours: a link, a pipe
            continue
        ours = [cell for cell in cells if cell["id"] in ids]
        if ours and 2 * len(ours) >= len([cell for cell in cells if cell["id"]]):
            found.append((str(ours[-1]["kernel"]), file.parent))
    return [folder for kernel, folder in found if kernel == found[-1][0]]


def doubts(notebook: Notebook, record: Record | None) -> list[str]:
    """How what was run differs from the page; each names its cells."""
    code = [cell for cell in notebook.code if ASIDE not in cell.tags]
    last = {id(cell): _last(cell, record) for cell in code}
    told = []
    never = [cell for cell in code if last[id(cell)] is None]
    if len(never) < len(code):
        told += [f"{cell} is on the page, and was not run" for cell in never]
    if record is not None and record.runs:
        told += _against_record(notebook, code, record)
    ran = [(cell, number) for cell in code if (number := last[id(cell)]) is not None]
    for (one, first), (two, second) in pairwise(ran):
        if second < first:
            told.append(f"{two} was run before {one}, which stands above it")
    told += _stale(ran)
    return told


def _last(cell: Cell, record: Record | None) -> int | None:
    """The position of a cell's last run in the order of all runs; None where it was not run."""
    if record is not None and record.runs:
        runs = record.run_of(cell)
        return record.runs.index(runs[-1]) if runs else None
    return cell.count


def _against_record(notebook: Notebook, code: Sequence[Cell], record: Record) -> list[str]:
    told = []
    for cell in code:
        runs = record.run_of(cell)
        if runs and runs[-1].text.strip() != _as_recorded(cell):
            told.append(f"{cell} was edited after it was run")
        if runs and not runs[-1].done:
            told.append(f"{cell} ended with an error")
        done = sum(run.done for run in runs)
        if done > 1:
            told.append(f"{cell} was run {done} times")
    ids, texts = {cell.id for cell in notebook.cells}, {_as_recorded(cell) for cell in notebook.cells}
    gone = [run for run in record.runs if run.id not in ids and run.text.strip() not in texts and run.done]
    edited = {run.id for run in record.runs if run.id in ids}
    for run in gone:
        if run.id not in edited:
            first = run.text.strip().splitlines()[0]
            told.append(f"In [{run.number}] was run, and is no longer on the page: {first:.60}")
    return told


def _stale(ran: Sequence[tuple[Cell, int]]) -> list[str]:
    """Cells that read a value which a cell above them has made again since."""
    told = []
    names = {id(cell): _names(cell) for cell, _ in ran}
    for place, (cell, number) in enumerate(ran):
        for maker, made in ran[:place]:
            common = sorted(names[id(maker)][0] & names[id(cell)][1])
            if made > number and common:
                told.append(f"{cell} is stale: {maker} has made {common[0]!r} anew since")
    return told


def _names(cell: Cell) -> tuple[set[str], set[str]]:
    """What a cell binds, and what it reads; nothing of a cell that is not Python."""
    try:
        statements: list[Statement] = statements_of(cell)
    except BadInput:
        return set(), set()
    return {n for s in statements for n in s.names.binds}, {n for s in statements for n in s.names.uses}


def as_run(notebook: Notebook, record: Record) -> list[Cell]:
    """The cells in the order in which they were run, with the text that they had then; what failed is left out. The
    page's text comes before the first run of the cell below it."""
    if not record.runs:
        raise BadInput("a notebook without a record", "cells are recorded from the moment a workbench is opened",
                       "give the run folder with --run, or export --as-written")  # fmt: skip
    above: dict[int, list[Cell]] = {}
    waiting: list[Cell] = []
    for cell in notebook.cells:
        if cell.code and not cell.blank:
            above[cell.number], waiting = waiting, []
        elif not cell.code:
            waiting.append(cell)
    order: list[Cell] = []
    if waiting_title := above.get(notebook.code[0].number if notebook.code else 0):
        order.append(waiting_title.pop(0))
    for run in record.runs:
        if not run.done:
            continue
        on_page = next((cell for cell in notebook.code if run in record.run_of(cell)), None)
        if on_page is None:
            order.append(Cell(0, _text_of(run, None, notebook), id=run.id, count=run.number))
            continue
        order += above.pop(on_page.number, [])
        order.append(replace(on_page, text=_text_of(run, on_page, notebook), count=run.number))
    return order


def _text_of(run: RunCell, on_page: Cell | None, notebook: Notebook) -> str:
    """What was run. Where the record masks a part of it, the page has the whole text; else `BadInput`."""
    if not run.masked or (on_page is not None and ASIDE in on_page.tags):
        return run.text
    cells = [on_page] if on_page is not None and _as_recorded(on_page) == run.text.strip() else notebook.code
    texts = {cell.text.strip(): cell.text for cell in cells if _as_recorded(cell) == run.text.strip()}
    if len(texts) == 1:
        return texts.popitem()[1]
    lines = run.text.strip().splitlines()
    line = next((line for line in lines if MASK in line), lines[0])
    where = "a deleted cell" if on_page is None else f"cell {on_page.number}, edited since,"
    raise BadInput(
        f"{where} that was run as In [{run.number}]: {line.strip():.60}",
        f"a script has the text that was run; the record has {MASK} in place of a secret, and the page lacks the text",
        "put the cell back as it was run and save the notebook; or read the secret from os.environ and run the "
        "notebook again; or export --as-written",
    )
