"""Kernels of notebooks, driven as a front end drives them."""

from __future__ import annotations

import queue
import re
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

LOST = "lost by the kernel"
ROOT = Path(__file__).resolve().parents[2]


class Kernel:
    """A kernel whose cells are run one by one. folder: where it works."""

    def __init__(self, folder: Path) -> None:
        self._manager, self._client = start_new_kernel(cwd=str(folder))
        self.run(f"import sys; sys.path.insert(0, {str(ROOT)!r})")

    def run(self, text: str) -> str:
        """A cell that has to work; what it printed."""
        error, said = self.cell(text)
        assert not error, error
        return said

    def cell(self, text: str) -> tuple[str, str]:
        """The error of a cell, as the notebook shows it, and what it printed."""
        return self.answer(self.start(text))

    def start(self, text: str) -> str:
        """Begin a cell, and return when the kernel is at it; what `answer` takes."""
        request: str = self._client.execute(text)
        while True:
            message = self._client.get_iopub_msg(timeout=240)
            if message["parent_header"].get("msg_id") == request and message["msg_type"] == "execute_input":
                return request

    def answer(self, request: str, timeout_s: float = 300) -> tuple[str, str]:
        """Wait for a cell, see `cell`. One that hangs fails here."""
        error, said = "", ""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                message: Any = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                said += content["text"]
            elif message["msg_type"] == "error":
                error = f"{content['ename']}: " + re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return error, said
        raise TimeoutError("a cell hangs")

    def wait_until_shown(self, text: str) -> None:
        """Wait for a text in what the cell under way shows."""
        while text not in str(self._client.get_iopub_msg(timeout=120)["content"]):
            pass

    def answer_interrupted(self, request: str) -> tuple[str, str]:
        """`answer` for a cell that was interrupted. In the moment before and after the cell's own code an interrupt
        meets the kernel's, which then forgets the request: the next cell is answered, and this one never."""
        try:
            return self.answer(request, timeout_s=20)
        except TimeoutError:
            self.run("pass")
            return LOST, ""

    def interrupt(self) -> None:
        """What the stop button does."""
        self._manager.interrupt_kernel()

    def wait_until_gone(self) -> None:
        """Wait for a process that ends by itself."""
        last = time.monotonic() + 120
        while self._manager.is_alive():
            assert time.monotonic() < last, "the kernel lives"
            time.sleep(0.02)

    def kill(self) -> None:
        """End its process at once, as a machine that runs out of memory does."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
