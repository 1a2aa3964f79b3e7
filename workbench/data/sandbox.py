"""Runs programs that a model wrote in a sandbox: bubblewrap (https://github.com/containers/bubblewrap).

    ran = wb.sandbox.run_python("print(6 * 7)", timeout_s=5)  # ran.stdout is "42\n"

A program sees the system's programs and this Python with its packages, read-only; a /tmp of its own; no other files,
processes, devices or environment variables, and no network unless you allow it. Time, memory, processes and threads,
and written bytes are limited; all its processes end with it. Without bubblewrap, `run_python` raises
`MissingDependency` and runs nothing. The sandbox does not protect from bugs in the kernel, whose user namespaces
bubblewrap uses. Processes and memory are checked every `TICK_S`: a program may exceed a limit for that long, and memory
that no process has mapped (`memfd_create`) is not counted.
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

MOST_FILE_BYTES = 2**24  # the largest size of each file that a program writes, including its output
MOST_SHOWN_BYTES = 2**16
TICK_S = 0.05
OWN_TASKS = 2  # bubblewrap's own processes
PROBE_TIMEOUT_S = 20.0
REMEDY = "install bubblewrap 0.8 or newer (Debian: `apt install bubblewrap`), and allow user namespaces"
PROGRAM = "/tmp/program.py"
# sets limits that the program inherits and cannot raise, then runs the program
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
    """The result of a program. ended: "exit", or the limit that ended the program. exit_code: 0 for success; None if a
    limit ended it. stdout, stderr: the first 64 KiB of each. last: the end of stdout. began: whether the program ran at
    all; if not, bubblewrap could not make the sandbox, and stderr has the reason."""

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

    stdin: the text that it reads. timeout_s: wall-clock time. memory_bytes: the limit of the program's memory, and also
        of its /tmp, and of its /dev/shm. threads: the most threads at one time, over all its processes. network: True
        shares the machine's network; False: none.
    Raises `MissingDependency` if no sandbox works here.
    """
    check_sandbox()
    return _run(program, stdin, timeout_s, memory_bytes, threads, network)


def check_sandbox(remedy: str = REMEDY) -> None:
    """Raise `MissingDependency` if no sandbox works on this machine."""
    if problem := problem_here():
        raise MissingDependency(f"no sandbox works here: {problem}", "programs of a model run only in one", remedy)


@functools.cache
def problem_here() -> str:
    """Return why no sandbox works on this machine; "" if one works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        ran = _run("", "", PROBE_TIMEOUT_S, 2**29, 32, False)
    except OSError as error:
        return f"bwrap: {error}"
    return "" if ran.exit_code == 0 else ran.stderr.strip()[:300] or f"bwrap ended with {ran.exit_code} ({ran.ended})"


def command(program: int, status: int, memory_bytes: int, network: bool) -> list[str]:
    """Return the command line of bubblewrap. program, status: file descriptors of the program's text, and of the file
    in which bubblewrap reports the program's end."""
    return [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",  # user, pid, network, mount, uts, ipc and cgroup namespaces
        *(["--share-net"] if network else []),
        "--die-with-parent",
        "--new-session",  # no terminal
        "--clearenv",
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        *("--size", str(memory_bytes), "--tmpfs", "/tmp"),  # before other mounts: the interpreter may be below /tmp
        *_seen(network),
        *("--proc", "/proc", "--dev", "/dev", "--chdir", "/tmp"),
        *("--ro-bind-data", str(program), PROGRAM),
        # these file systems are in memory, and would have no limit by default
        *("--size", str(memory_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--json-status-fd", str(status), "--cap-drop", "ALL", "--"),
        *_python(PROGRAM, memory_bytes),
    ]


def _python(path: str, memory_bytes: int) -> list[str]:
    return [sys.executable, "-I", "-c", START, path, str(memory_bytes), str(MOST_FILE_BYTES)]


def _seen(network: bool) -> Iterator[str]:
    """Yield bubblewrap's arguments for the read-only parts of the file system that a program sees."""
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
    """Like `run_python`, but only with limits: the program has all your rights."""
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
    """Run a command, and kill it if it passes a limit. Return its output, and how it ended."""
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
                elif used_bytes > 2 * memory_bytes:  # counts shared memory too, with files in its /tmp and /dev/shm
                    ended = "memory"
        finally:
            # bubblewrap's end ends everything in the sandbox; without bubblewrap, this ends the program's session
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
    """Return the number of threads of a process and its descendants, and their bytes of memory without file pages."""
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
