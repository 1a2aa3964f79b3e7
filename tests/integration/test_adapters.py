"""An actor with an adapter on two ranks, its weights sharded: the numbers of one rank, and no second model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, rollouts, tiny_lab, train_on, vowels

pytest.importorskip("peft")
# as in test_ray: fp32 on other micro-batches and other orders of summation
TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}
MODELS = {"actor": wb.Model(TINY, adapter=wb.LoRA(rank=4, alpha=16)), "critic": TINY, "reward": vowels}


@pytest.mark.slow
@pytest.mark.thorough
def test_two_ranks_of_zero_3_give_what_one_rank_gives(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    with tiny_lab("one", tmp_path, backend="inline", devices=1, models=MODELS) as lab:
        stored = rollouts(lab)
        expected, checksum = train_on(lab, *stored), lab.actor.weights_checksum()[0]
    torch.set_num_threads(threads)
    split = wb.Placement.of({"policy": (2, ["actor"]), "scorers": (1, ["critic", "reward"])})
    options: dict[str, Any] = {"engine": "deepspeed", "training": {"zero_stage": 3}, "models": MODELS}
    with tiny_lab("two", tmp_path, placement=split, devices=3, **options) as lab:
        assert lab.reference.hosts == lab.actor.hosts
        assert train_on(lab, *stored) == pytest.approx(expected, **TOLERANCE)
        checksums = lab.actor.weights_checksum()
        assert len(set(checksums)) == 1
        assert checksums[0] == pytest.approx(checksum, rel=1e-5)
        # the adapter is gathered for a generation engine that holds its own model
        (first, second) = lab.actor.sync_weights()
        assert max(first["sync_gap/mean"], second["sync_gap/mean"]) < 1e-5
        shown: Any = lab.topology().set_index(["role", "rank"])
        assert shown.loc[("reference", 1), "process"] == shown.loc[("actor", 1), "process"]
        assert shown.loc[("reference", 0), "parameters_bytes"] == 0
        whole = lab.actor.save_model(tmp_path / "whole")
    with tiny_lab("saved", tmp_path, backend="inline", models={"actor": whole[0]}) as lab:
        assert lab.actor.weights_checksum()[0] == pytest.approx(checksums[0], rel=1e-6)
