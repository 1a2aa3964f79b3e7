"""8-bit Adam of bitsandbytes: its steps, from codes and scales by hand; its state, on the move and on disk."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.engines.training_ranks import make_engine, negative_log_likelihood, sequences, settings, train, weights
from tests.expected import expect_error
from workbench.engines.training.steps import CODES, SCALES
from workbench.errors import BadInput, MissingDependency
from workbench.models.heads import TokenLogProbs
from workbench.placement.memory import blocks_8bit, rank_memory
from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
RATE, DECAY, EPS, BETAS = 1e-3, 0.1, 1e-6, (0.9, 0.95)
GIVEN: dict[str, Any] = {
    "optimizer": "adamw_8bit", "learning_rate": RATE, "weight_decay": DECAY, "schedule": "constant", "warmup_steps": 0,
    "total_steps": None, "max_grad_norm": 0.0, "eps": EPS, "betas": BETAS,
}  # fmt: skip


def model() -> LlamaForCausalLM:
    """Of its weights some have 4,096 elements and more, and not all of these whole blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape: dict[str, Any] = {
            "vocab_size": 97, "hidden_size": 50, "intermediate_size": 90, "num_hidden_layers": 1,
            "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 10,
        }  # fmt: skip
        return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.2, use_cache=False)).eval()


def engine() -> Any:
    return make_engine("torch", module=TokenLogProbs(model(), micro_batch_tokens=1024), **GIVEN)


def whole(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Moments from their codes, fp64."""
    flat = table.double()[codes.flatten().long()]
    return (flat * scales.double().repeat_interleave(256)[: len(flat)]).view(codes.shape)


@needs_bitsandbytes
def test_steps_are_those_by_hand() -> None:
    """AdamW on the moments that the codes stand for; the step before them is exact, as moments are 0."""
    from bitsandbytes.functional import create_dynamic_map

    learns = engine()
    moments: dict[str, tuple[Tensor, Tensor]] = {}
    large = 0
    for step in range(3):
        before = weights(learns)
        batch = negative_log_likelihood(sequences(step))
        gradients = {name: g.double().clone() for name, g in learns.gradients([batch])}
        learns.step([batch])
        held = {kind: dict(learns.held_state(kind)) for kind in (*CODES, *SCALES, "exp_avg", "exp_avg_sq")}
        for name, after in weights(learns).items():
            zeros = torch.zeros_like(after, dtype=torch.float64)
            m, v = moments.get(name, (zeros, zeros))
            g = gradients[name]
            m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
            decayed = before[name].double() * (1 - RATE * DECAY if after.dim() > 1 else 1.0)
            root = (v / (1 - BETAS[1] ** (step + 1))).sqrt()
            expected = decayed - RATE * m / (1 - BETAS[0] ** (step + 1)) / (root + EPS)
            # a step is at most about the rate; eps may be added before or after the bias of the root is corrected
            torch.testing.assert_close(after.double(), expected, rtol=0, atol=2e-3 * RATE, msg=name)
            if after.numel() < 4096:
                small = held["exp_avg"][name], held["exp_avg_sq"][name]
                torch.testing.assert_close(small[0].double(), m, rtol=1e-5, atol=1e-9)
                moments[name] = small[0].double(), small[1].double()
                continue
            large += 1
            assert held[CODES[0]][name].dtype == torch.uint8
            assert len(held[SCALES[0]][name]) == blocks_8bit(after.numel())
            kept = [
                whole(held[code][name], held[scale][name], create_dynamic_map(signed=code == CODES[0]))
                for code, scale in zip(CODES, SCALES, strict=True)
            ]
            assert float((kept[0] - m).norm() / m.norm()) < 0.02
            moments[name] = kept[0], kept[1]
    assert large == 3 * 5  # embedding, head, three of the MLP; projections have 2,500 elements


@needs_bitsandbytes
def test_a_saved_state_goes_on_to_the_last_bit_and_bytes_are_as_estimated() -> None:
    one, other = engine(), engine()
    train(one, range(2), cuts=())
    other.load_state_dict(one.state_dict())
    for each in (one, other):
        train(each, range(2, 4), cuts=())
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    role = RoleModel(
        config=model().config, head="lm", dtype="float32", training=settings("torch", **GIVEN), trained=True
    )
    estimated = rank_memory(role, Layout(), 0).optimizer
    assert one.memory_bytes()["optimizer"] == estimated
    assert estimated < 0.5 * 8 * sum(math.prod(p.shape) for p in model().parameters())


@needs_bitsandbytes
def test_a_checkpoint_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    training = {"optimizer": "adamw_8bit"}
    with tiny_lab("8bit", tmp_path, backend="inline", models={"actor": TINY}, training=training) as lab:
        batch: Any = lab.put(stored())
        lab.actor.update_actor(batch)
        lab.save(tmp_path / "one", models=False)
        assert lab.actor.update_actor(batch)["optimizer_steps"] == 4
        expected = lab.actor.weight_digests()
        assert list((tmp_path / "one").rglob("exp_avg_codes-00000.safetensors"))
    with wb.restore(tmp_path / "one", name="again", runs=tmp_path) as lab:
        lab.actor.update_actor(lab.put(stored()))
        assert lab.actor.weight_digests() == expected
    with pytest.raises(BadInput, match="with the same parts trained"):
        tiny_lab("other", tmp_path, backend="inline", models={"actor": TINY}, resume=tmp_path / "one")


def test_where_it_cannot_be_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error(BadInput, value="optimizer='adamw_8bit', engine='deepspeed'", rule="pieces of many"):
        wb.Training(optimizer="adamw_8bit")
    options: dict[str, Any] = {"models": {"actor": TINY}, "training": {"optimizer": "adamw_8bit"}}
    find = importlib.util.find_spec
    without = {"bitsandbytes": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: without.get(name, find(name, *more)))
    with expect_error(
        MissingDependency, value="bitsandbytes is not installed", remedy=r"pip install -e '.\[adam8bit\]'"
    ):
        tiny_lab("missing", tmp_path, backend="inline", **options)


@needs_bitsandbytes
def test_tensors_that_are_cut_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"models": {"actor": TINY}, "training": {"optimizer": "adamw_8bit"}}
    placement = wb.Placement.of({"all": (2, ["actor"])}, layouts={"actor": (1, 2, 1)})
    with pytest.raises(BadInput, match=r"optimizer='adamw_8bit'.*t=2 cuts tensors"):
        tiny_lab("cut", tmp_path, devices=2, placement=placement, **options)
