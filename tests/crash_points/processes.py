"""Kernels that end, stop or are interrupted right after the nth call that changes a file.

`crash_points.c` counts these calls, in the C library, and sends the signal: every file that Python or safetensors
writes goes through there, in whichever thread. A fork server has imported everything, so that a kernel starts at once.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
import traceback
from multiprocessing.connection import Connection
from multiprocessing.forkserver import _forkserver, ensure_running
from pathlib import Path
from typing import Any

import psutil

from workbench.support.files import home

SOURCE = Path(__file__).with_name("crash_points.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
PRELOADED = [
    "workbench.launch.opening", "workbench.workers.host", "workbench.algorithms.ppo", "workbench.engines.training",
    "workbench.engines.generation", "workbench.checks", "transformers.models.llama.modeling_llama", "pandas", "ray",
    "tests.cases",
]  # fmt: skip
LOST = "the process ended"


@functools.cache
def started() -> str:
    """Compile the library, and start the fork server with it; the library's path. There is one of each a process."""
    library = home() / "crash_points.so"  # the home of these tests, which goes with them
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    before, os.environ["LD_PRELOAD"] = os.environ.get("LD_PRELOAD"), str(library)
    try:
        _forkserver._stop()  # type: ignore[attr-defined]
        ensure_running()
    finally:
        del os.environ["LD_PRELOAD"]
        if before is not None:
            os.environ["LD_PRELOAD"] = before
    return str(library)


def stop() -> None:
    """End the fork server: the next tests start one that imports what they need, and counts no calls."""
    if started.cache_info().currsize:
        _forkserver._stop()  # type: ignore[attr-defined]
        started.cache_clear()


class Kernels:
    """Starts kernels, in a folder. root: what is written below it is counted; default: the folder."""

    def __init__(self, folder: Path, root: str = "") -> None:
        self._folder, self._root, self.living = folder, root or str(folder), list[Kernel]()
        self._library, self._context = started(), multiprocessing.get_context("forkserver")

    def start(self, text: str = "") -> Kernel:
        """A new one, in which `text` has been run."""
        kernel = Kernel(self._context, self._folder, self._root, self._library)
        self.living.append(kernel)
        if text:
            kernel.run(text)
        return kernel

    def close(self) -> None:
        """End all."""
        for kernel in self.living:
            kernel.kill()


class Kernel:
    """One process, whose texts are run one by one."""

    def __init__(self, context: Any, folder: Path, root: str, library: str) -> None:
        self._folder = folder
        self._answers, mine = context.Pipe()
        environment = {k: v for k, v in os.environ.items() if k.startswith(("WORKBENCH", "OMP", "RAY"))}
        self.process = context.Process(target=serve, args=(mine, str(folder), root, library, environment))
        self.process.start()
        mine.close()

    def run(self, text: str) -> Any:
        """Run a text that has to work; the value of its variable `out`."""
        error, out = self.try_to(text)
        assert not error, error
        return out

    def try_to(self, text: str) -> tuple[str, Any]:
        """The error of a text, with its class first, and its `out`; `LOST` where the process ended."""
        self.begin(text)
        return self.answer()

    def begin(self, text: str) -> None:
        """Run a text, without waiting for it."""
        self._answers.send(text)

    def answer(self, timeout_s: float = 120) -> tuple[str, Any]:
        """Of what was begun."""
        try:
            if not self._answers.poll(timeout_s):
                raise TimeoutError(f"no answer for {timeout_s:g} s")
            found: tuple[str, Any] = self._answers.recv()
            return found
        except (EOFError, ConnectionResetError):
            return LOST, None

    def arm(self, point: int, sent: signal.Signals, *, half: bool = False) -> None:
        """Have the signal sent after that call, counted from now on; 0: never. half: of what it writes, half is
        written."""
        self.run(f"arm({point}, {int(sent)}, {half})")

    def count(self, text: str) -> list[str]:
        """The calls that a text makes, as "write /path"."""
        self.arm(0, signal.SIGKILL)
        self.run(text)
        self.disarm()
        lines = (self._folder / "calls.txt").read_text().splitlines()
        return [line.partition(" ")[2] for line in lines]

    def disarm(self) -> int:
        """Send no signal any more; the calls since `arm`."""
        return int(self.run("out = disarm()"))

    def wait_until_stopped(self) -> bool:
        """Wait for a SIGSTOP that was armed; whether it came before what was begun had ended."""
        process = psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            if self._answers.poll(0.005):
                return False
        return True

    def go_on(self) -> None:
        """After a SIGSTOP."""
        psutil.Process(self.process.pid).resume()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()


def serve(answers: Connection, folder: str, root: str, library: str, environment: dict[str, str]) -> None:
    """The process of a kernel."""
    os.environ.pop("LD_PRELOAD", None)
    os.environ |= environment
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between two texts
    found = ctypes.CDLL(library)

    def arm(point: int, sent: int, half: bool) -> None:
        log = os.open("calls.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        found.crash_arm(root.encode(), ctypes.c_long(point), sent, int(half), log)

    names: dict[str, Any] = {"arm": arm, "disarm": found.crash_disarm, "__name__": "kernel"}
    while True:
        try:
            text = answers.recv()
        except EOFError:
            os._exit(0)
        error = ""
        names["out"] = None
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            exec(compile(text, "cell", "exec"), names)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except BaseException as raised:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            error = f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_exception(raised)[-6:])}"
        answers.send((error, names["out"]))
