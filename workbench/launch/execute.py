"""Run a notebook headless, in a process of its own: `python -m workbench.launch.execute NOTEBOOK FOLDER`; without
arguments: end the workbenches, and the Ray head, of this home."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def execute(notebook: Path, folder: Path) -> None:
    """From top to bottom, with `folder` as the working directory; the first error ends it."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    NotebookClient(content, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()


def end() -> None:
    """Stop every workbench that lives here, and the Ray head that they shared."""
    from workbench.backends.cluster import stop_head
    from workbench.errors import WorkbenchError
    from workbench.launch.listing import ls
    from workbench.launch.opening import stop

    for row in ls():
        with suppress(WorkbenchError):
            stop(row["name"])
    stop_head()


if __name__ == "__main__":
    execute(Path(sys.argv[1]), Path(sys.argv[2])) if sys.argv[1:] else end()
