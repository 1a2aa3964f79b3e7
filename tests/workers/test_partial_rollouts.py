"""Responses in parts: what is drawn by which weights, and what may not be in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from tests.tolerances import rounding
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, UnknownColumn

STOPS = {"max_new_tokens": 20, "stop_token_ids": range(0, 256, 16)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models: dict[str, Any] = {"actor": wb.Model(TINY, training=wb.Training(engine="torch", learning_rate=2e-3))}
    with tiny_lab("parts", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def ragged(batch: wb.Batch, name: str) -> Ragged:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return column


def test_parts_by_the_same_weights_are_the_whole_response(lab: wb.Workbench) -> None:
    """A stop string lies across a border, too."""
    prompts = lab.prompts.next(4)
    whole = lab.actor.generate_sequences(prompts, samples=2, seed=3, **STOPS)
    text = whole.df()["response_text"].iloc[0]
    for stops in (STOPS, {"max_new_tokens": 20, "stop": [text[6:9]]}):
        whole = lab.actor.generate_sequences(prompts, samples=2, seed=3, **stops)
        batch = lab.actor.generate_sequences(prompts, samples=2, seed=3, pause_after=7, **stops)
        assert lab.last_metrics["generate_sequences"]["ending_paused/fraction"] > 0
        lengths = [batch.lengths("response_ids").tolist()]
        while "paused" in (endings := list(batch.fetch(["ending"])["ending"])):
            assert all((n == len(lengths) * 7) == (e == "paused") for n, e in zip(lengths[-1], endings, strict=True))
            batch = lab.actor.generate_sequences(batch, resume=True, pause_after=7, **stops)
            lengths.append(batch.lengths("response_ids").tolist())
        assert len(lengths) == 3
        assert torch.equal(ragged(batch, "response_ids").values, ragged(whole, "response_ids").values)
        assert list(batch.fetch(["ending"])["ending"]) == list(whole.fetch(["ending"])["ending"])
        one, two = (ragged(b, "rollout_log_prob").values for b in (batch, whole))
        torch.testing.assert_close(one, two, rtol=0, atol=10 * rounding(64))
        assert not ragged(batch, "token_versions").values.any()


def test_each_token_is_drawn_by_the_policy_of_its_version(lab: wb.Workbench) -> None:
    """Its log-probability is that policy's, and the importance weights of another policy have the mean 1 where that
    policy did not draw: over the first token of each part."""
    batch = lab.actor.generate_sequences(lab.prompts.next(8), samples=128, max_new_tokens=4, pause_after=2, seed=1)
    with lab.kept("actor") as go_back:
        old_batch = batch
        advantages = ragged(batch, "rollout_log_prob")
        signs = advantages.like(ragged(batch, "response_ids").values % 2 * 2.0 - 1)
        scored = lab.actor.compute_log_prob(old_batch).join(lab.put({"advantages": signs}))
        for _ in range(3):
            lab.actor.update_actor(scored)
        version = lab.weights["actor"].steps
        batch = lab.actor.generate_sequences(batch, max_new_tokens=4, resume=True)
        new = ragged(lab.actor.compute_log_prob(batch), "old_log_prob").pad()
        go_back()
        old = ragged(lab.actor.compute_log_prob(batch), "old_log_prob").pad()
    versions, drawn = ragged(batch, "token_versions").pad(), ragged(batch, "rollout_log_prob").pad()
    inside = ragged(batch, "response_mask").pad().bool()
    assert set(versions[inside].tolist()) == {0, version} and set(versions[:, 2:][inside[:, 2:]].tolist()) == {version}
    torch.testing.assert_close(drawn, torch.where(versions == 0, old, new), rtol=0, atol=10 * rounding(64))
    assert ragged(batch, "response_ids").pad()[:, :2].equal(ragged(old_batch, "response_ids").pad()[:, :2])
    there = inside[:, 2]
    weights = (old - new)[there, 2].exp()
    error = float(weights.std()) / len(weights) ** 0.5
    assert abs(float(weights.mean()) - 1) < 4 * error < 0.3  # drawn by the new policy
    assert float((new - old)[there, 2].exp().mean()) - 1 > 8 * error  # and not by the old one


def test_what_is_refused_or_leaves_nothing_to_do(lab: wb.Workbench, tmp_path: Path) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=6, pause_after=3)
    for given in (
        {"keep_mask": True, "top_k": 4},
        {"presence_penalty": 0.5},
        {"environment": wb.Tools([wb.toolbox.calculator])},
    ):
        with expect_error(BadInput, value=f"{next(iter(given))} with pause_after", rule="as part of the prompt"):
            lab.actor.generate_sequences(batch, pause_after=3, **given)
    with expect_error(BadInput, value="cache='kept'", remedy="resume=True"):
        lab.actor.generate_sequences(batch, cache="kept")
    with expect_error(BadInput, value="cache='kept' on engine='transformers'"):
        lab.actor.generate_sequences(batch, resume=True, cache="kept")
    with expect_error(UnknownColumn, value="token_versions"):
        lab.actor.generate_sequences(batch.drop("token_versions"), resume=True)
    with expect_error(BadInput, value="samples=2 with resume=True"):
        lab.actor.generate_sequences(batch, resume=True, samples=2)
    failed = batch.join(lab.put({"valid": torch.tensor([True, False]), "failure": ["", "compute_reward no"]}))
    failed = lab.actor.generate_sequences(failed, resume=True, max_new_tokens=6)
    assert failed.fetch(["valid"])["valid"].tolist() == [True, False]  # what failed for a response that goes on
    shorter = lab.actor.generate_sequences(batch, resume=True, max_new_tokens=2)  # less than they have
    assert list(shorter.fetch(["ending"])["ending"]) == ["length", "length"]
    again = lab.actor.generate_sequences(shorter, resume=True, max_new_tokens=6)
    assert ragged(again, "response_ids").values.equal(ragged(batch, "response_ids").values)
