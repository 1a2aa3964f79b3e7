"""Describes the failure of a stage: frames of the user's code and of ours, with equal failures of ranks merged."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from workbench.errors.plain_text import said

if TYPE_CHECKING:
    from workbench.errors import WorkbenchError


OURS = f"{Path(__file__).resolve().parents[1]}/"
# files whose frames lie between the host's call and the worker's method, or between that method and a user's function
DISPATCH = tuple(OURS + name for name in ("workers/host.py", "data/user_functions.py", "support/calls/", "backends/"))
LIBRARIES = tuple(
    f"{path}/" for path in {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
MOST_CAUSES = 4


@dataclass(frozen=True)
class Frame:
    """One frame: file, line number, function, and the line's text ("": it was not known where the error was raised)."""

    file: str
    line: int
    function: str
    text: str = ""

    def lines(self, cells: Mapping[str, str]) -> list[str]:
        """Return the frame as two lines of text. cells: the displayed name of each file that is a notebook cell."""
        file = cells.get(self.file) or f'File "{self.file}"'
        text = self.text or linecache.getline(self.file, self.line).strip()
        return [f"  {file}, line {self.line}, in {self.function}", *([f"    {text}"] if text else [])]


@dataclass(frozen=True)
class Omitted:
    """Library frames that are not shown: their number, the names of the libraries, and the last frame."""

    count: int
    libraries: tuple[str, ...]
    last: Frame

    def lines(self, cells: Mapping[str, str]) -> list[str]:
        """Return the omitted frames as one line of text."""
        name, libraries = self.last.file.rpartition("-packages/")[2], ", ".join(self.libraries)
        frames = "a frame" if self.count == 1 else f"{self.count} frames, the last"
        return [f"  ... {frames} in {libraries}: {name}, line {self.last.line}, in {self.last.function}"]


@dataclass(frozen=True)
class Raised:
    """One exception of a chain: its class name, its message, and its frames, the outermost first."""

    kind: str
    message: str
    frames: tuple[Frame | Omitted, ...]

    def lines(self, cells: Mapping[str, str]) -> list[str]:
        """Return the exception as Python prints it, without the "Traceback" heading."""
        line = f"{self.kind}: {self.message}" if self.message else self.kind
        return [line for frame in self.frames for line in frame.lines(cells)] + line.splitlines()


class RaisedElsewhere(Exception):
    """Stands for an exception of another process: its class name, its message, its frames."""

    def __init__(self, kind: str, message: str, chain: tuple[Raised, ...]) -> None:
        super().__init__(kind, message, chain)
        self.chain = chain

    def __str__(self) -> str:
        return "\n".join(line for raised in self.chain for line in raised.lines({}))


def chain_of(error: BaseException) -> tuple[Raised, ...]:
    """Return a just caught exception and its causes, the first cause first, at most `MOST_CAUSES` exceptions. Keeps the
    frames of the user's code and of ours, counts library frames, and drops frames of `DISPATCH`."""
    found: list[Raised] = []
    step: BaseException | None = error
    while step is not None and len(found) < MOST_CAUSES:
        if isinstance(step, RaisedElsewhere):
            return (*step.chain, *reversed(found))
        frames = tuple(_shown(traceback.extract_tb(step.__traceback__)))
        found.append(Raised(type(step).__name__, said(step), frames))
        step = step.__cause__ or (None if step.__suppress_context__ else step.__context__)
    return tuple(reversed(found))


def is_ours(file: str) -> bool:
    return file.startswith(OURS)


def is_users(file: str) -> bool:
    """Whether a file is neither of this package nor of an installed library."""
    return not is_ours(file) and not file.startswith((*LIBRARIES, "<frozen")) and "-packages/" not in file


