"""The record of workbenches that live on this machine: one small folder each, for new kernels and `wb ls`.

A folder belongs to one opening, not to a name: closing a workbench removes only its own record, even when another
workbench of that name has been opened in the meantime.

    labs/<id>/lab.json          name, processes, address, models by role: read by all
    labs/<id>/description.pkl   its present description, for `attach`; loading it needs the modules of its functions
    labs/<id>/owner.json        which kernel drives it
    labs/<id>/journal.pkl       entries from which a later kernel continues, see `workbench.session.journal`
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

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
ROOM_BYTES = 64 * 2**10  # for the files beside the description
NAME_BYTES = 100  # of a workbench's name, which begins the names of its folders and hosts

opened: dict[str, Any] = {}  # by name: workbenches that this process opened or attached to


@dataclass(frozen=True, kw_only=True)
class Record:
    """A workbench on Ray that was opened and not closed.

    id: of this opening. digests: of its descriptions. address: of its cluster; None: this user's own Ray head. hosts:
    the process of each host, by the host's name. format: the record format of the writing version. roles: the model of
    each role, as text.
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
        """Whether all its hosts run; None: unknown, because some are on other machines."""
        states = {process.alive for process in self.hosts.values()}
        return False if False in states else None if None in states else True

    @property
    def running(self) -> list[psutil.Process]:
        """Its processes that run on this machine."""
        return [here for process in self.hosts.values() if (here := process.here)]

    @property
    def folder(self) -> Path:
        return _folder(self.id)


def check_name(name: str) -> str:
    """Return `name`; raise `BadInput` if no workbench can have this name."""
    text = isinstance(name, str) and name and all(c.isalnum() or c in "-_." for c in name) and not name.startswith(".")
    if not text or len(name.encode()) > NAME_BYTES:
        rule = "a workbench's name has letters, digits, '-', '_' and '.' (not as the first), and is not empty"
        raise BadInput(
            f"name {shown(name, 80)}", f"{rule}; it has at most {NAME_BYTES} bytes", "choose another, such as 'lab'"
        )
    return name


def write(record: Record, description: Description) -> Record:
    """Record a workbench; return the record, with its roles' models. Raises `WriteFailed`."""
    files.private_folder(record.folder)
    files.write_bytes(record.folder / "description.pkl", pickles.dumps(description))
    record = replace(record, roles={role: str(model) for role, model in description.models.items()})
    files.write_json(record.folder / "lab.json", asdict(record))
    return record


def rewrite(description: Description, hosts: dict[str, Process]) -> None:
    """Record the hosts of a workbench after a move, unless it was closed elsewhere."""
    record = next((record for record in records() if record.id == description.id), None)
    if record is not None:
        write(replace(record, hosts=hosts, digests=description.digests), description)


def check_room(description: Description) -> None:
    """Raise `WriteFailed` if the disk has no room for another record of a workbench."""
    with _unless_closed(description.id):
        files.check_room(_folder(description.id), 2 * len(pickles.dumps(description)) + ROOM_BYTES)


def records() -> list[Record]:
    """Return the records of all workbenches, by name."""
    found = []
    for path in (home() / "labs").glob("*/lab.json"):
        try:
            values = files.read_json(path)
            hosts = {name: Process(**process) for name, process in values.pop("hosts").items()}
            # a later version may have added fields
            known = {one.name: values[one.name] for one in fields(Record) if one.name in values}
            found.append(Record(**{**known, "digests": tuple(values["digests"])}, hosts=hosts))
        except BadInput as error:
            files.tell_once(str(error))
        except (OSError, ValueError, KeyError, TypeError):  # removed just now, or of another version
            continue
    return sorted(found, key=lambda record: record.name)


def find(name: str) -> Record | None:
    """Return the record of the workbench with that name, or None."""
    check_name(name)
    return next((record for record in records() if record.name == name), None)


def get(name: str) -> Record:
    """Return the record of the workbench with that name. Raises `NotFound`."""
    record = find(name)
    if record is None:
        names = ", ".join(record.name for record in records())
        raise NotFound(
            f"no workbench named {name!r}",
            f"there are: {names or 'none'}; only the process that opened it knows a workbench with backend='inline'",
            "open one with wb.open(...)",
        )
    return record


