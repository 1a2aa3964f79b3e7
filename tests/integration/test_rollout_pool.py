"""An actor on one pool and rollout workers on another, as processes: slices, versions, overlap, a death."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import vowels
from workbench.backends import registry
from workbench.batches.columns import Ragged
from workbench.errors import HostDied, WorkbenchError
from workbench.models.loading import load_causal_lm
from workbench.models.spec import Model
from workbench.stages import stage
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.rollout import plan_of_rollout, rollout_layout
from workbench.workers.worker import Context

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU"),
]
TINY = "tiny-llama-tied-4kv"
POOLS = {"train": (2, ["actor", "reward"]), "rollout": (2, ["rollout"])}


class SlowSender(ActorWorker):
    """An actor whose slices can be made to take their time."""

    def __init__(self, spec: Model, context: Context) -> None:
        super().__init__(spec, context)
        exchange: Any = context.exchange
        served, self.delay_s = exchange.served, 0.0

        def slowly(*asked: Any) -> Any:
            time.sleep(self.delay_s)
            return served(*asked)

        exchange.served = slowly

    @wb.register("ONE_TO_ALL")
    def slow_down(self, delay_s: float) -> None:
        self.delay_s = delay_s


def open_lab(
    name: str, runs: Path, training: wb.Training, generation: wb.Generation, layout: wb.Layout
) -> wb.Workbench:
    return wb.open(
        name,
        models={"actor": wb.Model(TINY, worker=SlowSender), "reward": vowels},
        prompts="arithmetic/test",
        placement=wb.Placement.of(POOLS, layouts={"actor": layout}),
        devices=4,
        training=training,
        generation=generation,
        runs=runs,
    )


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    """Two tensor ranks train; two ranks generate as one with vLLM, or each by itself without."""
    generation = wb.Generation(engine="transformers", max_model_tokens=128, sync="whole")
    if importlib.util.find_spec("vllm") is not None:
        generation = wb.Generation(tensor_parallel_size=2, max_model_tokens=128, kv_cache_gib=0.05, sync="whole")
    training = wb.Training(engine="torch", learning_rate=1e-2)
    with open_lab("cut-pools", tmp_path_factory.mktemp("runs"), training, generation, wb.Layout(1, 2, 1)) as lab:
        yield lab


def train(lab: wb.Workbench, batch: wb.Batch) -> None:
    batch = lab.reward.compute_reward(lab.actor.compute_log_prob(batch))
    lab.actor.update_actor(lab.compute_advantages(batch, estimator="rloo"))


def sent_as_planned(lab: wb.Workbench, known: set[int]) -> int:
    """Bytes of a sync, pair by pair those of the plan."""
    layout = lab.actor.layout
    plan = plan_of_rollout(lab.rollout.spec, layout, rollout_layout(lab.rollout.spec, 2)).figures()
    moved = lab.transfers("weights")
    moved = moved[~moved["run"].isin(known)]
    assert set(moved["stage"]) == {"receive_weights"}
    matrix = np.zeros_like(plan.matrix)
    for transfer in moved.itertuples():
        source, destination = str(transfer.source), str(transfer.destination)
        assert (source[:-1], destination[:-1]) == ("train-", "rollout-")
        matrix[int(source[-1]), layout.size + int(destination[-1])] += transfer.moved_bytes
    assert (matrix == plan.matrix).all()
    return int(matrix.sum())


def three_updates(lab: wb.Workbench) -> None:
    """After each of them the rollout workers generate as the trainer would, with what the plan sends them."""
    seen: list[float] = []
    for _ in range(4):
        known = set(lab.transfers("weights")["run"])
        prompts = lab.prompts.next(4)
        greedy = lab.actor.generate_sequences(prompts, temperature=0, max_new_tokens=6, ignore_eos=True)
        if seen:
            metrics = lab.last_metrics["generate_sequences"]
            assert metrics["sync_gap/mean"] < 1e-4
            assert metrics["sync/received_bytes"] == sent_as_planned(lab, known) > 0
        assert greedy.meta["weights_version"] == lab.weights["actor"].steps
        lab.actor.compute_log_prob(greedy)
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4
        column = greedy.fetch(["rollout_log_prob"])["rollout_log_prob"]
        assert isinstance(column, Ragged)
        seen.append(column.values.sum().item())
        train(lab, lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=6))
    assert len(set(seen)) == 4
    assert lab.topology()["host_published_bytes"].max() == 0


@pytest.mark.thorough
def test_slices_of_a_cut_actor_arrive(cut: wb.Workbench) -> None:
    three_updates(cut)
    assert {finding.verdict for finding in cut.check("weights", "rollout")} == {"ok"}
    assert max(cut.actor.check_sync()) < 1e-4


@pytest.mark.thorough
def test_one_pool_trains_while_the_other_generates(cut: wb.Workbench) -> None:
    batch = cut.actor.generate_sequences(cut.prompts.next(8), samples=2, max_new_tokens=16)
    batch = cut.reward.compute_reward(cut.actor.compute_log_prob(batch))
    batch = cut.compute_advantages(batch, estimator="rloo")
    before, version = cut.runner.counters.run, batch.meta["weights_version"]
    with cut.overlap():
        # seconds of work each, so that a late start is still beside the other
        ahead = cut.rollout.generate_sequences(cut.prompts.next(8), samples=96, max_new_tokens=64, ignore_eos=True)
        cut.actor.update_actor(batch, epochs=96)
        after = cut.actor.generate_sequences(cut.prompts.next(4), max_new_tokens=4)
    assert ahead.meta["weights_version"] == version
    assert after.meta["weights_version"] == cut.weights["actor"].steps == version + 96
    spans = cut.spans()
    spans = (
        spans[(spans["kind"] == "compute") & (spans["run"] > before)]
        .groupby("run")
        .agg({"stage": "first", "start_s": "min", "end_s": "max"})
    )
    update = spans[spans["stage"] == "update_actor"].iloc[0]
    generation = spans[spans["stage"] == "generate_sequences"].iloc[0]
    assert max(update["start_s"], generation["start_s"]) < min(update["end_s"], generation["end_s"])


@pytest.mark.thorough
def test_a_rollout_host_that_dies_takes_no_actor_with_it(
    cut: wb.Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comes last: its pool is lost, with the rollouts that lie there."""
    monkeypatch.setattr(stage, "GRACE_S", 2.0)
    batch = cut.actor.generate_sequences(cut.prompts.next(4), samples=2, max_new_tokens=6)
    batch.save(tmp_path / "rollouts.safetensors")
    batch = cut.load(tmp_path / "rollouts.safetensors")
    train(cut, batch)
    cut.actor.slow_down(1.0)
    syncing = cut.actor.sync_weights.submit()
    deadline = time.monotonic() + 300
    while not cut.hosts.backend.ask("train-0", "describe").result()["published_bytes"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(cut.hosts.backend.processes["rollout-1"].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(WorkbenchError, match="host rollout-1 is gone"):
        syncing.result()
    with pytest.raises(HostDied, match="pool 'rollout' was lost"):
        cut.actor.generate_sequences(cut.prompts.next(4))
    train(cut, batch)
    assert cut.hosts.backend.ask("train-0", "describe").result()["published_bytes"] == 0
    cut.drop("rollout")  # the actor is whole: it goes on alone
    drawn = cut.actor.generate_sequences(cut.prompts.next(4), max_new_tokens=4)
    assert drawn.meta["weights_version"] == cut.weights["actor"].steps
    assert set(cut.hosts.backend.processes) == {"train-0", "train-1"}  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_weights_that_zero_has_sharded_arrive(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    training = wb.Training(zero_stage=3, learning_rate=1e-2)
    generation = wb.Generation(engine="transformers", max_model_tokens=128, sync="whole")
    with open_lab("zero-pools", tmp_path, training, generation, wb.Layout(d=2)) as lab:
        three_updates(lab)
        sent = lab.traffic("weights").matrix.loc[["train-0", "train-1"], ["rollout-0", "rollout-1"]].to_numpy()
        assert sent.min() > 0.9 * sent.max()  # both replicas serve both
        del registry.opened["zero-pools"]  # as in another kernel
        again = wb.attach("zero-pools")
        assert again is not lab
        assert again.weights["rollout"] != again.weights["actor"]
        assert again.actor.sync_weights()[0]["sync_gap/mean"] < 1e-4


@pytest.mark.thorough
def test_an_adapter_that_zero_has_sharded_arrives_in_bfloat16(tmp_path: Path) -> None:
    """Both hosts of the pool are sent A and B alone, and generate as the trainer would, also after a small step."""
    for package in ("deepspeed", "peft"):
        pytest.importorskip(package)
    models = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=4), dtype="bfloat16"), "reward": vowels}
    with wb.open(
        "adapter-pools",
        models=models,
        prompts="arithmetic/test",
        placement=wb.Placement.of(POOLS),
        devices=4,
        training=wb.Training(zero_stage=3, learning_rate=1e-5),
        generation=wb.Generation(engine="transformers", max_model_tokens=128),
        runs=tmp_path,
    ) as lab:
        for _ in range(2):
            known = set(lab.transfers("weights")["run"])
            train(lab, lab.actor.generate_sequences(lab.prompts.next(4), samples=2, max_new_tokens=6))
            (synced, _) = lab.actor.sync_weights()
            assert synced["sync_gap/mean"] < 0.02
            moved = lab.transfers("weights")
            layers = [m for n, m in load_causal_lm(TINY).named_modules() if n.endswith("proj")]
            needed = 2 * 2 * 4 * sum(layer.in_features + layer.out_features for layer in layers)
            assert moved[~moved["run"].isin(known)]["moved_bytes"].sum() == needed == synced["sync/received_bytes"]
        assert lab.traffic("weights").total_bytes == lab.traffic("weights").minimum_bytes
        for found in lab.actor.compare_weights():
            assert (found.read, found.differ, found.moved_differ) == (2 * 14, (), ())
