"""Opening a workbench, finding one that lives, and ending it: `wb.open`, `wb.attach`, `wb.ls`, `wb.stop`."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from workbench import registry
from workbench.controller import Workbench
from workbench.description import Description
from workbench.engines.settings import Generation, Training, one_of
from workbench.errors import HostDied, NameTaken
from workbench.placement import Placement
from workbench.workers.backends import RayBackend
from workbench.workers.cluster import running_head, stop_idle_head

IfExists = Literal["attach", "replace", "error"]


def open(
    name: str = "lab",
    *,
    models: Mapping[str, Any],
    placement: Placement | None = None,
    prompts: Any = None,
    training: Training | None = None,
    generation: Generation | None = None,
    dtype: str = "float32",
    backend: Literal["ray", "inline"] = "ray",
    device: Literal["cpu", "cuda"] | None = None,
    devices: int | None = None,
    seed: int = 0,
    address: str | None = None,
    if_exists: IfExists = "attach",
    runs: str | Path = "runs",
) -> Workbench:
    """Open a workbench: start its hosts, load its models, and return the controller.

    models: role -> hub id, local folder, bundled or tiny name, function (reward, cost), or `wb.Model`.
    placement: which roles share which devices; default: all on one device.
    prompts: a data set name, a .jsonl file, a list, or a dict of `Prompts` options with "source".
    training, generation, dtype: defaults of all roles; a `wb.Model` overrides them for its role.
    backend: "ray", or "inline": everything in this process on one device, no Ray.
    device, devices: "cuda" where there is a GPU; on a CPU, `devices` declares slots that share its cores.
    address: a Ray cluster to join, "host:port"; default: this user's own, started if need be.
    if_exists: what to do when a workbench of that name lives. "attach": take it up if it was opened with the same
        description, else `NameTaken`; "replace": close it first; "error": `NameTaken`.
    runs: folder under which the run folder (telemetry, logs) is made.

    Everything that can be checked is checked before a process starts; `BadInput` and its kin say what to change.
    """
    one_of("if_exists", if_exists, ("attach", "replace", "error"))
    registry.folder_of(name)
    description = Description.of(
        name, models=models, placement=placement, prompts=prompts, training=training, generation=generation,
        dtype=dtype, backend=backend, device=device, devices=devices, seed=seed, address=address,
    )  # fmt: skip
    living = _living(name, description.backend)
    if living is not None:
        if if_exists == "error" or (if_exists == "attach" and living != description.digest):
            raise NameTaken(
                f"a workbench named {name!r} lives",
                "if_exists='error'" if if_exists == "error" else "it was opened with another description",
                "attach to it with wb.attach(name), use another name, or open with if_exists='replace'",
            )
        if if_exists == "attach":
            return attach(name)
        stop(name)
    run_folder = Path(runs).resolve() / name / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    lab = Workbench(description, run_folder)
    try:
        lab._start()
        pids = [lab._backend.ask(info.name, "describe").result()["process"] for info in lab._infos]
    except BaseException:
        if hasattr(lab, "_backend"):
            lab._backend.close()
        raise
    if description.backend == "ray":
        registry.write(
            name, description=description, digest=description.digest, run_folder=run_folder, address=address, pids=pids
        )
        lab._save_state()
    registry.opened[name] = lab
    return lab


def attach(name: str) -> Workbench:
    """Take up a workbench that lives, opened in this kernel or an earlier one."""
    if name in registry.opened:
        return registry.opened[name]
    description = registry.description(name)
    record = registry.read(name)
    assert record is not None
    lab = Workbench(description, Path(record["run_folder"]))
    lab._backend = RayBackend(name, description.address, start=False)
    lab._backend.attach(lab._infos)
    state = registry.load_state(name)
    lab._run_number, lab._batch_number = state.get("run", 0), state.get("batch", 0)
    lab.iteration, lab.prompts.drawn = state.get("iteration", 0), state.get("drawn", 0)
    if lab.prompts.source and state.get("prompts"):
        lab.prompts.source.load_state_dict(state["prompts"])
    lab.telemetry.append_event("attached")
    registry.opened[name] = lab
    return lab


def ls() -> list[dict[str, Any]]:
    """The workbenches that live on this machine: name, alive, processes, run folder."""
    found = []
    for name in registry.names():
        record = registry.read(name)
        if record is not None:
            found.append({key: record[key] for key in ("name", "alive", "address", "processes", "run_folder")})
    for name, lab in registry.opened.items():
        if lab.description.backend == "inline":
            found.append(
                {"name": name, "alive": True, "address": "inline", "processes": [], "run_folder": str(lab.run_folder)}
            )
    return found


def stop(name: str) -> None:
    """Close a workbench by name, from any process; `NotFound` if there is none."""
    if name in registry.opened:
        registry.opened[name].close()
        return
    description = registry.description(name)
    if description.address is not None or running_head() is not None:
        backend = RayBackend(name, description.address)
        with contextlib.suppress(HostDied):  # what is left of it is ended all the same
            backend.attach(description.hosts(Path()))
        backend.close()
    registry.forget(name)
    stop_idle_head()


def _living(name: str, backend: str) -> str | None:
    """The digest of the workbench of that name that lives, or None; a dead one's record is swept away."""
    if name in registry.opened:
        return registry.opened[name].description.digest
    record = registry.read(name)
    if record is None:
        return None
    if record["alive"] is False:
        stop(name)
        return None
    digest: str = record["digest"]
    return digest


@atexit.register
def _leave() -> None:
    for lab in list(registry.opened.values()):
        if lab.description.backend == "inline":
            lab.close()
    stop_idle_head()
