from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import psutil
import pytest

from workbench.support import machine
from workbench.support.files import locked
from workbench.support.machine import Process, cores, end


def python(code: str, **options: Any) -> tuple[subprocess.Popen[bytes], Process]:
    child = subprocess.Popen([sys.executable, "-c", code], **options)
    return child, replace(Process.current(), pid=child.pid, created_s=psutil.Process(child.pid).create_time())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_are_those_that_this_process_may_use() -> None:
    one = "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])"
    code = f"{one}; from workbench.support.machine import cores; print(cores())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"1"
    assert cores() == len(os.sched_getaffinity(0))


def test_a_process_is_known_by_machine_id_and_start() -> None:
    me = Process.current()
    assert me.alive is True
    assert replace(me, created_s=me.created_s - 10).alive is False  # an earlier one with the same id
    elsewhere = replace(me, machine="another-machine")
    assert elsewhere.alive is None
    assert elsewhere.here is None


def test_end_waits_for_a_process_that_goes_and_kills_one_that_stays() -> None:
    going, one = python("import time; time.sleep(0.5)")
    staying, two = python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)")
    remote = replace(Process.current(), machine="another-machine")  # its id is that of this very test
    start_s = time.monotonic()
    end([one, two, remote], grace_s=1.5)
    assert 1.0 < time.monotonic() - start_s < 60
    assert not psutil.pid_exists(going.pid)
    assert not psutil.pid_exists(staying.pid)
    going.wait()
    staying.wait()


def test_a_lock_keeps_others_out_until_its_holder_is_gone() -> None:
    hold = "with locked('mine'): print('in', flush=True); time.sleep(60)"
    code = f"import time; from workbench.support.files import locked\n{hold}"
    holder, _ = python(code, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"in\n"
    waits: list[float] = []

    def waiting() -> None:
        waits.append(time.monotonic())
        if len(waits) == 2:
            holder.kill()
            holder.wait()

    with locked("mine", waiting):
        pass
    assert len(waits) >= 2
    holder.stdout.close()


SAID: list[tuple[str, int]] = [("1", 1), ("1,4", 1), ("64", 4), ("", 4), ("0", 4), ("many", 4)]


def test_threads_are_a_share_of_the_cores_and_at_most_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, threads in SAID:
        monkeypatch.setattr(machine, "cores", lambda: 8)
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert machine.computing_threads(2) == threads
        assert machine.computing_threads(100) == 1
