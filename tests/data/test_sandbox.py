"""What a program in the sandbox can reach, and how it is ended. Where there is no bubblewrap: that nothing runs."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.data import sandbox
from workbench.data.sandbox import command, problem_here, run_python
from workbench.errors import BadInput, MissingDependency
from workbench.launch.doctor import _sandbox

here = pytest.mark.skipif(bool(problem_here()), reason=f"no sandbox: {problem_here()}; `apt install bubblewrap`")


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem_here.cache_clear()
    for problem in ("bwrap is not installed", "bwrap: No permissions"):
        with pytest.raises(MissingDependency, match=rf"no sandbox works here: {problem}.*install bubblewrap"):
            run_python("print(1)")
        check = _sandbox()
        assert not check.ok and not check.needed and "install bubblewrap" in check.remedy
        broken = tmp_path / "bwrap"  # one that may not make namespaces
        broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        broken.chmod(0o700)
        problem_here.cache_clear()
    problem_here.cache_clear()


def test_wrong_arguments_are_refused_first() -> None:
    for wrong in ({"timeout_s": 0}, {"memory_bytes": "1"}, {"threads": True}):
        with pytest.raises(BadInput, match=next(iter(wrong))):
            run_python("", **wrong)
    with expect_error(BadInput, rule="must be a text"):
        run_python(b"print(1)")  # type: ignore[arg-type]


def test_the_command_line_shares_nothing_that_it_need_not() -> None:
    words = command(7, 8, 2**20, False)
    assert "--unshare-all" in words and "--die-with-parent" in words and "--clearenv" in words
    assert not {"--share-net", "--bind", "--dev-bind", "--ro-bind-fd"} & set(words)
    assert "--share-net" in command(7, 8, 2**20, True)
    shared = {words[i + 2] for i, word in enumerate(words) if word == "--ro-bind"}
    assert not shared & {"/", "/home", "/root", "/etc", "/tmp", "/run", "/var", str(Path.home())}


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@here
def test_files_environment_processes_and_network_are_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listening: int
) -> None:
    (tmp_path / "private").write_text("secret")
    monkeypatch.setenv("API_TOKEN", "secret")
    look = f"""
import os, socket
def tried(act):
    try:
        return repr(act())
    except OSError as error:
        return type(error).__name__
print(tried(lambda: open({str(tmp_path / "private")!r}).read()))
print(tried(lambda: open("/etc/passwd").read()))
print(tried(lambda: open("/usr/lib/written", "w")))
print(tried(lambda: open("/tmp/program.py", "w")))
print(tried(lambda: os.kill({os.getpid()}, 0)))
print("API_TOKEN" in os.environ, len([p for p in os.listdir("/proc") if p.isdigit()]) < 5)
print(tried(lambda: socket.create_connection(("127.0.0.1", {listening}), timeout=2)))
print(tried(lambda: open("/tmp/own", "w").write("x")))
"""
    found = run_python(look).stdout.split("\n")
    assert found == [
        "FileNotFoundError", "FileNotFoundError", "OSError", "OSError", "ProcessLookupError", "False True",
        "ConnectionRefusedError", "1", "",
    ]  # fmt: skip
    assert "secret" not in run_python(look, network=True).stdout
    assert run_python(look, network=True).stdout.split("\n")[6].startswith("<socket")


@here
def test_time_memory_processes_threads_and_output_are_limited() -> None:
    children, threads, begun_s = psutil.Process().children(), threading.active_count(), time.monotonic()
    hangs = run_python("import re; re.match('(a+)+$', 'a' * 60 + 'b')", timeout_s=0.5)
    assert (hangs.ended, hangs.exit_code) == ("time", None) and time.monotonic() - begun_s < 60
    eats = run_python("x = bytearray(2**30)")
    assert eats.exit_code == 1 and "MemoryError" in eats.stderr
    assert run_python("import subprocess; print(subprocess.run(['/bin/true']).returncode)").stdout == "0\n"
    forks = run_python("import os, time\nfor _ in range(7): os.fork()\ntime.sleep(20)")
    assert forks.ended == "threads"
    thread = "Thread(target=time.sleep, args=(9,), daemon=True).start()"
    begin = "import time; from threading import Thread\nfor _ in range({}): " + thread
    assert run_python(begin.format(8)).exit_code == 0
    many = run_python(begin.format(100) + "\ntime.sleep(20)", memory_bytes=2**32)
    assert many.ended == "threads"
    assert set(psutil.Process().children()) <= set(children) and threading.active_count() == threads
    loud = run_python("while True: print('x' * 1000)")
    assert loud.ended == "exit" and loud.exit_code != 0 and len(loud.stdout) == sandbox.MOST_SHOWN_BYTES
    full = run_python("open('/tmp/x', 'wb').write(bytes(2**25))")
    assert full.exit_code != 0


@here
def test_a_program_reads_its_input_and_prints() -> None:
    ran = run_python("print(input()[::-1])", stdin="abc\n")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended) == ("cba\n", "", 0, "exit")
    assert wb.sandbox.run_python is run_python


@here
@pytest.mark.parametrize("folder", ["/", "/dev", "/dev/shm", "/etc"])
def test_no_folder_of_the_sandbox_takes_more_than_its_memory(folder: str) -> None:
    ran = run_python(
        f"""
for n in range(20):
    with open("{folder}/file" + str(n), "wb") as file:
        file.write(bytes(15 * 2**20))
print("all")
""", memory_bytes=2**27,
    )  # fmt: skip
    assert ran.exit_code != 0 and "all" not in ran.stdout
    assert "Read-only file system" in ran.stderr or "No space left" in ran.stderr, ran


@here
def test_memory_that_a_program_could_share_is_limited() -> None:
    ran = run_python(
        """
import mmap, time
shared = mmap.mmap(-1, 2**29)
for at in range(0, len(shared), 4096):
    shared[at] = 1
time.sleep(20)
""", memory_bytes=2**27, timeout_s=15.0,
    )  # fmt: skip
    assert ran.ended == "memory"
