from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.engines import generation_cases as cases
from tests.expected import expect_error
from workbench.engines.generation.base import check_model
from workbench.engines.generation.transformers_engine import TransformersEngine
from workbench.errors import BadInput, SyncError
from workbench.models import load_tokenizer
from workbench.models.loading import load_causal_lm
from workbench.settings.engines import Generation, Sampling

SETTINGS = Generation(engine="transformers", max_model_tokens=cases.MAX_MODEL_TOKENS)


@pytest.fixture(scope="module")
def model():
    return load_causal_lm("tiny-llama")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-llama")


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    return TransformersEngine(model, tokenizer, SETTINGS, owns_model=False)


@pytest.mark.parametrize("case", cases.EVERY)
def test_what_every_engine_does(case, engine, model, tokenizer):
    case(engine, model, tokenizer)


def test_a_batch_of_two_rows_draws_the_same(engine, model, tokenizer):
    narrow = TransformersEngine(model, tokenizer, Generation(max_model_tokens=64, max_rows=2), owns_model=False)
    sampling = Sampling(max_new_tokens=12)
    wide = engine.generate(cases.PROMPTS, sampling, cases.SEEDS)
    assert narrow.generate(cases.PROMPTS, sampling, cases.SEEDS).response_ids == wide.response_ids


def test_a_response_ends_with_the_turn_of_the_template(model):
    """Where the template ends turns with another token than the tokenizer's EOS; that one still ends a response too."""
    tokenizer = load_tokenizer("tiny-llama")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}<|unk|>"
    engine = TransformersEngine(model, tokenizer, SETTINGS, owns_model=False)
    ends = [tokenizer.convert_tokens_to_ids("<|unk|>"), tokenizer.eos_token_id]
    for end in ends:
        bias = {end: 100.0, **{other: -100.0 for other in ends if other != end}}
        rollout = engine.generate([[9, 10, 11]], Sampling(temperature=0.0, max_new_tokens=4, logit_bias=bias), [1])
        assert rollout.response_ids == [[end]] and rollout.finished == [True]


def test_no_prompts(engine):
    assert engine.generate([], Sampling(), []).response_ids == []


def test_the_checkpoints_generation_config_changes_nothing(engine, model):
    expected = engine.generate(cases.PROMPTS, Sampling(max_new_tokens=12), cases.SEEDS)
    before = model.generation_config
    model.generation_config = copy.deepcopy(before)
    model.generation_config.update(repetition_penalty=5.0, temperature=0.1, do_sample=True)
    try:
        assert engine.generate(cases.PROMPTS, Sampling(max_new_tokens=12), cases.SEEDS) == expected
    finally:
        model.generation_config = before


def test_sampled_first_tokens_follow_softmax(engine, model):
    """Pearson's chi-square of 4,000 first tokens; 5 standard deviations."""
    rows, temperature = 4000, 1.5
    settings = Generation(max_model_tokens=64, max_rows=500)
    wide = TransformersEngine(model, engine._tokenizer, settings, owns_model=False)
    rollout = wide.generate([[1, 40]] * rows, Sampling(temperature=temperature, max_new_tokens=1), range(rows))
    with torch.no_grad():
        expected = rows * (model(torch.tensor([[1, 40]])).logits[0, -1] / temperature).double().softmax(-1)
    counts = torch.tensor([ids[0] for ids in rollout.response_ids]).bincount(minlength=len(expected))
    rare = expected < 5  # pooled, as the test wants counts that are not tiny
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    freedom = len(expected) - 1
    assert freedom > 10
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_live_module_needs_no_sync(engine, model):
    assert engine.update_weights(model.named_parameters(), 3) == 0
    assert engine.weights_version == 3
    assert engine.memory_bytes()["weights"] == 0


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied"])
def test_a_copy_takes_weights_in(name, tokenizer):
    trainer = load_causal_lm(name)
    own = TransformersEngine(load_causal_lm(name), tokenizer, SETTINGS, owns_model=True)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = list(trainer.named_parameters())
    assert own.update_weights(weights, 1) == sum(w.nbytes for _, w in weights) == own.memory_bytes()["weights"]
    torch.testing.assert_close(own.log_probs(cases.PROMPTS[2]), cases.scored(trainer, cases.PROMPTS[2]))
    with pytest.raises(SyncError, match="did not arrive"):
        own.update_weights(weights[:-1], 2)
    assert own.weights_version == -1
    own.update_weights(weights, 2)
    torch.testing.assert_close(own.log_probs(cases.PROMPTS[2]), cases.scored(trainer, cases.PROMPTS[2]))
    assert own.weights_version == 2


