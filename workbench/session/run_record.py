"""The arguments a workbench was opened with: `run.json` in its run folder, which `wb.runs` and `wb.diff` read.

    {"format": 1, "name", "id", "opened_s", "settings": {name: value}, "code": {...}, "data": {name: value}}

It has only plain values.

The module also records the cells that were run: a notebook's page can be edited, run out of order, and lose cells.
`wb export` uses this record, and finds the cells' texts on the page and in IPython's own history, by their digests.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.display.interrupts import uninterrupted
from workbench.errors.frames import ipython_shell
from workbench.placement import ROLLOUT
from workbench.support import files
from workbench.support.code_version import code_version, function_version
from workbench.support.fingerprint import is_of_notebook
from workbench.support.flat_settings import flat
from workbench.support.notebook_cell import end_of_cell, failed_cells, in_notebook
from workbench.support.sources import loaded
from workbench.telemetry.store import TelemetryStore

if TYPE_CHECKING:
    from workbench.config.description import Description
    from workbench.data.prompt_stream import PromptStream

RUN_FILE, FORMAT = Path("run.json"), 1
SOURCE_CHARACTERS = 20_000  # of a function
POSITION = ("position", "place", "counts", "epoch")  # of prompts: the position in the data, not the data


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The settings, code and data that a run was opened with.

    settings: by name, such as "seed" and "actor/training/learning_rate". code: `commit`, `versions` of libraries,
    `files` of the package with digests, `functions` by role, each with its name, digest and, unless a cell defines it,
    its source. data: the source of the prompts, and a digest of them.
    """

    name: str
    opened_s: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def write_run_record(run_folder: Path, description: Description, prompts: PromptStream) -> None:
    functions = {
        role: _function(model.function, description.record)
        for role, model in description.models.items() if model.function is not None
    }  # fmt: skip
    record = {
        "format": FORMAT, "name": description.name, "id": description.id, "opened_s": time.time(),
        "settings": settings_of(description), "code": {**code_version(), "functions": functions},
        "data": data_of(description, prompts),
    }  # fmt: skip
    files.write_json(run_folder / RUN_FILE, record)


def settings_of(description: Description) -> dict[str, Any]:
    """Return the settings that distinguish one opening from another, by name."""
    found: dict[str, Any] = {
        "seed": description.seed, "placement": str(description.placement), "backend": description.backend,
        "device": description.device, "devices": description.devices, "share_memory": description.share_memory,
    }  # fmt: skip
    for role, model in description.models.items():
        unused = [] if model.trained else [f"{role}/training/"]
        unused += [] if role in ("actor", ROLLOUT) else [f"{role}/generation/"]
        found |= {name: value for name, value in flat(model, role).items() if not name.startswith(tuple(unused))}
    return found


def data_of(description: Description, prompts: PromptStream) -> dict[str, Any]:
    """Return the source of the prompts, and a digest of them."""
    given, source = description.prompts, prompts.source
    if source is None:
        return {}
    options = dict(given) if isinstance(given, Mapping) else {"source": given}
    found = {f"prompts/{name}": value for name, value in flat(options).items()}
    found |= {f"prompts/{name}": value for name, value in flat(source.state_dict()).items() if name not in POSITION}
    return found if source.read_as is None else {**found, "prompts/read_as": str(source.read_as)}


def _function(function: Callable[..., Any], with_source: bool) -> dict[str, str]:
    found = function_version(function)
    if with_source and not (in_notebook() and is_of_notebook(inspect.unwrap(function))):
        with suppress(OSError, TypeError):  # a function that was made without a file
            found["source"] = inspect.getsource(inspect.unwrap(function))[:SOURCE_CHARACTERS]
    return found


def read_run_record(run_folder: Path) -> RunRecord | None:
    """Return the record of a run folder; None where there is none, as after a kernel that ended while it opened. Raises
    `BadInput` for a file that is not JSON, or that has another format."""
    try:
        found = files.read_json(run_folder / RUN_FILE, format=FORMAT)
    except FileNotFoundError:
        return None
    return RunRecord(**{one.name: found[one.name] for one in fields(RunRecord)})


@dataclass(frozen=True)
class RunCell:
    """One execution of a cell. kernel: its process and its session in IPython's history, "4321-17". number: n of `In
    [n]`. id: the cell's id on the page; "" where the front end does not send it. digest: of the text, see `digest_of`.
    done: whether it ended without an error. failed: line and column of the statement that raised, if known."""

    kernel: str
    number: int
    id: str
    digest: str
    done: bool
    failed: tuple[int, int] | None = None

    def text(self) -> str | None:
        """Return the text that was run, from IPython's own history; None where the history does not have it."""
        with suppress(Exception):  # no IPython, no history, or one that cannot be read
            for text in _in_history(int(self.kernel.rpartition("-")[2]), self.number):
                if digest_of(text) == self.digest:
                    return text
        return None


def digest_of(text: str) -> str:
    """Return the sha256 of a cell's text, without blank lines around it."""
    return hashlib.sha256(text.strip().encode(errors="surrogatepass")).hexdigest()


def _in_history(session: int, number: int) -> list[str]:
    """Return the text of `In [number]` in a session: from this kernel's history, or the default profile's file."""
    shell = ipython_shell()
    if shell is not None:
        return [text for _, _, text in shell.history_manager.get_range(session, number, number + 1)]
    from IPython.paths import locate_profile

    file = Path(locate_profile(), "history.sqlite").as_uri()
    with closing(sqlite3.connect(f"{file}?mode=ro", uri=True)) as history:
        query = "SELECT source_raw FROM history WHERE session = ? AND line = ?"
        return [text for (text,) in history.execute(query, (session, number))]


def record_cells(telemetry: TelemetryStore, closed: Callable[[], bool]) -> None:
    """In a notebook, add the cells that this kernel has run, and each cell that it will run, as events "cell", until
    the workbench is closed; the cell that closes it is the last. Outside a notebook, do nothing."""
    if not in_notebook() or threading.current_thread() is not threading.main_thread():
        return
    history = _history(ipython_shell())
    for cell in history.cells:
        telemetry.append_event("cell", **asdict(cell))
    history.followers.append((telemetry, closed))


class _History:
    """All cells of this kernel, and the telemetry stores that record new ones."""

    def __init__(self, shell: Any) -> None:
        self.kernel = f"{os.getpid()}-{shell.history_manager.session_number}"
        texts = list(shell.history_manager.input_hist_raw[1:-1])  # without the last cell, which still runs
        failed = failed_cells()
        self.cells = [
            RunCell(self.kernel, n, "", digest_of(text), n not in failed, failed.get(n))
            for n, text in enumerate(texts, 1)
            if text
        ]
        self.followers: list[tuple[TelemetryStore, Callable[[], bool]]] = []
        shell.events.register("post_run_cell", self._ran)

    def _ran(self, result: Any) -> None:
        with suppress(KeyboardInterrupt), uninterrupted():  # the cell has ended: there is nothing left to interrupt
            loaded.note()
            info, ended = result.info, end_of_cell(result)
            if ended is None:
                return
            cell = RunCell(
                self.kernel, int(result.execution_count or 0), str(info.cell_id or ""), digest_of(info.raw_cell),
                *ended,
            )  # fmt: skip
            self.cells.append(cell)
            for telemetry, _ in self.followers:
                try:
                    telemetry.append_event("cell", **asdict(cell))
                except OSError:  # a run folder that was deleted
                    continue
            self.followers = [follower for follower in self.followers if not follower[1]()]


_history = functools.cache(_History)
