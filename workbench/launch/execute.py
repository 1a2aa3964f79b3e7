"""Runs a notebook headless, in a process of its own: `python -m workbench.launch.execute NOTEBOOK FOLDER OPENING`.
Without arguments, ends the workbenches and the Ray head of this home."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def execute(notebook: Path, folder: Path, opening: dict[str, Any]) -> None:
    """Run the notebook from top to bottom, with `folder` as the working directory; the first error ends it. opening:
    arguments that replace those of each `wb.open`, like the command line of a script."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    client = NotebookClient(content, timeout=None, resources={"metadata": {"path": str(folder)}})
    override = f"from workbench.launch import arguments as o; o.running = o.Script(opening={opening!r}); del o"

    def begin(notebook: Any) -> None:
        assert client.kc is not None
        client.kc.execute(override, silent=True)

    client.on_notebook_start = begin
    client.execute()


def end() -> None:
    """Stop every workbench on this machine, and the Ray head that they shared."""
    from workbench.backends.cluster import stop_head
    from workbench.errors import WorkbenchError
    from workbench.launch.listing import ls
    from workbench.launch.opening import stop

    for row in ls():
        with suppress(WorkbenchError):
            stop(row["name"])
    stop_head()


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])) if sys.argv[1:] else end()
