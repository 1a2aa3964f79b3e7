"""Write `scripts/constraints/` anew from the ranges of `pyproject.toml` (`make lock`), or say which versions an
environment has in their place (`make drift`). Standard library and pip only.

One file serves Python 3.11 and 3.12: pip skips the pins of what it does not install.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from scripts.setup_env import BUNDLED_MODEL, CONSTRAINTS, CPU_TORCH, CUDA_ONLY, ROOT, requirement

OWN = "workbench"
HEAD = "# Every package that set-up installs for {}, with its version; written by `make lock` from pyproject.toml.\n"


def normal(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(build: str) -> dict[str, str]:
    """What a constraints file says, by package."""
    lines = (CONSTRAINTS / f"{build}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def resolved(build: str) -> dict[str, str]:
    """The newest versions that fit together, by package; nothing is installed."""
    wanted = ["--editable", requirement(build), *([CPU_TORCH] if build == "cpu" else [])]
    # a folder of wheels that pip is told of may have the CPU build of torch, which would go before the CUDA build
    hidden = {"PIP_FIND_LINKS": ""} if build == "cuda" else {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
            "--report",
            str(report),
            *wanted,
        ]
        subprocess.run([sys.executable, *command], cwd=ROOT, env=os.environ | hidden, check=True)
        found = json.loads(report.read_text())["install"]
    versions = {normal(one["metadata"]["name"]): one["metadata"]["version"].partition("+")[0] for one in found}
    left_out = {OWN, *(CUDA_ONLY if build == "cpu" else ())}
    bundled = dict([BUNDLED_MODEL.split("==")])
    return {name: version for name, version in versions.items() if name not in left_out} | bundled


def write(build: str) -> None:
    before, now = pins_of(build) if (CONSTRAINTS / f"{build}.txt").exists() else {}, resolved(build)
    lines = [f"{name}=={version}\n" for name, version in sorted(now.items())]
    (CONSTRAINTS / f"{build}.txt").write_text(HEAD.format("a CPU" if build == "cpu" else "CUDA") + "".join(lines))
    say_changes(before, now)


def installed(folder: Path) -> dict[str, str]:
    """What an environment has, by package."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "list", "--format", "json", "--exclude-editable"]
    found = json.loads(subprocess.check_output(command, text=True))
    return {normal(one["name"]): one["version"].partition("+")[0] for one in found}


def say_changes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    for name in changed:
        print(f"{name:32} {before.get(name, '-'):16} {now.get(name, '-')}")
    print(f"{len(changed)} of {len(now)} packages differ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the exact versions again, or compare an environment with them.")
    parser.add_argument("--only", choices=("cpu", "cuda"), help="which file; default: both")
    parser.add_argument("--compare", metavar="FOLDER", type=Path, help="print where this environment differs")
    chosen = parser.parse_args()
    if chosen.compare:
        say_changes(pins_of("cpu"), {k: v for k, v in installed(chosen.compare).items() if k not in ("pip", OWN)})
        return
    CONSTRAINTS.mkdir(exist_ok=True)
    for build in [chosen.only] if chosen.only else ("cpu", "cuda"):
        print(f"{build}:", flush=True)
        write(build)


if __name__ == "__main__":
    main()
