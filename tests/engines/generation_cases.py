"""What every generation engine must do, checked on an engine and a transformers model with the same fp32 weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from workbench.engines.generation.base import GenerationEngine
from workbench.engines.settings import Sampling
from workbench.errors import BadInput

MAX_MODEL_TOKENS = 64
PROMPTS = [[1, 30, 31, 32], [1, 40], [1, 50, 51, 52, 53, 54, 55, 56, 57], [1, 60, 61], [1, 40], [1, 100, 101, 102]]
SEEDS = [11, 12, 13, 14, 15, 16]


@torch.no_grad()
def scored(model: torch.nn.Module, ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """The trainer's log softmax(logits / temperature) of ids[1:]."""
    logits = model(torch.tensor([list(ids)])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def assert_log_probs_are_the_models(engine: GenerationEngine, model: torch.nn.Module, sampling: Sampling) -> None:
    rollout = engine.generate(PROMPTS, sampling, SEEDS)
    for prompt, response, log_probs in zip(PROMPTS, rollout.response_ids, rollout.log_probs, strict=True):
        expected = scored(model, prompt + response, sampling.temperature or 1.0)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)


def assert_greedy_is_transformers(engine: GenerationEngine, model) -> None:
    rollout = engine.generate(PROMPTS, Sampling(temperature=0, max_new_tokens=12), SEEDS)
    for prompt, response in zip(PROMPTS, rollout.response_ids, strict=True):
        ids = torch.tensor([prompt])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert response == plain[0, len(prompt) :].tolist()


def assert_rows_have_their_own_streams(engine: GenerationEngine) -> None:
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


def assert_truncation_is_renormalized(engine: GenerationEngine, model: torch.nn.Module) -> None:
    rollout = engine.generate(PROMPTS[:1], Sampling(top_k=3, max_new_tokens=10), SEEDS[:1])
    ids = PROMPTS[0] + rollout.response_ids[0]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    values, kept = logits.topk(3)
    for t, token in enumerate(rollout.response_ids[0]):
        assert token in kept[t].tolist()
        expected = values[t].log_softmax(-1)[kept[t].tolist().index(token)]
        assert rollout.log_probs[0][t] == pytest.approx(expected.item(), abs=1e-4)


def assert_responses_are_cut_at_the_longest_sequence(engine: GenerationEngine) -> None:
    prompts = [[1] + [40] * (MAX_MODEL_TOKENS - 4), [1, 41]]
    rollout = engine.generate(prompts, Sampling(temperature=0, max_new_tokens=5), [0, 1])
    assert len(rollout.response_ids[0]) <= 3
    assert rollout.finished[0] == (len(rollout.response_ids[0]) < 3)
    assert len(rollout.response_ids[1]) <= 5
    full = prompts[0] + [40] * 3
    assert engine.log_probs(full).shape == (MAX_MODEL_TOKENS - 1,)
    with pytest.raises(BadInput, match="prompt 1 has 64 tokens"):
        engine.generate([[1], [1] * MAX_MODEL_TOKENS], Sampling(), [0, 1])
    with pytest.raises(BadInput, match="65 tokens"):
        engine.log_probs([1] * (MAX_MODEL_TOKENS + 1))


def assert_stop_strings_end_responses(engine: GenerationEngine, tokenizer) -> None:
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


def assert_an_ending_at_the_last_token_allowed_counts(engine: GenerationEngine, tokenizer, eos: int) -> None:
    """A response whose end falls on the last token that it may have came to its own end: it was not cut."""
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


def assert_eos_ends_responses_and_is_kept(engine: GenerationEngine, eos: int) -> None:
    sampling = Sampling(max_new_tokens=40, temperature=2.0)
    rollout = engine.generate([[1, 40]] * 40, sampling, range(40))
    for ids, finished in zip(rollout.response_ids, rollout.finished, strict=True):
        assert eos not in ids[:-1]
        assert finished == (ids[-1] == eos)
        assert finished or len(ids) == 40
    assert any(rollout.finished)


def assert_progress_is_reported(engine: GenerationEngine) -> None:
    seen: list[tuple[int, int, int]] = []
    rollout = engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS, lambda *now: seen.append(now))
    assert seen[-1] == (len(PROMPTS), len(PROMPTS), sum(map(len, rollout.response_ids)))
    assert seen == sorted(seen)
    assert len(seen) >= 7


def assert_a_raising_progress_leaves_the_engine_usable(engine: GenerationEngine) -> None:
    expected = engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS)

    def stop(done: int, rows: int, tokens: int) -> None:
        if tokens >= 12:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS, stop)
    assert engine.generate(PROMPTS, Sampling(max_new_tokens=7), SEEDS).response_ids == expected.response_ids
