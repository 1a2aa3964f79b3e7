"""What every generation engine must do, checked on an engine and a transformers model with the same fp32 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from workbench.engines.generation.base import GenerationEngine, Response
from workbench.errors import BadInput
from workbench.settings.engines import Sampling

# a cache of 4 GB: vLLM keeps a Python object for each block
GPU_FRACTION = 4e9 / torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0.2
MAX_MODEL_TOKENS = 64
PROMPTS = [[1, 30, 31, 32], [1, 40], [1, 50, 51, 52, 53, 54, 55, 56, 57], [1, 60, 61], [1, 40], [1, 100, 101, 102]]
SEEDS = [11, 12, 13, 14, 15, 16]


@torch.no_grad()
def scored(model: torch.nn.Module, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """The trainer's log softmax(logits / temperature) of ids[1:]."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def log_probs_are_the_models(engine: GenerationEngine, model, tokenizer) -> None:
    for temperature in (0, 0.7, 1.0):
        rollout = engine.generate(PROMPTS, Sampling(temperature=temperature, max_new_tokens=12), SEEDS)
        for prompt, response, log_probs in zip(PROMPTS, rollout.response_ids, rollout.log_probs, strict=True):
            expected = scored(model, prompt + response, temperature or 1.0)[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(engine.log_probs(PROMPTS[2]), scored(model, PROMPTS[2]), atol=1e-4, rtol=0)


def greedy_is_transformers(engine: GenerationEngine, model, tokenizer) -> None:
    rollout = engine.generate(PROMPTS, Sampling(temperature=0, max_new_tokens=12), SEEDS)
    for prompt, response in zip(PROMPTS, rollout.response_ids, strict=True):
        ids = torch.tensor([prompt])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert response == plain[0, len(prompt) :].tolist()


def rows_have_their_own_streams(engine: GenerationEngine, model, tokenizer) -> None:
    """Same seeds, same tokens, whatever the order and the company; another seed, another response."""
    sampling = Sampling(max_new_tokens=12)
    rollout = engine.generate(PROMPTS, sampling, SEEDS)
    back = engine.generate(PROMPTS[::-1], sampling, SEEDS[::-1])
    assert back.response_ids[::-1] == rollout.response_ids
    for half in (slice(0, 2), slice(2, 6)):
        assert engine.generate(PROMPTS[half], sampling, SEEDS[half]).response_ids == rollout.response_ids[half]
    assert rollout.response_ids[1] != rollout.response_ids[4]  # same prompt
    other = engine.generate(PROMPTS, sampling, [seed + 2**40 for seed in SEEDS])
    assert other.response_ids != rollout.response_ids


def truncation_is_renormalized(engine: GenerationEngine, model, tokenizer) -> None:
    rollout = engine.generate(PROMPTS[:1], Sampling(top_k=3, max_new_tokens=10), SEEDS[:1])
    ids = PROMPTS[0] + rollout.response_ids[0]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    values, kept = logits.topk(3)
    for t, token in enumerate(rollout.response_ids[0]):
        assert token in kept[t].tolist()
        expected = values[t].log_softmax(-1)[kept[t].tolist().index(token)]
        assert rollout.log_probs[0][t] == pytest.approx(expected.item(), abs=1e-4)


SHAPED = [
    Sampling(min_p=0.1, max_new_tokens=10),
    Sampling(min_p=0.02, top_k=20, top_p=0.8, temperature=1.4, max_new_tokens=10),
    Sampling(repetition_penalty=1.8, max_new_tokens=10),
    Sampling(presence_penalty=1.5, frequency_penalty=0.7, temperature=0.6, max_new_tokens=10),
    Sampling(logit_bias={70: 6.0, 71: 5.5, 72: float("-inf"), 90: -3.0}, max_new_tokens=10),
    Sampling(min_new_tokens=6, stop_token_ids=(70, 71), logit_bias={70: 6.0, 2: 6.0}, max_new_tokens=10),
    Sampling(
        min_p=0.05, top_k=30, top_p=0.9, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=-0.4, logit_bias={70: 2.0}, min_new_tokens=3, max_new_tokens=10,
    ),
]  # fmt: skip


def shaped(logits_V: Tensor, prompt: list[int], response: list[int], sampling: Sampling, ends: set[int]) -> Tensor:
    """log-probabilities [V] of the next token, token by token, as `Sampling` words it."""
    logits = logits_V.double().clone()
    for token, bias in (sampling.logit_bias or {}).items():
        logits[token] += bias
    if len(response) < sampling.min_new_tokens:
        logits[list(ends | set(sampling.stop_token_ids))] = -torch.inf
    for token in set(prompt + response):
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(response):
        logits[token] -= sampling.frequency_penalty * response.count(token) + sampling.presence_penalty
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    probs = (logits / sampling.temperature).softmax(-1)
    probs[probs < sampling.min_p * probs.max()] = 0
    if sampling.top_k:
        probs[probs < probs.sort(descending=True).values[sampling.top_k - 1]] = 0
    probs = probs / probs.sum()
    order = probs.argsort(descending=True).tolist()
    kept, mass = 0, 0.0
    while mass < sampling.top_p - 1e-9 and kept < len(order):
        mass, kept = mass + float(probs[order[kept]]), kept + 1
    probs[order[kept:]] = 0
    return (probs / probs.sum()).log()


def log_probs_are_of_the_distribution_sampled_from(engine: GenerationEngine, model, tokenizer) -> None:
    for sampling in (*SHAPED, *(replace(sampling, temperature=0) for sampling in SHAPED)):
        rollout = engine.generate(PROMPTS, sampling, SEEDS)
        for prompt, response, log_probs in zip(PROMPTS, rollout.response_ids, rollout.log_probs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            for t, token in enumerate(response):
                expected = shaped(logits[t], prompt, response[:t], sampling, {2})
                assert log_probs[t] == pytest.approx(float(expected[token]), abs=2e-4), (sampling, t)
                if sampling.temperature == 0:
                    assert expected[token] > expected.max() - 1e-4


def masks_are_the_tokens_that_could_be_drawn(engine: GenerationEngine, model, tokenizer) -> None:
    for sampling in [sampling for sampling in SHAPED if sampling.top_k]:
        rollout = engine.generate(PROMPTS, replace(sampling, keep_mask=True), SEEDS)
        plain = engine.generate(PROMPTS, sampling, SEEDS)
        assert rollout.response_ids == plain.response_ids and rollout.log_probs == plain.log_probs
        assert plain.sets is None and rollout.sets is not None
        for prompt, response, sets in zip(PROMPTS, rollout.response_ids, rollout.sets, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            for t, ids in enumerate(sets):
                expected = shaped(logits[t], prompt, response[:t], sampling, {2})
                assert list(ids) == expected.isfinite().nonzero()[:, 0].tolist()
    assert engine.generate(PROMPTS, Sampling(max_new_tokens=2, keep_mask=True), SEEDS).sets is None


def endings_are_named(engine: GenerationEngine, model, tokenizer) -> None:
    """Each way to end a response, in one batch: a bias makes the ends likely, the length is short."""
    eos = tokenizer.eos_token_id
    likely = Sampling(logit_bias={70: 4.0, eos: 4.0}, stop_token_ids=(70,), max_new_tokens=6)
    prompts, seeds = [[1, 40]] * 60, list(range(60))
    rollout = engine.generate(prompts, likely, seeds)
    assert set(rollout.endings) == {"eos", "stop", "length"}
    for ids, ending in zip(rollout.response_ids, rollout.endings, strict=True):
        assert not {70, eos} & set(ids[:-1])
        assert {"eos": ids[-1] == eos, "stop": ids[-1] == 70, "length": ids[-1] not in (70, eos)}[ending]
        assert ending != "length" or len(ids) == 6
    late = engine.generate(prompts, replace(likely, min_new_tokens=4), seeds)
    assert min(map(len, late.response_ids)) == 5  # the end comes after as many
    assert set(late.endings) == {"eos", "stop", "length"}
    assert not any({70, eos} & set(ids[:4]) for ids in late.response_ids)
    forced = engine.generate(prompts, replace(likely, ignore_eos=True, stop_token_ids=()), seeds)
    assert {len(ids) for ids in forced.response_ids} == {6}
    assert any(eos in ids[:-1] for ids in forced.response_ids)  # as likely as it was, it ends nothing
    assert set(forced.endings) == {"length"}
    with expect_error(BadInput, value="stop_token_ids or logit_bias holds a token id outside"):
        engine.generate(prompts, Sampling(logit_bias={10**6: 1.0}), seeds)


def responses_are_cut_at_the_longest_sequence(engine: GenerationEngine, model, tokenizer) -> None:
    prompts = [[1] + [40] * (MAX_MODEL_TOKENS - 4), [1, 41]]
    rollout = engine.generate(prompts, Sampling(temperature=0, max_new_tokens=5), [0, 1])
    assert len(rollout.response_ids[0]) <= 3
    assert rollout.finished[0] == (len(rollout.response_ids[0]) < 3)
    assert len(rollout.response_ids[1]) <= 5
    full = prompts[0] + [40] * 3
    assert engine.log_probs(full).shape == (MAX_MODEL_TOKENS - 1,)
    with expect_error(BadInput, value="prompt 1 has 64 tokens"):
        engine.generate([[1], [1] * MAX_MODEL_TOKENS], Sampling(), [0, 1])
    with expect_error(BadInput, value="65 tokens"):
        engine.log_probs([1] * (MAX_MODEL_TOKENS + 1))


def stop_strings_end_responses(engine: GenerationEngine, model, tokenizer) -> None:
    sampling = Sampling(max_new_tokens=12)
    free = engine.generate(PROMPTS, sampling, SEEDS)
    text = tokenizer.decode(free.response_ids[0][4:6])
    stopped = engine.generate(PROMPTS, Sampling(max_new_tokens=12, stop=(text,)), SEEDS)
    assert stopped.response_ids[0] == free.response_ids[0][: len(stopped.response_ids[0])]
    assert len(stopped.response_ids[0]) <= 6
    assert tokenizer.decode(stopped.response_ids[0]).endswith(text)
    assert stopped.finished[0]
    assert len(stopped.log_probs[0]) == len(stopped.response_ids[0])
    assert max(map(len, stopped.response_ids)) == 12  # another row went on
    made = dict[int, Response]()
    with engine.decoding(sampling) as decoding:  # rows with stops of their own, and without
        for row, stop in enumerate([(text,), None, (text, "no such text"), ()]):
            decoding.add(row, PROMPTS[0], SEEDS[0], 12, stop)
        while decoding.open:
            made.update((response.row, response) for response in decoding.step())
    assert made[0].ids == made[2].ids == stopped.response_ids[0]
    assert made[1].ids == made[3].ids == free.response_ids[0]
    assert [made[row].ending for row in range(4)] == ["stop", "length", "stop", "length"]


def an_ending_at_the_last_token_allowed_counts(engine: GenerationEngine, model, tokenizer) -> None:
    """A response whose end falls on the last token that it may have came to its own end: it was not cut."""
    eos = tokenizer.eos_token_id
    free = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=12), SEEDS[:1]).response_ids[0]
    stop = (tokenizer.decode(free[4:6]),)
    stopped = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=12, stop=stop), SEEDS[:1])
    for room, finished in ((len(stopped.response_ids[0]), True), (len(stopped.response_ids[0]) - 1, False)):
        just = engine.generate(PROMPTS[:1], Sampling(max_new_tokens=room, stop=stop), SEEDS[:1])
        assert just.response_ids == [stopped.response_ids[0][:room]]
        assert just.finished == [finished]
    hot = engine.generate([[1, 40]] * 40, Sampling(max_new_tokens=40, temperature=2.0), range(40))
    row = next(row for row, ids in enumerate(hot.response_ids) if ids[-1] == eos and len(ids) > 1)
    room = len(hot.response_ids[row])
    just = engine.generate([[1, 40]], Sampling(max_new_tokens=room, temperature=2.0), [row])
    assert (just.response_ids, just.finished) == ([hot.response_ids[row]], [True])


