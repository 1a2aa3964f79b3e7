"""A kernel that is killed, and the next one that goes on; two kernels on one workbench."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import workbench as wb
from tests.cases import tiny_lab
from tests.kernel.kernels import Kernel
from tests.kernel.suspending import SUSPENDING

OPEN = """
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
from tests.kernel.suspending import SUSPENDING, suspend_in
def opened(name, devices=1):
    placement = wb.Placement.colocate(devices)
    return tiny_lab(name, Path("runs").resolve(), models=SUSPENDING, placement=placement, if_exists="replace")
def algorithm(lab):
    return wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=8), epochs=2)
def suspended_in(lab, stage):
    "Have the host suspend itself when the stage has done one of its steps. Prints the process."
    process = lab.hosts.backend.processes["shared-0"].pid
    suspend_in(process, stage)
    print(process)
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    made: list[Kernel] = []

    def make() -> Kernel:
        made.append(Kernel(tmp_path))
        made[-1].run(OPEN)
        return made[-1]

    yield make
    wb.stop("left")
    for kernel in made:
        kernel.kill()


def wait_until_suspended(host: int) -> None:
    last = time.monotonic() + 120
    while psutil.Process(host).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < last, host
        time.sleep(0.02)


def algorithm(lab: wb.Workbench) -> wb.PPO:
    return wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=8), epochs=2)


def test_the_next_kernel_goes_on_where_the_killed_one_was(
    kernels: Callable[[], Kernel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is ended after an interrupt in the middle of an update, the second in the middle of the next update."""
    first = kernels()
    first.run("lab = opened('left'); ppo = algorithm(lab); ppo.iterate()")
    first.run("while ppo.next_stage != 'update_critic':\n    ppo.step()")
    host = int(first.run("suspended_in(lab, 'update_critic')"))
    request = first.start("ppo.step()")  # an update of both minibatches, twice
    wait_until_suspended(host)
    first.interrupt()
    first.wait_until_shown("stopping at the next safe point")
    os.kill(host, signal.SIGCONT)
    error, _ = first.answer(request)
    assert "critic.update_critic was interrupted after optimizer step" in error
    first.kill()

    second = kernels()
    assert "left" in second.run("print([row['name'] for row in wb.ls() if not row['driver']['alive']])")
    said = second.run("lab = wb.attach('left'); ppo = algorithm(lab)")
    assert "PPO continues in iteration 2" in said
    assert "critic.update_critic: continues at optimizer step" in second.run("ppo.step()")
    second.run("assert ppo.next_stage == 'update_actor'")
    second.run("suspended_in(lab, 'update_actor')")
    second.start("ppo.step()")
    wait_until_suspended(host)
    second.kill()
    os.kill(host, signal.SIGCONT)

    # the third is this process, which has imported all that it takes
    lab = wb.attach("left")
    ppo = algorithm(lab)
    capsys.readouterr()
    two = ppo.iterate()
    assert "actor.update_actor: it had ended when it was interrupted" in capsys.readouterr().err
    three = ppo.iterate()
    assert (lab.batch(lab.batches().iloc[-1]["batch"]).rows, lab.batch("batch1 v1").df().shape[0]) == (4, 4)
    # one rank gives the same bits on both backends: tests/integration/test_ray.py
    with tiny_lab("clean", tmp_path, models=SUSPENDING, backend="inline") as clean:
        again = algorithm(clean)
        again.iterate()
        pair = again.iterate(), again.iterate()
    differ = {n: (a.get(n), b.get(n)) for a, b in zip((two, three), pair, strict=True) for n in {*a, *b}}
    assert [(name, *found) for name, found in differ.items() if found[0] != found[1]] == []
    assert sorted(set(lab.metrics()["iteration"])) == [1, 2, 3]
    events = lab.telemetry.events()["event"].tolist()
    assert events.count("attached") == 2
    assert "run of an earlier kernel" in events


@pytest.mark.thorough
def test_an_update_that_had_just_ended_is_not_made_again(kernels: Callable[[], Kernel]) -> None:
    """Its kernel is gone between the end of the stage and the record of the algorithm's position."""
    first = kernels()
    make = "ppo = algorithm(lab)"
    first.run(f"lab = opened('left'); {make}")
    first.run("while ppo.next_stage != 'update_critic':\n    ppo.step()")
    first.run("import os; type(lab).note_position = lambda self: os._exit(1)")
    first.start("ppo.step()")
    first.wait_until_gone()
    second = kernels()
    second.run(f"lab = wb.attach('left'); {make}")
    assert second.run("print(ppo.next_stage)").strip() == "update_critic"
    assert "critic.update_critic: was done" in second.run("ppo.step()")
    assert second.run("print(ppo.iterate()['update_critic/optimizer_steps'])").strip() == "4"


@pytest.mark.thorough
def test_an_update_whose_metrics_nobody_had_is_not_made_again(kernels: Callable[[], Kernel]) -> None:
    """Its kernel is killed inside `lab.overlap()`, while the update behind it is under way."""
    first = kernels()
    first.run("lab = opened('left'); ppo = algorithm(lab)")
    first.run("while ppo.next_stage != 'update_critic':\n    ppo.step()")
    first.run("batch = lab.batch(lab.batches().iloc[-1]['batch'])")
    host = int(first.run("suspended_in(lab, 'update_actor')"))
    name = first.run("print(batch.id)").strip()
    update = "lab.critic.update_critic(batch, epochs=2)"
    first.start(f"with lab.overlap():\n    {update}; lab.actor.update_actor(batch, epochs=2)")
    wait_until_suspended(host)
    first.kill()
    os.kill(host, signal.SIGCONT)
    second = kernels()
    second.run(f"lab = wb.attach('left'); batch = lab.batch({name!r})")
    assert "critic.update_critic: was done" in second.run(f"metrics = {update}")
    assert second.run("print(metrics['optimizer_steps'])").strip() == "4"
    assert "actor.update_actor: was done" in second.run("lab.actor.update_actor(batch, epochs=2)")


@pytest.mark.thorough
def test_two_kernels_do_not_mix_their_steps(kernels: Callable[[], Kernel]) -> None:
    first, second = kernels(), kernels()
    first.run("lab = opened('left'); ppo = algorithm(lab); batch = ppo.step(); batch = ppo.step()")
    assert "looking at left, which process" in second.run("lab = wb.attach('left')")
    assert second.run("print(lab.looks, len(lab.batches()), lab.batch('batch1 v1').rows)").split() == ["True", "2", "4"]
    second.run("lab.topology(); lab.batch('batch1 v1').df()")
    refused, _ = second.cell("lab.actor.compute_log_prob(lab.batch('batch1 v1'))")
    assert refused.startswith("NotDriving") and "take_over=True" in refused
    first.run("batch = ppo.step()")
    second.run("lab = wb.attach('left', take_over=True); ppo = algorithm(lab); ppo.iterate()")
    refused, _ = first.cell("ppo.step()")
    assert refused.startswith("NotDriving")
    first.run("lab.close()")  # lets go, and ends nothing
    second.run("ppo.iterate()")
