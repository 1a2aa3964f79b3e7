"""Both engines, every ZeRO stage and every split compute what a plain single-process loop computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.training_ranks import (
    DENOMINATOR,
    ENGINES,
    TEMPERATURE,
    asked,
    make_engine,
    run_ranks,
    sequences,
    settings,
    tiny_model,
    train,
    weights,
)
from workbench.engines.training.steps import learning_rate


def scenarios(ties: list[bool]) -> dict[tuple[bool, str], Any]:
    results = {}
    for tied in ties:
        for kind in ENGINES:
            engine = make_engine(kind, tied=tied)
            reports = train(engine, range(3))
            results[tied, kind] = {
                "reports": reports,
                "weights": weights(engine),
                "memory_bytes": engine.memory_bytes(),
            }
    return results


def plain_training(tied: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(losses, norms, weights) of the whole batch through the model's own logits, torch's clip and AdamW."""
    model = tiny_model(tied=tied)
    given = settings("torch")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=given.betas, eps=given.eps)
    losses, norms = [], []
    for step in range(3):
        total = torch.zeros(())
        for tokens in sequences(step):
            log_probs = torch.log_softmax(model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
            total = total - log_probs[torch.arange(len(tokens) - 1), tokens[1:]].sum() / DENOMINATOR
        optimizer.zero_grad()
        total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), given.max_grad_norm)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(given, step)
        optimizer.step()
        losses.append(float(total.detach()))
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[int, list[Any]]:
    ties: dict[int, list[bool]] = {2: [True]}
    for world, tied in asked(request, "world", "tied"):
        ties.setdefault(world, []).append(tied)
    return {world: run_ranks(scenarios, world, list(dict.fromkeys(ties[world]))) for world in ties}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_engine_equals_plain_training(trained: Any, world: int, tied: bool, kind: str) -> None:
    losses, norms, expected = plain_training(tied)
    assert min(norms) > 1.0, "the batch must be one that is clipped"
    ranks = [rank[tied, kind] for rank in trained[world]]
    for step in range(3):
        loss = sum(rank["reports"][step]["loss"] for rank in ranks)
        assert loss == pytest.approx(losses[step], rel=1e-4)
        assert all(rank["reports"][step]["grad_norm"] == pytest.approx(norms[step], rel=1e-4) for rank in ranks)
        assert all(rank["reports"][step]["steps"] == step + 1 for rank in ranks)
    for rank in ranks:  # transformers' names and full shapes on every rank, also where weights are sharded
        assert rank["weights"].keys() == expected.keys()
        for name, weight in expected.items():
            assert rank["weights"][name].shape == weight.shape
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=3e-5)


def test_stages_shard_what_they_promise(trained: Any) -> None:
    held = {kind: trained[2][0][True, kind]["memory_bytes"] for kind in ENGINES}
    assert held["zero3"]["parameters"] < 0.7 * held["zero0"]["parameters"]
    # Stage 1 holds half of the moments and masters, where stage 0 holds both moments whole and no second masters.
    assert held["zero1"]["optimizer"] == pytest.approx(0.75 * held["zero0"]["optimizer"], rel=0.02)


@pytest.mark.parametrize("cuts", [(4,), (1, 2, 5)])
def test_micro_batches_do_not_matter(cuts: tuple[int, ...]) -> None:
    whole, cut = make_engine("torch"), make_engine("torch")
    norm_whole = train(whole, range(1), cuts=())[0]["grad_norm"]
    norm_cut = train(cut, range(1), cuts=cuts)[0]["grad_norm"]
    assert norm_cut == pytest.approx(norm_whole, rel=1e-4)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], weight, rtol=0, atol=1e-5)
