"""Runs a notebook headless, saying which cell it is at, and writes it with its outputs: what `make demo` does.

python scripts/run_notebook.py NOTEBOOK FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def main(source: Path, folder: Path) -> None:
    notebook = nbformat.read(source, as_version=4)
    cells, begun = sum(cell.cell_type == "code" for cell in notebook.cells), time.monotonic()
    started = 0

    def say(cell: Any, cell_index: int) -> None:
        nonlocal started
        started += 1
        first = next(iter(cell.source.splitlines()), "")
        print(f"{time.monotonic() - begun:5.0f} s  cell {started} of {cells}: {first[:80]}", flush=True)

    client = NotebookClient(
        notebook, timeout=None, resources={"metadata": {"path": str(source.parent)}}, on_cell_execute=say
    )
    try:
        client.execute()
    finally:  # with the outputs up to the cell that failed
        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, folder / source.name)
    print(f"{time.monotonic() - begun:5.0f} s  executed notebook: {folder / source.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
