"""A workbench that predicts itself."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

import workbench as wb
from tests.cases import tiny_lab
from workbench.display.palette import error_style
from workbench.errors import BadInput
from workbench.session.predicting import BETWEEN, START


def test_a_prediction_is_drawn_above_what_was_measured_and_coloured_by_its_error(tmp_path: Path) -> None:
    with tiny_lab("drawn", tmp_path, backend="inline") as lab:
        ppo = wb.PPO(lab, prompts=4, samples=2, sampling=wb.Sampling(max_new_tokens=4))
        ppo.run(2)
        lab.calibrate()
        told, spans, elsewhere = lab.predict(), lab.spans(), lab.predict(wb.Placement.split(2)).timeline()
    frame, first = told.frame().set_index("call"), "generate_sequences"
    rows = {row["stage"]: row for row in told.timeline().rows if row["device"] == "measured"}
    assert [row["device"] for row in told.timeline().summary] == ["predicted", "measured"]
    begun = spans[(spans["kind"] == "compute") & (spans["parent"] == "")].groupby("stage")["start_s"].max()
    assert set(rows) == set(frame.index) - {"iteration", BETWEEN}
    for call, row in rows.items():
        assert row["start_s"] - rows[first]["start_s"] == pytest.approx(begun[call] - begun[first], abs=1e-4)
        assert row["end_s"] - row["start_s"] == pytest.approx(frame.loc[call, "measured_s"])
        assert row["error"] == frame.loc[call, "error"]
    twice = {first: (0.0, 2 * float(frame["predicted_s"][first]))}
    drawn = replace(told, measured=twice)._repr_html_()
    assert drawn.count("s measured, error -50%") == 2  # of the predicted and of the measured bar
    assert drawn.count(f'fill="{error_style(-0.5).colour}"') == 2  # in the legend, and the bar
    assert {row["device"] for row in elsewhere.summary} == {"predicted"}


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
                 "update_actor", BETWEEN, "iteration"}  # fmt: skip
        assert set(frame.index) == calls
        assert (frame["measured_s"] > 0).all()
        assert frame["measured_s"].drop("iteration").sum() == pytest.approx(frame.loc["iteration", "measured_s"])
        assert frame["predicted_s"].drop("iteration").sum() == pytest.approx(told.iteration_s)
        assert frame.loc[BETWEEN, "error"] == pytest.approx(0)  # of one iteration
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
        ppo.step()  # generates
        with pytest.raises(BadInput, match="iteration 3 of PPO is under way"):
            lab.calibrate()
        time.sleep(1)
        ppo.iterate()
        lab.actor.generate_sequences(lab.prompts.next(1), max_new_tokens=2)  # by hand, and no part of an iteration
        lab.calibrate()
        assert len(lab.calibration.samples) == 2 * count
        assert lab.calibration.between_s == told.plan.workload.between_s  # pauses between steps are not predicted
        plans = lab.suggest(devices=4)
        assert "no call runs for" in plans.best.why
        assert set(plans.best.placement.roles) == set(lab.placement.roles)
        assert plans.error is not None and plans.error > 0
        assert plans.chance is not None and 0.5 <= plans.chance <= 1
        ahead = lab.suggest(devices=4, staleness=1).best
        assert ahead.placement.has_rollout and ahead.workload.ahead == 1
        again = [lab.predict(ahead.placement, staleness=k) for k in (0, 1)]
        waiting, beside = (sum(one.plan.stage_s.values()) for one in again)
        assert again[1].plan.iteration_s < again[0].plan.iteration_s and beside > 0
        assert again[0].plan.iteration_s == pytest.approx(waiting + lab.calibration.between_s)
        assert again[1].frame().set_index("call").loc["generate_sequences", "role"] == "rollout"
        assert "error" in told._repr_html_()
        grpo = wb.GRPO(lab, prompts=4, samples=2, sampling=wb.Sampling(max_new_tokens=4))  # calls no critic
        grpo.run(1)
        lab.calibrate()
        assert "critic" in lab.suggest(devices=2).best.placement.roles
