"""Each check fails on a system that is broken on purpose, names where, and leaves the others' verdicts alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.checks import CHECKS, CheckReport
from workbench.engines.generation.transformers_engine import TransformersEngine
from workbench.errors import BadInput, CheckFailed
from workbench.models.loading import load_causal_lm
from workbench.objectives.aggregation import denominator
from workbench.objectives.estimators import gae, moments
from workbench.objectives.groups import rloo
from workbench.workers import advantages
from workbench.workers.micro_batches import each_minibatch
from workbench.workers.roles import actor as actor_role
from workbench.workers.roles import numeric

MODELS: dict[str, Any] = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": TINY}


def length(prompt: str, response: str, **row: Any) -> float:
    return len(response) / 10


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("sabotage", tmp_path_factory.mktemp("runs"), backend="inline", models=MODELS) as lab:
        yield lab


def worker(lab: wb.Workbench, role: str) -> Any:
    """The live worker of a role: inline, it is in this process."""
    (host,) = cast(Any, lab.hosts.backend)._hosts.values()
    return host.workers[role]


def failed(report: CheckReport) -> set[str]:
    return {finding.check for finding in report.failed}


def test_a_healthy_system_passes(lab: wb.Workbench) -> None:
    report = lab.check()
    assert [finding.check for finding in report] == list(CHECKS)
    assert report.ok, report
    assert report.raise_if_failed() is report
    assert set(report.df["verdict"]) == {"ok", "not applicable"}
    assert report["replicas"].about == "every trained role has one rank"
    assert all(not finding.culprit for finding in report)
    assert "all that apply passed" in report._repr_html_()
    assert repr(report).splitlines()[2].split()[:2] == ["ratio", "ok"]
    with expect_error(BadInput, value="check 'ration'", rule="there are dropout, ratio"):
        lab.check("ration")


def test_a_mask_that_gae_does_not_read(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def maskless(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *arguments: Any) -> Any:
        return gae(rewards_BT, values_BT, torch.ones_like(mask_BT), *arguments)

    monkeypatch.setattr(advantages, "gae", maskless)
    report = lab.check("advantages")
    assert failed(report) == {"advantages"}
    assert report["advantages"].culprit.startswith(("advantages of row ", "returns of row "))


def test_advantages_that_are_whitened_over_tokens_outside_the_mask(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def maskless(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return moments(x_BT, torch.ones_like(mask_BT))

    monkeypatch.setattr(numeric, "moments", maskless)
    report = lab.check("advantages")
    assert failed(report) == {"advantages"}
    assert report["advantages"].culprit.endswith(", with more tokens outside the mask")


def test_advantages_that_depend_on_the_order_of_rows(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(scores_N: Tensor, group_N: Tensor) -> Tensor:  # the samples of a prompt need not lie side by side
        return rloo(scores_N, torch.arange(len(group_N)).div(2, rounding_mode="floor").clamp(max=len(group_N) // 2 - 1))

    monkeypatch.setattr(advantages, "rloo", neighbours)
    report = lab.check("advantages")
    assert report["advantages"].culprit.startswith("advantages of row ")
    assert report["advantages"].culprit.endswith("rloo, with its rows in another order, on other ranks")


def test_a_row_with_advantages_that_is_skipped(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_role, "_rows_without_advantage", lambda advantages, mask: frozenset(range(1, len(mask))))
    report = lab.check("denominators")
    assert failed(report) == {"denominators"}
    assert report["denominators"].culprit.startswith("actor, ppo, token-mean: the ")
    assert report["denominators"].culprit.endswith("between rows without advantage skipped and not")


def test_a_wrong_mask(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = worker(lab, "actor")
    update = actor.update_actor

    def without_mask(batch: Any, **arguments: Any) -> Any:
        mask = batch.ragged("response_mask")
        columns = {**batch.columns, "response_mask": mask.like(torch.ones_like(mask.values))}
        return update(replace(batch, columns=columns), **arguments)

    monkeypatch.setattr(actor, "update_actor", without_mask)
    report = lab.check("ratio", "rollout", "masks", "gradients")
    assert failed(report) == {"masks"}
    assert report["masks"].culprit.startswith("actor, ")
    assert "; row " in report["masks"].culprit
    with expect_error(CheckFailed, value="1 of 4 checks failed: masks: .* > 1, actor, .*: the"):
        report.raise_if_failed()


def test_shifted_positions(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = worker(lab, "actor").engine
    forward = engine.forward

    def shifted(*, positions: Tensor, **inputs: Any) -> Any:
        return forward(positions=(positions + 1).clamp(max=len(inputs["input_ids"]) - 1), **inputs)

    monkeypatch.setattr(engine, "forward", shifted)
    report = lab.check("ratio", "rollout", "kl", "masks", "frozen")
    assert failed(report) == {"rollout", "kl"}
    assert report["rollout"].culprit.startswith("actor, row ")
    assert report["rollout"].culprit.endswith("generated on rank 0 of pool shared")


def test_a_temperature_that_is_ignored(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = worker(lab, "actor").engine
    forward = engine.forward
    monkeypatch.setattr(engine, "forward", lambda temperature, **inputs: forward(temperature=1.0, **inputs))
    assert failed(lab.check("ratio", "rollout", "kl")) == {"rollout", "kl"}
    monkeypatch.undo()

    def hot_gradient(temperature: float, **inputs: Any) -> Any:  # in the update alone
        return forward(temperature=1.0 if torch.is_grad_enabled() else temperature, **inputs)

    monkeypatch.setattr(engine, "forward", hot_gradient)
    report = lab.check("ratio", "rollout", "kl", "masks")
    assert failed(report) == {"ratio"}
    assert report["ratio"].culprit.startswith("actor, rank 0; row ")


def test_dropout(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = worker(lab, "actor").engine.module.model.model.layers[1]
    dropping = nn.Sequential(layer.mlp, nn.Dropout(0.2))
    dropping.training = False
    monkeypatch.setitem(layer._modules, "mlp", dropping)
    random = torch.get_rng_state()
    report = lab.check("dropout", "ratio", "rollout", "invariance", "weights")
    assert {"dropout", "ratio", "rollout", "invariance"} <= failed(report)
    assert report["dropout"].figure == 1
    assert report["dropout"].culprit == "actor, rank 0: model.model.layers.1.mlp.1"
    assert report["invariance"].culprit.startswith("actor, row ")
    assert torch.equal(torch.get_rng_state(), random)


def test_a_reference_that_trains(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = worker(lab, "reference")
    compute = reference.compute_ref_log_prob

    def drifting(batch: Any, **arguments: Any) -> Any:
        reference.engine.module.model.model.norm.weight.data.mul_(1.01)
        return compute(batch, **arguments)

    before = lab.reference.weight_digests()
    monkeypatch.setattr(reference, "compute_ref_log_prob", drifting)
    report = lab.check("ratio", "rollout", "frozen", "masks")
    assert failed(report) == {"frozen"}
    assert report["frozen"].culprit == "reference, rank 0: model.norm.weight"
    assert lab.reference.weight_digests() == before  # what the check moved is put back


def test_a_reward_model_that_drifts_as_it_scores(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = worker(lab, "reward")
    compute, norm = reward.compute_reward, reward.engine.module.backbone.norm.weight
    before = norm.detach().clone()

    def drifting(batch: Any, **arguments: Any) -> Any:
        norm.data.mul_(1.01)
        return compute(batch, **arguments)

    monkeypatch.setattr(reward, "compute_reward", drifting)
    report = lab.check("frozen")
    norm.data.copy_(before)  # a model that is only run has no state to go back to
    assert failed(report) == {"frozen"}
    assert report["frozen"].culprit.startswith("reward, rank 0: ")
    assert report["frozen"].culprit.endswith("norm.weight")


def test_an_adapter_on_a_base_that_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=4)), "reward": length}
    with tiny_lab("adapter", tmp_path, backend="inline", models=models) as lab:
        before = lab.actor.weight_digests()
        report = lab.check("dropout", "rollout", "weights", "kl", "invariance", "frozen")
        assert {f.verdict for f in report} == {"ok"}, report
        assert lab.actor.weight_digests() == before  # the adapter moved, and is put back
        actor = worker(lab, "actor")
        update, module = actor.update_actor, actor.engine.module
        name = next(name for name, _ in module.named_parameters() if "base_layer" in name)
        base = module.get_parameter(name)
        kept = base.detach().clone()

        def moving(batch: Any, **arguments: Any) -> Any:
            base.data.mul_(1.5)
            return update(batch, **arguments)

        monkeypatch.setattr(actor, "update_actor", moving)
        report = lab.check("frozen")
        base.data.copy_(kept)  # a state holds what is trained: the adapter
        assert failed(report) == {"frozen"}
        assert report["frozen"].culprit.startswith("actor, rank 0: model.layers.0.")
        assert lab.actor.weight_digests() == before
        monkeypatch.undo()
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4))
        mask = batch.fetch(["response_mask"])["response_mask"]
        assert isinstance(mask, Ragged)
        lab.actor.update_actor(batch.join(lab.put({"advantages": mask.like(torch.ones(len(mask.values)))})))
        assert lab.check("kl")["kl"].verdict == "not applicable"


def test_a_workbench_without_an_actor(tmp_path: Path) -> None:
    models = {"reward": wb.Model(TINY, training=wb.Training(engine="torch"))}
    with tiny_lab("no-actor", tmp_path, backend="inline", prompts=None, models=models) as lab:
        report = lab.check()
        assert report.ok
        assert [finding.check for finding in report if finding.verdict == "ok"] == ["dropout"]
        assert report["invariance"].about == "there is no actor"
        with expect_error(BadInput, value="evaluate on a workbench without an actor"):
            lab.evaluate("arithmetic")


def test_a_mean_of_micro_batch_means(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    critic = worker(lab, "critic")
    steps = critic.steps

    def mean_of_means(term: Any, **arguments: Any) -> Any:
        mask = term.shard.ragged("response_mask")
        micros = each_minibatch(term.shard, critic.budget.tokens, critic.context.communicator, critic.context.device)
        whole = term.divisors(critic.context)
        of_micro = {tuple(m.index): (len(group), whole[i]) for i, group in enumerate(micros) for m in group}

        def loss(micro: Any, output: Any) -> Any:
            loss_BR, metrics = term.loss(micro, output)
            count, divisor = of_micro[tuple(micro.index)]
            mine = denominator(micro.mask_BR(mask), term.aggregation)
            return loss_BR * float(divisor / (count * mine)), metrics

        return steps(replace(term, loss=loss), **arguments)

    monkeypatch.setattr(critic, "steps", mean_of_means)
    report = lab.check("ratio", "masks", "denominators", "gradients")
    assert failed(report) == {"denominators"}
    assert report["denominators"].culprit.startswith("critic, ")
    assert "between one micro-batch and one a row" in report["denominators"].culprit


def test_a_gradient_that_is_not_finite(lab: wb.Workbench) -> None:
    weight = worker(lab, "critic").engine.module.score.weight
    hook = weight.register_hook(lambda gradient: gradient * float("nan"))
    try:
        report = lab.check("gradients", "ratio", "rollout")
    finally:
        hook.remove()
    assert failed(report) == {"gradients"}
    assert report["gradients"].culprit.startswith("critic, rank 0: the gradient of score.weight is not finite")


@pytest.mark.parametrize("role", ["reference", pytest.param("reward", marks=pytest.mark.thorough)])
def test_a_row_that_hears_its_neighbours(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    engine = worker(lab, role).engine
    forward = engine.forward

    def one_sequence(*, lengths: tuple[int, ...], after: tuple[int, ...], **inputs: Any) -> Any:
        return forward(lengths=(sum(lengths),), **inputs)

    monkeypatch.setattr(engine, "forward", one_sequence)
    report = lab.check("ratio", "rollout", "kl", "invariance")
    assert failed(report) == {"invariance", *(["kl"] if role == "reference" else [])}
    assert report["invariance"].culprit.startswith(f"{role}, row ")


def test_a_stage_that_fails_is_a_finding(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: Any, **arguments: Any) -> Any:
        raise ValueError("no such head")

    monkeypatch.setattr(worker(lab, "critic"), "compute_values", broken)
    report = lab.check("ratio", "invariance")
    assert failed(report) == {"invariance"}
    assert "critic.compute_values failed on rank 0: ValueError: no such head" in report["invariance"].culprit
    with expect_error(CheckFailed, value=r"1 of 2 checks failed: invariance: critic\.compute_values failed"):
        report.raise_if_failed()


class StaleHead(TransformersEngine):
    """An engine with a head of its own, which no sync reaches: what happens to packed copies of tied embeddings."""

    def update_weights(self, named_weights: Any, version: int, *, partial: bool = False) -> int:
        mine, taken = dict(self._model.named_parameters()), 0
        for name, weight in named_weights:
            mine[name].data.copy_(weight)
            taken += weight.nbytes
        self.weights_version = version
        return taken


def test_a_stale_output_head(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = worker(lab, "actor")
    model = load_causal_lm(TINY, dtype=torch.float32, device="cpu")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    engine = StaleHead(model, actor.tokenizer, actor.spec.generation, owns_model=True)
    monkeypatch.setattr(actor, "generator", engine)
    report = lab.check("rollout", "ratio", "weights", "kl")
    assert failed(report) == {"weights"}  # before the first step the old head is still the right one
    assert report["weights"].culprit == "actor, rank 0: lm_head.weight"
    # where nothing can be read, what it computes gives it away
    monkeypatch.setattr(engine, "readable_weights", dict)
    report = lab.check("weights")
    assert report["weights"].culprit == "actor, rank 0: output head, which a sync did not update with the embeddings"
    assert report["weights"].figure > 0.01
    # an engine of its own whose head follows passes
    model = load_causal_lm(TINY, dtype=torch.float32, device="cpu")
    sound = TransformersEngine(model, actor.tokenizer, actor.spec.generation, owns_model=True)
    monkeypatch.setattr(actor, "generator", sound)
    report = lab.check("weights", "rollout")
    assert report.ok, report
    assert "21 weights compared" in report["weights"].about  # the tied head counts by both of its names


def test_training_does_not_notice(tmp_path: Path) -> None:
    def seen(lab: wb.Workbench) -> tuple[Any, ...]:
        return (
            *(
                lab.iteration,
                lab.prompts.drawn,
                dict(lab.runner.counters.draws),
                dict(lab.last_metrics),
                dict(lab.weights),
            ),
            *(list(lab.batches()["batch"]), len(lab.metrics("compute_log_prob")), torch.get_rng_state().tolist()),
        )

    def train(name: str, look: bool) -> tuple[list[Any], list[dict[str, str]]]:
        with tiny_lab(name, tmp_path, backend="inline", models=MODELS) as lab:
            ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=8))
            one = ppo.iterate()
            assert one["update_actor/grad_norm"] > 0
            if look:
                before = seen(lab)
                lab.check("kl", "frozen", "gradients", "weights")
                lab.evaluate("arithmetic/test", n=3, samples=2, sampling=wb.Sampling(max_new_tokens=4))
                assert seen(lab) == before
            two = ppo.iterate()
            two.pop("generate_sequences/sync_gap/mean", None)  # the look has synced already
            return [one, two], lab.actor.weight_digests() + lab.critic.weight_digests()

    assert train("looked", True) == train("plain", False)
