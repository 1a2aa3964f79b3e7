"""Where workbench keeps what it may need again: prepared models, run records, addresses of live workbenches."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$WORKBENCH_HOME`, or `~/.cache/workbench`; made where it is missing."""
    folder = Path(os.environ.get("WORKBENCH_HOME") or "~/.cache/workbench").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
