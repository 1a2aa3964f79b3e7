"""Gradients without a step: those of the whole batch on every engine, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines.training_ranks import (
    ENGINES,
    make_engine,
    negative_log_likelihood,
    run_ranks,
    sequences,
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
@pytest.mark.parametrize("kind", ENGINES)
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