def test_a_copy_sleeps_until_it_is_given_weights(model, tokenizer):
    own = TransformersEngine(load_causal_lm("tiny-llama"), tokenizer, SETTINGS, owns_model=True)
    weights, expected = list(model.named_parameters()), own.log_probs(cases.PROMPTS[2])
    assert own.sleep() == sum(w.nbytes for _, w in weights)
    assert (own.lacks_weights, own.weights_version, own.memory_bytes()["weights"]) == (True, -1, 0)
    assert own.sleep() == 0
    for asked in (lambda: own.log_probs(cases.PROMPTS[2]), lambda: own.generate([[1]], Sampling(), [0])):
        with expect_error(BadInput, value="sleeps", remedy="generates=True"):
            asked()
    own.update_weights(weights, 4)
    assert (own.lacks_weights, own.weights_version) == (False, 4)
    assert torch.equal(own.log_probs(cases.PROMPTS[2]), expected)
    live = TransformersEngine(model, tokenizer, SETTINGS, owns_model=False)
    assert live.sleep() == 0
    assert torch.equal(live.log_probs(cases.PROMPTS[2]), expected)


def test_autocast_computes_in_bf16(model, tokenizer):
    ids = cases.PROMPTS[2]
    low = TransformersEngine(model, tokenizer, SETTINGS, owns_model=False, autocast_dtype=torch.bfloat16).log_probs(ids)
    assert low.dtype == torch.float32
    gap = (low - cases.scored(model, ids)).abs().max()
    assert 1e-5 < gap < 0.1


SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 264, "initializer_range": 0.3,
    "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "rule"),
    [("deepseek_v32", "another state"), ("lfm2", "another state"), ("bart", "no position_ids")],
)
def test_models_whose_batches_would_be_wrong_are_refused_by_their_configuration(family, rule):
    shape = SMALL | {"is_decoder": True}
    if family == "deepseek_v32":
        shape |= {"first_k_dense_replace": 1, "num_key_value_heads": 2}
    if family == "lfm2":
        shape |= {"layer_types": ["conv"]}
    with expect_error(BadInput, rule=rule):
        check_model(AutoConfig.for_model(family, **shape), SETTINGS)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_distances_in_place_of_positions_need_no_position_ids(family, tokenizer):
    own = {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 64} if family == "mpt" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **own)).eval()
    cases.log_probs_are_the_models(TransformersEngine(model, tokenizer, SETTINGS, owns_model=True), model, tokenizer)


def test_too_long_for_the_model(model, tokenizer):
    with expect_error(BadInput, rule="2048 positions"):
        TransformersEngine(model, tokenizer, Generation(max_model_tokens=4096), owns_model=False)


def test_rows_so_long_that_they_would_change_the_positions_of_others_are_refused():
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = LlamaConfig(max_position_embeddings=64, rope_parameters=scaling)
    with expect_error(BadInput, rule="64 positions"):
        check_model(config, Generation(max_model_tokens=65))
    check_model(config, Generation(engine="transformers", max_model_tokens=64))
    with expect_error(BadInput, rule="vLLM scales the positions of all rows"):
        check_model(config, Generation(engine="vllm", max_model_tokens=64))
