"""Checks, an evaluation and a refreshed reference where ranks are processes: vLLM, DeepSpeed, two ranks, two pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from workbench.messages.calls import Output
from workbench.messages.metrics import as_metrics
from workbench.objectives.aggregation import denominator
from workbench.workers.micro_batches import minibatch_indices
from workbench.workers.passes import Term
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.worker import Context

SHORT = wb.Sampling(max_new_tokens=6)


def length(prompt: str, response: str, **row: Any) -> float:
    return len(response) / 10


def surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    return -(log_prob - old_log_prob).exp() * advantages


def of_rank(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """A loss that differs between ranks, whatever the micro-batches are."""
    return surrogate(log_prob, old_log_prob, advantages) * (1 + dist.get_rank() if dist.is_initialized() else 1)


SPLIT = wb.Placement.of({"policy": (1, ["actor"]), "scorers": (1, ["critic", "reference", "reward"])})
MODELS: dict[str, Any] = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": length}


@pytest.mark.thorough
def test_a_healthy_system_passes_all_checks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "deepspeed", "generation": "vllm", "models": MODELS}
    with tiny_lab("healthy", tmp_path, placement=wb.Placement.colocate(2), devices=2, **options) as lab:
        before = lab.actor.weight_digests(), lab.critic.weight_digests()
        report = lab.check()
        assert set(report.df["verdict"]) == {"ok"}, report
        assert (lab.actor.weight_digests(), lab.critic.weight_digests()) == before
        history = wb.PPO(lab, prompts=4, sampling=SHORT).run(1, evaluate=lambda: lab.evaluate("arithmetic/test", n=4))
        assert history["compute_log_prob/rollout_gap/mean"].max() < 1e-3
        assert lab.check("kl")["kl"].verdict == "not applicable"
        lab.refresh_reference()
        report = lab.check("kl", "weights", "rollout")
        assert set(report.df["verdict"]) == {"ok"}, report
        assert lab.reference.weight_digests() == lab.actor.weight_digests()
        assert len(lab.metrics("evaluate")) == 1


class Lazy(ActorWorker):
    """Rank 1 takes part in every update and keeps its old weights."""

    def steps(self, *terms: Any, **arguments: Any) -> Output:
        before = self.engine.state_dict()
        output = super().steps(*terms, **arguments)
        if self.context.host.rank == 1 and as_metrics(output.metrics)["optimizer_steps"].value > before["steps"]:
            self.engine.load_state_dict(before)
        return output


def test_a_rank_that_skips_its_update(tmp_path: Path) -> None:
    models = {**MODELS, "actor": wb.Model(TINY, worker=Lazy)}
    with tiny_lab("lazy", tmp_path, placement=wb.Placement.colocate(2), devices=2, models=models) as lab:
        loss_batch = lab.put(stored(8), meta={"temperature": 1.0})
        assert lab.check("micro_batches", loss=surrogate, batch=loss_batch).ok
        culprit = lab.check("micro_batches", loss=of_rank, batch=loss_batch)["micro_batches"].culprit
        assert culprit.endswith("between two ways to deal rows to ranks")
        report = lab.check("ratio", "rollout", "replicas", "gradients")
        assert [finding.check for finding in report.failed] == ["replicas"]
        assert report["replicas"].culprit.startswith("actor, rank 1: model.")
        assert len(set(map(str, lab.actor.weight_digests()))) == 1  # put back


class MeanOfMeans(Term):
    """Each rank divides by its own tokens, times the ranks: a mean of the ranks' means."""

    def divisors(self, context: Context) -> list[Tensor]:
        mask, ranks = self.shard.ragged("response_mask").pad(), context.communicator.world_size
        minibatches = minibatch_indices(self.shard.minibatch_sizes)
        return [ranks * denominator(mask[r], self.aggregation, self.max_response_tokens) for r in minibatches]


class OwnDenominator(ActorWorker):
    def steps(self, *terms: Term, **arguments: Any) -> Output:
        return super().steps(*(MeanOfMeans(**vars(term)) for term in terms), **arguments)


@pytest.mark.thorough
def test_a_mean_of_rank_means(tmp_path: Path) -> None:
    models = {"actor": wb.Model(TINY, worker=OwnDenominator)}
    with tiny_lab("means", tmp_path, placement=wb.Placement.colocate(2), devices=2, models=models) as lab:
        report = lab.check("denominators", "gradients", "advantages")
        assert [finding.check for finding in report.failed] == ["denominators"]
        assert report["denominators"].culprit.endswith("between two ways to deal rows to ranks")


@pytest.mark.parametrize("placement", [SPLIT, wb.Placement.colocate(1)], ids=["split", "colocate"])
@pytest.mark.thorough  # of "split": tests/integration/test_ray.py
def test_the_reference_takes_the_actors_weights_from_host_to_host(tmp_path: Path, placement: wb.Placement) -> None:
    with tiny_lab("refresh", tmp_path, placement=placement, devices=2, models=MODELS) as lab:
        wb.PPO(lab, prompts=4, sampling=SHORT).run(1)
        assert lab.reference.weight_digests()[0] != lab.actor.weight_digests()[0]
        lab.refresh_reference()
        assert lab.check("kl")["kl"].verdict == "ok"
        assert lab.reference.weight_digests()[0] == lab.actor.weight_digests()[0]
        sent = set(lab.transfers("weights")["destination"])
        assert sent == (set() if placement.devices == 1 else set(lab.reference.hosts))
