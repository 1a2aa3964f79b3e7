"""Packed sequences give what each gives alone; models for which that would not hold keep padding, and say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.models.heads import TokenLogProbs, TokenValues, load_token_values
from workbench.models.loading import load_causal_lm
from workbench.models.packing import NAME, Pack, packed_attention, use_packing

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "smollm3": {"pad_token_id": 0},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
LENGTHS = (9, 4, 13, 1)


def model(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(family.split()[0], **(SHAPE | FAMILIES.get(family, {}) | changes))
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def packed_inputs() -> dict[str, Any]:
    tokens = torch.randint(1, 61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "lengths": LENGTHS, "positions": torch.arange(len(tokens))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_sequence_is_as_if_alone(family: str, dtype: torch.dtype) -> None:
    """Against the model as transformers made it, before packing; the windows are shorter than the sequences."""
    causal, given = model(family).to(dtype), packed_inputs()
    expected = torch.cat([causal(input_ids=s[None]).logits[0] for s in given["input_ids"].split(LENGTHS)]).float()
    targets = given["input_ids"].roll(-1)
    head = TokenLogProbs(causal)
    assert head.describe() == "packed"
    log_probs, _ = head(**given, targets=targets)
    alone = torch.log_softmax(expected, -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(log_probs, alone, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.3)


# a prompt of two responses, a sequence of its own, a prompt of one response, a second response to the first prompt
SHARING: dict[str, Any] = {"lengths": (6, 5, 9, 1, 3, 7), "after": (-1, 0, -1, -1, 3, 0)}


def alone_and_shared(tokens: Tensor) -> list[tuple[Tensor, slice]]:
    """Each sequence with what it goes on from, and where its own tokens lie in the pack."""
    parts = tokens.split(SHARING["lengths"])
    ends = torch.tensor(SHARING["lengths"]).cumsum(0).tolist()
    return [
        (torch.cat([parts[number], own]) if number >= 0 else own, slice(end - len(own), end))
        for own, number, end in zip(parts, SHARING["after"], ends, strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_that_goes_on_from_another_is_as_if_whole(family: str) -> None:
    """Values and gradients; the windows are shorter than what the responses go on from."""
    tokens = torch.randint(1, 61, (sum(SHARING["lengths"]),), generator=torch.Generator().manual_seed(0))
    weigh = torch.randn(len(tokens), generator=torch.Generator().manual_seed(3))
    outputs, gradients = [], []
    for packed in (True, False):
        values = TokenValues(model(family).base_model, 64, init="normal")
        if packed:
            out = values(tokens, positions=torch.arange(len(tokens)), **SHARING)
        else:
            out = torch.zeros(len(tokens))
            for whole, where in alone_and_shared(tokens):
                hidden = values.backbone(input_ids=whole[None], use_cache=False).last_hidden_state[0]
                own = torch.arange(len(tokens))[where]
                out = out.index_put((own,), values.score(hidden)[-len(own) :, 0])
        (out * weigh).sum().backward()
        outputs.append(out.detach())
        gradients.append({name: p.grad for name, p in values.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4)


def test_padded_generation_with_the_same_model_is_left_alone() -> None:
    causal = model("llama")
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = (ids > 0).long()

    def generated() -> Tensor:
        return causal.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0)

    expected = generated()
    assert use_packing(causal) is None
    assert causal.config._attn_implementation == NAME
    assert torch.equal(generated(), expected)


def own_attention(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention that no function can replace, written into the model's own class."""
    query, key, value = (
        p(args[0] if args else kwargs["hidden_states"]) for p in (self.q_proj, self.k_proj, self.v_proj)
    )
    groups = query.shape[-1] // key.shape[-1]
    key, value = key.repeat(1, 1, groups), value.repeat(1, 1, groups)
    causal = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return self.o_proj(causal), None


