"""Inline workbenches leave the kernel as they found it, share what a process has once, and fail like plain code."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import workbench as wb
from tests.cases import TINY, hosts_of, rollouts, stored, tiny_lab, train_on, vowels
from tests.expected import expect_error
from workbench.backends.inline import VARIABLES, InlineBackend
from workbench.errors import BadInput, HostDied, RewardError, StageError, StageInterrupted
from workbench.messages.calls import HostInfo, Output
from workbench.messages.shards import Shard
from workbench.support import machine
from workbench.workers.host import Host
from workbench.workers.roles.actor import ActorWorker


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A kernel with settings of its own: some rank variables set, others not, and one thread."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "7")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {"RANK": "7"}
    torch.set_num_threads(threads)


def settings() -> tuple[dict[str, str], int]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}, torch.get_num_threads()


def test_nothing_but_the_loopback_listens(tmp_path: Path) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("inet")
        return {(c.laddr.ip, c.laddr.port) for c in found if c.status == "LISTEN"}

    before = listening()
    with tiny_lab("quiet", tmp_path, backend="inline", devices=1):
        assert all(ip.startswith("127.") for ip, _ in listening() - before)


class Counting(ActorWorker):
    @wb.register("DP_PROTO", reads=("x",))
    def count_threads(self, batch: Shard) -> Output:
        return Output(metrics={"threads": torch.get_num_threads()})


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("100", 8), ("", 8)])
def test_it_computes_with_the_threads_that_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: dict[str, str], said: str, threads: int
) -> None:
    """As it does under Ray, and afterwards the kernel with its own number of before."""
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    models = {"actor": wb.Model(TINY, worker=Counting)}
    with tiny_lab("threads", tmp_path, backend="inline", devices=1, models=models) as lab:
        assert lab.actor.count_threads(lab.put({"x": [1]}))["threads"] == threads
    assert torch.get_num_threads() == 1


def test_only_the_owner_can_enter_a_run_folder(tmp_path: Path) -> None:
    with tiny_lab("private", tmp_path, backend="inline", devices=1) as lab:
        assert lab.run_folder.stat().st_mode & 0o777 == 0o700


# DeepSpeed imports parts of torch that use torch's own deprecated decorators.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_deepspeed_works_again_after_closing_and_beside_another(
    kernel: dict[str, str], tmp_path: Path, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "engine": "deepspeed", "training": {"zero_stage": zero_stage}, "backend": "inline", "devices": 1,
    }  # fmt: skip

    def train(lab: wb.Workbench) -> dict[str, float]:
        return train_on(lab, *rollouts(lab))

    with tiny_lab("first", tmp_path, **options) as lab:
        expected = train(lab)
    assert settings() == (kernel, 1)
    assert not dist.is_initialized()
    from deepspeed.accelerator import cuda_accelerator, real_accelerator

    # as after a workbench on a GPU: DeepSpeed has one kind of device a process
    monkeypatch.setattr(real_accelerator, "ds_accelerator", cuda_accelerator.CUDA_Accelerator())
    long = tiny_lab("long", tmp_path, **options)
    with tiny_lab("short", tmp_path, **options) as short:
        assert train(short) == expected
    assert train(long) == expected  # the group that `short` found outlives it
    early = long
    with tiny_lab("late", tmp_path, **options) as late:
        early.close()
        assert train(late) == expected  # the group outlives the workbench that made it
    assert settings() == (kernel, 1)
    assert not dist.is_initialized()


def test_nothing_goes_on_from_half_a_step(
    kernel: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_lab("halved", tmp_path, backend="inline") as lab:
        batch = lab.put(stored(4), meta={"temperature": 1.0})
        before = lab.actor.weight_digests()
        lab.save(tmp_path / "before", models=False)
        (host,) = hosts_of(lab).values()

        def pressed(*given: Any) -> Any:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(host.workers["actor"].engine, "step", pressed)
        with expect_error(StageInterrupted, value="update_actor was interrupted twice", rule="only in part"):
            lab.actor.update_actor(batch)
        with expect_error(HostDied, value="was lost during run", remedy=r"lab.recover\(\)"):
            lab.actor.update_actor(batch)
        lab.recover()
        assert lab.actor.weight_digests() == before
        lab.actor.update_actor(lab.put(stored(4), meta={"temperature": 1.0}))
        assert lab.actor.weight_digests() != before
    assert settings() == (kernel, 1) and not dist.is_initialized()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_a_closed_workbench_leaves_no_model_in_memory(tmp_path: Path, engine: str) -> None:
    """Though DeepSpeed hooks into gradients, where the garbage collector does not look."""
    with tiny_lab("closed", tmp_path, backend="inline", engine=engine) as lab:
        train_on(lab, *rollouts(lab))
        (host,) = hosts_of(lab).values()
        module = weakref.ref(host.workers["actor"].engine.module)
        del host
    gc.collect()
    assert module() is None


def test_the_users_own_group_stays(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tiny_lab("guest", tmp_path, backend="inline", models={"actor": TINY}) as lab:
            lab.actor.weights_checksum()
        lab.close()
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        pair = HostInfo(lab="x", pool="p", rank=0, world_size=2, device="cpu:0", threads=1, log_path=None)
        with expect_error(BadInput, value="a pool of 2 rank.* default process group has 1"):
            Host(pair, InlineBackend().call).join("127.0.0.1", 1)
    finally:
        dist.destroy_process_group()
        for name in VARIABLES:
            os.environ.pop(name, None)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("plain", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def test_an_interrupt_stops_between_micro_batches_and_a_second_one_at_once(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host,) = hosts_of(lab).values()
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    expected = lab.critic.compute_values(batch).fetch(["values"])["values"]

    engine: Any = host.workers["critic"].engine
    forward, presses = engine.forward, 1

    def pressed(**inputs: Any) -> Any:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        return forward(**inputs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "forward", pressed)
        with expect_error(
            StageInterrupted,
            rule="the state is as before the stage",
            remedy="run the same call again to continue; if it takes a batch",
        ):
            lab.critic.compute_values(batch)
        presses = 2
        with expect_error(
            StageInterrupted,
            value="compute_values was interrupted twice",
            rule="its result is dropped",
        ):
            lab.critic.compute_values(batch)
    assert host.status()[0] == ""
    again = lab.critic.compute_values(batch).fetch(["values"])["values"]
    assert torch.equal(again.values, expected.values)


def test_an_update_that_fails_goes_on_with_the_step_that_failed(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often and wherever it fails. The error says how many steps were taken, and what the same call does."""
    batch = lab.put(stored(4), meta={"temperature": 1.0})
    with lab.kept("actor"):
        expected, whole = lab.actor.update_actor(batch), lab.actor.weight_digests()
    (host,) = hosts_of(lab).values()
    worker: Any = host.workers["actor"]
    step, left = worker.engine.step, worker.engine.steps

    def failing(*arguments: Any) -> Any:
        if worker.engine.steps == left + 1:
            raise ValueError("broken")
        return step(*arguments)

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    ways = [
        (worker.engine, "step", failing, 1, "to continue with step 2"),
        (worker, "_cut_terms", broken, 1, "to continue with step 2"),
        (host, "_keep", broken, 2, "it repeats no step"),
    ]
    for owner, name, fault, taken, remedy in ways:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with expect_error(StageError, rule=f"taken optimizer step {taken} of 2", remedy=remedy):
                lab.actor.update_actor(batch)
    assert lab.actor.update_actor(batch) == expected
    assert lab.actor.weight_digests() == whole
    assert lab.weights["actor"].steps == worker.engine.steps == left + 2


