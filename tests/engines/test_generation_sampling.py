"""Random streams of rows, and where responses end: what both generation engines share."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.expected import expect_error
from workbench.engines.generation.base import Endings, response_room
from workbench.engines.generation.transformers_engine import Distribution, draw, exponential_noise
from workbench.errors import BadInput
from workbench.models import load_tokenizer
from workbench.settings.engines import Generation, Sampling


@pytest.mark.parametrize("vocabulary", [256, *(pytest.param(n, marks=pytest.mark.thorough) for n in (7, 700))])
def test_draws_follow_the_distribution(vocabulary):
    """Pearson's chi-square over 20,000 draws, each with a seed of its own; the bound is 5 standard deviations."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1)
    draws = 20_000
    tokens = torch.cat([draw(probs.expand(500, -1), range(i, i + 500), [3] * 500) for i in range(0, draws, 500)])
    expected = probs.double() * draws
    chi_square = ((tokens.bincount(minlength=vocabulary) - expected) ** 2 / expected).sum()
    freedom = vocabulary - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_impossible_tokens_are_never_drawn():
    probs = torch.zeros(2000, 300)
    probs[:, [5, 290]] = 0.5
    assert set(draw(probs, range(2000), [0] * 2000).tolist()) == {5, 290}


def test_noise_depends_on_seed_and_step_alone():
    noise = exponential_noise([7, 2**63 + 1, 7 + 2**32, 7], [4, 4, 4, 5], 10)
    assert torch.equal(exponential_noise([2**63 + 1], [4], 10)[0], noise[1])
    rows = [*noise]
    assert len({row[0].item() for row in rows}) == 4  # seeds differ in high bits too, and steps


def test_a_stop_string_is_found_where_tokens_cut_through_it():
    tokenizer = load_tokenizer("tiny-llama")  # one token a byte
    ends = Endings(tokenizer, Sampling(stop=("END", "größe")), frozenset((2,)))
    ids = tokenizer("a long enough beginning, größe", add_special_tokens=False).input_ids
    assert [ends.of(ids[:n][-ends.tail :], n) for n in range(1, len(ids) + 1)] == [None] * (len(ids) - 1) + ["stop"]
    assert Endings(tokenizer, Sampling(), frozenset((2,))).of(ids, len(ids)) is None
    late = Endings(tokenizer, Sampling(stop=("END",), min_new_tokens=5), frozenset((2,)))
    ids = tokenizer("END END", add_special_tokens=False).input_ids
    assert [late.of(ids[:n], n) for n in range(1, len(ids) + 1)] == [None] * 6 + ["stop"]


def test_a_stop_string_is_found_in_special_tokens():
    tokenizer = load_tokenizer("tiny-llama")
    ids = tokenizer("a<|user|>b", add_special_tokens=False).input_ids
    for stop in ("<|user|>", "user", "a<|", "|>b"):
        ends = Endings(tokenizer, Sampling(stop=(stop,)), frozenset((2,)))
        found = [ends.of(ids[:n], n) for n in range(1, len(ids) + 1)]
        assert found == ([None, None, "stop"] if stop == "|>b" else [None, "stop", None])


def fused(*, metaspace: bool):
    """A tokenizer of pieces that begin words, parts of characters as bytes, and a decoder that strips the first space
    (or none does)."""
    pieces = ["\u2581a", "a", "\u2581", "b", "END", "E", "ND", "<0xE2>", "<0x82>", "<0xAC>", ".", "\u2581END", "<s>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    own = [decoders.Metaspace()] if metaspace else [decoders.Replace("\u2581", " ")]
    tokenizer.decoder = decoders.Sequence([*own, decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("tokenizer", [load_tokenizer("tiny-llama"), fused(metaspace=True), fused(metaspace=False)])
def test_tokens_that_close_no_stop_string_are_not_looked_at(tokenizer, monkeypatch):
    """Random streams end where they end when the text behind every token is searched; few are searched."""
    stop = ("END", " a", "b \u20ac", "a.", "\u20ac")
    ids = [i for text in stop for i in tokenizer(text, add_special_tokens=False).input_ids] + list(range(12))
    draws, searched, ended = random.Random(0), 0, 0
    for _ in range(300):
        stream = draws.choices(ids, k=20)
        quick, thorough = (Endings(tokenizer, Sampling(stop=stop), frozenset()) for _ in range(2))
        monkeypatch.setattr(thorough, "_may_close", lambda token: True)
        found = [quick.of(stream[:n][-quick.tail :], n) for n in range(1, 21)]
        assert found == [thorough.of(stream[:n][-quick.tail :], n) for n in range(1, 21)]
        ended += found.count("stop")
        searched += sum(quick._may_close(token) for token in stream)
    assert 30 < ended <= searched < 300 * 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"temperature": 0.001}, r"temperature=0.001.*0 \(greedy\)"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"presence_penalty": 3}, "presence_penalty=3"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9.*max_new_tokens=8"),
        ({"stop_token_ids": 2}, "stop_token_ids=2"),
        ({"environment": "calculator"}, "environment='calculator'.*must make an environment"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"call_timeout_s": 0}, "call_timeout_s=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(BadInput, match=message):
        Sampling(**settings)


def test_penalties_are_of_each_rows_own_tokens():
    """The rows have prompts and responses of several lengths; token 5 stands in both prompts, and 0 in none."""
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)
    scores = torch.ones(2, 9).index_fill_(1, torch.tensor([7]), -1.0)
    expected = torch.ones(2, 9)
    expected[0, 5] = 0.5
    expected[0, 7] = -2.0 - 1.0 - 0.5
    expected[1, [4, 5]] = 0.5
    expected[1, [3, 8]] = 0.5 - 1.0 - 0.25
    expected[1, 7] = -1.0
    out = Distribution(sampling, {2}).of(scores, [[5], [3, 4, 5]], [[7, 7], [8, 3]])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], ["prompt 3", "empty"]), ([1] * 20, ["20 tokens", "max_model_tokens=20"]), ([1, 99], ["prompt 3", "0..49"])],
)
def test_bad_prompts_are_named(prompt, words):
    with pytest.raises(BadInput) as caught:
        response_room(3, prompt, 8, Generation(max_model_tokens=20), vocab_size=50)
    assert all(word in str(caught.value) for word in words)


def test_room_is_what_the_prompt_leaves():
    assert [response_room(0, [1] * n, 8, Generation(max_model_tokens=20), 50) for n in (4, 19)] == [8, 1]


def test_rows_at_once():
    assert Generation(max_rows=7).rows_at_once(on_gpu=True) == 7
    assert [Generation().rows_at_once(on_gpu=on_gpu) for on_gpu in (False, True)] == [64, 512]
    assert Generation(engine="transformers").rows_at_once(on_gpu=True) == 64
    with expect_error(BadInput, value="max_rows=0"):
        Generation(max_rows=0)
