"""Whether the kernel can react to buttons now."""

from __future__ import annotations

import asyncio
import time

from workbench_widgets.front_end import in_notebook

SLOW_S = 0.35


class Pulse:
    """Pings the kernel's event loop, which also handles buttons. While a cell blocks the kernel, no answer comes."""

    def __init__(self) -> None:
        # outside a kernel there are no buttons, even if there is an event loop
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop() if in_notebook() else None
        self._asked_s = 0.0

    def _answer(self) -> None:
        self._asked_s = 0.0

    def blocked(self, slow_s: float = SLOW_S) -> bool:
        """Whether the loop has not answered for `slow_s` seconds. Called again and again, from another thread."""
        if self._loop is None or self._loop.is_closed():
            return False
        if self._asked_s == 0.0:
            self._asked_s = time.monotonic()
            self._loop.call_soon_threadsafe(self._answer)
            return False
        return time.monotonic() - self._asked_s > slow_s