def test_the_iteration_of_an_update_that_failed(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`run` goes on with it, and no checkpoint is made of it; an earlier one, by hand, is forgotten."""
    (host,) = hosts_of(lab).values()
    engine: Any = host.workers["actor"].engine
    step, left = engine.step, engine.steps

    def failing(*arguments: Any) -> Any:
        if engine.steps == left + 1:
            raise ValueError("broken")
        return step(*arguments)

    def no_reward(prompt: str, response: str, **row: Any) -> float:
        raise ZeroDivisionError

    algorithm = wb.GRPO(lab, prompts=2, samples=2, sampling=wb.Sampling(max_new_tokens=4), reward=vowels)
    monkeypatch.setattr(engine, "step", failing)
    with expect_error(StageError, value="broken"):
        algorithm.run(1)
    with expect_error(BadInput, value="update_actor stopped or failed between two of its steps", remedy=r"restart\(\)"):
        lab.save(tmp_path / "under way")
    monkeypatch.setattr(engine, "step", step)
    drawn = lab.prompts.drawn
    algorithm.run(1)
    assert (lab.prompts.drawn, engine.steps) == (drawn, left + 2)

    left = engine.steps
    monkeypatch.setattr(engine, "step", failing)
    with expect_error(StageError, value="broken"):
        lab.actor.update_actor(lab.put(stored(4), meta={"temperature": 1.0}))
    lab.save(tmp_path / "by hand", models=False)
    algorithm.reward = no_reward
    with expect_error(StageError, value="ZeroDivisionError"):
        algorithm.run(1)
    assert not algorithm.under_way


def test_weights_that_nobody_could_compare_are_sent_again(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise torch.OutOfMemoryError

    prompts = lab.prompts.next(2)
    lab.actor.update_actor(lab.put(stored(4), meta={"temperature": 1.0}))
    with monkeypatch.context() as patch:
        patch.setattr("workbench.workers.roles.hybrid.probe_gap", broken)
        with expect_error(StageError, value="generate_sequences"):
            lab.actor.generate_sequences(prompts, max_new_tokens=4)
    lab.actor.generate_sequences(prompts, max_new_tokens=4)
    assert "sync_gap/mean" in lab.last_metrics["generate_sequences"]


def frames(error: BaseException | None) -> list[str]:
    """Functions in the tracebacks of an error and its causes: what a notebook prints and `%debug` enters."""
    names: list[str] = []
    while error is not None:
        names += [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__
    return names


def test_the_users_frames_are_there(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)

    def my_helper(text: str) -> float:
        raise LookupError(text)

    def my_reward(prompt: str, response: str, **row: Any) -> float:
        return my_helper(prompt)

    with pytest.raises(RewardError) as caught:
        lab.reward.compute_reward(batch, function=my_reward)
    assert caught.value.failure is not None
    assert re.findall("in my_\\w+", "\n".join(caught.value.failure.lines())) == ["in my_reward", "in my_helper"]
    with pytest.raises(RewardError) as caught:
        lab.reward.compute_reward(batch, function=wb.limits(own_process=False)(my_reward))
    assert {"my_reward", "my_helper"} <= set(frames(caught.value))

    (host,) = hosts_of(lab).values()

    class Unsendable(Exception):
        """Local classes do not pickle; inline nothing needs to."""

    def my_forward(**inputs: Any) -> Any:
        mine = 5  # what `%debug` would show
        raise Unsendable(mine)

    monkeypatch.setattr(host.workers["critic"].engine, "forward", my_forward)
    with expect_error(StageError, value=r"critic\.compute_values failed on rank 0: Unsendable: 5") as failed:
        lab.critic.compute_values(batch)
    assert isinstance(failed.value.__cause__, Unsendable)
    assert {"compute_values", "my_forward"} <= set(frames(failed.value))
    trace: Any = failed.value.__cause__.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    assert trace.tb_frame.f_locals["mine"] == 5


def test_a_script_is_left_as_it_was_found(tmp_path: Path) -> None:
    """Its tracebacks, filters of warnings and logging are its own, and a process that it forks ends by itself."""
    script = """
import os, pathlib, sys, warnings
import workbench as wb
from transformers.utils import logging
from tests.cases import rollouts, stored, tiny_lab

def found():
    return sys.excepthook, list(warnings.filters), logging.get_verbosity(), os.environ.get("TORCHINDUCTOR_CACHE_DIR")

runs = pathlib.Path(sys.argv[1])
before = found()
with tiny_lab("left", runs, backend="inline") as lab:
    rollouts(lab)
    lab.actor.update_actor(lab.put(stored()))
    assert found()[:3:2] == before[:3:2]
    child = os.fork()
    if child == 0:
        sys.exit(3)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert found() == before
raise ValueError("of the script")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert "child 3" in done.stdout, done.stderr
    assert done.stderr.rstrip().splitlines()[-1] == "ValueError: of the script"
