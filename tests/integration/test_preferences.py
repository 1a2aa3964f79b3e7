"""Supervised stages on one rank and two, on torch and DeepSpeed: the same numbers, and models that are saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab

# as in test_ray: fp32 on other micro-batches and other orders of summation
TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}
ROWS = [
    {"prompt": f"Question {i}?", "chosen": f"yes, {'very ' * (i % 5)}gladly", "rejected": f"no{'!' * (i % 4)} {i}"}
    for i in range(13)
]
RATED = [
    {"prompt": row["prompt"], "response": row[answer], "label": answer == "chosen"}
    for i, row in enumerate(ROWS)
    for answer in ("chosen", "rejected")
    if answer == "chosen" or i % 3
]


def lab_of(name: str, runs: Path, training: dict[str, Any], **options: Any) -> wb.Workbench:
    settings: dict[str, Any] = {"learning_rate": 1e-3, "minibatches": 2, "micro_batch_tokens": 150, **training}
    reward = wb.Model(TINY, training=wb.Training(**{"engine": "torch", **settings}))
    models = {"actor": TINY, "reference": TINY, "reward": reward}
    return tiny_lab(name, runs, models=models, prompts=None, training=settings, **options)


def learn(lab: wb.Workbench, saved: Path) -> dict[str, float]:
    """Every supervised stage once or twice; all metrics, and the scores of held-out pairs by the saved reward model."""
    pairs = lab.pairs(ROWS, held_out=3)
    demonstrations = lab.demonstrations([{"prompt": row["prompt"], "response": row["chosen"]} for row in ROWS])
    found: dict[str, float] = {}

    def tell(stage: str, metrics: Any) -> None:
        found.update({f"{stage}/{name}": value for name, value in metrics.items()})

    batch = lab.reference.compute_ref_pair_log_prob(pairs.next(10))
    tell("reward", lab.reward.update_reward(batch, epochs=2))
    tell("dpo", lab.actor.update_dpo(batch, epochs=2))
    tell("ipo", lab.actor.update_ipo(batch, epochs=2))
    tell("orpo", lab.actor.update_orpo(batch))
    tell(
        "kto", lab.actor.update_kto(lab.reference.compute_ref_feedback_log_prob(lab.feedback(RATED).next(12)), epochs=2)
    )
    tell("sft", lab.actor.update_sft(demonstrations.next(12)))
    tell("center", lab.reward.center(pairs.held_out, answers="chosen_ids"))
    lab.reward.compute_pair_rewards(pairs.held_out)
    lab.actor.compute_pair_log_prob(lab.reference.compute_ref_pair_log_prob(pairs.held_out))
    for stage in ("compute_pair_rewards", "compute_pair_log_prob"):
        tell(stage, lab.last_metrics[stage])
    lab.reward.save_model(str(saved))
    lab.actor.save_model(str(saved.with_name(f"{saved.name}_actor")))
    return found


def scores(runs: Path, saved: Path) -> torch.Tensor:
    """Of all pairs by a saved reward model, inline."""
    threads = torch.get_num_threads()
    with tiny_lab(f"of_{saved.name}", runs, models={"reward": saved}, prompts=None, backend="inline") as lab:
        column = lab.reward.compute_pair_rewards(lab.pairs(ROWS, shuffle=False).next(13)).fetch()["chosen_rewards"]
    torch.set_num_threads(threads)
    assert isinstance(column, torch.Tensor)
    return column


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], torch.Tensor, Path]:
    runs = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    with lab_of("inline", runs, {}, backend="inline", devices=1) as lab:
        metrics = learn(lab, runs / "models" / "inline")
    torch.set_num_threads(threads)
    return metrics, scores(runs, runs / "models" / "inline"), runs


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "placement", "training"),
    [
        ("two", wb.Placement.colocate(2), {}),
        ("zero1", wb.Placement.colocate(2), {"engine": "deepspeed", "zero_stage": 1}),
        ("zero3", wb.Placement.colocate(2), {"engine": "deepspeed", "zero_stage": 3}),
        ("apart", wb.Placement.of({"a": (1, ["actor", "reference"]), "b": (1, ["reward"])}), {}),
    ],
)
def test_ranks_engines_and_placements_agree(
    inline: tuple[dict[str, float], torch.Tensor, Path], name: str, placement: wb.Placement, training: dict[str, Any]
) -> None:
    expected, expected_scores, runs = inline
    with lab_of(name, runs, training, placement=placement, devices=2) as lab:
        metrics = learn(lab, runs / "models" / name)
    assert metrics.keys() == expected.keys()
    for metric, value in expected.items():
        assert metrics[metric] == pytest.approx(value, **TOLERANCE), metric
    torch.testing.assert_close(scores(runs, runs / "models" / name), expected_scores, rtol=2e-3, atol=2e-3)
    # what was saved is whole: a causal language model again
    with tiny_lab(
        f"actor_{name}", runs, models={"actor": runs / "models" / f"{name}_actor"}, backend="inline"
    ) as again:
        assert again.actor.generate_sequences(again.prompts.next(2), max_new_tokens=2).rows == 2
