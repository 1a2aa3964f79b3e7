"""An adapter is peft's: what it computes, what it makes of the weights, and what is saved of it."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.training_ranks import CPU, replicas, settings
from tests.expected import expect_error
from tests.tolerances import rounding
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput
from workbench.models.heads import TokenLogProbs
from workbench.models.loading import load_causal_lm
from workbench.models.lora import LoRA, add_lora, linear_layers, without_adapter, write_adapter
from workbench.placement.role_model import RoleModel
from workbench.settings.training import Training

peft: Any = pytest.importorskip("peft")
LENGTHS = (9, 4, 13)


def adapted(name: str, lora: LoRA | None = None, *, seed: int = 0, moved: bool = True) -> TorchEngine:
    """A model with an adapter that changes what it computes; without `moved` one that was just made."""
    model = load_causal_lm(name)
    add_lora(model, lora or LoRA(rank=3, alpha=7), seed)
    engine = TorchEngine(TokenLogProbs(model), settings("torch"), replicas(), device=CPU, dtype=torch.float32)
    if moved:
        generator = torch.Generator().manual_seed(1)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return engine


def tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(8, 264, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def log_probs(engine: TorchEngine) -> Tensor:
    ids = torch.cat(tokens())
    positions = torch.cat([torch.arange(n - 1) + end - n for n, end in zip(LENGTHS, accumulate(LENGTHS), strict=True)])
    values: Tensor = engine.forward(input_ids=ids, lengths=LENGTHS, positions=positions, targets=ids[positions + 1])[0]
    return values


@torch.no_grad()
def plain_log_probs(model: Any) -> Tensor:
    """By a plain call of a model of transformers or peft, a sequence at a time."""
    parts = []
    for ids in tokens():
        every = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), dim=-1)
        parts.append(every.gather(-1, ids[1:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied", "tiny-qwen2"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_plain_peft_is_the_witness(name: str, targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    """peft's own model, from the file that was saved: the same log-probabilities, and the same merged weights."""
    engine = adapted(name, LoRA(rank=3, alpha=7, targets=targets))
    model: Any = engine.module.model
    write_adapter(tmp_path / "adapter", {n: t.clone() for n, t in engine.named_adapter()}, model)
    witness = peft.PeftModel.from_pretrained(load_causal_lm(name), tmp_path / "adapter").eval()
    expected = plain_log_probs(witness)
    torch.testing.assert_close(log_probs(engine), expected, rtol=1e-5, atol=2e-5)
    merged = witness.merge_and_unload()
    theirs, ours = dict(merged.named_parameters()), dict(engine.named_weights())
    assert ours.keys() == theirs.keys()
    for weight in theirs:
        torch.testing.assert_close(ours[weight], theirs[weight], rtol=1e-6, atol=1e-6)
    untouched = load_causal_lm(name)
    changed = {n.rsplit(".", 2)[1] for n, w in untouched.named_parameters() if not torch.equal(w, ours[n])}
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert changed == (every if targets is None else set(targets))
    untouched.load_state_dict(ours, strict=False)  # a tied head has no weight of its own
    torch.testing.assert_close(plain_log_probs(untouched), expected, rtol=0, atol=rounding(4 * 4096))
    assert (plain_log_probs(load_causal_lm(name)) - expected).abs().mean() > 0.1


def test_without_its_adapter_a_model_is_what_it_was() -> None:
    engine = adapted("tiny-llama")
    model: Any = engine.module.model
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    before = log_probs(engine)
    never = load_causal_lm("tiny-llama")
    expected = log_probs(TorchEngine(TokenLogProbs(never), None, replicas(), device=CPU, dtype=torch.float32))

    def fail_without() -> None:
        with without_adapter(model):
            assert torch.equal(log_probs(engine), expected)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_without()
    assert torch.equal(log_probs(engine), before)
    assert not torch.equal(before, expected)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained
    assert trained and all(".lora_" in name for name in trained)
    fresh = adapted("tiny-llama", moved=False)
    assert torch.equal(log_probs(fresh), expected)


def test_an_adapter_comes_from_its_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = (dict(adapted("tiny-llama", seed=seed, moved=False).named_adapter()) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if "lora_A" in name)


def test_only_the_adapter_is_stored_in_fp32_and_kept_in_a_state() -> None:
    model = load_causal_lm("tiny-llama")
    add_lora(model, LoRA(rank=3), 0)
    engine = TorchEngine(TokenLogProbs(model), settings("torch"), replicas(), device=CPU, dtype=torch.bfloat16)
    stored = {p.requires_grad: p.dtype for p in engine.module.parameters()}
    assert stored == {True: torch.float32, False: torch.bfloat16}
    state = engine.state_dict()
    kept = state["held"]["parameters"]
    assert len(kept) == sum(p.requires_grad for p in engine.module.parameters())
    assert all(".lora_" in name and tensor.dtype == torch.float32 for name, tensor in kept.items())
    kept.popitem()
    with expect_error(BadInput, rule="their names differ"):
        engine.load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "LoRA.rank=0"),
        ({"alpha": 0}, "LoRA.alpha=0"),
        ({"targets": "q_proj"}, "targets='q_proj'.*names of layers"),
        ({"targets": ()}, "names of layers"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LoRA(**given)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "query"])
def test_targets_that_are_not_there(target: str) -> None:
    with pytest.raises(BadInput, match=f"'{target}'.*without its output head, are down_proj, gate_proj"):
        add_lora(load_causal_lm("tiny-llama"), LoRA(targets=("q_proj", target)), 0)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # of peft, for GPT-2
@pytest.mark.parametrize("family", ["falcon_h1", "zamba2", "qwen2_moe", "mixtral", "gpt2"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "c_attn")])
def test_what_is_saved_and_moved_of_an_adapter_are_its_weights(family: str, targets: tuple[str, ...] | None) -> None:
    """Routers are no linear layers, and GPT-2's have [in, out] weights. Mamba's `out_proj` gets no adapter, and neither
    do Zamba2's layers with a number for a name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8, pad_token_id=0,
        **{"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 2} if family == "zamba2" else {},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    there = {name.rpartition(".")[2] for name in linear_layers(model)}
    assert there.isdisjoint({"gate", "lm_head", "out_proj"})
    lora = LoRA(rank=2, targets=targets and tuple(there.intersection(targets)))
    add_lora(model, lora, 0)
    role = RoleModel(config=config, head="lm", dtype="float32", training=Training(), trained=True, adapter=lora)
    made = {n.replace(".default", ""): p.shape for n, p in model.named_parameters() if ".lora_" in n}
    assert {weight.name: weight.shape for weight in role.adapter_weights} == made
