"""The agent of `lab.serve()`: it tells the kernel where the server is, and waits until that says stop."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from workbench.support.files import write_json

ADDRESS, STOP, POLL_S = "address.json", "stop", 0.05


@dataclass(frozen=True)
class EndpointCall:
    """folder: private, of the kernel with process id `kernel`. Where that process or the folder is gone, it stops."""

    folder: str
    kernel: int
    records = False  # nothing that is answered is part of a row

    def __call__(self, base_url: str, api_key: str) -> None:
        folder = Path(self.folder)
        if not folder.is_dir():
            return
        write_json(folder / ADDRESS, {"base_url": base_url, "api_key": api_key})
        while folder.is_dir() and not (folder / STOP).exists() and _lives(self.kernel):
            time.sleep(POLL_S)


def read_address(folder: Path) -> tuple[str, str] | None:
    """The URL and the key, once they are known."""
    try:
        found = json.loads((folder / ADDRESS).read_text())
    except FileNotFoundError:
        return None
    return str(found["base_url"]), str(found["api_key"])


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is of another user, as inside a container
        pass
    return True