def test_a_model_with_attention_of_its_own_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    monkeypatch.setattr(LlamaAttention, "forward", own_attention)
    causal, given = model("llama"), packed_inputs()
    head = TokenLogProbs(causal)
    assert head.describe() == "padded: LlamaForCausalLM gives other results in a pack"
    assert causal.config._attn_implementation == "sdpa"
    targets = given["input_ids"].roll(-1)
    expected = torch.cat([causal(input_ids=s[None]).logits[0] for s in given["input_ids"].split(LENGTHS)])
    alone = torch.log_softmax(expected, -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(head(**given, targets=targets)[0], alone, rtol=0, atol=1e-4)


def test_a_model_without_sdpa_is_padded(tmp_path: Path) -> None:
    """Its attention has sinks, which no pack reads."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape: dict[str, Any] = SHAPE | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**shape, pad_token_id=0, eos_token_id=1)
    config.layer_types = ["sliding_attention", "full_attention"]
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    causal, given = load_causal_lm(tmp_path), packed_inputs()
    head = TokenLogProbs(causal)
    assert head.describe().startswith("padded: GptOssForCausalLM cannot run packs: ")
    logits = torch.cat([causal(input_ids=s[None]).logits[0] for s in given["input_ids"].split(LENGTHS)])
    targets = given["input_ids"].roll(-1)
    alone = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(head(**given, targets=targets)[0], alone, rtol=0, atol=1e-4)


def test_a_cap_on_attention_scores_is_kept(tmp_path: Path) -> None:
    """SDPA would leave it out, without a word."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**SHAPE, attn_logit_softcapping=0.5, sliding_window=4, pad_token_id=0)
    plain = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    values, given = load_token_values(tmp_path, init="normal"), packed_inputs()
    hidden = [plain.model(input_ids=s[None]).last_hidden_state[0] for s in given["input_ids"].split(LENGTHS)]
    torch.testing.assert_close(values(**given), values.score(torch.cat(hidden))[:, 0], rtol=0, atol=1e-4)


def test_a_backbone_that_its_family_gives_another_name_is_found(tmp_path: Path) -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **SHAPE, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=4, pad_token_id=0, eos_token_id=1
    )
    Llama4ForCausalLM(config).save_pretrained(tmp_path)
    causal, given = load_causal_lm(tmp_path), packed_inputs()
    head = TokenLogProbs(causal)
    assert head.describe() == "padded: Llama4ForCausalLM has layers of chunked_attention"
    logits = torch.cat([causal(input_ids=s[None]).logits[0] for s in given["input_ids"].split(LENGTHS)])
    targets = given["input_ids"].roll(-1)
    alone = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(head(**given, targets=targets)[0], alone, rtol=0, atol=1e-4)


def test_a_folder_does_not_choose_the_attention(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"attn_implementation": "eager"}))
    assert load_causal_lm(tmp_path).config._attn_implementation == "sdpa"


def test_layers_that_are_no_attention_are_padded() -> None:
    causal = model("llama")
    causal.config.layer_types = ["full_attention", "linear_attention"]
    assert use_packing(causal) == "LlamaForCausalLM has layers of linear_attention"


def test_a_window_that_only_the_mask_has_is_padded() -> None:
    from transformers import PhimoeConfig, PhimoeForCausalLM

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 61}
    config = PhimoeConfig(**shape, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, sliding_window=8)
    assert use_packing(PhimoeForCausalLM(config)) == "PhimoeForCausalLM has its sliding window only in the mask"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fp32_weights_are_tried_in_bfloat16_too() -> None:
    """Flash attention, which runs them under autocast, has no heads of more than 256; fp32 attention has."""
    assert use_packing(model("llama").cuda()) is None
    why = use_packing(model("llama", head_dim=320).cuda())
    assert why is not None and why.startswith("LlamaForCausalLM cannot run packs")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("key_value_heads", [2, 4])
@pytest.mark.parametrize(("lengths", "after"), [(LENGTHS, ()), (SHARING["lengths"], SHARING["after"])])
def test_flash_attention_equals_one_sequence_at_a_time(
    window: int | None, key_value_heads: int, lengths: tuple[int, ...], after: tuple[int, ...]
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    pack = Pack.of(lengths, torch.device("cuda"), after)
    module = torch.nn.Module()
    module.num_key_value_groups = 4 // key_value_heads  # type: ignore[assignment]
    results = []
    shapes = [(1, heads, sum(lengths), 32) for heads in (4, key_value_heads, key_value_heads)]
    drawn = [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]
    for dtype in (torch.bfloat16, torch.float32):
        query, key, value = inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in drawn]
        out, _ = packed_attention(module, query, key, value, None, scaling=32**-0.5, sliding_window=window, pack=pack)
        out.float().square().sum().backward()
        results.append([out.float(), *(x.grad.float() for x in inputs)])  # type: ignore[union-attr]
    for flash, loop in zip(*results, strict=True):
        torch.testing.assert_close(flash, loop, rtol=0.05, atol=0.05)
