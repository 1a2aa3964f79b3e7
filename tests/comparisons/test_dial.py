"""`wb.dial(lab)`: gain and cost of staleness over one axis."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.errors import BadInput


def busy_s(lab: wb.Workbench, start_s: float, end_s: float) -> float:
    """Seconds in which some span that is no queue lies, of a workbench with one device."""
    spans = lab.spans()
    worked = spans[spans["kind"] != "queue"].sort_values("start_s")
    reached, total = start_s, 0.0
    for first_s, last_s in zip(worked["start_s"].tolist(), worked["end_s"].tolist(), strict=True):
        from_s, to_s = max(first_s, reached), min(last_s, end_s)
        if to_s > from_s:
            total, reached = total + to_s - from_s, to_s
    return total


def test_a_row_an_iteration_with_gain_and_cost(tmp_path: Path) -> None:
    with tiny_lab("dial", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        assert wb.dial(lab).df.empty and "no iteration" in wb.dial(lab)._repr_html_()
        sampling = wb.Sampling(max_new_tokens=8, ignore_eos=True)
        grpo = wb.GRPO(lab, prompts=4, samples=2, sampling=sampling, correction=wb.Correction())
        run = grpo.run(4, staleness=1)
        found = wb.dial(lab)
        df = found.df
        assert df.index.tolist() == [1, 2, 3, 4]  # and not the fifth, whose rollouts wait
        assert df["age_steps"].tolist() == [0.0, *run["buffer/age_steps/mean"].tolist()[1:]]
        assert df["age_steps"].iloc[-1] > 0
        assert df["reward"].tolist() == run["compute_reward/rewards/mean"].tolist()
        effective = run["update_actor/correction/effective_sample_size"].tolist()
        assert df["effective_sample_size"].tolist() == effective
        assert df["largest_ratio_deviation"].tolist() == run["update_actor/rollout_ratio/max_deviation"].tolist()

        events = lab.telemetry.events()
        begun = events[events["event"] == "iteration"]["time_s"].tolist()
        for number in (1, 2, 3):
            start_s, end_s = begun[number - 1 : number + 1]
            busy, seconds = busy_s(lab, start_s, end_s), df["seconds"][number]
            assert 0 < busy <= seconds * (1 + 1e-6) and seconds <= end_s - start_s + 1e-6
            assert df["tokens_per_s"][number] == pytest.approx(4 * 2 * 8 / seconds)
            assert df["idle_share"][number] == pytest.approx(1 - busy / seconds, abs=1e-3)

        assert [chart.x for chart in found.charts()] == ["iteration"] * 6
        assert len(found.figure()["data"]) == 6 and "response tokens a second" in found._repr_html_()
        assert "Dial of 4 iterations" in repr(found)

        time.sleep(0.5)  # nothing is called, between iterations 4 and 5
        grpo.run(1)
        events = lab.telemetry.events()
        begun = events[events["event"] == "iteration"]["time_s"].tolist()
        assert wb.dial(lab).df["seconds"][4] <= begun[4] - begun[3] - 0.5


def test_what_was_made_again_counts_once(tmp_path: Path) -> None:
    with tiny_lab("again", tmp_path, backend="inline", models={"actor": TINY, "reward": vowels}) as lab:
        grpo = wb.GRPO(lab, prompts=2, samples=2, sampling=wb.Sampling(max_new_tokens=4))
        grpo.run(1)
        saved = lab.save(tmp_path / "saved", grpo)
        grpo.run(2)
        before = wb.dial(lab).df
        lab.recover(saved.folder)
        again = wb.GRPO(lab, prompts=2, samples=2, sampling=wb.Sampling(max_new_tokens=4)).run(1)
        after = wb.dial(lab)
        assert before.index.tolist() == [1, 2, 3] and after.df.index.tolist() == [1, 2]
        assert after.df["reward"][2] == again["compute_reward/rewards/mean"].iloc[0] == before["reward"][2]
        assert after.df["seconds"][2] != before["seconds"][2]
        assert after.df["effective_sample_size"].isna().all() and len(after.charts()) == 5  # no correction
    with expect_error(BadInput, value="wb.dial"):
        wb.dial("again")
