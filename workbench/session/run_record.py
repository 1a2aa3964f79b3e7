"""What a workbench was opened with: `run.json` in its run folder, which `wb.runs` and `wb.diff` read.

    {"format": 1, "name", "id", "opened_s", "settings": {name: value}, "code": {...}, "data": {name: value}}

Plain values alone. Whatever is read is checked: it may be damaged.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config.description import Description
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.placement import ROLLOUT
from workbench.support import files
from workbench.support.code_version import code_version, function_version
from workbench.support.fingerprint import is_of_notebook
from workbench.support.flat_settings import flat
from workbench.support.notebook_cell import in_notebook

if TYPE_CHECKING:
    from workbench.data.prompt_stream import PromptStream

RUN_FILE, FORMAT = Path("run.json"), 1
LATEST_S = 4102444800  # the year 2100: a moment behind it is not one of ours
LIMIT_BYTES = 8 * 2**20
SOURCE_CHARACTERS = 20_000  # of a function
POSITION = ("position", "place", "counts", "epoch")  # of prompts: where they are, not what they are


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run was opened with.

    settings: by name, such as "seed" and "actor/training/learning_rate". code: `commit`, `versions` of libraries,
    `files` of the package with digests, `functions` by role, each with its name, digest and, where it is no function of
    a cell, its source. data: where prompts come from, and a digest of them.
    """

    name: str
    opened_s: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def write_run_record(run_folder: Path, description: Description, prompts: PromptStream) -> None:
    """Write what a workbench is opened with."""
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
    """What distinguishes one opening from another, by name."""
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
    """Where prompts come from, and which they are."""
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
        with suppress(OSError, TypeError):  # of a function that was made without a file
            found["source"] = inspect.getsource(inspect.unwrap(function))[:SOURCE_CHARACTERS]
    return found


def read_run_record(run_folder: Path) -> RunRecord | None:
    """The record of a run folder; None where it has none, as after a kernel that ended while it opened. Raises
    `BadInput` for a file that is not JSON, or that has another format."""
    try:
        found = files.read_json(run_folder / RUN_FILE, limit=LIMIT_BYTES)
    except FileNotFoundError:
        return None
    if not isinstance(found, dict):
        return None
    if (wrote := found.get("format")) != FORMAT:
        what = f"{str(run_folder / RUN_FILE)!r} has format {shown(wrote, 80)}"
        raise BadInput(what, f"this version reads {FORMAT}", "use the version of workbench that wrote it")
    parts = {name: part for name in ("settings", "code", "data") if isinstance(part := found.get(name), dict)}
    opened_s = found.get("opened_s")
    known = isinstance(opened_s, int | float) and not isinstance(opened_s, bool) and 0 <= opened_s < LATEST_S
    return RunRecord(name=str(found.get("name", "")), opened_s=float(opened_s) if known else 0.0, **parts)  # type: ignore[arg-type]
