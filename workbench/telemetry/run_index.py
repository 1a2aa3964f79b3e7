"""Where in a growing file of JSON lines those of each stage call are, so that they are read without the others."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from pathlib import Path

from workbench.support.files import opened

_RUN = re.compile(rb'"run":(\d+),')  # a quote inside a text has a backslash before it: this is the key


class RunIndex:
    """The lines of one file by the number of their run; any thread may ask. Each asking looks at what is new."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._places: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # by run: offset and length
        self._lock = threading.Lock()

    def lines(self, run: int) -> list[bytes]:
        """The whole lines of a run, in order."""
        if not self._path.exists():
            return []
        with self._lock, opened(self._path, limit=None) as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                if found := _RUN.search(line):
                    self._places[int(found[1])].append((self._offset, len(line)))
                self._offset += len(line)
            lines = []
            for offset, length in self._places.get(run, []):
                file.seek(offset)
                lines.append(file.read(length))
        return lines
