"""A workbench whose models are cut over ranks: the same numbers as on one rank, from rollouts to saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, rollouts, tiny_lab, train_on
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput
from workbench.models.loading import load_causal_lm

pytestmark = pytest.mark.slow

TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}  # fp32 sums in another order, over four steps of an update
FIRST_RATIO = "update_actor/first_minibatch/ratio/max_deviation"
ROLES = ("actor", "critic", "reference", "reward")


def open_lab(name: str, runs: Path, layout: wb.Layout, **more: Any) -> wb.Workbench:
    models = dict.fromkeys(ROLES, TINY) | {"reward": wb.Model(TINY, training=wb.Training(engine="torch"), seed=5)}
    placement = wb.Placement.colocate(layout.size, layouts=dict.fromkeys(ROLES, layout))
    options: dict[str, Any] = {"models": models, "placement": placement, "devices": layout.size, **more}
    return tiny_lab(name, runs, **options)


def generated(lab: wb.Workbench) -> list[list[int]]:
    batch = lab.actor.generate_sequences(lab.put(PROMPTS), max_new_tokens=6, samples=2, seed=3)
    responses = batch.fetch(["response_ids"])["response_ids"]
    assert isinstance(responses, Ragged)
    return [row.tolist() for row in responses.rows()]


PROMPTS: Table = {
    "prompt_ids": Ragged.of([[1, 70 + n, 90 + n] for n in range(3)], torch.int64),
    "prompt_uid": torch.arange(3),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with open_lab("one", tmp_path_factory.mktemp("runs"), wb.Layout(), backend="inline") as lab:
        before = generated(lab)
        table, meta = rollouts(lab)
        metrics = train_on(lab, table, meta)
        lab.reward.center(lab.put(table, meta=meta))
        return {
            "table": table,
            "meta": meta,
            "metrics": metrics,
            "centred": lab.last_metrics["center"],
            "before": before,
            "checksum": lab.actor.weights_checksum()[0],
        }


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        pytest.param(wb.Layout(1, 2, 1), "torch", marks=pytest.mark.thorough),
        (wb.Layout(2, 1, 1), "torch"),
        pytest.param(wb.Layout(1, 2, 1, 1, 1), "torch", marks=pytest.mark.thorough),
        pytest.param(wb.Layout(1, 2, 1), "deepspeed", marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.thorough
def test_a_layout_gives_the_numbers_of_one_rank(
    expected: dict[str, Any], tmp_path: Path, layout: wb.Layout, engine: str
) -> None:
    with open_lab("cut", tmp_path, layout, engine=engine) as lab:
        assert generated(lab) == expected["before"]
        metrics = train_on(lab, expected["table"], expected["meta"])
        assert metrics.keys() == expected["metrics"].keys()
        assert metrics[FIRST_RATIO] <= 1e-5
        for name in expected["metrics"].keys() - {FIRST_RATIO}:
            assert metrics[name] == pytest.approx(expected["metrics"][name], **TOLERANCE), name
        lab.reward.center(lab.put(expected["table"], meta=expected["meta"]))
        assert lab.last_metrics["center"] == pytest.approx(expected["centred"], **TOLERANCE)
        assert lab.actor.weights_checksum() == pytest.approx([expected["checksum"]] * layout.size, rel=1e-5)
        drawn = lab.actor.generate_sequences(lab.put(PROMPTS), max_new_tokens=6, samples=2, seed=3)
        lab.actor.compute_log_prob(drawn)
        assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-3  # with the weights of the update
        spans = lab.spans()
        forward = spans[(spans["kind"] == "forward") & (spans["role"] == "actor")]
        tokens = forward.groupby("rank")["processed_tokens"].sum()
        assert tokens.loc[layout.size - 1 if layout.p > 1 else 0] > 0
        assert (tokens > 0).sum() == 1  # the same rows on both ranks count once
        assert (forward["moved_bytes"] > 0).all() == (layout.t > 1)
        handed_on = spans[(spans["kind"] == "communication") & (spans["parent"] == "forward")]
        assert (handed_on["moved_bytes"] > 0).any() == (layout.p > 1)
        report = lab.check("weights", "gradients", "replicas")  # what layouts take part in
        assert set(report.df["verdict"]) == {"ok"}, report
        lab.refresh_reference()
        assert lab.reference.weight_digests() == lab.actor.weight_digests()
        lab.actor.save_model(tmp_path / "saved")
        lab.reward.save_model(tmp_path / "scores")
        total = sum(p.double().abs().sum().item() for p in load_causal_lm(tmp_path / "saved").parameters())
        assert total == pytest.approx(lab.actor.weights_checksum()[0], rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "training", "message"),
    [
        (wb.Layout(2, 1, 1), wb.Training(), r"layouts.'actor'.*deepspeed.*engine='torch'"),
        (wb.Layout(1, 2, 1), wb.Training(zero_stage=3), r"layouts.'actor'.*t=2.*zero_stage=3.*use zero_stage=2"),
        (wb.Layout(1, 4, 1), wb.Training(engine="torch"), "layouts.'actor'.*2 key-value heads over t=4"),
        (wb.Layout(4, 1, 1), wb.Training(engine="torch"), "layouts.'actor'.*2 layers over p=4"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(
    tmp_path: Path, layout: wb.Layout, training: wb.Training, message: str
) -> None:
    placement = wb.Placement.colocate(layout.size, layouts={"actor": layout})
    with pytest.raises(BadInput, match=message):
        wb.open(
            "no", models={"actor": TINY}, placement=placement, devices=layout.size, training=training,
            generation=wb.Generation(engine="transformers"), runs=tmp_path,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())
