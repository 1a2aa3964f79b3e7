"""Ranks save together: all of them or none, and they stay usable where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.training_ranks import run_ranks
from tests.workers.update_ranks import context_here
from workbench.errors import WorkbenchError
from workbench.models import load_tokenizer, resolve
from workbench.models.lora import LoRA
from workbench.models.spec import Model
from workbench.settings.engines import Generation
from workbench.settings.training import Training
from workbench.workers.roles.actor import ActorWorker


@pytest.mark.slow
def test_where_the_first_rank_cannot_write_all_ranks_raise_and_go_on(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    resolve("tiny-llama")  # made here, before there are ranks
    (tmp_path / "file").write_text("no folder")
    one, other = run_ranks(save_here_and_there, 2, str(tmp_path), ["file", "free", "free"])
    assert one == other
    for kind, message in one[:2]:
        assert kind == "WriteFailed"
        assert "nothing was saved to" in message
        assert "File exists" in message
    assert one[2:4] == [("", "free/save_model"), ("", "free/save_adapter")]
    assert [kind for kind, _ in one[4:]] == ["BadInput"] * 2
    assert (tmp_path / "free" / "save_model" / "config.json").is_file()
    assert (tmp_path / "free" / "save_adapter" / "adapter_config.json").is_file()


def test_router_biases_are_saved(tmp_path: Path) -> None:
    """They are no parameters: GLM-4.5 and DeepSeek-V3 keep them in buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=264, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path / "model")
    load_tokenizer("tiny-llama").save_pretrained(tmp_path / "model")
    generation = Generation(engine="transformers", max_model_tokens=64, check_sync=False)
    spec = Model(name=tmp_path / "model", dtype="float32", training=Training(engine="torch"), generation=generation)
    saved = ActorWorker(spec, context_here(str(tmp_path))).save_model("saved")
    assert AutoModelForCausalLM.from_pretrained(saved).get_buffer(bias).tolist() == [0, 1, 2, 3]


def save_here_and_there(folder: str, paths: list[str]) -> list[tuple[str, str]]:
    """For each path below `folder`, saving model and adapter there: (class of the error, message), or ("", path)."""
    generation = Generation(engine="transformers", check_sync=False)
    training = Training(engine="torch")
    spec = Model(name="tiny-llama", dtype="float32", training=training, generation=generation, adapter=LoRA(rank=2))
    worker, outcomes = ActorWorker(spec, context_here(folder)), []
    for path in paths:
        for save in (worker.save_model, worker.save_adapter):
            try:
                saved = save(Path(path, save.__name__))
                outcomes.append(("", str(Path(saved).relative_to(Path(folder).resolve()))))
            except WorkbenchError as error:
                outcomes.append((type(error).__name__, str(error)))
    return outcomes
