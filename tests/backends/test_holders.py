"""Who holds devices: what the driver prints, who that is, and openings that find no room."""

from __future__ import annotations

import getpass
import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.backends import ray as ray_backend
from workbench.backends import registry
from workbench.backends.holders import on_cluster, taken, when_free
from workbench.display.html import bytes_text
from workbench.errors import DevicesTaken
from workbench.support.machine import MIB, Gpu, Process, cores, parse_gpus, read_gpus, visible

GPUS = "0, GPU-aaaa, NVIDIA H100, 9.0, 81559, 23456\n1, GPU-bbbb, NVIDIA H100, 9.0, 81559, 4\n"
PROCESSES = "GPU-aaaa, 4242, 20000\nGPU-aaaa, 4343, [N/A]\n"
FULL = DevicesTaken("needs 60 GB on cuda:0", "it has 40 GB")


def test_what_the_driver_prints_is_read() -> None:
    first, second = parse_gpus(GPUS, PROCESSES)
    assert first == Gpu(0, "GPU-aaaa", "NVIDIA H100", 9.0, 81559 * MIB, 23456 * MIB, {4242: 20000 * MIB, 4343: None})
    assert second.holders == {}
    assert first.taken_bytes() == 23456 * MIB
    assert first.taken_bytes([4242]) == 3456 * MIB
    assert second.taken_bytes() == 0  # what an idle GPU has in use is no one's
    assert parse_gpus("", "") == []
    with pytest.raises(ValueError, match="values to unpack"):
        parse_gpus("NVIDIA-SMI has failed", "")


@pytest.mark.parametrize(
    ("variable", "seen"), [(None, [0, 1]), ("1", [1]), ("GPU-a", [0]), ("", []), ("1,0", [0, 1]), ("7", [])]
)
def test_gpus_that_this_process_may_not_use_are_left_out(variable: str | None, seen: list[int]) -> None:
    assert [gpu.index for gpu in visible(parse_gpus(GPUS, PROCESSES), variable)] == seen


def test_a_process_that_holds_memory_is_named_with_its_user_and_start() -> None:
    here = psutil.Process()
    gpu = Gpu(
        0, "GPU-a", "NVIDIA H100", 9.0, 80_000 * MIB, 3_000 * MIB, {here.pid: 2_000 * MIB, 2**22 + 1: 1_000 * MIB}
    )
    text = str(taken(FULL, [gpu]))
    assert text.startswith("needs 60 GB on cuda:0. it has 40 GB. Held by: ")
    assert f"process {here.pid} of {here.username()} (" in text
    assert f"{bytes_text(2_000 * MIB)} of GPU memory, since " in text
    assert f"of another user or outside of this container, {bytes_text(1_000 * MIB)} of GPU memory" in text
    assert "wb.open(..., wait_s=600)" in text
    assert f"process {here.pid} " not in str(taken(FULL, [gpu], mine=[here.pid]))
    assert "a process that is not visible here" in str(taken(FULL, []))


def test_a_workbench_whose_host_holds_memory_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path))
    with tiny_lab("inline", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        record = registry.Record(
            id="big-1", name="big", digests=("d",), run_folder=str(tmp_path), address=None,
            hosts={"shared-0": Process.current()},
        )  # fmt: skip
        registry.write(record, lab.description)
    gpu = Gpu(0, "GPU-a", "NVIDIA H100", 9.0, 80_000 * MIB, 41_000 * MIB, {os.getpid(): 40_000 * MIB})
    for error in (taken(FULL, [gpu]), taken(FULL, [gpu], [record])):
        text = str(error)
        assert text.count("workbench 'big'") == 1
        assert f"of {getpass.getuser()}, 1 device(s), {bytes_text(40_000 * MIB)} of GPU memory, " in text
        assert f"process {os.getpid()} on {socket.gethostname()}, since " in text
        assert "without a driver" in text
        assert "stop it with `wb stop big`; or use it with wb.attach('big')" in text
    assert [found.name for found in on_cluster(None, "cpu")] == ["big"]
    assert on_cluster(None, "cuda") == on_cluster("10.0.0.1:6379", "cpu") == []


def test_waiting_for_memory_ends_when_it_is_free_or_the_time_is_over() -> None:
    asked, notes = [], list[str]()

    def attempt() -> None:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise FULL

    when_free(30, notes.append, attempt)
    assert (len(asked), len(notes)) == (3, 2)
    asked.clear()
    with pytest.raises(DevicesTaken):
        when_free(0, notes.append, attempt)
    assert len(asked) == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_slots_that_another_workbench_holds_are_told_of_at_once_and_waited_for_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_backend, "CPU_SHARE", cores())  # a host takes all that the head has
    models = {"actor": wb.Model(TINY), "reward": vowels}
    holder = tiny_lab("holder", tmp_path, models=models)
    try:
        begun = time.monotonic()
        with pytest.raises(DevicesTaken) as caught:
            tiny_lab("second", tmp_path, models=models)
        assert time.monotonic() - begun < 60  # grants take 5 s; the rest is a busy machine's
        (pid,) = (process.pid for process in registry.get("holder").hosts.values())
        text = str(caught.value)
        assert f"1 device(s) for pool 'shared' are not free. of {cores()} CPU(s) of the cluster 0 are" in text
        assert f"workbench 'holder' of {getpass.getuser()}, 1 device(s), " in text
        assert f"process {pid} on {socket.gethostname()}, since " in text
        assert f"driven by process {os.getpid()}" in text
        assert "`wb stop holder`" in text
        assert [row["name"] for row in wb.ls()] == ["holder"]
        leaving = threading.Timer(2, holder.close)
        leaving.start()
        with tiny_lab("second", tmp_path, models=models, wait_s=120) as second:
            assert second.actor.generate_sequences(second.prompts.next(1), max_new_tokens=2).rows == 1
        leaving.join()
    finally:
        holder.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_a_process_holds_of_a_gpu_is_seen_and_refuses_an_opening(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info(0)
    held = torch.empty(int(free * 0.9), dtype=torch.uint8, device="cuda:0")
    gpu = read_gpus()[0]
    assert gpu.total_bytes == pytest.approx(total, rel=0.05)
    assert gpu.taken_bytes() >= held.nbytes
    settings = wb.Generation(engine="vllm", max_model_tokens=192, gpu_memory_fraction=0.4)
    models = {"actor": wb.Model(TINY, generation=settings), "reward": vowels}
    with pytest.raises(DevicesTaken, match="Held by: "):
        tiny_lab("full", tmp_path, backend="inline", device="cuda", models=models)