def _shown(frames: Sequence[traceback.FrameSummary]) -> Iterator[Frame | Omitted]:
    kept = [frame for frame in frames if not frame.filename.startswith(DISPATCH)]
    for foreign, run in groupby(kept, key=lambda f: not is_ours(f.filename) and not is_users(f.filename)):
        these = [Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in run]
        if foreign:
            names = dict.fromkeys(frame.file.rpartition("-packages/")[2].partition("/")[0] for frame in these)
            yield Omitted(len(these), tuple("Python" if n.endswith(".py") or not n else n for n in names), these[-1])
        else:
            yield from these


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """One failure of one or more ranks. chain: see `chain_of`; empty for an error of ours whose message is enough.

    messages: (rank, message) of each rank whose message differs from that of the first rank.
    """

    ranks: tuple[int, ...]
    kind: str
    message: str
    chain: tuple[Raised, ...] = ()
    messages: tuple[tuple[int, str], ...] = ()

    @property
    def title(self) -> str:
        """The ranks as text, such as "ranks 0, 3"."""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"

    def lines(self, cells: Mapping[str, str], *, alone: bool) -> list[str]:
        """Return the lines to show. alone: all failed ranks failed alike, so the error's message already says how."""
        others = [f"on rank {rank}: {message}" for rank, message in self.messages]
        if alone and not self.chain:
            return others
        lines = [f"on {self.title}:"]
        for number, raised in enumerate(self.chain):
            if number:
                lines.append("which led to:")
            lines += raised.lines(cells)
        if not self.chain:
            lines.append(f"{self.kind}: {self.message}")
        return lines + others


@dataclass(frozen=True, kw_only=True)
class StageFailure:
    """The role, stage, pool and run in which a stage failed, and the failures of its ranks."""

    role: str
    stage: str
    pool: str
    run: int
    failures: tuple[RankFailure, ...] = field(default=())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for failure in self.failures for rank in failure.ranks))

    def lines(self, cells: Mapping[str, str] = {}) -> list[str]:
        """Return the lines of all failures; ranks that failed alike share one entry."""
        alone = len(self.failures) == 1
        return [line for failure in self.failures for line in failure.lines(cells, alone=alone)]


HINT = "lab.last_error().batch is the input of the stage; lab.debug() runs the stage in this kernel, where pdb works"


def block(error: WorkbenchError) -> str:
    """Return an error as text, without its class name; a stage's error with its ranks' frames before the remedy."""
    failure = error.failure
    if failure is None:
        return str(error)
    help = (error.rule, f"Remedy: {error.remedy}" if error.remedy else "")
    said = "\n".join(f"{part.rstrip('.')}." for part in help if part)
    parts = (f"{error.value.rstrip('.')}.", "\n".join(failure.lines(cell_names())), said)
    return "\n\n".join(part for part in (*parts, HINT) if part)


def rendered(error: WorkbenchError) -> list[str]:
    """Return the lines that IPython shows for an error: the kernel's frames of user code, formatted by IPython, then
    `block`. `%xmode Verbose` shows every frame; `%debug` enters them all."""
    shell = ipython_shell()
    if shell is None:
        return [f"{type(error).__name__}: {block(error)}"]
    shown, trace = shell.InteractiveTB, error.__traceback__
    if shown.mode == "Verbose":
        return list(shown.structured_traceback(type(error), error, trace, tb_offset=1))
    # a plain error of the same name, without causes: `block` contains them already
    plain = type(type(error).__name__, (Exception,), {"__module__": "builtins"})(block(error))
    try:
        return list(shown.structured_traceback(type(plain), plain, _user_frames(trace), tb_offset=0))
    finally:
        shown.tb = trace  # the traceback that `%debug` enters


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback with only the frames of user code: neither ours nor a library's."""
    if trace is None:
        return None
    rest = _user_frames(trace.tb_next)
    if not is_users(trace.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def cell_names() -> dict[str, str]:
    """Return the displayed name of each file that IPython made of a cell; empty outside IPython."""
    shell = ipython_shell()
    if shell is None:
        return {}
    names = {file: shell.compile.format_code_name(file) for file in getattr(shell.compile, "_filename_map", {})}
    return {file: " ".join(name) for file, name in names.items() if name}


def ipython_shell() -> Any:
    """Return IPython's shell; None outside IPython. Does not import IPython: a notebook has already imported it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
