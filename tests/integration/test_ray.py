"""The Ray backend on one machine: same numbers as inline, two ranks, two pools, attaching, errors, leaving."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import workbench as wb
from tests.cases import TINY, rollouts, tiny_lab, train_on, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.display import Progress
from workbench.errors import HostDied, MissingDependency, NameTaken, NotDriving, RewardError, StageError
from workbench.workers.roles.critic import CriticWorker

Stored = tuple[Table, dict[str, Any]]
# fp32 on other micro-batches and other orders of summation: four updates drift by 1e-5 to 1e-4
SPLIT = wb.Placement.of({"policy": (1, ["actor"]), "scorers": (1, ["critic", "reference", "reward"])})
TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def inline(runs: Path, full: wb.Workbench) -> tuple[Stored, dict[str, float], float]:
    """Rollouts, the metrics of one iteration's training on them, and the actor's checksum after it.

    `full` is asked for so that one Ray head lives through all of these tests.
    """
    threads = torch.get_num_threads()
    with tiny_lab("inline", runs, backend="inline", devices=1) as lab:
        stored = rollouts(lab)
        metrics = train_on(lab, *stored)
        checksum = lab.actor.weights_checksum()[0]
    torch.set_num_threads(threads)
    return stored, metrics, checksum


def test_one_rank_gives_the_same_bits_on_both_backends(
    inline: tuple[Stored, dict[str, float], float], runs: Path
) -> None:
    stored, expected, checksum = inline
    with tiny_lab("one", runs, devices=1) as lab:
        again, _ = rollouts(lab)
        assert train_on(lab, *stored) == expected
        assert lab.actor.weights_checksum() == [checksum]
    for name in ("response_ids", "rollout_log_prob"):  # same seeds, same responses
        mine, theirs = again[name], stored[0][name]
        assert isinstance(mine, Ragged)
        assert isinstance(theirs, Ragged)
        assert torch.equal(mine.values, theirs.values)


def test_nothing_but_the_loopback_is_listened_on(full: wb.Workbench) -> None:
    for pid in {int(pid) for pid in full.topology()["process"]} | {os.getpid()}:
        listening = [c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
        assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1"}, (pid, listening)


@pytest.mark.parametrize(
    ("name", "placement", "training"),
    [
        pytest.param("two", wb.Placement.colocate(2), {}, marks=pytest.mark.thorough),
        pytest.param(
            "zero2", wb.Placement.colocate(2), {"engine": "deepspeed", "zero_stage": 2}, marks=pytest.mark.thorough
        ),
        ("split", SPLIT, {}),
    ],
)
def test_placements_agree(
    inline: tuple[Stored, dict[str, float], float],
    runs: Path,
    name: str,
    placement: wb.Placement,
    training: dict[str, Any],
) -> None:
    stored, expected, checksum = inline
    with tiny_lab(name, runs, placement=placement, devices=2, training=training) as lab:
        metrics = train_on(lab, *stored)
        checksums = lab.actor.weights_checksum()
        transfers = lab.transfers()
        lab.refresh_reference()
        assert lab.reference.weight_digests()[0] == lab.actor.weight_digests()[0]
        # from host to host
        assert name != "split" or set(lab.transfers("weights")["destination"]) == set(lab.reference.hosts)
    assert metrics.keys() == expected.keys()
    first = "update_actor/first_minibatch/ratio/max_deviation"
    assert metrics[first] <= 1e-5
    for metric in expected.keys() - {first}:
        assert metrics[metric] == pytest.approx(expected[metric], **TOLERANCE), metric
    assert checksums == pytest.approx([checksum] * len(checksums), rel=1e-5)
    assert len(set(checksums)) == 1  # replicas hold the same bits
    # rows went straight between hosts, and only those that were not there
    assert (transfers["source"] != transfers["destination"]).all()
    assert transfers["moved_bytes"].gt(0).all()


@pytest.fixture(scope="module")
def full(runs: Path) -> Iterator[wb.Workbench]:
    """Two ranks with vLLM and DeepSpeed beside each other in every process."""
    with tiny_lab(
        "full", runs, engine="deepspeed", generation="vllm", placement=wb.Placement.colocate(2), devices=2
    ) as lab:
        yield lab


def test_vllm_samples_from_the_weights_that_deepspeed_trained(full: wb.Workbench) -> None:
    history = wb.PPO(full, prompts=8, sampling=wb.Sampling(max_new_tokens=12)).run(3)
    # the tied embeddings move by 1e-3 a step and weight: a stale head would show as several tenths
    assert history["generate_sequences/sync_gap/mean"].iloc[1:].max() < 1e-3
    assert history["compute_log_prob/rollout_gap/mean"].max() < 1e-3
    assert history["update_actor/first_minibatch/ratio/max_deviation"].max() <= 1e-6
    assert history["update_actor/first_minibatch/rollout_ratio/max_deviation"].max() < 1e-2
    assert history["update_actor/optimizer_steps"].tolist() == [2, 4, 6]


def test_a_conversation_by_hand_on_two_ranks_of_vllm(full: wb.Workbench) -> None:
    stops = tuple(range(3, 250, 2))
    given = wb.Sampling(environment=Counting, max_turns=4, max_new_tokens=96, stop_token_ids=stops)
    chat = full.conversation("1+2=", sampling=given, seed=3)
    first, second = chat.step(), chat.step()
    assert [first.answer, second.answer] == [" 1 ", " 2 "] and chat.edit(0, "some words ").answer == " 1 "
    fork = chat.fork(4)
    assert len(fork.df) == 4 and fork.failed == 0 and fork.critic is not None
    chat.go(second).finish()
    full.actor.compute_log_prob(chat.batch(chat.here, *(turn.number for turn in fork.leaves)))
    assert full.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-3  # vLLM's, of each turn behind what it read
    assert math.isfinite(float(chat.train(*fork.leaves)["loss"]))


class Counting:
    """Says how often it was asked."""

    turns = 0

    def step(self, response: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f" {self.turns} ", 1.0, False


def test_a_stale_engine_is_caught(full: wb.Workbench) -> None:
    batch = full.prompts.next(4)
    batch = full.actor.generate_sequences(batch, max_new_tokens=4)
    assert max(full.actor.check_sync()) < 1e-3
    # train on what the engine just sampled, and ask before it is synced
    batch = full.compute_advantages(
        full.critic.compute_values(full.actor.compute_log_prob(full.reward.compute_reward(batch)))
    )
    full.actor.update_actor(batch)
    assert min(full.actor.check_sync()) > 1e-3
    full.actor.sync_weights()
    assert max(full.actor.check_sync()) < 1e-3


def test_samples_stand_side_by_side_and_seeds_decide(full: wb.Workbench) -> None:
    prompts = full.prompts.next(3)
    one = full.actor.generate_sequences(prompts, samples=2, max_new_tokens=6, seed=5)
    two = full.actor.generate_sequences(prompts, samples=2, max_new_tokens=6, seed=5)
    anew = full.actor.generate_sequences(prompts, samples=2, max_new_tokens=6)
    assert one.rows == 6
    frame = one.df(["prompt_uid", "response_ids"])
    assert frame["prompt_uid"].tolist() == [uid for uid in frame["prompt_uid"].unique() for _ in range(2)]
    assert frame["response_ids"].tolist() == two.df(["response_ids"])["response_ids"].tolist()
    assert frame["response_ids"].tolist() != anew.df(["response_ids"])["response_ids"].tolist()


@pytest.mark.thorough
def test_grpo_needs_no_critic(full: wb.Workbench) -> None:
    history = wb.GRPO(full, prompts=2, samples=4, sampling=wb.Sampling(max_new_tokens=6), kl_coefficient=0.1).run(1)
    assert abs(history["compute_advantages/advantages/mean"].iloc[0]) < 1
    assert history["update_actor/kl_loss"].iloc[0] >= 0


def test_a_reward_that_fails_on_one_rank_leaves_the_pool_whole(full: wb.Workbench) -> None:
    batch = full.actor.generate_sequences(full.prompts.next(4), max_new_tokens=4)
    unlucky = batch.fetch(["prompt"], rows=[3])["prompt"][0]

    def broken(prompt: str, response: str, **row: Any) -> float:
        return float("nan") if prompt == unlucky else 0.0

    with expect_error(RewardError, value="failed on rank 1: .*returned nan for row 3 on rank 1"):
        full.reward.compute_reward(batch, function=broken)
    assert "rewards" in full.reward.compute_reward(batch).columns


def test_telemetry_has_every_rank_and_stage(full: wb.Workbench) -> None:
    spans = full.spans()
    last = spans[spans["run"] == spans["run"].max()]
    for rank in (0, 1):
        kinds = set(last[last["rank"] == rank]["kind"])
        assert {"queue", "transfer", "compute"} <= kinds
    assert spans[spans["kind"] == "generate"]["processed_tokens"].gt(0).all()
    assert spans[spans["kind"] == "weight_sync"]["moved_bytes"].gt(0).any()
    assert spans[spans["kind"] == "compute"]["peak_memory_bytes"].gt(10e6).all()
    picture = full.timeline(None).svg
    assert picture.startswith("<svg")
    assert "update_actor" in picture
    assert len(full.metrics("update_actor")) >= 4


def test_where_everything_is(full: wb.Workbench) -> None:
    where = full.topology()
    assert len(where) == 8
    assert where["process"].nunique() == 2
    parents = [psutil.Process(pid).parent() for pid in where["process"].unique()]
    assert len(set(parents)) == 1  # hosts are forks of one process
    assert "host_server.py" in " ".join(parents[0].cmdline())
    actor = where[where["role"] == "actor"]
    assert (actor["generation_weights_bytes"] > 0).all()
    assert (actor["optimizer_bytes"] > 0).all()
    assert "tiny-llama-tied" in full._repr_html_()
    assert len(repr(full)) < 80


def test_opening_again(full: wb.Workbench, runs: Path) -> None:
    same: dict[str, Any] = {
        "engine": "deepspeed",
        "generation": "vllm",
        "placement": wb.Placement.colocate(2),
        "devices": 2,
    }
    assert tiny_lab("full", runs, **same) is full
    with expect_error(NameTaken, rule="another description"):
        tiny_lab("full", runs, **{**same, "seed": 1})
    with expect_error(NameTaken, value="'full' runs"):
        tiny_lab("full", runs, **same, if_exists="error")


@pytest.mark.thorough
def test_another_kernel_takes_it_up(runs: Path) -> None:
    script = """
