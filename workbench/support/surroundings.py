"""What code reads of its process: environment variables, the current folder, and where modules are looked for."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Surroundings:
    """Those of one process. folder: None where it is gone. path: `sys.path`."""

    variables: Mapping[str, str]
    folder: str | None
    path: tuple[str, ...]

    @classmethod
    def here(cls, **variables: str) -> Surroundings:
        """This process's own. variables: that differ."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = None
        # Python leaves out other entries of sys.path, such as Paths
        return cls({**os.environ, **variables}, folder, tuple(entry for entry in sys.path if isinstance(entry, str)))

    def since(self, before: Surroundings) -> dict[str, Any]:
        """What has changed: variables by name, None for those that are gone, the folder, and entries of the path that
        have come (added) and gone (removed). Empty: nothing."""
        names = {**before.variables, **self.variables}
        variables = {n: self.variables.get(n) for n in names if self.variables.get(n) != before.variables.get(n)}
        changes = {
            "variables": variables,
            "folder": self.folder if self.folder != before.folder else None,
            "added": [entry for entry in self.path if entry not in before.path],
            "removed": [entry for entry in before.path if entry not in self.path],
        }
        return {name: change for name, change in changes.items() if change}

    def take_changes(self, changes: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Make what has changed in another process this process's own, whose surroundings were these before. last: the
        changes that it took before, of which those that are no longer there go."""
        variables = changes.get("variables", {})
        for name in {**last.get("variables", {}), **variables}:
            value = variables.get(name) if name in variables else self.variables.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _go_to(changes.get("folder", self.folder))
        gone = changes.get("removed", ())
        sys.path[:] = [*changes.get("added", ()), *(entry for entry in self.path if entry not in gone)]

    def take(self) -> None:
        """Make them this process's own."""
        for name in os.environ.keys() - self.variables.keys():
            del os.environ[name]
        os.environ.update(self.variables)
        _go_to(self.folder)
        sys.path[:] = self.path


def _go_to(folder: str | None) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