def eos_ends_responses_and_is_kept(engine: GenerationEngine, model, tokenizer) -> None:
    eos, sampling = tokenizer.eos_token_id, Sampling(max_new_tokens=40, temperature=2.0)
    rollout = engine.generate([[1, 40]] * 40, sampling, range(40))
    for ids, finished in zip(rollout.response_ids, rollout.finished, strict=True):
        assert eos not in ids[:-1]
        assert finished == (ids[-1] == eos)
        assert finished or len(ids) == 40
    assert any(rollout.finished)


def rows_come_and_go(engine: GenerationEngine, model, tokenizer) -> None:
    """Rows that are added while others are decoded get what they get together; one may continue one that has ended."""
    sampling = Sampling(max_new_tokens=12, top_k=50)
    expected = engine.generate(PROMPTS, sampling, SEEDS)
    made = dict[int, Response]()
    with engine.decoding(sampling) as decoding:
        for row in range(len(PROMPTS)):
            decoding.add(row, PROMPTS[row], SEEDS[row], 12 - 2 * (row == 1))
            made.update((response.row, response) for response in decoding.step())
        assert decoding.open == len(PROMPTS) - len(made) > 0
        while 0 not in made:
            made.update((response.row, response) for response in decoding.step())
        assert decoding.open > 0
        continued = PROMPTS[0] + made[0].ids[:-1] + [50]
        decoding.add(10, continued, 7, 12)
        while decoding.open:
            made.update((response.row, response) for response in decoding.step())
        assert decoding.tokens == sum(len(response.ids) for response in made.values())
    for row, (ids, log_probs) in enumerate(zip(expected.response_ids, expected.log_probs, strict=True)):
        length = 10 if row == 1 else 12
        assert made[row].ids == ids[:length]
        assert made[row].log_probs == pytest.approx(log_probs[:length], abs=1e-4)
    afresh = engine.generate([continued], sampling, [7])
    assert made[10].ids == afresh.response_ids[0]
    assert made[10].log_probs == pytest.approx(afresh.log_probs[0], abs=1e-4)
    with engine.decoding(sampling) as decoding:
        decoding.add(0, PROMPTS[0], 0, 12)
        decoding.step()
        with expect_error(BadInput, value="prompt 3 holds a token id outside"):
            decoding.add(3, [10**6], 0, 12)
    assert engine.generate(PROMPTS, sampling, SEEDS) == expected


def progress_is_reported(engine: GenerationEngine, model, tokenizer) -> None:
    seen: list[tuple[int, int, int]] = []
    rollout = engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS, lambda *now: seen.append(now))
    assert seen[-1] == (len(PROMPTS), len(PROMPTS), sum(map(len, rollout.response_ids)))
    assert seen == sorted(seen)
    assert len(seen) >= 7


def a_raising_progress_leaves_the_engine_usable(engine: GenerationEngine, model, tokenizer) -> None:
    expected = engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS)

    def stop(done: int, rows: int, tokens: int) -> None:
        if tokens >= 12:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS, stop)
    assert engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS).response_ids == expected.response_ids


EVERY = [
    log_probs_are_the_models,
    greedy_is_transformers,
    rows_have_their_own_streams,
    truncation_is_renormalized,
    log_probs_are_of_the_distribution_sampled_from,
    masks_are_the_tokens_that_could_be_drawn,
    endings_are_named,
    responses_are_cut_at_the_longest_sequence,
    stop_strings_end_responses,
    an_ending_at_the_last_token_allowed_counts,
    eos_ends_responses_and_is_kept,
    rows_come_and_go,
    progress_is_reported,
    a_raising_progress_leaves_the_engine_usable,
]
