"""Checkpoints of ranks that hold slices: read by the same ranks to the last bit, and by others within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, update_on, vowels
from workbench.placement import ROLES

TORCH: dict[str, Any] = {"learning_rate": 1e-3, "minibatches": 2, "micro_batch_tokens": 256}


def trained(**training: Any) -> wb.Model:
    return wb.Model(TINY, training=wb.Training(**TORCH, **training))


# models, placement to save under, placement to go on under
CASES = {
    "tensor parallel, and ZeRO-1": (
        {"actor": trained(engine="torch"), "critic": trained(engine="deepspeed", zero_stage=1)},
        wb.Placement.of({"all": (2, ROLES)}, layouts={"actor": (1, 2, 1)}),
        wb.Placement.of({"policy": (1, ["actor", "reference"]), "scorers": (1, ["critic", "reward"])}),
    ),
    "ZeRO-3, and replicas": (
        {"actor": trained(engine="deepspeed", zero_stage=3), "critic": trained(engine="torch")},
        wb.Placement.of({"all": (2, ROLES)}),
        wb.Placement.colocate(1),
    ),
    "two stages, with rollout workers": (
        {"actor": trained(engine="torch"), "critic": trained(engine="torch")},
        wb.Placement.of(
            {"all": (2, ROLES), "more": (1, ["rollout"])}, layouts={"actor": (2, 1, 1), "critic": (2, 1, 1)}
        ),
        wb.Placement.colocate(1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [name if not n else pytest.param(name, marks=pytest.mark.thorough) for n, name in enumerate(CASES)]
)
@pytest.mark.parametrize("where", ["other", pytest.param("same", marks=pytest.mark.thorough)])
def test_another_process_goes_on(case: str, where: str, tmp_path: Path) -> None:
    models, placement, other = CASES[case]
    table, all_models = stored(), {**models, "reference": TINY, "reward": vowels}
    with tiny_lab("saved", tmp_path, models=all_models, placement=placement, devices=placement.devices) as lab:
        update_on(lab, table)
        lab.refresh_reference()
        reference = lab.reference.weight_digests()[0]
        checkpoint = lab.save(tmp_path / "one")
        roles = {role: sum(f.stat().st_size for f in (checkpoint.folder / "roles" / role).glob("*.safetensors"))
                 for role in ("actor", "critic")}  # fmt: skip
        weights = {role: sum(w.numel for w in lab_weights(lab, role)) for role in roles}
        for role in roles:  # both ends of a pipeline hold a tied embedding
            if placement.layout_of(role).p > 1 and role == "actor":
                weights[role] += next(w.numel for w in lab_weights(lab, role) if "embed_tokens" in w.name)
        # fp32 weights and two moments, each element once however many replicas hold it; and a header a file
        for role, nbytes in roles.items():
            assert 12 * weights[role] <= nbytes < 12 * weights[role] + 6 * 8192
        expected = update_on(lab, table)
    # the same ranks to the last bit, replicas: tests/integration/test_recover.py
    with wb.restore(tmp_path / "one", name=where, runs=tmp_path, placement=other if where == "other" else None) as lab:
        assert lab.reference.weight_digests()[0] == reference
        found = update_on(lab, table)
        assert found == (expected if where == "same" else pytest.approx(expected, rel=2e-3, abs=2e-4))
        assert in_sync(lab)


def in_sync(lab: wb.Workbench) -> bool:
    lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    return bool(lab.actor.check_sync()[0] < 1e-3)


def lab_weights(lab: wb.Workbench, role: str) -> Any:
    from workbench.placement.state import state_of

    model = lab.description.role_models()[role]
    assert model is not None
    return next(part.weights for part in state_of(model) if part.what == "parameters")
