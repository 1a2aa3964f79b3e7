"""A model folder that is written is the model: plain transformers gives equal logits, also from several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cases import TINY
from workbench.models import load_causal_lm
from workbench.models.saving import write_model


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
