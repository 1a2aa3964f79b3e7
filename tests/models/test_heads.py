"""Heads compute what the whole model computes, at the asked positions only."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from tests.tolerances import rounding
from workbench.errors import BadInput
from workbench.models.heads import (
    ROWS_PER_CALL,
    TokenLogProbs,
    TokenValues,
    load_token_values,
)
from workbench.models.logits import ChosenLogProbs


def llama(tied: bool = False, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape["num_attention_heads"] = 4
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LlamaConfig(**(shape | changes), initializer_range=0.2, tie_word_embeddings=tied)
        return LlamaForCausalLM(config).eval()


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 61, (n,), generator=generator) for n in (9, 4, 13, 2)]
    input_ids, lengths = torch.cat(tokens), tuple(map(len, tokens))
    last = torch.tensor(lengths).cumsum(0) - 1
    positions = torch.tensor([t for t in range(len(input_ids)) if t not in last.tolist()])
    return {"input_ids": input_ids, "lengths": lengths, "positions": positions, "targets": input_ids[positions + 1]}


def sequence_and_time(given: dict[str, Any], position: int) -> tuple[Tensor, int]:
    """The sequence [1, length] that a position of the pack is in, and the time there."""
    for sequence in given["input_ids"].split(given["lengths"]):
        if position < len(sequence):
            return sequence[None], position
        position -= len(sequence)
    raise AssertionError


class Squares:
    """Reads the sum of squared probabilities, and notes how many positions it was given at a time."""

    width = 1

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, log_probs: Tensor, positions: slice) -> Tensor:
        assert len(log_probs) <= ROWS_PER_CALL
        self.seen.append((positions.start, positions.stop))
        return (2 * log_probs).exp().sum(-1, keepdim=True)


def test_a_reader_sees_the_whole_distribution_a_few_positions_at_a_time() -> None:
    model, given = llama(), batch()
    given["positions"] = given["positions"].repeat(2 * ROWS_PER_CALL // len(given["positions"]) + 1)
    reader, head = Squares(), TokenLogProbs(model)
    hidden = head.hidden_states(given["input_ids"], given["lengths"]).index_select(0, given["positions"])
    whole = (2 * (model.lm_head(hidden) / 0.7).log_softmax(-1)).exp().sum(-1)
    read = head(**{**given, "targets": given["positions"]}, temperature=0.7, reader=reader)
    torch.testing.assert_close(read[:, 0], whole)
    assert [start for start, _ in reader.seen[1:]] == [stop for _, stop in reader.seen[:-1]]
    assert (reader.seen[0][0], reader.seen[-1][1]) == (0, len(whole))
    weights = list(model.parameters())
    found, expected = (torch.autograd.grad(x.sum(), weights, retain_graph=True) for x in (read, whole))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    nothing = head.unread(given["positions"], reader=reader)
    assert isinstance(nothing, Tensor) and nothing.shape == read.shape


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("micro_batch_tokens", [1, 1024, 100_000])
def test_log_probs_and_entropy_equal_the_whole_models(temperature: float, micro_batch_tokens: int) -> None:
    """100,000 tokens make 196 calls of the head for 24 rows: more calls than rows are right too."""
    model, given = llama(), batch()
    log_probs, entropy = TokenLogProbs(model, micro_batch_tokens=micro_batch_tokens)(
        **given, temperature=temperature, with_entropy=True
    )
    for n, position in enumerate(given["positions"].tolist()):
        sequence, time = sequence_and_time(given, position)
        expected = torch.log_softmax(model(input_ids=sequence).logits[0, time] / temperature, -1)
        torch.testing.assert_close(log_probs[n], expected[given["targets"][n]], rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[n], -(expected.exp() * expected).sum(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_grad_or_no_grad_same_bits(dtype: torch.dtype, autocast: bool) -> None:
    head, given = TokenLogProbs(llama().to(dtype)), batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with_grad, _ = head(**given, temperature=0.9)
        with torch.no_grad():
            without, _ = head(**given, temperature=0.9)
    assert with_grad.requires_grad
    assert not without.requires_grad
    assert with_grad.dtype == torch.float32
    assert torch.equal(with_grad, without)


def plainly(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)], ids=["chosen", "entropy", "both"])
def test_gradient_of_chosen_log_probs_is_that_of_the_formula(
    dtype: torch.dtype, temperature: float, weights: tuple[float, float]
) -> None:
    draws = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(7, 53, generator=draws)).to(dtype)
    targets = torch.randint(0, 53, (7,), generator=draws)
    upstream = [weight * torch.randn(7, generator=draws) for weight in weights]
    gradients = []
    for own in (True, False):
        leaf = logits.clone().requires_grad_()
        outputs: Any = (
            ChosenLogProbs.apply(leaf, targets, temperature, True) if own else plainly(leaf, targets, temperature)
        )
        used = [(output * up).sum() for output, up in zip(outputs, upstream, strict=True) if up.any()]
        torch.stack(used).sum().backward()
        gradients.append((*outputs, leaf.grad))
    for ours, expected in zip(*gradients, strict=True):
        tolerance = rounding(53) if dtype == torch.float32 else 0.03
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_a_sharded_head_is_called_equally_often_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the micro-batch's budget, where gathering its weight is a collective; else by the positions asked for."""
    calls: list[int] = []
    head = TokenLogProbs(llama(), micro_batch_tokens=3 * ROWS_PER_CALL)
    head.model.lm_head.register_forward_hook(lambda module, given, output: calls.append(len(output)))
    with torch.no_grad():
        head(**batch())
        assert len(calls) == 1
        head.model.lm_head.weight.ds_id = 0  # DeepSpeed's mark of a weight of stage 3
        head(**batch())
    assert len(calls) == 1 + 3