import json, ray, workbench as wb  # Ray imported first: its settings are then read before ours are made
lab = wb.attach("given", take_over=True)
rloo = wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=4))
batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
uids = batch.df(["prompt_uid"])["prompt_uid"].tolist()
weights = {role: weights.steps for role, weights in lab.weights.items()}
rate, changes = lab.actor.training.learning_rate, lab.history.changes()["after"].tolist()
kept = [rloo.clip, rloo.sampling.temperature, rloo.iterate()["update_actor/learning_rate"]]
print(json.dumps({"rows": batch.rows, "iteration": lab.iteration - 1, "uids": uids, "weights": weights, "rate": rate,
                  "changes": changes, "kept": kept}))
"""
    lab = tiny_lab("given", runs, models={"actor": TINY, "reward": vowels}, devices=1)
    rloo = wb.RLOO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=4))
    rloo.run(1)
    lab.actor.training.learning_rate = 2e-4
    rloo.clip, rloo.sampling.temperature = 0.1, 0.7  # type: ignore[misc]
    before, drawn = lab.iteration, lab.prompts.drawn
    weights = {role: weights.steps for role, weights in lab.weights.items()}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer == {
        "rows": 2, "iteration": before + 1, "uids": [drawn, drawn + 1], "weights": weights, "rate": 2e-4,
        "changes": [2e-4, 0.1, 0.7], "kept": [0.1, 0.7, 2e-4],
    }  # fmt: skip
    assert weights["actor"] > 0
    with expect_error(NotDriving, rule=r"process \d+ on .* drives it"):
        lab.prompts.next(2)
    wb.stop("given")


def hardest(ledger: Any) -> Any:
    return ledger.sort_values("pass_rate", kind="stable", na_position="first")


@pytest.mark.thorough  # the state and what was noted since it: tests/data/test_ledger.py
def test_a_later_kernel_draws_what_this_one_would_have(runs: Path) -> None:
    script = """