def description(record: Record) -> Description:
    """Return the description of a workbench. Raises `BadInput` where another version of workbench, or another user, has
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
            "its functions and worker classes are imported by the names of their modules",
            "run from the folder of that module or with PYTHONPATH=<folder>; or define the function in the notebook, "
            f"and open the workbench again. `wb stop {record.name}` works in any case",
        ) from error
    return value


def forget(lab: str) -> None:
    """Remove the record of the workbench with this id, but not of others with its name."""
    shutil.rmtree(_folder(lab), ignore_errors=True)


def append_to_journal(lab: str, entry: Mapping[str, Any]) -> None:
    """Add an entry to the journal, unless the workbench was closed elsewhere. Raises `WriteFailed`."""
    with _unless_closed(lab):
        journal_file.append(_folder(lab) / JOURNAL, entry)


def start_journal(lab: str, entry: Mapping[str, Any]) -> None:
    """Replace the journal by one entry, unless the workbench was closed elsewhere. Raises `WriteFailed`."""
    with _unless_closed(lab):
        journal_file.start(_folder(lab) / JOURNAL, entry)


def journal(lab: str) -> Iterator[dict[str, Any]]:
    return journal_file.entries(_folder(lab) / JOURNAL)


def owned_entries(lab: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of the handle that took over the workbench last; its first entry is a whole one. A slow kernel
    may have added its own entries after that, before it noticed."""
    controller = None
    for entry in journal(lab):
        if controller is None or "whole" in entry:
            controller = entry.get("controller")
        if entry.get("controller") == controller:
            yield entry


def counters(lab: str) -> dict[str, Any]:
    """Return the counters of the journal, without unpickling; empty where they cannot be read."""
    text = "{}"
    for entry in owned_entries(lab):
        text = entry.get("counters", text)
    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def journal_stamp(lab: str) -> journal_file.Stamp | None:
    """Return a value that changes whenever the journal is written; None where there is none."""
    return journal_file.stamp(_folder(lab) / JOURNAL)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The kernel that drives a workbench. controller: the handle in that process."""

    controller: str
    process: Process

    @property
    def lives(self) -> bool:
        """Whether it may still call stages: False after its process has ended."""
        return self.process.alive is not False

    @property
    def mine(self) -> bool:
        """Whether it is this process."""
        return self.process == Process.current()


def driving(lab: str, waiting: Callable[[], None] = lambda: None) -> AbstractContextManager[None]:
    """Inside, no other kernel can take over the workbench with this id, or switch it to another placement."""
    return locked(f"labs/{lab}/driving", waiting)


def own(lab: str, controller: str) -> None:
    """Record that this process's controller drives the workbench with this id."""
    with _unless_closed(lab):
        owner = Owner(controller=controller, process=Process.current())
        files.write_json(_folder(lab) / "owner.json", asdict(owner))


def owner(lab: str) -> Owner | None:
    """Return the kernel that drives the workbench with this id; None where it is unknown."""
    try:
        values = files.read_json(_folder(lab) / "owner.json")
        return Owner(controller=values["controller"], process=Process(**values["process"]))
    except BadInput as error:
        files.tell_once(str(error))
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def owner_stamp(lab: str) -> int | None:
    """Return a number that changes whenever another kernel takes over the workbench; None where no owner is known."""
    try:
        return (_folder(lab) / "owner.json").stat().st_mtime_ns
    except OSError:
        return None


def last_used_s(lab: str) -> float:
    """Return when a stage of the workbench was last called, unix time; 0.0: unknown."""
    try:
        return (_folder(lab) / JOURNAL).stat().st_mtime
    except OSError:
        return 0.0


def _folder(lab: str) -> Path:
    return home() / "labs" / lab


@contextlib.contextmanager
def _unless_closed(lab: str) -> Iterator[None]:
    """Suppress failed writes if the record is gone, because the workbench was closed."""
    try:
        yield
    except WriteFailed:
        if _folder(lab).is_dir():
            raise
