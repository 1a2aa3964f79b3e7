"""What the tests of a full disk run, on a small file system of its own: python -m tests.integration.full_disk WHAT."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, hosts_of, tiny_lab
from workbench.backends.cluster import running_head
from workbench.errors import WorkbenchError

MIB = 2**20
FIGURES = "bytes are free"


def fill(disk: Path) -> Path:
    """A file that takes all that is free."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (MIB, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def refused(call: Callable[[], Any]) -> None:
    """A call that says what cannot be written, and how much is free."""
    with pytest.raises(WorkbenchError, match=r"No space left on device.* bytes are free there|GiB are free"):
        call()


def stages(disk: Path) -> None:
    """Stages go on while the disk is full; everything that a call is asked to write says why it cannot be."""
    with tiny_lab("full", disk / "runs", backend="inline") as lab:
        ppo = wb.PPO(lab, prompts=4, samples=2, sampling=wb.Sampling(max_new_tokens=4))
        ppo.iterate()
        filler = fill(disk)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            made = [ppo.iterate() for _ in range(3)]
            lab.autosave(1)
            made.append(ppo.iterate())
        said = [str(one.message) for one in warned if "telemetry" in str(one.message)]
        assert len(said) == 1, said
        assert FIGURES in said[0]
        assert "rows of telemetry not on disk" in repr(lab), repr(lab)
        assert any("no checkpoint after iteration" in str(one.message) for one in warned)
        waiting = lab.telemetry.unwritten
        assert waiting > 100
        assert list(lab.metrics("update_actor")["iteration"]) == [1, 2, 3, 4, 5]
        batch = lab.put({"x": list(range(100_000))})
        refused(lambda: batch.save(disk / "batch.safetensors"))
        refused(lambda: lab.save(disk / "saved"))
        refused(lambda: lab.actor.save_model(disk / "model"))
        refused(lambda: lab.trace(disk / "trace.json"))
        refused(lambda: tiny_lab("other", disk / "other", backend="inline"))
        lab.drop("critic")
        lab.add("critic", TINY)
        left = [path for path in disk.rglob("*") if path.is_file() and not path.is_relative_to(lab.run_folder)]
        assert left == [filler], left
        filler.unlink()
        lab.autosave(None)
        made.append(wb.GRPO(lab, prompts=4, samples=2, sampling=wb.Sampling(max_new_tokens=4)).iterate())
        lab.telemetry.flush()
        assert lab.telemetry.unwritten == 0
        assert batch.save(disk / "batch.safetensors").is_file()
        assert lab.save(disk / "saved", models=False).iteration == 6
        from workbench.telemetry.store import TelemetryStore

        on_disk = TelemetryStore(lab.run_folder)
        assert list(on_disk.metrics("update_actor")["iteration"]) == [1, 2, 3, 4, 5, 6]
        assert not on_disk.spans().duplicated().any()
        assert "telemetry" not in repr(lab)
        assert hosts_of(lab)


def opening(disk: Path) -> None:
    """An opening on Ray whose record cannot be written ends its processes."""
    import psutil

    os.environ["WORKBENCH_HOME"] = str(disk / "home")
    os.environ.pop("WORKBENCH_KEEP_RAY", None)  # the last workbench ends the head: its home goes with the disk
    for folder in ("home", "home/models"):
        (disk / folder).mkdir()
    with tiny_lab("first", disk / "runs", devices=2) as lab:  # models are made, Ray is started
        batch = lab.put({"x": [1]})
        filler = fill(disk)

        def hosts(wanted: int = 0) -> set[int]:
            """The hosts on this head. wanted: how many there should be, which are waited for."""
            head, until = running_head(), time.monotonic() + 120
            assert head is not None
            while True:
                found = set[int]()
                for one in psutil.Process(head["pid"]).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        found |= {one.pid} if any("HostActor" in word for word in one.cmdline()) else set()
                if len(found) == wanted or not wanted or time.monotonic() > until:
                    return found
                time.sleep(0.2)

        before = hosts()
        assert before
        refused(lambda: tiny_lab("second", disk.parent / "runs", devices=2))
        assert hosts(len(before)) == before
        assert [row["name"] for row in wb.ls()] == ["first"]
        placement = lab.placement
        refused(lambda: lab.move(wb.Placement.split(2)))
        assert lab.placement == placement
        assert hosts(len(before)) == before
        refused(lambda: lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)))
        filler.unlink()
        lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2))
        assert batch.rows == 1
    assert running_head() is None


def exporting(disk: Path) -> None:
    """`wb export`, and the file that was there stays as it was."""
    import nbformat

    cells = [nbformat.v4.new_code_cell(f"import workbench as wb\nlab = wb.open('x', models={{'actor': {TINY!r}}})")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), disk / "page.ipynb")
    (disk / "script.py").write_text("as it was")
    fill(disk)
    command = [sys.executable, "-m", "workbench", "export", str(disk / "page.ipynb"), "-o", str(disk / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done
    assert FIGURES in done.stderr, done
    assert "Traceback" not in done.stderr, done
    assert (disk / "script.py").read_text() == "as it was"
    assert sorted(path.name for path in disk.iterdir()) == ["filler", "page.ipynb", "script.py"]


if __name__ == "__main__":
    where = Path(sys.argv[2])
    globals()[sys.argv[1]](where)
    print("as it should be")
