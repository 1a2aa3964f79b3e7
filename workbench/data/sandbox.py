"""Programs that a model wrote, in a sandbox of the system: bubblewrap (https://github.com/containers/bubblewrap).

    ran = wb.sandbox.run_python("print(6 * 7)", timeout_s=5)  # ran.stdout is "42\n"

A program sees the system's programs and this Python with its packages, read-only; a /tmp of its own; no other file, no
process, no device, no environment variable, and no network unless it is asked for. Time, memory, processes with their
threads, and what it writes are limited; all that it has started ends with it. Where there is no bubblewrap,
`MissingDependency` says so: nothing runs without a sandbox. Not kept from it: mistakes of the kernel, on whose user
namespaces bubblewrap builds. Processes and memory are counted every `TICK_S`: a program may pass a limit for that long,
and memory that no process has mapped (`memfd_create`) is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from workbench.errors import MissingDependency
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveFloat, PositiveInt

MOST_FILE_BYTES = 2**24  # of each file that a program writes, its output among them
MOST_SHOWN_BYTES = 2**16
TICK_S = 0.05
OWN_TASKS = 2  # of bubblewrap
PROBE_TIMEOUT_S = 20.0
REMEDY = "install bubblewrap 0.8 or newer (Debian: `apt install bubblewrap`), and allow user namespaces"
PROGRAM = "/tmp/program.py"
# limits that the program inherits and cannot raise; then the program
START = """
import resource, runpy, sys
path, memory, files = sys.argv[1], *map(int, sys.argv[2:])
for name, limit in (("DATA", memory), ("FSIZE", files), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
sys.argv[:] = ["program.py"]
runpy.run_path(path, run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of a program. ended: "exit", or the limit that ended it. exit_code: 0 where all went well; None: it was
    ended. stdout, stderr: the first 64 KiB of each. last: the end of stdout. began: whether the program ran at all;
    else bubblewrap could not make the sandbox, and says why in stderr."""

    ended: Literal["exit", "time", "threads", "memory"]
    exit_code: int | None
    stdout: str
    stderr: str
    duration_s: float
    last: str = field(default="", repr=False)
    began: bool = field(default=True, repr=False)


@checked_call("wb.sandbox.run_python")
def run_python(
    program: str,
    *,
    stdin: str = "",
    timeout_s: PositiveFloat = 10.0,
    memory_bytes: PositiveFloat = 2**29,
    threads: PositiveInt = 32,
    network: bool = False,
) -> Ran:
    """Run a Python program in a sandbox, and wait until it has ended.

    memory_bytes: of the program, and again of its /tmp, and of its /dev/shm. threads: of all its processes, at one
        time.
    Raises `MissingDependency` where no sandbox works here.
    """
    check_sandbox()
    return _run(program, stdin, timeout_s, memory_bytes, threads, network)


def check_sandbox(remedy: str = REMEDY) -> None:
    """Raise `MissingDependency` where no sandbox works on this machine."""
    if problem := problem_here():
        raise MissingDependency(f"no sandbox works here: {problem}", "programs of a model run in nothing else", remedy)


@functools.cache
def problem_here() -> str:
    """Why no sandbox works on this machine; empty where one does."""
    if shutil.which("bwrap") is None:
        return "there is no bwrap"
    try:
        ran = _run("", "", PROBE_TIMEOUT_S, 2**29, 32, False)
    except OSError as error:
        return f"bwrap: {error}"
    return "" if ran.exit_code == 0 else ran.stderr.strip()[:300] or f"bwrap ended with {ran.exit_code} ({ran.ended})"


def command(program: int, status: int, memory_bytes: int, network: bool) -> list[str]:
    """The command line of bubblewrap. program, status: descriptors of the text, and of what bubblewrap says about the
    program's end."""
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",  # users, processes, network, mounts, names, shared memory, groups
        *(["--share-net"] if network else []),
        "--die-with-parent",
        "--new-session",  # no terminal
        "--clearenv",
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        *("--size", str(memory_bytes), "--tmpfs", "/tmp"),  # first: the interpreter may lie below it
        *_seen(network),
        *("--proc", "/proc", "--dev", "/dev", "--chdir", "/tmp"),
        *("--ro-bind-data", str(program), PROGRAM),
        # these lie in memory, without a limit otherwise
        *("--size", str(memory_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--json-status-fd", str(status), "--cap-drop", "ALL", "--"),
        *_python(PROGRAM, memory_bytes),
    ]


def _python(path: str, memory_bytes: int) -> list[str]:
    return [sys.executable, "-I", "-c", START, path, str(memory_bytes), str(MOST_FILE_BYTES)]


def _seen(network: bool) -> Iterator[str]:
    """The parts of the file system that a program sees, read-only."""
    for name in ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), name)
        elif path.is_dir():
            yield from ("--ro-bind", name, name)
    names = ["ld.so.cache", "alternatives", *(["resolv.conf", "ssl", "nsswitch.conf", "hosts"] if network else [])]
    for name in names:
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
    for folder in dict.fromkeys((sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent.parent))):
        if Path(folder) not in (Path("/"), Path("/usr")):
            yield from ("--ro-bind", folder, folder)


