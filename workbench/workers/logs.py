"""Worker output goes to files: the notebook stays quiet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from workbench.support.files import open_to_append, private_folder


def send_output_to(path: str) -> None:
    """Point this process's stdout and stderr, those of its C++ libraries included, at a file (appended to)."""
    logs = Path(path).parent
    private_folder(logs.parent)  # the run folder
    private_folder(logs)
    file = open_to_append(Path(path))
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Ray wraps these two; plain ones write straight to the file
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


def tail(path: Path, lines: int) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