import json, workbench as wb
from workbench.errors import BadInput
lab = wb.attach("ordered", take_over=True)
try:
    lab.prompts.next(4)
except BadInput as error:
    said = str(error)
known = lab.prompts.ledger().to_json()
lab.prompts.order = lambda ledger: ledger.sort_values("pass_rate", kind="stable", na_position="first")
texts = [lab.prompts.next(4).df(["prompt"])["prompt"].tolist() for _ in range(2)]
print(json.dumps([said, known, texts]))
"""
    prompts = [f"Say {i}." for i in range(10)]
    lab = tiny_lab("ordered", runs, models={"actor": TINY, "reward": vowels}, devices=1, prompts=prompts)
    lab.prompts.order, lab.prompts.threshold = hardest, 0.2
    wb.GRPO(lab, prompts=3, samples=2, sampling=wb.Sampling(max_new_tokens=4)).run(2)
    known = lab.prompts.ledger()
    assert known["responses"].sum() == 12
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, found, (first, second) = json.loads(done.stdout.splitlines()[-1])
    assert "lab.prompts.order = hardest" in said
    assert found == known.to_json()
    assert first == known["prompt"].tolist()[:4]  # those that were never drawn come first, in the usual order
    assert second[:4] != first
    wb.stop("ordered")


def test_the_command_line_sees_it(full: wb.Workbench) -> None:
    listed = subprocess.run([sys.executable, "-m", "workbench", "ls", "--json"], capture_output=True, check=True)
    (row,) = [row for row in json.loads(listed.stdout) if row["name"] == "full"]
    assert (row["id"], row["alive"], len(row["processes"])) == (full.description.id, True, 2)


class HalfBroken(CriticWorker):
    """Loads on rank 0 only, which then waits for rank 1."""

    def __init__(self, spec: wb.Model, context: Any) -> None:
        if context.host.rank == 1:
            raise OSError("the disk is full")
        torch.distributed.barrier()
        super().__init__(spec, context)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_rank_that_does_not_load_ends_the_opening_at_once(
    full: wb.Workbench, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("workbench.launch.opening.Progress", partial(Progress, after_s=0))
    monkeypatch.setattr("workbench.display.progress.sys", SimpleNamespace(stderr=terminal))
    models = {"actor": TINY, "critic": wb.Model(TINY, worker=HalfBroken), "reference": TINY, "reward": vowels}
    before = _hosts_of("broken")
    start_s = time.monotonic()
    with expect_error(StageError, value="loading critic failed on pool shared, rank 1: OSError: the disk") as caught:
        tiny_lab("broken", runs, models=models, placement=wb.Placement.colocate(2), devices=2)
    assert time.monotonic() - start_s < 600  # the collective of rank 0 would wait for half an hour
    shown = re.findall(r"opening broken: ([a-z ]+)  \d+ s so far", terminal.getvalue())
    assert "starting hosts" in shown
    assert shown[-1].startswith("loading ")  # the line changes four times a second at most: not every role is seen
    (note,) = caught.value.__notes__
    assert "on host shared-1" in note
    assert 'raise OSError("the disk is full")' in note
    assert "broken" not in [row["name"] for row in wb.ls()]
    assert _hosts_of("broken") == before == []


def _hosts_of(name: str) -> list[str]:
    import ray

    listed = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in listed if actor["name"].startswith(f"{name}-")]


def _runs(pid: int) -> bool:
    """Also a zombie, which Ray has not read the exit code of yet, holds no memory any more."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


