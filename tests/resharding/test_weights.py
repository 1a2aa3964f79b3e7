"""How weights are cut: what torch and the families' own shapes say, not the code under test."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.models.dense_config import DenseConfig, read_plan_config
from workbench.resharding.weights import ModelWeights, Weight, model_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


def by_name(weights: ModelWeights) -> dict[str, Weight]:
    return {weight.name: weight for weight in weights}


def test_weights_are_those_of_the_model_and_tied_ones_come_once() -> None:
    for config in (
        LlamaConfig(**SHAPE, tie_word_embeddings=True),
        LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SHAPE, tie_word_embeddings=False),
        Qwen3Config(**SHAPE, head_dim=16),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        weights = model_weights(config, dtype="bfloat16")
        assert {w.name: w.shape for w in weights} == {n: tuple(p.shape) for n, p in model.named_parameters()}
        assert weights.nbytes == sum(parameter.nbytes for parameter in model.parameters())


def test_a_dense_config_has_the_weights_of_the_model_that_transformers_builds(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for config in (
        LlamaConfig(**SHAPE, tie_word_embeddings=True, dtype="bfloat16"),
        LlamaConfig(**SHAPE, head_dim=16, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SHAPE | {"attention_bias": True}),
        Qwen2Config(**SHAPE, tie_word_embeddings=True),
        Qwen3Config(**SHAPE, head_dim=16, attention_bias=True),
    ):
        file.write_text(config.to_json_string())
        dense = read_plan_config(file)
        assert isinstance(dense, DenseConfig)
        heads: tuple[Literal["lm", "scalar"], ...] = ("lm", "scalar")
        for head in heads:
            assert model_weights(dense, head=head) == model_weights(config, head=head)
    for other in (Phi3Config(**SHAPE, pad_token_id=0), LlamaConfig(**SHAPE | {"quantization_config": {"bits": 4}})):
        file.write_text(other.to_json_string())
        assert not isinstance(read_plan_config(file), DenseConfig)


def test_slices_of_all_tensor_ranks_make_up_each_weight() -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
    weights = model_weights(config)
    for t in (1, 2, 4, 8):
        for weight in weights:
            whole = torch.arange(weight.numel).reshape(weight.shape)
            slices = [weight.cut(whole, j, t) for j in range(t)]
            assert [tuple(piece.shape) for piece in slices] == [weight.local_shape(j, t) for j in range(t)]
            if weight.axis is None:
                assert all(torch.equal(piece, whole) for piece in slices)
                continue
            copies = t // 2 if "k_proj" in weight.name or "v_proj" in weight.name else 1
            if "embed_tokens" not in weight.name and "lm_head" not in weight.name:
                assert len({piece.shape for piece in slices}) == 1
            assert torch.equal(torch.cat(slices[:: max(copies, 1)], weight.axis), whole)


def test_vocabulary_is_cut_as_torch_chunks_it_and_heads_stay_whole() -> None:
    weights = by_name(model_weights(LlamaConfig(**SHAPE)))
    for t in (2, 4, 8):
        expected = [len(chunk) for chunk in torch.arange(50).chunk(t)]
        held = [weights["model.embed_tokens.weight"].local_shape(j, t)[0] for j in range(t)]
        assert held[: len(expected)] == expected
        assert not any(held[len(expected) :])
    embedding = weights["model.embed_tokens.weight"]
    assert [embedding.intervals(j, 2, 64)[0] for j in range(2)] == [(0, 32), (32, 50)]  # 50 rows count as 64
    assert [embedding.local_shape(j, 4, 64)[0] for j in range(4)] == [16, 16, 16, 2]
    key = weights["model.layers.3.self_attn.k_proj.weight"]  # two heads of eight rows each
    assert [key.intervals(j, 2) for j in range(2)] == [((0, 8),), ((8, 16),)]
    assert [key.intervals(j, 8)[0] for j in range(8)] == [(0, 8)] * 4 + [(8, 16)] * 4
    out = weights["model.layers.3.self_attn.o_proj.weight"]
    assert (out.axis, out.intervals(1, 4)) == (1, ((16, 32),))


def test_fused_projections_are_cut_part_by_part() -> None:
    weights = by_name(model_weights(Phi3Config(**SHAPE, pad_token_id=0)))
    fused = weights["model.layers.0.self_attn.qkv_proj.weight"]
    q, k, v = torch.randn(64, 64), torch.randn(16, 64), torch.randn(16, 64)
    expected = torch.cat((q[32:], k[8:], v[8:]))
    assert torch.equal(fused.cut(torch.cat((q, k, v)), 1, 2), expected)
    assert weights["model.layers.0.mlp.gate_up_proj.weight"].intervals(1, 2) == ((24, 48), (72, 96))


def test_stages_hold_layers_evenly_and_both_ends_a_tied_embedding() -> None:
    tied, untied = (model_weights(LlamaConfig(**SHAPE, tie_word_embeddings=tie)) for tie in (True, False))
    names = [{weight.name for weight in tied.of_stage(i, 2)} for i in range(2)]
    assert names[0] & names[1] == {"model.embed_tokens.weight"}
    assert "model.layers.1.mlp.up_proj.weight" in names[0]
    assert {"model.layers.2.mlp.up_proj.weight", "model.norm.weight"} < names[1]
    assert untied.stages(by_name(untied)["lm_head.weight"], 4) == (3,)
    assert untied.stages(by_name(untied)["model.embed_tokens.weight"], 4) == (0,)
    assert tied.stages(by_name(tied)["model.embed_tokens.weight"], 1) == (0,)


def test_a_scalar_head_is_whole_and_on_the_last_stage() -> None:
    weights = model_weights(LlamaConfig(**SHAPE), head="scalar")
    found = by_name(weights)
    assert found["score.weight"].shape == (1, 64)
    assert found["score.weight"].axis is found["score.bias"].axis is None
    assert weights.stages(found["score.bias"], 4) == (3,)
    assert "model.layers.0.mlp.up_proj.weight" in found
    assert "lm_head.weight" not in found


def test_what_cannot_be_cut_is_named() -> None:
    weights = model_weights(LlamaConfig(**SHAPE))
    with expect_error(BadInput, value=r"self_attn\.q_proj\.weight: 8 units over t=3"):
        weights.check(1, 3)
    with expect_error(BadInput, value="4 layers over p=3"):
        weights.check(3, 1)
    with expect_error(BadInput, value=r"h\.\*\.attn\.c_attn.*wte"):
        model_weights(GPT2Config(n_layer=2, n_embd=32, n_head=2))
