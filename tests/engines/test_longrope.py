"""Rotary embeddings of Phi-3 and Phi-4-mini: the longest sequence decides the factors of all rows, in every engine."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engines.generation_cases import scored
from tests.expected import expect_error
from workbench.engines.generation.base import check_model
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.errors import BadInput
from workbench.models import load_tokenizer
from workbench.models.heads import TokenLogProbs
from workbench.models.loading import Limits, load_causal_lm, load_config
from workbench.settings.engines import Generation

ORIGINAL, LONGEST = 64, 256


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose short and long factors differ much."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("phi")
    factors = {"short_factor": [1.0 + i / 10 for i in range(12)], "long_factor": [2.0 + i for i in range(12)]}
    config = AutoConfig.for_model(
        "phi3", vocab_size=264, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, partial_rotary_factor=0.75, initializer_range=0.1, pad_token_id=0, eos_token_id=2,
        max_position_embeddings=LONGEST, original_max_position_embeddings=ORIGINAL,
        rope_scaling={"type": "longrope", "attention_factor": 1.6, **factors},  # not that of the positions' ratio
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("tiny-llama").save_pretrained(folder)
    return folder


def ids(length: int) -> Tensor:
    return torch.randint(8, 264, (length,), generator=torch.Generator().manual_seed(length))


def log_probs(head: TokenLogProbs, *lengths: int) -> list[Tensor]:
    """Of each row but its first token, of rows in one call."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    positions = torch.cat([torch.arange(start, end - 1) for start, end in pairwise(ends)])
    tokens = torch.cat([ids(length) for length in lengths])
    found, _ = head(tokens, lengths, positions, tokens[positions + 1])
    return list(found.detach().split([length - 1 for length in lengths]))


def test_the_longest_sequence_decides_for_all_rows(phi: Path) -> None:
    """transformers itself decides by the longest row of a call; a row of 150 tokens alone takes the long factors."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(phi)
    long, short = (TokenLogProbs(load_causal_lm(phi, longest=longest)) for longest in (LONGEST, ORIGINAL))
    (alone,), (beside, far) = log_probs(long, 30), log_probs(long, 30, 150)
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(far, scored(theirs, ids(150).tolist()), rtol=0, atol=1e-4)
    (near,) = log_probs(short, 30)
    torch.testing.assert_close(near, scored(theirs, ids(30).tolist()), rtol=0, atol=1e-4)
    assert (near - alone).abs().max() > 0.1
    assert [Limits.of(phi, longest).context for longest in (0, ORIGINAL, ORIGINAL + 1)] == [64, 64, 256]
    with expect_error(BadInput, rule="256 positions"):
        check_model(load_config(phi), Generation(max_model_tokens=LONGEST + 1))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares fp32 engines on the CPU")
@pytest.mark.parametrize("longest", [ORIGINAL, pytest.param(LONGEST, marks=pytest.mark.thorough)])
def test_vllm_takes_the_same_factors(phi: Path, longest: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = Generation(max_model_tokens=longest, kv_cache_gib=0.1)
    try:
        engine = VllmEngine(phi, settings, dtype=torch.float32, device=torch.device("cpu"), threads=1)
        row = ids(longest).tolist()
        expected = scored(load_causal_lm(phi, longest=longest), row)
        torch.testing.assert_close(engine.log_probs(row), expected, rtol=0, atol=1e-4)
        engine.close()
    finally:
        dist.destroy_process_group()
