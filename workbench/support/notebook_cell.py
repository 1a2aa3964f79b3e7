"""Which cell of a notebook is being run: so that a stage, a span and a picture can say who asked for them."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import BadInput


@dataclass(frozen=True)
class Cell:
    """number: what the notebook shows beside it, `In [number]`. id: the one that the file keeps; "" where the front end
    does not tell."""

    number: int
    id: str


def _shell() -> Any:
    """IPython's shell; None outside of it. A notebook has imported IPython itself: no reason to import it here."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def running_cell() -> Cell | None:
    """The cell that this call comes from; None outside a notebook, and in a thread of its own."""
    shell = _shell()
    kernel = getattr(shell, "kernel", None)
    if shell is None or kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    parent = kernel.get_parent("shell") or {}
    # `execution_count` is this cell's in some versions of IPython, and the next one's in others
    number = len(shell.history_manager.input_hist_parsed) - 1
    return Cell(number, str(parent.get("metadata", {}).get("cellId", "")))


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    return getattr(_shell(), "kernel", None) is not None


def notebook_path() -> Path:
    """The file of the notebook that this kernel belongs to, as JupyterLab and VS Code tell it; else `BadInput`."""
    shell = _shell()
    told = (shell.user_ns.get("__vsc_ipynb_file__") if shell is not None else None) or os.environ.get(
        "JPY_SESSION_NAME"
    )
    if not told or not Path(told).is_file():
        rule = "this kernel's front end does not tell which file its notebook is"
        raise BadInput(f"notebook={told!r}", rule, "save it, and give its path: notebook='path/to/file.ipynb'")
    return Path(told)


def code_of_cell(number: int) -> str:
    """The text of the cell that was run as `In [number]`; empty where there is none."""
    shell = _shell()
    texts = [] if shell is None else shell.user_ns.get("In", [])
    return str(texts[number]) if 0 < number < len(texts) else ""