OTHER_KERNEL = """
import sys
from pathlib import Path
import only_there
from tests.cases import TINY, tiny_lab
if __name__ == "__main__":
    lab = tiny_lab("taken", Path(sys.argv[1]), models={"actor": TINY, "reward": only_there.score}, devices=1)
    print("open", flush=True)
    sys.stdin.readline()
    lab.close()
"""


@pytest.mark.thorough
def test_a_name_is_taken_over_without_the_old_kernels_code_and_the_old_kernel_leaves_the_new_one_alone(
    full: wb.Workbench, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "only_there.py").write_text("def score(prompt, response, **row):\n    return 1.0\n")
    (tmp_path / "kernel.py").write_text(OTHER_KERNEL)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "kernel.py"), str(runs)], env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as kernel:  # fmt: skip
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "open\n"
        (old,) = [row for row in wb.ls() if row["name"] == "taken"]
        with expect_error(MissingDependency, value="module 'only_there'"):
            wb.attach("taken")
        new = tiny_lab("taken", runs, models={"actor": TINY}, devices=1, if_exists="replace")
        assert not _runs(old["processes"][0]["process"])  # gone before its successor was there
        kernel.communicate("\n", timeout=300)
        assert kernel.returncode == 0
    (listed,) = [row for row in wb.ls() if row["name"] == "taken"]
    assert (listed["id"], listed["alive"]) == (new.description.id, True)
    assert new.actor.generate_sequences(new.prompts.next(2), max_new_tokens=2).rows == 2
    new.close()
    assert not _runs(listed["processes"][0]["process"])
    assert "taken" not in [row["name"] for row in wb.ls()]


def test_a_dead_host_is_said_and_the_rest_can_be_stopped(full: wb.Workbench) -> None:
    """Comes last: it kills a host."""
    batch = full.prompts.next(4)
    (victim, survivor) = full.topology().drop_duplicates("process")["process"]
    psutil.Process(int(victim)).kill()
    with expect_error(HostDied, value="is gone"):
        full.actor.generate_sequences(batch, max_new_tokens=4)
    with expect_error(HostDied, remedy=r"lab\.recover"):
        full.actor.generate_sequences(batch, max_new_tokens=4)
    subprocess.run([sys.executable, "-m", "workbench", "stop", "full"], check=True, capture_output=True)
    psutil.wait_procs([psutil.Process(int(survivor))] if psutil.pid_exists(int(survivor)) else [], timeout=300)
    assert not psutil.pid_exists(int(survivor))
    assert "full" not in [lab["name"] for lab in wb.ls()]
