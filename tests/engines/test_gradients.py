"""Gradients without a step: those of the whole batch on every engine, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines.training_ranks import (
    DENOMINATOR,
    KINDS,
    TEMPERATURE,
    make_engine,
    negative_log_likelihood,
    run_ranks,
    sequences,
    tiny_model,
    train,
    weights,
)  # fmt: skip
from workbench.workers.gradients import Sketch


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = sequences(0)[rank::world_size]
    passes = [negative_log_likelihood(part) for part in (mine[:1], mine[1:])]
    return {name: gradient.float().clone() for name, gradient in engine.gradients(passes)}


def on_ranks(kind: str) -> tuple[dict[str, torch.Tensor], bool, bool]:
    engine = make_engine(kind)
    train(engine, range(1))
    before, optimizer = weights(engine), str(engine.state_dict())
    seen = gradients(engine)
    same = all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())
    return seen, same, str(engine.state_dict()) == optimizer


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_gives_the_gradient_of_the_whole_batch(kind: str) -> None:
    alone = make_engine("torch")
    train(alone, range(1))
    expected = gradients(alone)
    assert max(float(gradient.norm()) for gradient in expected.values()) > 0.01
    for seen, same_weights, same_state in run_ranks(on_ranks, 2, kind):
        assert same_weights
        assert same_state
        assert seen.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(seen[name], gradient, rtol=1e-3, atol=1e-5)


def norms_on_ranks(kind: str) -> tuple[list[float], bool]:
    engine = make_engine(kind)
    before = weights(engine)
    mine = sequences(0)[dist.get_rank() :: dist.get_world_size()]
    norms = engine.gradient_norms([negative_log_likelihood([row]) for row in mine])
    return norms, all(torch.equal(weight, before[name]) for name, weight in weights(engine).items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_of_each_micro_batch_is_that_of_its_own_rows(kind: str) -> None:
    model, expected = tiny_model(), []
    for row in sequences(0):
        model.zero_grad()
        log_probs = torch.log_softmax(model(input_ids=row[None]).logits[0, :-1] / TEMPERATURE, -1)
        (-log_probs[torch.arange(len(row) - 1), row[1:]].sum() / DENOMINATOR).backward()
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
        expected.append(squares**0.5)
    assert max(expected) > 1.2 * min(expected) > 0
    for rank, (norms, same) in enumerate(run_ranks(norms_on_ranks, 2, kind)):
        assert same
        assert norms == pytest.approx(expected[rank::2], rel=1e-4)


def test_a_sketch_tells_how_far_two_gradients_are_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    one, noise = torch.randn(300, 200, generator=generator), torch.randn(300, 200, generator=generator)
    assert Sketch.of("w", one) == Sketch.of("w", one.clone())
    assert Sketch.of("w", one).norm == pytest.approx(float(one.norm()), rel=1e-5)
    guesses = []
    for i in range(10):
        distance = Sketch.of(f"w{i}", one).distance(Sketch.of(f"w{i}", one + 0.1 * noise))
        guesses.append(distance**2)
    assert (sum(guesses) / len(guesses)) ** 0.5 == pytest.approx(float(noise.norm()) * 0.1, rel=0.1)
