"""Which workbenches live on this machine: one small folder each, so that a new kernel, and `wb ls`, find them.

A folder belongs to one opening, not to a name: who closes a workbench removes its own record and nobody else's, also
when another workbench of that name has been opened in the meantime.

    labs/<id>/lab.json          name, processes, address, models by role: read by all
    labs/<id>/description.pkl   what it was opened with, or moved to; needs the modules of its functions: for `attach`
    labs/<id>/owner.json        which kernel drives it
    labs/<id>/journal.pkl       what a later kernel goes on from, entry by entry: see `workbench.session.journal`
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.backends import journal_file
from workbench.errors import BadInput, MissingDependency, NotFound, WriteFailed
from workbench.errors.plain_text import shown
from workbench.support import files, pickles
from workbench.support.files import home, locked
from workbench.support.machine import Process

if TYPE_CHECKING:
    from workbench.config.description import Description

FORMAT = 5  # of a record and its journal

JOURNAL = "journal.pkl"
ROOM_BYTES = 64 * 2**10  # of the files beside the description
NAME_BYTES = 100  # of a workbench: the names of its folders and hosts begin with it

opened: dict[str, Any] = {}  # by name: those that this process opened or attached to


@dataclass(frozen=True, kw_only=True)
class Record:
    """A workbench on Ray that was opened and not closed.

    id: of this opening. digests: of its descriptions. address: of its cluster; None: this user's own Ray head.
    hosts: the process of each host, by the host's name. format: of the version of workbench that wrote it. roles: the
    model of each, as text.
    """

    id: str
    name: str
    digests: tuple[str, ...]
    run_folder: str
    address: str | None
    hosts: dict[str, Process]
    format: int = FORMAT
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> bool | None:
        """Whether all its hosts run; None: some are on other machines, and none is known to have ended."""
        states = {process.alive for process in self.hosts.values()}
        return False if False in states else None if None in states else True

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return _folder(self.id)


def check_name(name: str) -> str:
    """Return `name`, or raise `BadInput` if no workbench can be called that."""
    text = isinstance(name, str) and name and all(c.isalnum() or c in "-_." for c in name) and not name.startswith(".")
    if not text or len(name.encode()) > NAME_BYTES:
        rule = "a workbench's name has letters, digits, '-', '_' and '.', and is not empty"
        raise BadInput(
            f"name {shown(name, 80)}", f"{rule}; it has at most {NAME_BYTES} bytes", "choose another, such as 'lab'"
        )
    return name


def write(record: Record, description: Description) -> Record:
    """Record a workbench as it is now; gives the record, with the models of its roles. Raises `WriteFailed`."""
    files.private_folder(record.folder)
    files.write_bytes(record.folder / "description.pkl", pickles.dumps(description))
    record = replace(record, roles={role: str(model) for role, model in description.models.items()})
    files.write_json(record.folder / "lab.json", asdict(record))
    return record


def rewrite(description: Description, hosts: dict[str, Process]) -> None:
    """Record the hosts that a workbench has after a move; nothing is recorded of one that was closed elsewhere."""
    record = next((record for record in records() if record.id == description.id), None)
    if record is not None:
        write(replace(record, hosts=hosts, digests=description.digests), description)


def check_room(description: Description) -> None:
    """Raise `WriteFailed` where the disk has no room for another record of a workbench."""
    with _unless_closed(description.id):
        files.check_room(_folder(description.id), 2 * len(pickles.dumps(description)) + ROOM_BYTES)


def records() -> list[Record]:
    """Every workbench that is recorded, by name."""
    found = []
    for path in (home() / "labs").glob("*/lab.json"):
        try:
            values = files.read_json(path)
            hosts = {name: Process(**process) for name, process in values.pop("hosts").items()}
            found.append(Record(**{**values, "digests": tuple(values["digests"])}, hosts=hosts))
        except BadInput as error:
            files.tell_once(str(error))
        except (OSError, ValueError, KeyError, TypeError):  # removed just now; of another version
            continue
    return sorted(found, key=lambda record: record.name)


def find(name: str) -> Record | None:
    """The record of the workbench of that name, if there is one."""
    check_name(name)
    return next((record for record in records() if record.name == name), None)


def with_id(id: str) -> Record:
    """The record of one opening, or `NotFound`."""
    for record in records():
        if record.id == id:
            return record
    raise NotFound(f"no workbench with the id {id!r}", "it was closed", "see `wb ls --json`")


def get(name: str) -> Record:
    """The record of the workbench of that name, or `NotFound`."""
    record = find(name)
    if record is None:
        names = ", ".join(record.name for record in records())
        raise NotFound(
            f"no workbench named {name!r}",
            f"there are: {names or 'none'}; one with backend='inline' is known only to the process that opened it",
            "open one with wb.open(...)",
        )
    return record


def description(record: Record) -> Description:
    """What a workbench was opened with. Raises `BadInput` where another version of workbench, or another user, has
    written it, `MissingDependency` where code that it names cannot be imported."""
    if record.format != FORMAT:
        raise BadInput(
            f"workbench {record.name!r} was opened by another version of workbench: its record has format "
            f"{record.format}", f"this version reads {FORMAT}",
            f"attach with the version that opened it, or end it with `wb stop {record.name}` and open it again",
        )  # fmt: skip
    try:
        value: Description = pickle.loads(files.read_bytes(record.folder / "description.pkl"))
    except OSError:
        raise NotFound(f"no workbench named {record.name!r}", "it was closed a moment ago", "open it again") from None
    except (ImportError, AttributeError) as error:
        module = f"module {error.name!r}" if isinstance(error, ImportError) and error.name else str(error)
        raise MissingDependency(
            f"workbench {record.name!r} was opened with code that this process cannot import: {module}",
            "its functions and worker classes are found by the names of their modules",
            "run from the folder of that module or with PYTHONPATH=<folder>; or define the function in the notebook, "
            f"and open again. `wb stop {record.name}` works in any case",
        ) from error
    return value


def forget(lab: str) -> None:
    """Remove the record of the workbench with this id, and no other's of its name."""
    shutil.rmtree(_folder(lab), ignore_errors=True)


