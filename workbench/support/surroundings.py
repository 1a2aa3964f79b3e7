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
        """What has changed: variables by name, None for those that are gone, folder and path. Empty: nothing."""
        names = {**before.variables, **self.variables}
        variables = {n: self.variables.get(n) for n in names if self.variables.get(n) != before.variables.get(n)}
        changed: dict[str, Any] = {"variables": variables} if variables else {}
        return changed | {n: getattr(self, n) for n in ("folder", "path") if getattr(self, n) != getattr(before, n)}

    def with_changes(self, changes: Mapping[str, Any]) -> Surroundings:
        """These, with what has changed in another process."""
        variables = {**self.variables, **changes.get("variables", {})}
        return Surroundings(
            {name: value for name, value in variables.items() if value is not None},
            changes.get("folder", self.folder), changes.get("path", self.path),
        )  # fmt: skip

    def take(self) -> None:
        """Make them this process's own."""
        for name in os.environ.keys() - self.variables.keys():
            del os.environ[name]
        os.environ.update(self.variables)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
        sys.path[:] = self.path
