"""An error in a cell as one block: the user's lines, the frames on the ranks, the remedy."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from workbench.errors.frames import is_users

if TYPE_CHECKING:
    from workbench.errors import WorkbenchError

HINT = "lab.last_error().batch is what the stage was given; lab.debug() runs it again in this kernel, where pdb works"


def block(error: WorkbenchError, cells: Mapping[str, str] | None = None) -> str:
    """An error as text, without its class: where a stage failed, the frames on its ranks between message and remedy.

    cells: what to call files that are cells of this notebook.
    """
    failure = error.failure
    if failure is None:
        return str(error)
    cells = cell_names() if cells is None else cells
    help = (error.rule, f"Remedy: {error.remedy}" if error.remedy else "")
    said = "\n".join(f"{part.rstrip('.')}." for part in help if part)
    parts = (f"{error.value.rstrip('.')}.", "\n".join(failure.lines(cells)), said)
    return "\n\n".join(part for part in (*parts, HINT) if part)


def rendered(error: WorkbenchError) -> list[str]:
    """What IPython shows of an error: of the frames in the kernel the user's alone, by IPython's own means, then the
    block. `%xmode Verbose` shows every frame; `%debug` enters them all."""
    shell = _shell()
    if shell is None:
        return [f"{type(error).__name__}: {block(error)}"]
    shown, trace = shell.InteractiveTB, error.__traceback__
    if shown.mode == "Verbose":
        return list(shown.structured_traceback(type(error), error, trace, tb_offset=1))
    # a plain error of the same name: what caused ours is in the block already
    plain = type(type(error).__name__, (Exception,), {"__module__": "builtins"})(block(error))
    try:
        return list(shown.structured_traceback(type(plain), plain, _of_user(trace), tb_offset=0))
    finally:
        shown.tb = trace  # where `%debug` begins


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are neither ours nor a library's."""
    if trace is None:
        return None
    rest = _of_user(trace.tb_next)
    if not is_users(trace.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def cell_names() -> dict[str, str]:
    """For the files that IPython makes of cells, which cell each is; empty outside of it."""
    shell = _shell()
    if shell is None:
        return {}
    names = {file: shell.compile.format_code_name(file) for file in getattr(shell.compile, "_filename_map", {})}
    return {file: " ".join(name) for file, name in names.items() if name}


def _shell() -> Any:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
