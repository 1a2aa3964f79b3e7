"""The folder of a checkpoint: its files, how it is written whole or not at all, and how it is found again.

    checkpoint.json     the manifest: format, iteration, placement, counters, positions of prompts and algorithm; and of
                        each other file its size and SHA-256; signed by the user who wrote it
    ledger.safetensors  the state of the ledger of prompts, see `workbench.data.ledger`
    random.safetensors  states of the random generators of each role's ranks
    controller.pkl      the description of the workbench, with its functions and worker classes, and extra state
                        of workers (`Worker.extra_state`). The only pickle, apart from states of the user's own workers.
                        Pickles are loaded only where the manifest names them and this user has signed it
    roles/<role>/       see `workbench.workers.role_state`; model/ is loaded by transformers and vLLM
    made/               batches of an iteration that was under way

A checkpoint is written next to its final place, under a name that begins with a dot, and renamed once it is whole: a
process that is killed while saving leaves this folder behind, and earlier checkpoints as they were. A later save there
deletes the folder after an hour without writes. A file that the manifest does not name is never read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.display.html import bytes_text, table
from workbench.errors import BadInput, MissingDependency, NotFound
from workbench.support import files, pickles
from workbench.support.files import is_signed, signed

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.config.description import Description
    from workbench.workers.role_state import RankState


FORMAT = 4
CONTROLLER, RANDOM, LEDGER = "controller.pkl", "random.safetensors", "ledger.safetensors"
MANIFEST = "checkpoint.json"
AUTOMATIC = "checkpoints"  # in a run folder
STALE_S = 3600.0
PARTS = {"roles", "made", "buffer", CONTROLLER, RANDOM, LEDGER, MANIFEST}  # what a checkpoint's folder holds


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `lab.save` wrote. folder: an absolute path. values: the content of its manifest."""

    folder: Path
    values: Mapping[str, Any] = field(repr=False)

    @property
    def iteration(self) -> int:
        """The number of iterations that had begun."""
        return int(self.values["state"]["iteration"])

    @property
    def _when(self) -> str:
        under_way = (self.values["algorithm"] or {}).get("under_way")
        return f"in iteration {self.iteration}" if under_way else f"after {self.iteration} iterations"

    @property
    def nbytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.values["files"].values())

    def verify(self) -> None:
        """Raise `BadInput` naming the first file that has changed since it was written."""
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda name: _entry(self.folder, name), self.values["files"])
            for (name, written), now in zip(self.values["files"].items(), found, strict=True):
                if now != written:
                    raise self._damaged(name, now)

    def require(self, path: Path) -> None:
        """Raise `BadInput` where the manifest does not name this file."""
        if (name := path.relative_to(self.folder).as_posix()) not in self.values["files"]:
            raise self._damaged(name, None)

    def checksums(self, prefix: str) -> dict[str, str]:
        """Return the SHA-256 of the files whose names begin with `prefix`, by the last part of the name."""
        return {
            name.rpartition("/")[2]: str(entry["sha256"])
            for name, entry in self.values["files"].items() if name.startswith(prefix)
        }  # fmt: skip

    def trust(self) -> None:
        """Verify the files, then sign the checkpoint as this user's own: restoring it then runs its code."""
        self.verify()
        files.write_json(self.folder / MANIFEST, signed(self.values), flush=True)

    def _read(self, name: str) -> bytes:
        """Return the content of a file that the manifest names, after a check of its size and checksum."""
        self.require(self.folder / name)
        try:
            data = files.read_bytes(self.folder / name)
        except FileNotFoundError:
            raise self._damaged(name, None) from None
        now = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if now != self.values["files"][name]:
            raise self._damaged(name, now)
        return data

    def _damaged(self, name: str, now: Mapping[str, Any] | None) -> BadInput:
        written = self.values["files"].get(name)
        what = "is gone" if now is None else f"has {now['bytes']} bytes with another checksum"
        return BadInput(
            f"{self.folder / name} {what}",
            "the manifest does not name the file" if written is None else
            f"{written['bytes']} bytes with SHA-256 {written['sha256'][:12]} were written",
            "restore from another checkpoint: this one is damaged",
        )  # fmt: skip

    def controller(self) -> tuple[Description, dict[str, list[RankState]]]:
        """Return the description of the workbench, and by role the small state of each rank. Raises `BadInput` where
        this user has not signed the checkpoint, `MissingDependency` where code that it names cannot be imported."""
        from safetensors.torch import load

        from workbench.workers.role_state import RankState

        if not is_signed(self.values):
            raise BadInput(
                f"checkpoint {str(self.folder)!r} is not signed by this user, or was changed after it was signed",
                "it holds Python objects, and loading them runs code of the person who wrote it",
                f"if you trust that person and the place where it was kept: wb trust {shlex.quote(str(self.folder))}",
            )
        try:
            description, added = pickle.loads(self._read(CONTROLLER))
        except (ImportError, AttributeError) as error:
            raise MissingDependency(
                f"checkpoint {str(self.folder)!r} was made with code that this process cannot import: {error}",
                "its functions and worker classes are imported by the names of their modules",
                "run from the folder of that module, or with PYTHONPATH=<folder>",
            ) from error
        random: dict[tuple[str, int], dict[str, Tensor]] = {}
        for name, state in load(self._read(RANDOM)).items():
            role, rank, generator = name.split("/")
            random.setdefault((role, int(rank)), {})[generator] = state
        states = {}
        for role, said in self.values["roles"].items():
            scale = said["loss_scale"]
            states[role] = [
                RankState(
                    steps=said["steps"], moments=said["moments"], random=random[role, rank], extra=more,
                    loss_scale=None if scale is None else (scale[0], scale[1]),
                )
                for rank, more in enumerate(added[role])
            ]  # fmt: skip
        return description, states

    def ledger(self) -> bytes | None:
        """Return the saved state of the ledger of prompts; None where there was no ledger."""
        return self._read(LEDGER) if LEDGER in self.values["files"] else None

    def described(self) -> str:
        """Describe the checkpoint (kind, owner, signer), so that the user can decide whether to trust it."""
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.values["saved_s"]))
        by_user = "signed" if is_signed(self.values) else "not signed"
        return (
            f"{self.folder}\n  {self.values['name']!r} {self._when}, saved {saved}\n"
            f"  roles {', '.join(self.values['roles'])}; {len(self.values['files'])} files, {bytes_text(self.nbytes)}\n"
            f"  owned by user {self.folder.stat().st_uid}; it is {by_user} by this user"
        )

    def __repr__(self) -> str:
        return f"<Checkpoint {self._when} of {self.values['name']!r}: {self.folder}>"

    def _repr_html_(self) -> str:
        rows = [{"role": role, **{k: v for k, v in said.items() if k != "parts"}}
                for role, said in self.values["roles"].items()]  # fmt: skip
        return table(rows, caption=f"{self.folder}: {self._when}, {bytes_text(self.nbytes)}")


