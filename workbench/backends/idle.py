"""A workbench that nobody has used for hours closes itself, so that what was forgotten does not hold a machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from workbench.backends.registry import last_used_s
from workbench.messages.calls import HostInfo

LOOK_S = 60.0  # at most, how often it is looked at
GRACE_S = 120.0  # how long `wb stop` may take before a host ends itself


class Idle:
    """Watches when a host last worked. One host of a workbench, that of its first device, ends it after `info.idle_s`
    seconds in which neither it nor, as far as is known here, any other has worked; None: never."""

    def __init__(self, info: HostInfo) -> None:
        self._info, self._at_work, self._last_s = info, 0, time.monotonic()
        if info.idle_s is not None:
            threading.Thread(target=self._watch, name="idle", daemon=True).start()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, it is at work."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1
            self._last_s = time.monotonic()

    def _watch(self) -> None:
        assert self._info.idle_s is not None
        while True:
            called_s = time.time() - last_used_s(self._info.lab)  # of any of its roles
            if not self._at_work and min(time.monotonic() - self._last_s, called_s) > self._info.idle_s:
                break
            time.sleep(min(LOOK_S, self._info.idle_s / 4))
        print(f"closing: nobody has used this workbench for {self._info.idle_s / 3600:g} h", flush=True)
        # a grandchild: Ray ends the children of a process that it ends, and this one has more to do after that
        command = ["/bin/sh", "-c", '"$0" "$@" >/dev/null 2>&1 &', sys.executable, "-m", "workbench", "stop", "--id"]
        with contextlib.suppress(OSError):
            subprocess.run([*command, self._info.lab], start_new_session=True)
        time.sleep(GRACE_S)
        os._exit(0)  # the record is on another machine
