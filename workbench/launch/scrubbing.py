"""`wb scrub`: masks secrets in a run folder that was written without masking, and in the checkpoints of that run; the
rules are those of `workbench.support.secrets`.

Records, logs and manifests are text, and are written anew. Other files are only searched: a pickle cannot be changed
without running it, and a batch would be another one.
"""

from __future__ import annotations

import json
import os
import pickletools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.backends import registry
from workbench.errors import BadInput
from workbench.session.checkpoint.files import MANIFEST, Checkpoint, read_checkpoint
from workbench.support import files
from workbench.support.secret_literals import is_secret
from workbench.support.secrets import masked, without_forms
from workbench.support.signing import is_signed, signed

EVENTS = "events.jsonl"


@dataclass
class Scrubbed:
    """What `scrub` did. cleaned: files in which something was masked. left: files that hold, or may hold, a secret, and
    why they were left. private: files and folders that others could read, and no longer can."""

    cleaned: list[Path] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)
    private: int = 0

    def __str__(self) -> str:
        lines = [f"masked in {path}" for path in self.cleaned]
        lines += [f"not cleaned: {path}: {why}" for path, why in self.left.items()]
        lines.append(
            f"secrets masked in {len(self.cleaned)} files; {len(self.left)} files not cleaned; {self.private} files "
            "and folders that others could read are this user's alone now"
        )
        return "\n".join(lines)


def scrub(run: str | os.PathLike[str]) -> Scrubbed:
    """Mask secrets in the files of a run folder, or of a checkpoint, and make them this user's alone (folders 0700,
    files 0600). Checkpoints that were saved elsewhere are found by the record; only those are cleaned that this user
    has signed as of this run, and in them the files that their manifests name.

    Raises `BadInput` for another folder, and for that of a workbench that lives.
    """
    folder = files.real_path(run, "RUN")
    if not any((folder / name).is_file() for name in (EVENTS, MANIFEST)):
        raise BadInput(
            str(folder), f"a run folder has {EVENTS}, a checkpoint {MANIFEST}", "give runs/NAME/DATE, or a checkpoint"
        )
    living = [record for record in registry.records() if record.alive is not False]
    living += [lab for lab in registry.opened.values() if lab.description.backend == "inline"]
    for record in living:
        if Path(record.run_folder).resolve() == folder:
            raise BadInput(
                f"{record.name!r} lives, and writes to {folder}", "a folder is cleaned when nobody writes to it",
                f"close it first: wb stop {record.name}",
            )  # fmt: skip
    done = Scrubbed()
    found = [(path, folder) for path in _walk(folder, done)]
    found += [(path, saved.folder) for saved in _saved_elsewhere(folder, done) for path in _named(saved, done)]
    for path, place in found:
        try:
            _clean(path, place, done)
        except (OSError, BadInput) as error:
            done.left[path] = str(error)
    return done


def _saved_elsewhere(folder: Path, done: Scrubbed) -> Iterator[Checkpoint]:
    """The checkpoints of this run that the record names, and that are still there. A record may be somebody else's, and
    name any folder."""
    rows = [row for row in _rows(folder / EVENTS) if row.get("event") == "saved"]
    named = dict.fromkeys(row["details"].get("folder") for row in rows if isinstance(row.get("details"), dict))
    for saved in named:
        if not isinstance(saved, str) or "\0" in saved or not os.path.isabs(saved):
            continue
        place = Path(os.path.realpath(saved))
        if not (place / MANIFEST).is_file() or place.is_relative_to(folder):
            continue
        try:
            checkpoint = read_checkpoint(place)
            ours = is_signed(checkpoint.values) and files.real_path(checkpoint.values["run_folder"], "run") == folder
        except (OSError, BadInput):
            ours = False
        if ours:
            yield checkpoint
        else:
            done.left[place] = "no checkpoint of this run that this user has signed; if it is yours: wb scrub FOLDER"


def _named(checkpoint: Checkpoint, done: Scrubbed) -> Iterator[Path]:
    """The files that a manifest names, and itself, with private modes; links are not followed."""
    _make_private(checkpoint.folder, 0o700, done)
    for name in (*sorted(checkpoint.values["files"]), MANIFEST):
        path = checkpoint.folder / name
        if Path(os.path.realpath(path)) != path:
            done.left[path] = "it is a link, which is not followed"
        elif path.is_file():
            _make_private(path, 0o600, done)
            yield path


def _walk(place: Path, done: Scrubbed) -> Iterator[Path]:
    """All files below a folder, with private modes; links are not followed."""
    for folder, _, names in os.walk(place):
        _make_private(Path(folder), 0o700, done)
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_symlink():
                done.left[path] = "it is a link, which is not followed"
            elif path.is_file():
                _make_private(path, 0o600, done)
                yield path


def _make_private(path: Path, mode: int, done: Scrubbed) -> None:
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(mode)
            done.private += 1
    except OSError as error:
        done.left[path] = f"its mode cannot be changed: {error.strerror}"


def _clean(path: Path, place: Path, done: Scrubbed) -> None:
    if path.name == EVENTS:
        _rewrite(path, _masked_event, done)
    elif path.suffix == ".jsonl":
        _rewrite(path, without_forms, done)
    elif path.suffix in (".log", ".out", ".err"):
        _rewrite(path, masked, done)
    elif path.name == MANIFEST:
        _clean_manifest(path, done)
    elif path.suffix in (".pkl", ".pt"):
        if path.suffix == ".pt" or _hides_secret(files.read_bytes(path)):
            done.left[path] = "Python objects, which cannot be masked, may hold a secret: delete it if one does"
    elif not (path.suffix == ".safetensors" and "roles" in path.relative_to(place).parts):  # those are numbers
        text = files.read_bytes(path).decode("latin-1")
        if without_forms(text) != text:
            done.left[path] = "it seems to hold a key, and only text files can be changed: delete it"


def _rewrite(path: Path, mask: Callable[[str], Any], done: Scrubbed) -> None:
    """Mask the lines of a text."""
    text = files.read_bytes(path, limit=None).decode(errors="replace")
    clean = "".join(str(mask(line)) for line in text.splitlines(keepends=True))
    if clean != text:
        files.write_bytes(path, clean.encode(), flush=True)
        done.cleaned.append(path)


def _masked_event(line: str) -> str:
    """A line of the record; nothing of one that is not whole, which no reader takes."""
    try:
        row = json.loads(line)
        details = row["details"]
        clean = masked(details)
    except (ValueError, KeyError, TypeError):
        return ""
    if clean == details:
        return line
    if row["event"] == "cell" and "masked" in clean:
        clean["masked"] = True
    return json.dumps({**row, "details": clean}, separators=(",", ":")) + "\n"


def _clean_manifest(path: Path, done: Scrubbed) -> None:
    values = dict(read_checkpoint(path.parent).values)
    kept = {name: values[name] for name in ("files", "signature") if name in values}
    clean = {**masked({name: value for name, value in values.items() if name not in kept}), **kept}
    if clean != values:
        files.write_json(path, signed(clean) if is_signed(values) else clean, flush=True)
        done.cleaned.append(path)


def _hides_secret(data: bytes) -> bool:
    """Whether a text in a pickle is a secret by its form, or follows the name of one. Nothing is unpickled."""
    before = ""
    with suppress(Exception):  # a damaged one: up to there
        for opcode, value, _ in pickletools.genops(data):
            if not isinstance(value, str):
                before = before if opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT") else ""
                continue
            if masked(value) != value or (before and is_secret(before, value)):
                return True
            before = value
    return False


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = files.read_bytes(path, limit=None)
    except FileNotFoundError:
        return
    for line in text.splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row
