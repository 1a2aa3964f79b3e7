"""Muon: a step by hand, from a singular value decomposition; its state, to the byte, on the move and on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.engines.layout_ranks import first_step, stepped_by_hand
from tests.engines.training_ranks import run_ranks, settings, tiny_model
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.placement.memory import rank_memory
from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

GIVEN: dict[str, Any] = {
    "optimizer": "muon", "learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "constant", "warmup_steps": 0,
    "total_steps": None, "max_grad_norm": 0.0, "eps": 1e-6, "rates": {r"layers\.1\.": 3.0},
}  # fmt: skip


def orthogonalised(gradient: Tensor) -> Tensor:
    """Five steps of x -> a x + b x^3 + c x^5 on the singular values of G / |G|, in fp64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize(("ranks", "layout"), [(1, None), (2, None), (2, Layout(2, 1, 1))])
def test_a_step_is_that_by_hand_and_bytes_are_as_estimated(ranks: int, layout: Layout | None) -> None:
    role = RoleModel(
        config=tiny_model().config, head="lm", dtype="float32", training=settings("torch", **GIVEN), trained=True
    )
    for number, found in enumerate(run_ranks(first_step, ranks, "torch", layout, GIVEN)):
        of_muon = 0
        for name, before in found["before"].items():
            rate, gradient = 1e-3 * (3.0 if "layers.1." in name else 1.0), found["gradients"][name]
            moved = found["after"][name].double() - before.double()
            if before.dim() == 2 and "embed" not in name:
                of_muon += 1
                scale = rate * 0.2 * math.sqrt(max(before.shape))
                expected = -rate * 0.1 * before.double() - scale * orthogonalised(gradient)
                error = (moved - expected).norm() / expected.norm()
                assert error < 0.03, (name, float(error))  # it is computed in bf16
            else:
                expected = stepped_by_hand(before, gradient, rate) - before.double()
                assert torch.allclose(moved, expected, atol=2e-7, rtol=0), name
        assert of_muon == 14
        assert found["bytes"]["optimizer"] == rank_memory(role, layout or Layout(d=ranks), number).optimizer
        assert found["alike"]


def test_a_checkpoint_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    with tiny_lab("muon", tmp_path, backend="inline", models={"actor": TINY}, training={"optimizer": "muon"}) as lab:
        batch: Any = lab.put(stored())
        lab.actor.update_actor(batch)
        lab.save(tmp_path / "one", models=False)
        assert lab.actor.update_actor(batch)["optimizer_steps"] == 4
        expected = lab.actor.weight_digests()
    with wb.restore(tmp_path / "one", name="again", runs=tmp_path) as lab:
        lab.actor.update_actor(lab.put(stored()))
        assert lab.actor.weight_digests() == expected
        with expect_error(BadInput, rule="fixed when the role's engine is made"):
            lab.actor.training.optimizer = "adamw"
    with expect_error(BadInput, remedy="with the same parts trained"):
        tiny_lab("other", tmp_path, backend="inline", models={"actor": TINY}, resume=tmp_path / "one")


def test_where_matrices_are_not_whole_it_is_refused(tmp_path: Path) -> None:
    with expect_error(BadInput, value="optimizer='muon', engine='deepspeed'", rule="pieces of many"):
        wb.Training(optimizer="muon")
    placement = wb.Placement.of({"all": (2, ["actor"])}, layouts={"actor": (1, 2, 1)})
    with expect_error(BadInput, value="optimizer='muon'", rule="t=2 splits them"):
        tiny_lab(
            "cut", tmp_path, models={"actor": TINY}, devices=2, placement=placement, training={"optimizer": "muon"}
        )
