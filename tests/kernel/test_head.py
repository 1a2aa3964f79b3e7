"""The Ray head goes away under a notebook, or memory of a host: the kernel stays, and goes on from a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kernel.kernels import Kernel
from workbench.backends.cluster import stop_head
from workbench.support.files import home

OPEN = """
import json
from pathlib import Path
import workbench as wb
from tests.cases import TINY, tiny_lab
from workbench.backends.cluster import running_head, stop_head
lab = tiny_lab("headless", Path("runs").resolve(), placement=wb.Placement.colocate(1))
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=8), epochs=2)
ppo.iterate()
one = lab.save("one")
expected = ppo.iterate()
other = tiny_lab("other", Path("runs").resolve(), placement=wb.Placement.colocate(1), models={"actor": TINY})
"""

HUNGRY = """
import time
import torch
import workbench as wb
from pathlib import Path
from tests.cases import TINY, tiny_lab
from workbench.backends.cluster import stop_head
feast, eaten = Path("feast").resolve(), []

@wb.limits(own_process=False)  # it is the host that is to run out of memory
def hungry(prompt, response, **row):
    while feast.exists():
        eaten.append(torch.ones(2**26))  # 256 MiB
        time.sleep(0.02)
    return sum(c in "aeiou" for c in response) / max(1, len(response))

models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": hungry}
lab = tiny_lab("hungry", Path("runs").resolve(), placement=wb.Placement.colocate(1), models=models)
ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=8))
ppo.iterate()
one = lab.save("one")
expected = ppo.iterate()
"""


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends processes when 6 GiB more than now are in use on this machine. (Read when a head starts.)"""
    memory = psutil.virtual_memory()
    most = memory.total - memory.available + 6 * 2**30
    if most > 0.95 * memory.total:
        pytest.skip(f"needs 7 GiB of free memory: {memory.available / 2**30:.1f} GiB are free")
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{most / memory.total:.3f}")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    own = tmp_path / "home"  # with a head of its own
    own.mkdir()
    (own / "models").symlink_to(home() / "models")
    monkeypatch.setenv("WORKBENCH_HOME", str(own))
    made = Kernel(tmp_path)
    try:
        yield made
        made.run("lab.close()")
    finally:
        made.kill()
        stop_head()  # by WORKBENCH_HOME, which is still that of this test


def head_of(kernel: Kernel) -> list[psutil.Process]:
    head = psutil.Process(json.loads(kernel.run("print(json.dumps(running_head()))"))["pid"])
    return [head, *head.children(recursive=True)]


def end(family: list[psutil.Process]) -> None:
    """As the system does when memory runs out."""
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_that_is_gone_is_said_and_recovered_from(kernel: Kernel) -> None:
    kernel.run(OPEN)
    end(head_of(kernel))
    error, _ = kernel.cell("ppo.iterate()")
    assert error.startswith("HostDied")
    assert "Ray head of this user is gone" in error
    assert "lab.recover()" in error
    said = kernel.run("checkpoint = lab.recover()")
    assert "pool shared restarted; everything is as after iteration 1" in said
    assert kernel.run("print(ppo.iterate() == expected)").strip() == "True"
    error, _ = kernel.cell("other.prompts.next(2)\nother.actor.generate_sequences(other.prompts.more(2))")
    assert "Ray head of this user is gone" in error  # that one was joined to
    kernel.run("other.recover(); other.actor.generate_sequences(other.prompts.next(2)); other.close()")


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_that_goes_while_a_stage_is_at_work(kernel: Kernel) -> None:
    kernel.run(OPEN)
    kernel.run("while ppo.next_stage != 'update_actor': ppo.step()")
    family = head_of(kernel)
    kernel.run("ppo.epochs = 1000")
    request = kernel.start("ppo.step()")  # minutes, if nothing came in between
    end(family)
    error, _ = kernel.answer(request)
    assert "Ray head of this user is gone" in error
    time.sleep(70)  # by itself Ray ends a process whose head has been gone for a minute
    kernel.run("ppo.epochs = 2; lab.recover(one.folder)")
    assert kernel.run("print(ppo.iterate() == expected)").strip() == "True"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("narrow")
def test_a_host_that_runs_out_of_memory_is_said_and_recovered_from(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(HUNGRY)
    kernel.run("while ppo.next_stage != 'compute_reward': ppo.step()")
    (tmp_path / "feast").touch()
    error, _ = kernel.cell("ppo.step()")
    assert error.startswith("HostDied")
    assert "ran out of memory, and Ray ended it" in error
    assert "lab.recover()" in error
    (tmp_path / "feast").unlink()
    kernel.run("lab.recover()")
    assert kernel.run("print(ppo.iterate() == expected)").strip() == "True"