def test_no_asked_positions() -> None:
    head, given = TokenLogProbs(llama()), batch()
    for key in ("positions", "targets"):
        given[key] = given[key][:0]
    log_probs, _ = head(**given)
    assert log_probs.shape == (0,)
    log_probs.sum().backward()


def test_temperature_zero_is_refused() -> None:
    with expect_error(BadInput, rule="above 0"):
        TokenLogProbs(llama())(**batch(), temperature=0)


def test_models_that_change_their_logits_are_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    shape |= {"vocab_size": 61, "num_attention_heads": 2, "num_key_value_heads": 1}
    for cap in (0.5, 30.0):  # a cap of 30 changes no logit of a new model
        with expect_error(BadInput, rule="scaling or capping"):
            TokenLogProbs(Gemma2ForCausalLM(Gemma2Config(**shape, final_logit_softcapping=cap)))


@pytest.mark.parametrize("tied", [False, True])
def test_weight_names_are_transformers_names(tied: bool) -> None:
    model = llama(tied)
    expected = {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in expected) is not tied
    assert set(TokenLogProbs(model).weight_names().values()) == expected


def test_values_are_a_linear_read_out() -> None:
    backbone, given = llama().model, batch()
    del given["targets"]
    values = TokenValues(backbone, 32, init="normal", seed=4)
    values.score.bias.data.fill_(0.25)
    places = [sequence_and_time(given, position) for position in given["positions"].tolist()]
    hidden = torch.stack([backbone(input_ids=sequence).last_hidden_state[0, time] for sequence, time in places])
    expected = hidden @ values.score.weight[0] + 0.25
    torch.testing.assert_close(values(**given), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert values(**given).dtype == torch.float32
    assert (TokenValues(backbone, 32, init="zero")(**given) == 0).all()


def test_head_init() -> None:
    backbone = llama(hidden_size=4096, intermediate_size=8, num_hidden_layers=1, num_attention_heads=64).model
    state = torch.get_rng_state()
    first, again, other = (TokenValues(backbone, 4096, init="normal", seed=seed).score.weight for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert float(first.detach().std()) == pytest.approx(4097**-0.5, rel=0.05)


def test_saved_score_is_loaded(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels, config.pad_token_id = 1, 0
    saved = LlamaForSequenceClassification(config).eval()
    saved.save_pretrained(tmp_path)
    module, given = load_token_values(tmp_path), batch()
    assert set(module.weight_names().values()) == {name for name, _ in saved.named_parameters()} | {"score.bias"}
    row = given["input_ids"][:9]
    score = module(row, (9,), torch.tensor([8]))
    torch.testing.assert_close(score, saved(input_ids=row[None]).logits[:, 0])


def test_head_without_saved_score_is_initialised(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert (load_token_values(tmp_path).score.weight == 0).all()
    drawn = load_token_values(tmp_path, init="normal", seed=7).score.weight
    assert torch.equal(drawn, TokenValues(llama().model, 32, init="normal", seed=7).score.weight)


def test_a_head_of_many_scores_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama().config
    config.num_labels = 3
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with expect_error(BadInput, remedy="num_labels=1"):
        load_token_values(tmp_path)


def test_heads_that_are_called_in_other_ways_are_plain(tmp_path: Path) -> None:
    """OPT does not call its base model as a module; files of GPT-NeoX call the head embed_out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
    opt = AutoConfig.for_model("opt", **shape, ffn_dim=64, word_embed_proj_dim=32)
    TokenLogProbs(AutoModelForCausalLM.from_config(opt))
    neox = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_neox", **shape, intermediate_size=64))
    neox.save_pretrained(tmp_path)
    assert (load_token_values(tmp_path).score.weight == 0).all()


def test_a_head_that_is_not_known_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 61}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = AutoConfig.for_model("modernbert-decoder", **shape, **ids, num_attention_heads=2, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with expect_error(BadInput, value="'classifier.weight'", rule="one layer, named score"):
        load_token_values(tmp_path)


def test_the_logits_of_one_part_are_in_memory_at_a_time_also_in_the_backward_pass() -> None:
    module, alive, sizes = TokenLogProbs(llama()), list[Any](), list[int]()
    hidden = torch.randn(2 * ROWS_PER_CALL + 5, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def entropy(logits: Tensor, places: slice) -> Tensor:
        assert not any(other() is not None for other in alive)
        alive.append(weakref.ref(logits))
        sizes.append(len(logits))
        assert len(logits) == places.stop - places.start
        return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    found = module.each_logits(hidden, entropy, temperature=0.7)
    (gradient,) = torch.autograd.grad(found.square().sum(), hidden)
    whole = entropy(module.model.lm_head(hidden) / 0.7, slice(0, len(hidden)))
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole.square().sum(), hidden)[0])
    assert max(sizes[:-1]) <= ROWS_PER_CALL and len(sizes) == 7  # three parts, forward and backward
