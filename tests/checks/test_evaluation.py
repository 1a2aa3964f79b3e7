"""Held-out evaluation: the numbers by hand, several data sets, a loop that calls it, and a refreshed reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.calculator import sums
from tests.cases import TINY, tiny_lab
from workbench.batches.columns import Ragged
from workbench.checks.evaluation import _scores, summary
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput

SHORT = wb.Sampling(max_new_tokens=6)


def length(prompt: str, response: str, **row: Any) -> float:
    return len(response) / 10


def letters(prompt: str, response: str, **row: Any) -> list[float] | float:
    return float(sum(c.isalpha() for c in response) > 2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": length}
    with tiny_lab("evaluate", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def test_the_numbers_of_a_data_set() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 2.0, 0.0, 0.0])  # three prompts, two samples each
    row = summary(rewards, np.array([1, 2, 3, 4, 5, 6]), np.array([True, True, False, True, True, True]), 2, 1.0)
    assert row["reward_mean"] == pytest.approx(3.5 / 6)
    means = [0.5, 1.25, 0.0]
    assert row["reward_standard_error"] == pytest.approx(np.std(means, ddof=1) / math.sqrt(3))
    assert row["pass@1"] == pytest.approx(2 / 6)
    assert row["pass@2"] == pytest.approx(2 / 3)
    assert row["response_tokens_mean"] == 3.5
    assert row["truncated_fraction"] == pytest.approx(1 / 6)
    assert [name for name in summary(np.ones(6), np.ones(6), np.ones(6), 6, 1.0) if name.startswith("pass")] == [
        *("pass@1", "pass@2", "pass@4", "pass@6")
    ]
    assert math.isnan(summary(np.ones(6), np.ones(6), np.ones(6), 6, 1.0)["reward_standard_error"])


@pytest.mark.parametrize("threshold", [0.9, 0.7, 0.3, 0.6])
def test_a_reward_at_the_threshold_passes(threshold: float) -> None:
    for column in (torch.full((8,), threshold), Ragged.of([[0.0, threshold]] * 8, torch.float32)):
        assert summary(_scores(column), np.ones(8), np.ones(8), 4, threshold)["pass@1"] == 1.0
        assert summary(_scores(column), np.ones(8), np.ones(8), 4, threshold + 1e-6)["pass@1"] == 0.0
    assert summary(_scores(torch.tensor([0, 1])), np.ones(2), np.ones(2), 2, 0.5)["pass@1"] == 0.5  # whole numbers


def test_data_sets_by_name(lab: wb.Workbench) -> None:
    mine = [{"prompt": "Say a."}, {"prompt": "Say b, and c."}]
    frame = lab.evaluate(
        {"sums": {"source": "arithmetic", "max_prompt_tokens": 100}, "mine": mine}, samples=3, sampling=SHORT,
        reward=letters, n=5,
    )  # fmt: skip
    assert frame.index.tolist() == ["sums", "mine"]
    assert frame["prompts"].tolist() == [5, 2]
    assert frame["samples"].tolist() == [3, 3]
    assert frame["pass@1"].tolist() == pytest.approx(frame["reward_mean"].tolist())  # of a reward that is 0 or 1
    assert (frame["pass@3"] >= frame["pass@2"]).all()
    again = lab.evaluate({"mine": mine}, samples=3, sampling=SHORT, reward=letters)
    assert again.loc["mine"].to_dict() == frame.loc["mine"].to_dict()  # the same seed, the same responses
    other = lab.evaluate({"mine": mine}, samples=3, sampling=SHORT, seed=1)
    assert other.loc["mine", "reward_mean"] != lab.evaluate(mine, samples=3, sampling=SHORT).iloc[0]["reward_mean"]
    recorded = lab.metrics("evaluate")
    assert recorded["mine/pass@3"].iloc[0] == frame.loc["mine", "pass@3"]
    assert recorded["iteration"].tolist() == [lab.iteration] * 4


def test_tokens_of_an_environment_are_not_the_policys(lab: wb.Workbench) -> None:
    frame = lab.evaluate("arithmetic", n=4, samples=2, sampling=wb.Sampling(**sums()))
    recorded = lab.metrics("evaluate/stages")
    assert recorded["observation_tokens/mean"].dropna().iloc[-1] > 0
    assert frame["response_tokens_mean"].iloc[0] == recorded["response_tokens/mean"].dropna().iloc[-1]


def test_an_algorithm_evaluates_on_its_way(lab: wb.Workbench) -> None:
    before = len(lab.metrics("evaluate"))
    grpo = wb.GRPO(lab, prompts=2, samples=2, sampling=SHORT)
    seen: list[int] = []

    def look() -> None:
        lab.evaluate("arithmetic", n=2, samples=1, sampling=SHORT)
        seen.append(lab.iteration)

    history = grpo.run(3, evaluate=look, every=2)
    assert seen == [history.index[1]]
    assert len(lab.metrics("evaluate")) == before + 1
    with pytest.raises(BadInput, match="every=0"):
        grpo.run(1, every=0)


def test_what_cannot_be_evaluated(lab: wb.Workbench) -> None:
    for options, message in (
        ({"samples": 0}, "samples=0"),
        ({"n": 0}, "n=0"),
        ({"sampling": {"top_p": 1}}, "wb.Sampling"),
        ({"reward": "length"}, "must be a function"),
        ({"threshold": "1"}, "threshold='1'"),
        ({"data": {}}, "a data set at least"),
        ({"data": "arithmetics"}, "arithmetics"),
    ):
        with pytest.raises(Exception, match=message):
            lab.evaluate(**{"data": "arithmetic", "n": 1, **options})  # type: ignore[arg-type]


def test_a_reference_that_takes_over_the_actor(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.refresh_reference()
    batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=6))
    with lab.reuse():
        old = lab.reference.compute_ref_log_prob(batch)
        scored = lab.compute_advantages(lab.critic.compute_values(lab.reward.compute_reward(batch)))
        lab.actor.update_actor(scored)
        assert lab.check("kl")["kl"].verdict == "not applicable"
        with lab.kept("reference"):
            lab.refresh_reference()
            new = lab.reference.compute_ref_log_prob(batch)  # not from the store: it has other weights
            assert lab.check("kl")["kl"].verdict == "ok"
        assert lab.check("kl")["kl"].verdict == "not applicable"  # back at its old weights
    assert not new.df(["ref_log_prob"]).equals(old.df(["ref_log_prob"]))
    assert lab.reference.compute_ref_log_prob(batch).df(["ref_log_prob"]).equals(old.df(["ref_log_prob"]))
    lab.refresh_reference()
    assert lab.check("kl")["kl"].verdict == "ok"
    assert lab.reference.weight_digests() == lab.actor.weight_digests()
    before = lab.reference.weight_digests()
    monkeypatch.setattr(TorchEngine, "weight_shapes", lambda engine: {"another.weight": (1,)})
    with pytest.raises(BadInput, match=r"weight 'another\.weight'.*of its own architecture"):
        lab.refresh_reference()
    assert lab.reference.weight_digests() == before
    assert lab.topology()["host_published_bytes"].max() == 0
