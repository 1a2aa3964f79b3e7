"""Training in fp16: losses are scaled, steps whose gradients overflow are skipped, and nothing else changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, hosts_of, stored, tiny_lab, vowels
from tests.engines.training_ranks import (
    ENGINES,
    make_engine,
    negative_log_likelihood,
    run_ranks,
    sequences,
    train,
    weights,
)
from tests.workers.head_ranks import Headed, run_headed
from workbench.batches.columns import Ragged
from workbench.engines.training.steps import FIRST, LEAST, LossScale
from workbench.placement import Layout

HALF = torch.float16


def overflowing() -> Any:
    """A micro-batch whose gradient is finite in fp32, and beyond fp16 when it is scaled."""
    micro = negative_log_likelihood(sequences(0))
    return dataclasses.replace(micro, loss=lambda output: micro.loss(output) * 1e5)


def test_the_scale_by_hand() -> None:
    scale = LossScale(growth_steps=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.after_step(finite=finite)
        seen.append(scale.state)
    half = FIRST / 2
    assert seen == [(FIRST, 1), (FIRST, 2), (half, 0), (half, 1), (half, 2), (FIRST, 0), (FIRST, 1)]
    for _ in range(30):
        scale.after_step(finite=False)
    assert scale.state == (LEAST, 0)


def test_a_step_that_overflows_is_skipped_and_the_next_go_on() -> None:
    engine = make_engine("torch", HALF, max_grad_norm=0.0)
    train(engine, range(2))
    before, moments = weights(engine), {n: t.clone() for n, t in engine.held_state("exp_avg")}
    report = engine.step([overflowing()])
    assert report.skipped and report.culprit and report.loss_scale == FIRST and engine.steps == report.steps == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in engine.held_state("exp_avg"))
    assert engine.loss_scale is not None and engine.loss_scale.state == (FIRST / 2, 0)
    (after,) = train(engine, range(2, 3))
    assert not after["skipped"] and after["steps"] == 3 and after["loss_scale"] == FIRST / 2
    while engine.step([overflowing()]).skipped:  # at a smaller scale it fits
        pass
    assert LEAST <= engine.loss_scale.scale < FIRST / 2 and engine.steps == 4


def test_the_scale_grows_after_good_steps_and_changes_no_gradient() -> None:
    grown, fixed = make_engine("torch", HALF), make_engine("torch", HALF)
    assert grown.loss_scale is not None
    grown.loss_scale.growth_steps = 2
    scales = [report["loss_scale"] for report in train(grown, range(4))]
    assert scales == [FIRST, FIRST, 2 * FIRST, 2 * FIRST] and grown.loss_scale.scale == 4 * FIRST
    train(fixed, range(4))
    assert all(torch.equal(weight, weights(grown)[name]) for name, weight in weights(fixed).items())
    (over,) = train(grown, range(4, 5))  # beyond what fits
    assert over["skipped"] and grown.loss_scale.scale == 2 * FIRST


def test_gradients_are_those_of_fp32_within_rounding() -> None:
    passes = [negative_log_likelihood(sequences(0))]
    exact, half, bf16 = (
        {name: g.clone() for name, g in make_engine("torch", dtype).gradients(passes)}
        for dtype in (torch.float32, HALF, torch.bfloat16)
    )

    def error(found: dict[str, torch.Tensor]) -> float:
        gap = sum(float((found[name] - g).square().sum()) for name, g in exact.items())
        return float((gap / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)

    assert error(half) < 4e-3 < error(bf16)


def test_gradients_that_overflow_are_computed_again_with_a_smaller_scale() -> None:
    half, exact = (make_engine("torch", dtype) for dtype in (HALF, torch.float32))
    found, expected = ({n: g.clone() for n, g in e.gradients([overflowing()])} for e in (half, exact))
    size = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=2e-2 * size)
    assert half.loss_scale is not None and half.loss_scale.state == (FIRST, 0)  # a check changes nothing


def test_a_state_has_the_scale_and_goes_on_to_the_bit() -> None:
    engine, other = make_engine("torch", HALF), make_engine("torch", HALF)
    assert engine.loss_scale is not None and other.loss_scale is not None
    train(engine, range(2))
    engine.step([overflowing()])
    train(engine, range(2, 3))
    other.load_state_dict(engine.state_dict())
    assert other.loss_scale.state == engine.loss_scale.state == (FIRST / 2, 1)
    assert train(engine, range(3, 5)) == train(other, range(3, 5))
    assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(engine).items())


def half_steps(kind: str = "torch") -> dict[str, Any]:
    """Steps on this rank's share; the second overflows on rank 0 alone. Then gradients, which overflow there too."""
    engine = make_engine(kind, HALF)
    first = train(engine, range(1))
    alone = not torch.distributed.is_initialized()
    rank, world = (0, 1) if alone else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    micro = negative_log_likelihood(sequences(1)[rank::world])
    factor = 1e5 if rank == 0 else 1.0
    over = dataclasses.replace(micro, loss=lambda output: micro.loss(output) * factor)
    skipped = engine.step([over])
    last = train(engine, range(2, 4))
    found = {"weights": weights(engine), "scale": engine.loss_scale}
    gradients = {name: gradient.clone() for name, gradient in engine.gradients([over])}
    assert engine.loss_scale == found["scale"]
    return {"reports": [*first, dataclasses.asdict(skipped), *last], "gradients": gradients, **found}


STEP: dict[str, Any] = {"dtype": "float16", "head_dtype": "same"}


def on_ranks() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    tensors = Headed(**STEP, layout=Layout(1, 2, 1))
    headed = [Headed(**STEP), tensors, dataclasses.replace(tensors, engine="deepspeed", zero_stage=2)]
    return {kind: half_steps(kind) for kind in ENGINES}, run_headed(headed)