def sweep(folder: Path) -> None:
    """Delete unfinished checkpoints in a folder, if there is one: leftovers of processes that were killed while saving,
    to which nobody has written for an hour."""
    for left in folder.glob(".*"):
        if not re.fullmatch(r"\..+\.[0-9a-f]{8}", left.name) or not left.is_dir():
            continue
        with contextlib.suppress(OSError):  # it was renamed to its final name just now
            ours = {inner.name for inner in left.iterdir()} <= PARTS
            newest = max(one.stat().st_mtime for one in (left, *left.rglob("*")))
            if ours and time.time() - newest > STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def write_manifest(
    folder: Path, values: Mapping[str, Any], description: Description, states: Mapping[str, Sequence[RankState]]
) -> Checkpoint:
    """Write the files of the controller, after all others, and last the manifest, which names all files.

    states: the state of each role's ranks.
    """
    from safetensors.torch import save

    added = {role: [state.extra for state in of_ranks] for role, of_ranks in states.items()}
    files.write_bytes(folder / CONTROLLER, pickles.dumps((description, added)))
    random = {
        f"{role}/{rank}/{generator}": tensor
        for role, of_ranks in states.items()
        for rank, state in enumerate(of_ranks)
        for generator, tensor in state.random.items()
    }
    files.write_bytes(folder / RANDOM, save(random))
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

    def finished(name: str) -> dict[str, Any] | None:
        (folder / name).chmod(files.PRIVATE)  # libraries write with the permissions of the umask
        files.to_disk(folder / name)
        return _entry(folder, name)

    with ThreadPoolExecutor(4) as pool:
        entries = dict(zip(names, pool.map(finished, names), strict=True))
    written = signed(json.loads(json.dumps({"format": FORMAT, **values, "files": entries})))
    files.write_json(folder / MANIFEST, written, flush=True)
    for inner in [folder, *(inner for inner in folder.rglob("*") if inner.is_dir())]:
        files.to_disk(inner)
    return Checkpoint(folder, written)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises `BadInput` where the manifest is missing, or has another format."""
    try:
        return Checkpoint(folder, files.read_json(folder / MANIFEST, format=FORMAT))
    except FileNotFoundError as error:
        raise BadInput(f"{str(folder / MANIFEST)!r} cannot be read", str(error), "use another checkpoint") from error


def find_checkpoint(path: str | Path | Checkpoint) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest one in a run folder, in its `checkpoints`, or in a folder of runs.

    Raises `NotFound` where there is none, `BadInput` where it cannot be read.
    """
    folder = files.real_path(path.folder if isinstance(path, Checkpoint) else path, "path")
    if (folder / MANIFEST).is_file():
        return read_checkpoint(folder)
    inside = ("*", f"{AUTOMATIC}/*", f"*/{AUTOMATIC}/*")
    manifests = (file for pattern in inside for file in folder.glob(f"{pattern}/{MANIFEST}"))
    # the folder of an unfinished checkpoint has a name that begins with a dot
    found = [file for file in manifests if not any(p.startswith(".") for p in file.relative_to(folder).parts)]
    if not found:
        raise NotFound(
            f"no checkpoint in {str(folder)!r}",
            "a checkpoint is a folder written by lab.save(path) or an automatic save"
            if folder.is_dir() else "there is no such folder",
            "give the folder of a checkpoint, or of a run with automatic saves: runs/<name>/<time>",
        )  # fmt: skip
    return max((read_checkpoint(file.parent) for file in found), key=lambda checkpoint: checkpoint.values["saved_s"])


def _entry(folder: Path, name: str) -> dict[str, Any] | None:
    """Return size and checksum of a file; None: the file is gone."""
    try:
        with files.opened(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except FileNotFoundError:
        return None
