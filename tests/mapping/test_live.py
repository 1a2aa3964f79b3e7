"""A workbench that predicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import workbench as wb
from tests.cases import tiny_lab
from workbench.errors import BadInput
from workbench.session.predicting import START


def test_a_workbench_is_calibrated_and_predicts(tmp_path: Path) -> None:
    with tiny_lab("predicted", tmp_path, backend="inline") as lab:
        with pytest.raises(BadInput, match="no algorithm has taken a step"):
            lab.calibrate()
        with pytest.raises(BadInput, match="is not calibrated"):
            lab.predict()
        ppo = wb.PPO(lab, prompts=8, samples=2, sampling=wb.Sampling(max_new_tokens=12))
        ppo.run(2)
        lab.calibrate()
        assert lab.calibration is not None
        told = lab.predict()
        frame = told.frame().set_index("call")
        calls = {"generate_sequences", "compute_log_prob", "compute_ref_log_prob", "compute_values", "update_critic",
                 "update_actor", "iteration"}  # fmt: skip
        assert set(frame.index) == calls
        assert (frame["measured_s"] > 0).all()
        spans = lab.spans()
        last = spans[(spans["stage"] == "update_actor") & (spans["kind"] == "compute")].iloc[-1]
        assert frame.loc["update_actor", "measured_s"] == pytest.approx(last["duration_s"])
        samples = lab.calibration.samples.values()

        def off(constants: wb.mapping.Constants) -> float:
            return sum((constants.seconds(sample.terms) / sample.seconds - 1) ** 2 for sample in samples)

        assert off(lab.calibration.constants) < off(START)  # it was fitted to them
        other = lab.predict(wb.Placement.split(2))
        assert other.frame()["measured_s"].isna().all()
        with pytest.raises(BadInput, match="devices=0"):
            lab.suggest(devices=0)
        apart = lab.predict(wb.Placement.split(2))
        assert apart.iteration_s <= apart.plan.iteration_s * (1 + 1e-9)  # without barriers, with what each call reads
        count = len(lab.calibration.samples)
        lab.calibrate()
        assert len(lab.calibration.samples) == count  # of the same iteration
        ppo.step()
        with pytest.raises(BadInput, match="iteration 3 of PPO is under way"):
            lab.calibrate()
        ppo.iterate()
        lab.actor.generate_sequences(lab.prompts.next(1), max_new_tokens=2)  # by hand, and no part of an iteration
        lab.calibrate()
        assert len(lab.calibration.samples) == 2 * count
        plans = lab.suggest(devices=4)
        assert set(plans.best.placement.roles) == set(lab.placement.roles)
        assert plans.error is not None and plans.error > 0
        assert plans.chance is not None and 0.5 <= plans.chance <= 1
        ahead = lab.suggest(devices=4, staleness=1).best
        assert ahead.placement.has_rollout and ahead.workload.ahead == 1
        again = [lab.predict(ahead.placement, staleness=k) for k in (0, 1)]
        waiting, beside = (sum(one.plan.stage_s.values()) for one in again)
        assert again[1].plan.iteration_s < again[0].plan.iteration_s == pytest.approx(waiting) and beside > 0
        assert again[1].frame().set_index("call").loc["generate_sequences", "role"] == "rollout"
        assert "error" in told._repr_html_()
        grpo = wb.GRPO(lab, prompts=4, samples=2, sampling=wb.Sampling(max_new_tokens=4))  # calls no critic
        grpo.run(1)
        lab.calibrate()
        assert "critic" in lab.suggest(devices=2).best.placement.roles