def append_to_journal(lab: str, entry: Mapping[str, Any]) -> None:
    """Add an entry to the journal; nothing is added to that of a workbench that was closed elsewhere. Raises
    `WriteFailed`."""
    with _unless_closed(lab):
        journal_file.append(_folder(lab) / JOURNAL, entry)


def start_journal(lab: str, entry: Mapping[str, Any]) -> None:
    """Put one entry in the place of the journal; nothing is written for a workbench that was closed elsewhere. Raises
    `WriteFailed`."""
    with _unless_closed(lab):
        journal_file.start(_folder(lab) / JOURNAL, entry)


def journal(lab: str) -> Iterator[dict[str, Any]]:
    """The entries of the journal, oldest first, without those that are damaged."""
    return journal_file.entries(_folder(lab) / JOURNAL)


def owned_entries(lab: str) -> Iterator[dict[str, Any]]:
    """The entries of the handle that took the workbench over last, which has begun the file with a whole one. A slow
    kernel may have added its own behind that before it noticed."""
    controller = None
    for entry in journal(lab):
        if controller is None or "whole" in entry:
            controller = entry.get("controller")
        if entry.get("controller") == controller:
            yield entry


def counters(lab: str) -> dict[str, Any]:
    """The counters of the journal, of which nothing is unpickled; empty where they cannot be read."""
    text = "{}"
    for entry in owned_entries(lab):
        text = entry.get("counters", text)
    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def journal_stamp(lab: str) -> journal_file.Stamp | None:
    """Another value whenever the journal has been written; None where there is none."""
    return journal_file.stamp(_folder(lab) / JOURNAL)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The kernel that drives a workbench. controller: of its processes' workbenches, which one. since_s: unix time."""

    controller: str
    process: Process
    since_s: float

    @property
    def lives(self) -> bool:
        """Whether it may still call stages: not, where its process has ended."""
        return self.process.alive is not False

    @property
    def mine(self) -> bool:
        """Whether it is this process."""
        return self.process == Process.current()


def driving(lab: str, waiting: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    """Inside, no other kernel takes the workbench with this id over, nor switches it to another placement."""
    return locked(f"labs/{lab}/driving", waiting)


def own(lab: str, controller: str) -> None:
    """Record that this process's controller drives the workbench with this id."""
    with _unless_closed(lab):
        owner = Owner(controller=controller, process=Process.current(), since_s=time.time())
        files.write_json(_folder(lab) / "owner.json", asdict(owner))


def owner(lab: str) -> Owner | None:
    """Which kernel drives the workbench with this id; None where none is known."""
    try:
        values = files.read_json(_folder(lab) / "owner.json")
        return Owner(**{**values, "process": Process(**values["process"])})
    except BadInput as error:
        files.tell_once(str(error))
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def owner_stamp(lab: str) -> int | None:
    """Another number whenever another kernel has taken the workbench with this id; None where none is known."""
    try:
        return (_folder(lab) / "owner.json").stat().st_mtime_ns
    except OSError:
        return None


def last_used_s(lab: str) -> float:
    """When a stage of it was last called, unix time; 0.0: nothing is known."""
    try:
        return (_folder(lab) / JOURNAL).stat().st_mtime
    except OSError:
        return 0.0


def _folder(lab: str) -> Path:
    return home() / "labs" / lab


@contextlib.contextmanager
def _unless_closed(lab: str) -> Iterator[None]:
    """What cannot be written because the record is gone is not written."""
    try:
        yield
    except WriteFailed:
        if _folder(lab).is_dir():
            raise