@pytest.mark.slow
def test_ranks_and_engines_skip_together_and_agree() -> None:
    """Two replicas; and with tensors cut over two ranks the loss is scaled once."""
    alone, (expected,) = half_steps(), run_headed([Headed(**STEP)])
    (one, steps), (other, more) = run_ranks(on_ranks, 2)
    size = max(float(gradient.abs().max()) for gradient in alone["gradients"].values())
    for kind in ENGINES:
        mine, its = one[kind], other[kind]
        for rank in (alone, mine, its):
            assert [report["skipped"] for report in rank["reports"]] == [False, True, False, False]
            assert [report["loss_scale"] for report in rank["reports"]] == [FIRST, FIRST, FIRST / 2, FIRST / 2]
        assert mine["scale"] == its["scale"] == alone["scale"]
        for name, weight in alone["weights"].items():
            assert torch.equal(mine["weights"][name], its["weights"][name])
            # Adam's steps are of 3e-3
            torch.testing.assert_close(mine["weights"][name], weight, rtol=8e-3, atol=4e-3)
            torch.testing.assert_close(mine["gradients"][name], its["gradients"][name])
            assert mine["gradients"][name].abs().max() < size
    gradients = one["torch"]["gradients"]
    for kind in ENGINES[1:]:
        for name, gradient in one[kind]["gradients"].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=2e-2 * size)
    for found in (*steps, *more):
        assert found["norm"] == pytest.approx(expected["norm"], rel=0.01) and found["scale"] == FIRST


def test_a_workbench_in_fp16(tmp_path: Path) -> None:
    """Rollouts, updates, their metrics and notes; a checkpoint has the scale."""
    models = {"actor": wb.Model(TINY, dtype="float16"), "reference": wb.Model(TINY, dtype="float16"), "reward": vowels}
    with tiny_lab("half", tmp_path, models=models, backend="inline", training={"minibatches": 1}) as lab:
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=8, seed=1))
        assert lab.reference.compute_ref_log_prob(batch)
        told = lab.put(stored())
        metrics = lab.actor.update_actor(told)
        assert metrics["loss_scale"] == FIRST and metrics["skipped/fraction"] == 0 and metrics["optimizer_steps"] == 1
        table = stored()
        advantages = table["advantages"]
        assert isinstance(advantages, Ragged)
        table["advantages"] = advantages.like(1e6 * advantages.values)
        metrics = lab.actor.update_actor(lab.put(table))
        assert metrics["skipped/fraction"] == 1 and metrics["optimizer_steps"] == 1
        assert "grad_norm" not in metrics  # of steps that were taken
        lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)  # in sync
        lab.save(tmp_path / "kept")
        lab.actor.update_actor(told)
        scale = hosts_of(lab)["shared-0"].workers["actor"].engine.loss_scale
        assert scale.state == (FIRST / 2, 1)
        expected = lab.actor.weight_digests()
    with wb.restore(tmp_path / "kept", name="half-again", runs=tmp_path) as again:
        engine = hosts_of(again)["shared-0"].workers["actor"].engine
        assert engine.loss_scale.state == (FIRST / 2, 0)
        again.actor.update_actor(again.put(stored()))
        assert engine.loss_scale.state == (FIRST / 2, 1) and again.actor.weight_digests() == expected


def test_a_check_says_the_same_where_a_gradient_overflows(tmp_path: Path) -> None:
    def loss(log_prob: Any, old_log_prob: Any, advantages: Any, mask: Any) -> Any:
        return -(log_prob - old_log_prob).exp() * advantages * 1000

    with tiny_lab("checked", tmp_path, models={"actor": wb.Model(TINY, dtype="float16")}, backend="inline") as lab:
        batch = lab.put({**stored(), "prompt_uid": torch.arange(4) // 2})
        found = lab.check(loss=loss, batch=batch)
        failed = [line.split()[0] for line in repr(found).splitlines() if "failed" in line]
        assert failed == ["ratio_1"] and "1e+03 of the policy gradient, cosine 1" in repr(found)  # as in fp32
        assert hosts_of(lab)["shared-0"].workers["actor"].engine.loss_scale.state[0] == FIRST


@pytest.mark.parametrize("zero_stage", [3, *(pytest.param(stage, marks=pytest.mark.thorough) for stage in (0, 1, 2))])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_workbench_in_fp16_with_deepspeed(tmp_path: Path, zero_stage: int) -> None:
    """A step, one that is skipped, rollouts with the new weights, a checkpoint with the scale."""
    training = {"minibatches": 1, "engine": "deepspeed", "zero_stage": zero_stage}
    models = {"actor": wb.Model(TINY, dtype="float16")}
    with tiny_lab("zero", tmp_path, models=models, backend="inline", training=training) as lab:
        told = lab.put(stored())
        first = lab.actor.update_actor(told)
        assert first["loss_scale"] == FIRST and first["skipped/fraction"] == 0
        table = stored()
        advantages = table["advantages"]
        assert isinstance(advantages, Ragged)
        table["advantages"] = advantages.like(1e6 * advantages.values)
        assert lab.actor.update_actor(lab.put(table))["skipped/fraction"] == 1
        batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4, seed=1))
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 0.05 and batch.rows == 2
        lab.save(tmp_path / "kept")
        lab.actor.update_actor(told)
        expected = lab.actor.weight_digests()
    with wb.restore(tmp_path / "kept", name="zero-again", runs=tmp_path) as again:
        engine = hosts_of(again)["shared-0"].workers["actor"].engine
        assert engine.loss_scale.state == (FIRST / 2, 0)
        again.actor.update_actor(again.put(stored()))
        assert engine.loss_scale.state == (FIRST / 2, 1) and again.actor.weight_digests() == expected
