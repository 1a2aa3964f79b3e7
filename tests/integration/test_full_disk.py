"""A file system of a few MiB in memory, filled to its last byte: the system refuses every write, no test does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.backends.test_cluster import processes_of

MOUNTING = ["unshare", "--map-root-user", "--mount", "sh", "-c"]


def can_mount() -> bool:
    """Whether this user may mount a file system in a name space of its own."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*MOUNTING, "mount -t tmpfs -o size=1m none /mnt"], capture_output=True)
    return tried.returncode == 0


def on_small_disk(what: str, folder: Path, mib: int) -> None:
    disk = folder / "disk"
    disk.mkdir()
    command = f'mount -t tmpfs -o size={mib}m none "{disk}" && exec "{sys.executable}" -m tests.integration.full_disk'
    done = subprocess.run(
        [*MOUNTING, f'{command} {what} "{disk}"'], capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert "as it should be" in done.stdout, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


pytestmark = pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")


@pytest.mark.slow
def test_stages_go_on_and_calls_that_write_say_why_they_cannot(tmp_path: Path) -> None:
    on_small_disk("stages", tmp_path, 12)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_opening_or_a_move_that_cannot_be_recorded_leaves_no_process(tmp_path: Path) -> None:
    on_small_disk("opening", tmp_path, 64)
    deadline = time.monotonic() + 300
    while (left := processes_of(tmp_path / "disk" / "home")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.mark.slow
@pytest.mark.thorough
def test_an_export_leaves_the_script_that_was_there(tmp_path: Path) -> None:
    on_small_disk("exporting", tmp_path, 1)
