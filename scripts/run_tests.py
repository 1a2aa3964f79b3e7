"""Run the tests as `make test` does: `run_tests.py [pytest's arguments]`.

- All that a run makes lies in one temporary folder; what still lies there at its end, and each process that still
  lives, fails the run and is named with the test that it came from.
- Up to three tests that failed run once more, alone. Those that pass then are printed under `flaky:`.
- Where an earlier run was killed, its processes and its folder go first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "wbt-"  # of the folder of a run; short, as sockets lie in it
MOST_FLAKY = 3
LEAVING_S = 60.0  # how long what is ending at the end of a run may take
APPEARED = "appeared"  # tests/conftest.py writes here which test an entry of the folder came from
# pytest's folders; what every later process of this user is to find again, of torch's compiler and for sockets; and
# multiprocessing's, which Python removes at the exit of a process, but not where a worker of pytest-xdist is ended
EXPECTED = (APPEARED, "cache", "lock", "pytest-of-", "torchinductor_", "wb-", "pymp-")


def pytest_exit(folder: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", "-o", f"cache_dir={folder / 'cache'}", *arguments]
    run = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)})
    try:
        return run.wait()
    except BaseException:
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(LEAVING_S)
        raise


def failed_in(folder: Path) -> list[str]:
    """The tests that failed last, by node id."""
    note = folder / "cache" / "v" / "cache" / "lastfailed"
    return sorted(json.loads(note.read_text())) if note.exists() else []


def run_twice(folder: Path, arguments: list[str]) -> int:
    """Run the tests, then what failed. Exit status: 0 where each test passed at least once, and few needed a second
    try."""
    code = pytest_exit(folder, *arguments)
    failed = failed_in(folder)
    if code != 1 or not 0 < len(failed) <= MOST_FLAKY:
        return code
    print(f"\nrunning {len(failed)} failed tests again, alone", flush=True)
    code = pytest_exit(folder, "--durations=0", *kept(arguments), *failed)
    flaky = [name for name in failed if name not in failed_in(folder)]
    if flaky:
        print("flaky:", *flaky, sep="\n  ", flush=True)
    return code


def kept(arguments: list[str]) -> list[str]:
    """The marks that are asked for, which hold for a second run too."""
    return arguments[arguments.index("-m") :][:2] if "-m" in arguments else []


def processes_of(folder: Path) -> list[psutil.Process]:
    """Which processes, this one apart, were started below a run: they have its folder in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and str(folder) in process.environ().get("TMPDIR", ""):
                found.append(process)
    return found


def left_behind(folder: Path) -> list[str]:
    """What a run has left, after a while for what is just ending: a line for each process, and for each file, socket or
    folder."""
    until_s = time.monotonic() + LEAVING_S
    while (living := processes_of(folder)) and time.monotonic() < until_s:
        time.sleep(0.5)
    left = []
    for process in living:
        with contextlib.suppress(psutil.Error):
            test = process.environ().get("PYTEST_CURRENT_TEST", "no test")
            left.append(f"process {process.pid} of {test}: {' '.join(process.cmdline())[:160]}")
    note = folder / APPEARED
    came_from = dict(line.split("\t", 1) for line in note.read_text().splitlines()) if note.exists() else {}
    kept = (entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(EXPECTED))
    return left + [f"{entry} of {came_from.get(entry.name, 'no test')}" for entry in kept]


def end(folder: Path) -> None:
    """End all that a run started, and remove its folder."""
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """The folder of this run, which is locked as long as this process lives; those of runs that were killed go."""
    for old in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (old / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print(f"ending processes of a killed run: {old}", flush=True)
            end(old)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            end(folder)


def say_seconds(report: Path) -> None:
    """Print how long the tests of each folder took, from a report of JUnit's form."""
    seconds, items = Counter[str](), Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = ".".join(case.attrib["classname"].split(".")[:2])
        seconds[name] += float(case.attrib["time"])  # type: ignore[assignment]
        items[name] += 1
    print("\nseconds by folder:")
    for name, took_s in seconds.most_common():
        print(f"{took_s:8.0f} s {items[name]:6} tests  {name}")
    print(f"{sum(seconds.values()):8.0f} s {sum(items.values()):6} tests", flush=True)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = ROOT / "runs" / "tests.xml"
    report.unlink(missing_ok=True)
    with run_folder() as folder:
        code = run_twice(folder, [f"--junitxml={report}", *sys.argv[1:]])
        if left := left_behind(folder):
            print("left behind:", *left, sep="\n  ", flush=True)
            code = code or 1
    if report.exists():
        say_seconds(report)
    return code


if __name__ == "__main__":
    sys.exit(main())
