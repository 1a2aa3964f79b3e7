"""A model folder that is written is the model: plain transformers gives equal logits, also from several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.cases import TINY
from workbench.models import load_tokenizer
from workbench.models.loading import load_causal_lm, write_model


@pytest.mark.parametrize(("shard_gb", "files"), [(5.0, 1), (1e-4, 2)])
def test_transformers_gives_equal_logits_from_one_file_and_from_shards(
    tmp_path: Path, shard_gb: float, files: int
) -> None:
    from transformers import AutoModelForCausalLM

    mine = load_causal_lm(TINY).eval()
    with torch.no_grad():
        for weight in mine.parameters():  # weights that the origin does not have
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    names = {name for name, _ in mine.named_parameters()}
    weights = {name: tensor for name, tensor in mine.state_dict().items() if name in names}
    write_model(tmp_path / "model", weights, TINY, scalar_head=False, shard_gb=shard_gb)
    found = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(found) >= files and (len(found) == 1) == (files == 1)
    if files > 1:
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {path.name for path in found} and set(index["weight_map"]) == names
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, mine(ids).logits)


def test_files_that_training_does_not_change_are_those_of_the_model(tmp_path: Path) -> None:
    """Published folders hold what transformers refuses to write, and pad with EOS: they are saved as they were."""
    mine, origin = load_causal_lm(TINY), tmp_path / "origin"
    mine.save_pretrained(origin)
    tokenizer = load_tokenizer(TINY)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(origin)
    (origin / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    config = json.loads((origin / "config.json").read_text())
    config |= {"torch_dtype": "float16", "attention_dropout": 0.1, "own": [1]}
    (origin / "config.json").write_text(json.dumps(config))
    weights = {name: weight.bfloat16() for name, weight in mine.state_dict().items()}
    for scalar_head in (False, True):
        saved = tmp_path / f"saved-{scalar_head}"
        more = {"score.weight": torch.ones(1, mine.config.hidden_size), "score.bias": torch.ones(1)}
        write_model(saved, weights | (more if scalar_head else {}), origin, scalar_head=scalar_head)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (saved / name).read_bytes() == (origin / name).read_bytes(), name
        written = json.loads((saved / "config.json").read_text())
        assert written["dtype"] == "bfloat16" and "torch_dtype" not in written
        assert (written["attention_dropout"], written["own"]) == (0.1, [1])
    assert written["score_bias"] == 1 and written["architectures"] == ["LlamaForSequenceClassification"]
    assert AutoConfig.from_pretrained(saved).num_labels == 1
    plain = tmp_path / "saved-False"
    assert (plain / "generation_config.json").read_text() == '{"temperature": 0.9, "top_p": 0.6}'
    assert AutoTokenizer.from_pretrained(plain).pad_token == tokenizer.eos_token