def _run(program: str, stdin: str, timeout_s: float, memory_bytes: float, threads: int, network: bool) -> Ran:
    with _file(program.encode(errors="replace")) as text, _file(b"") as status:
        passed = (text.fileno(), status.fileno())
        ran = _watched(
            command(*passed, int(memory_bytes), network), stdin, timeout_s, memory_bytes, threads, pass_fds=passed
        )  # fmt: skip
        return ran if ran.ended != "exit" else replace(ran, began="exit-code" in _beginning(status))


def run_without_sandbox(program: str, *, stdin: str, timeout_s: float, memory_bytes: int, threads: int) -> Ran:
    """As `run_python`, with nothing around the program but limits: it may do what you may."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program, errors="replace")
        environment = {"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"}
        return _watched(
            _python(str(path), int(memory_bytes)), stdin, timeout_s, memory_bytes, threads, cwd=folder, env=environment
        )  # fmt: skip


def _watched(
    words: Sequence[str], stdin: str, timeout_s: float, memory_bytes: float, threads: int, **options: Any
) -> Ran:
    """Run a command, and end it where it passes a limit: its output, and how it ended."""
    with _file(stdin.encode(errors="replace")) as given, _file(b"") as out, _file(b"") as err:
        begun_s = time.monotonic()
        process = subprocess.Popen(words, stdin=given, stdout=out, stderr=err, start_new_session=True, **options)
        ended: Literal["exit", "time", "threads", "memory"] = "exit"
        try:
            while ended == "exit":
                try:
                    process.wait(TICK_S)
                    break
                except subprocess.TimeoutExpired:
                    tasks, used_bytes = _use_of(process.pid)
                if time.monotonic() - begun_s > timeout_s:
                    ended = "time"
                elif tasks > threads + OWN_TASKS:
                    ended = "threads"
                elif used_bytes > 2 * memory_bytes:  # what it shares, with files in its /tmp and /dev/shm
                    ended = "memory"
        finally:
            # with bubblewrap ends all that is in the sandbox; without it, what the program started in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ran(
            ended=ended,
            exit_code=process.returncode if ended == "exit" else None,
            stdout=_beginning(out),
            stderr=_beginning(err),
            last=_end_of(out),
            duration_s=time.monotonic() - begun_s,
        )


def _use_of(pid: int) -> tuple[int, int]:
    """The threads of a process with all below it, and the bytes that they hold, without the pages of files."""
    threads = kib = 0
    with contextlib.suppress(psutil.Error):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                threads += process.num_threads()
                status = Path(f"/proc/{process.pid}/status").read_text()
                kib += sum(int(n) for n in re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", status, re.MULTILINE))
    return threads, 1024 * kib


def _file(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(content)
    file.seek(0)
    return file


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - 256))
    return file.read().decode(errors="replace")


def _beginning(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_SHOWN_BYTES).decode(errors="replace")
