"""Rates by parameter group: one step of AdamW by hand for each group, on every engine, cut and sharded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.engines.layout_ranks import first_steps, stepped_by_hand
from tests.engines.training_ranks import ENGINES, run_ranks, settings, tiny_model
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.placement.memory import rank_memory
from workbench.placement.role_model import RoleModel
from workbench.placement.state import state_of
from workbench.settings.layout import Layout
from workbench.settings.training import Training

RATES = {"embed": 0.1, r"layers\.1\.": 10.0, "norm|v_proj": 0.0}
GIVEN: dict[str, Any] = {
    "rates": RATES, "learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "constant", "warmup_steps": 0,
    "total_steps": None, "max_grad_norm": 0.0, "eps": 1e-6, "betas": (0.9, 0.95),
}  # fmt: skip
FACTORS = {
    "model.embed_tokens.weight": 0.1, "model.layers.0.self_attn.q_proj.weight": 1.0, "model.norm.weight": 0.0,
    "model.layers.0.self_attn.v_proj.weight": 0.0, "model.layers.1.self_attn.v_proj.weight": 10.0,
    "model.layers.1.input_layernorm.weight": 10.0, "model.layers.0.self_attn.q_proj.bias": 1.0,
}  # fmt: skip


def check(of_rank: dict[str, dict[str, Any]]) -> None:
    for kind, found in of_rank.items():
        assert found["alike"], kind
        for name, before in found["before"].items():
            factor = RATES.get(Training(rates=RATES).pattern_of(name), 1.0)
            assert FACTORS.get(name, factor) == factor
            expected = stepped_by_hand(before, found["gradients"][name], 1e-3 * factor)
            assert torch.allclose(found["after"][name].double(), expected, atol=2e-7, rtol=0), (kind, name)
            if factor == 0:
                assert torch.equal(found["after"][name], before)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_one_step_of_each_group_is_that_by_hand_and_its_state_lies_where_it_is_said_to(ranks: int) -> None:
    """Moves and checkpoints go by where the parts of each weight are; groups change that under ZeRO 1 and 2."""
    layout = Layout(d=ranks)
    for rank, of_rank in enumerate(run_ranks(first_steps, ranks, ENGINES, None, GIVEN)):
        check(of_rank)
        for kind, found in of_rank.items():
            role = RoleModel(
                config=tiny_model().config, head="lm", dtype="float32", training=settings(kind, **GIVEN), trained=True
            )
            memory = rank_memory(role, layout, rank)
            assert found["bytes"]["optimizer"] == memory.optimizer, (kind, rank)
            assert found["bytes"]["parameters"] == memory.parameters, (kind, rank)
            (part,) = (part for part in state_of(role) if part.what == "moments")
            where = part.distribution(layout, tuple(range(ranks)))
            shards = {weight.name: where.shard(weight, rank) for weight in part.weights}
            sizes = {name: math.prod(shard.shape) for name, shard in shards.items() if shard is not None}
            assert found["moments"] == {name: size for name, size in sizes.items() if size}, (kind, rank)


@pytest.mark.parametrize(
    ("layout", "kinds"), [(Layout(1, 2, 1), ("torch", "zero1", "zero2")), (Layout(2, 1, 1), ("torch",))]
)
def test_so_it_is_where_the_model_is_cut(layout: Layout, kinds: tuple[str, ...]) -> None:
    for of_rank in run_ranks(first_steps, 2, kinds, layout, GIVEN):
        check(of_rank)


def test_factors_change_and_patterns_stay(tmp_path: Path) -> None:
    training = wb.Training(engine="torch", learning_rate=1e-3, rates={"embed": 0.0, "score": 2.0})
    models = {"critic": wb.Model(TINY, training=training)}
    with tiny_lab("groups", tmp_path, backend="inline", models=models, prompts=None) as lab:
        before, batch = lab.critic.weight_digests()[0], lab.put(stored())
        for _ in range(2):  # the head starts at zero, and gives the weights below it no gradient before its first step
            lab.critic.update_critic(batch)
        frozen = [name for name, digest in lab.critic.weight_digests()[0].items() if before[name] == digest]
        assert frozen == ["model.embed_tokens.weight"]
        with expect_error(BadInput, rule=r"the role's engine has groups of weights for.*\['embed', 'score'\]"):
            lab.critic.training.rates = {"norm": 1.0}
        lab.critic.training.rates = {"embed": 1.0, "score": 0.0}
        before = lab.critic.weight_digests()[0]
        lab.critic.update_critic(batch)
        assert [name for name, d in lab.critic.weight_digests()[0].items() if before[name] == d] == [
            "score.weight",
            "score.bias",
        ]


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ({"embedding": 0.1}, r"'embedding'.*matches none of its \d+ trained.*nearest: 'embed_tokens'"),
    "no pattern": ({"(": 0.1}, r"is not a regular expression"),
    "negative": ({"embed": -1.0}, r"to factors of the rate, 0 or more"),
    "nan": ({"embed": math.nan}, r"to factors of the rate"),
    "a number": (3.0, r"to factors of the rate"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rates_are_refused_before_anything_starts(tmp_path: Path, case: str) -> None:
    rates, match = WRONG[case]
    with pytest.raises(BadInput, match=match):
        tiny_lab("wrong", tmp_path, backend="inline", models={"actor": TINY}, training={"rates": rates})
    assert not (tmp_path / "wrong").exists()
