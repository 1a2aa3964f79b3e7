"""What code reads of its process: environment variables, the current folder, and the search path of modules."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessEnvironment:
    """The environment of one process. folder: None where it was deleted. path: `sys.path`."""

    variables: Mapping[str, str]
    folder: str | None
    path: tuple[str, ...]

    @classmethod
    def here(cls, **variables: str) -> ProcessEnvironment:
        """Return this process's environment. variables: replace those of `os.environ`."""
        try:
            folder = os.getcwd()
        except OSError:
            folder = None
        # Python ignores other entries of sys.path, such as Paths
        return cls({**os.environ, **variables}, folder, tuple(entry for entry in sys.path if isinstance(entry, str)))

    def since(self, before: ProcessEnvironment) -> dict[str, Any]:
        """Return the changes: variables by name (None: removed), the folder, and the entries of the path that were
        added and removed. Empty without changes."""
        names = {**before.variables, **self.variables}
        variables = {n: self.variables.get(n) for n in names if self.variables.get(n) != before.variables.get(n)}
        changes = {
            "variables": variables,
            "folder": self.folder if self.folder != before.folder else None,
            "added": [entry for entry in self.path if entry not in before.path],
            "removed": [entry for entry in before.path if entry not in self.path],
        }
        return {name: change for name, change in changes.items() if change}


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process's environment; None: remove the variable."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def with_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has `values`; afterwards the old values."""
    before = {name: os.environ.get(name) for name in values}
    set_variables(values)
    try:
        yield
    finally:
        set_variables(before)


def apply_changes(changes: Mapping[str, Any]) -> None:
    """Apply the changes of another process's environment, see `ProcessEnvironment.since`, to this process."""
    set_variables(changes.get("variables", {}))
    if "folder" in changes:
        with contextlib.suppress(OSError):
            os.chdir(changes["folder"])
    gone = changes.get("removed", ())
    sys.path[:] = [*changes.get("added", ()), *(entry for entry in sys.path if entry not in gone)]
