"""Which workbenches live on this machine: one small folder each, so that a new kernel, and `wb ls`, find them."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from workbench.errors import BadInput, NotFound
from workbench.home import home

opened: dict[str, Any] = {}  # name -> Workbench: those that this process opened or attached to


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process that can be told from a later one of the same id."""

    pid: int
    created_s: float

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created_s and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def folder_of(name: str) -> Path:
    """Where the record of a workbench lies."""
    if not name or not all(c.isalnum() or c in "-_." for c in name) or name.startswith("."):
        raise BadInput(f"name {name!r}", "a workbench's name has letters, digits, '-', '_' and '.', and is not empty")
    return home() / "labs" / name


def write(name: str, *, description: Any, digest: str, run_folder: Path, address: str | None, pids: list[int]) -> None:
    """Record a workbench that was just opened."""
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "description.pkl").write_bytes(cloudpickle.dumps(description))
    processes = [{"pid": pid, "created_s": psutil.Process(pid).create_time()} for pid in pids if psutil.pid_exists(pid)]
    record = {
        "name": name, "digest": digest, "run_folder": str(run_folder), "address": address, "processes": processes
    }  # fmt: skip
    (folder / "lab.json").write_text(json.dumps(record, indent=1))


def read(name: str) -> dict[str, Any] | None:
    """The record of a workbench with `alive`, whether all its hosts run (None: they are on other machines)."""
    try:
        record: dict[str, Any] = json.loads((folder_of(name) / "lab.json").read_text())
    except (OSError, ValueError):
        return None
    local = [Process(**process).alive for process in record["processes"]]
    record["alive"] = all(local) if local else None
    return record


def description(name: str) -> Any:
    """The description that a workbench was opened with."""
    try:
        return pickle.loads((folder_of(name) / "description.pkl").read_bytes())
    except OSError:
        raise NotFound(
            f"no workbench named {name!r}", f"there are: {', '.join(names()) or 'none'}", "open one with wb.open(...)"
        ) from None


def names() -> list[str]:
    """All recorded workbenches."""
    labs = home() / "labs"
    return sorted(path.name for path in labs.iterdir() if (path / "lab.json").exists()) if labs.exists() else []


def forget(name: str) -> None:
    """Remove the record of a workbench that was closed."""
    shutil.rmtree(folder_of(name), ignore_errors=True)


def save_state(name: str, state: dict[str, Any]) -> None:
    """Keep the counters that a new kernel goes on from."""
    path = folder_of(name) / "state.json"
    if path.parent.exists():
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").replace(path)


def load_state(name: str) -> dict[str, Any]:
    """What `save_state` kept; empty when there is nothing."""
    try:
        state: dict[str, Any] = json.loads((folder_of(name) / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    return state
