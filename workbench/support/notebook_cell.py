"""Finds the notebook cell that is running, so that a stage, a span and a picture can name the cell that called them."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType, TracebackType
from typing import Any

from workbench.errors import BadInput
from workbench.errors.frames import ipython_shell


@dataclass(frozen=True)
class Cell:
    """number: n of `In [n]`. id: the cell's id in the notebook's file; "" where the front end does not send it."""

    number: int
    id: str


def running_cell() -> Cell | None:
    """Return the cell that this call comes from; None outside a notebook, and in other threads than the main one."""
    shell = ipython_shell()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    parent = kernel.get_parent("shell") or {}
    # `execution_count` is this cell's in some versions of IPython, and the next one's in others
    number = len(shell.history_manager.input_hist_parsed) - 1
    return Cell(number, str(parent.get("metadata", {}).get("cellId", "")))


def running_position() -> tuple[int, int] | None:
    """Return the position in the running cell that this call comes from: line, from 1, and column, in the text that
    Python was given. None where `running_cell` is None."""
    if running_cell() is None:
        return None
    frames = [(frame, frame.f_lasti) for frame, _ in walk_stack(inspect.currentframe())]
    return _position(reversed(frames))


def failed_position(error: BaseException | None) -> tuple[int, int] | None:
    """Return the position in a cell, as in `running_position`, of the statement that raised an error."""
    frames, traceback = [], error.__traceback__ if error is not None else None
    while isinstance(traceback, TracebackType):
        frames.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return _position(frames)


_failed: dict[int, tuple[int, int] | None] = {}
_inner: list[tuple[bool, tuple[int, int] | None]] = [(True, None)]  # how the last run inside a cell ended


def note_failures() -> None:
    """Note from now on which of the notebook's cells fail, and where; do nothing outside a notebook. Called when the
    package is imported, because a workbench may be opened after cells that failed."""
    if in_notebook():
        ipython_shell().events.register("post_run_cell", _note_failure)  # IPython registers it only once


def _note_failure(result: Any) -> None:
    ended = end_of_cell(result)
    if ended is not None and not ended[0] and result.execution_count:
        _failed[int(result.execution_count)] = ended[1]


def end_of_cell(result: Any) -> tuple[bool, tuple[int, int] | None] | None:
    """Return whether a cell ended without an error, and where it failed, as in `failed_position`. None for what is no
    cell, such as the run of its code inside `%%capture`, which shows an error but does not raise it."""
    info, ended = result.info, (bool(result.success), failed_position(result.error_in_exec))
    if not info.store_history or not str(info.raw_cell).strip():
        _inner[0] = ended
        return None
    return _inner[0] if ended[0] and str(info.raw_cell).lstrip().startswith("%%capture") else ended


def failed_cells() -> dict[int, tuple[int, int] | None]:
    """Return the cells of this kernel that failed, by n of `In [n]`, with their positions, as in `failed_position`;
    None: position unknown, as for cells before `note_failures`."""
    before = getattr(getattr(ipython_shell(), "history_manager", None), "exceptions", {})  # since IPython 9
    return dict.fromkeys(before) | _failed


def _position(frames: Iterable[tuple[FrameType, int]]) -> tuple[int, int] | None:
    """Of frames and their instructions, outermost first: the position in the cell's code, or in what `%%time` runs."""
    variables = getattr(ipython_shell(), "user_ns", None)
    of_cell = [(frame, at) for frame, at in frames if frame.f_globals is variables][:2]
    timed = [(frame, at) for frame, at in of_cell[1:] if frame.f_code.co_filename.startswith("<timed ")]
    for frame, at in timed or of_cell:
        line, _, column, _ = next(islice(frame.f_code.co_positions(), at // 2, None))
        return (line, column or 0) if line is not None else None
    return None


def variable_of(value: Any) -> str:
    """Return the first of the notebook's variables that refers to this object; "": none."""
    variables = list(getattr(ipython_shell(), "user_ns", {}).items())
    return next((name for name, held in variables if held is value and not name.startswith("_")), "")


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    return getattr(ipython_shell(), "kernel", None) is not None


def notebook_path() -> Path:
    """Return the file of this kernel's notebook, as JupyterLab and VS Code tell it. Raises `BadInput` without it."""
    variables = getattr(ipython_shell(), "user_ns", {})
    told = variables.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    if not told or not Path(told).is_file():
        rule = "this kernel's front end does not tell the path of its notebook"
        raise BadInput(f"notebook={told!r}", rule, "save it, and give its path: notebook='path/to/file.ipynb'")
    return Path(told)


def code_of_cell(number: int) -> str:
    """Return the text of the cell that was run as `In [number]`; "" where there is none."""
    texts = getattr(ipython_shell(), "user_ns", {}).get("In", [])
    return str(texts[number]) if 0 < number < len(texts) else ""
