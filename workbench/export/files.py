"""Notebook file to script file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Literal

from workbench.display.interrupts import stoppable
from workbench.errors import BadInput
from workbench.export.cells import Notebook, read_notebook
from workbench.export.exporting import Script, script_of
from workbench.export.recorded import Record, as_run, as_written, doubts, find_record, read_record
from workbench.support.checked_calls import checked_call
from workbench.support.files import SHARED, path_of, write_bytes

Order = Literal["written", "run"]


@checked_call("export_notebook")
@stoppable("the export", ("the script is written as a whole, or not at all", "the same call again writes it"))
def export_notebook(
    notebook: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    order: Order = "written",
    parameters: Collection[str] = (),
    loops: bool = False,
    moves: Literal["opening", "steps"] = "opening",
    runs: Iterable[str | os.PathLike[str]] | None = None,
) -> Script:
    """The script of a notebook, written to `output` if that is given.

    order: "written", the page's, or "run", that in which cells were run, with the text that they had then. runs: the
    run folders of the notebook's workbenches, where what was run is recorded; None: those of its last run are looked
    for under `runs/` here, beside the notebook, and one folder up. The others: see `script_of`.

    `Script.told` names what the reader should know: cells that were edited after they were run, out of order, stale, or
    not on the page any more; moves and repeats. Raises `BadInput` that names the cell for what cannot be in a script.
    """
    path = path_of(notebook, "notebook")
    page = read_notebook(path)
    output = None if output is None else path_of(output, "output")
    if output is not None and not output.absolute().parent.is_dir():
        raise BadInput(str(output), f"there is no folder {output.parent}", "make it first, or name another one")
    folders = find_record(page, path) if runs is None else [path_of(run, "runs") for run in runs]
    for folder in folders:
        if not (folder / "events.jsonl").is_file():
            raise BadInput(
                str(folder), "a run folder has events.jsonl", "give runs/NAME/DATE, as `lab.run_folder` says"
            )
    record = read_record(folders) if folders else Record((), {})
    told: list[str] = []
    missing = [*record.settings, *(record.lost if order == "run" else ())]
    script = script_of(
        as_run(page, record, missing) if order == "run" else as_written(page, record, missing, told),
        parameters=parameters,
        loops=loops,
        moves=moves,
        placements=record.placements,
        missing=missing,
    )
    script = replace(script, told=(*_doubts(page, record, order), *told, *script.told))
    if output is not None:
        write_bytes(output, script.text.encode(), mode=SHARED)
    return script


def _doubts(page: Notebook, record: Record, order: Order) -> list[str]:
    """In the order of the run nothing is out of order, and what left the page is there."""
    told = doubts(page, record)
    return told if order == "written" else [line for line in told if "error" in line or "not run" in line]
