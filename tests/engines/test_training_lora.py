"""An adapter on every engine, on one rank and two: it learns, the model under it stays, and both can be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.training_ranks import (
    ENGINES,
    asked,
    loss_now,
    make_engine,
    negative_log_likelihood,
    run_ranks,
    same,
    sequences,
    tiny_model,
    train,
    weights,
)
from workbench.engines.training.base import TrainingEngine
from workbench.models.heads import TokenLogProbs
from workbench.models.lora import LoRA, add_lora, without_adapter

pytest.importorskip("peft")
DTYPES = (torch.float32, torch.bfloat16)
# ZeRO-3 takes seconds where the others take tenths
GATE = [("torch", torch.float32), ("torch", torch.bfloat16), ("zero1", torch.bfloat16), ("zero3", torch.float32)]
CASES = [
    pytest.param(kind, dtype, marks=() if (kind, dtype) in GATE else pytest.mark.thorough)
    for kind in ENGINES
    for dtype in DTYPES
]
RANK = 4


def adapted(kind: str, dtype: torch.dtype, **changes: Any) -> TrainingEngine:
    model = tiny_model()
    add_lora(model, LoRA(rank=RANK, alpha=8), seed=0)
    return make_engine(kind, dtype, module=TokenLogProbs(model, micro_batch_tokens=1024), **changes)


@torch.no_grad()
def score(engine: TrainingEngine) -> float:
    return float(loss_now(engine, negative_log_likelihood(sequences(0))))


def without(engine: TrainingEngine) -> float:
    model: Any = engine.module.model
    with without_adapter(model):
        return score(engine)


def frozen(engine: TrainingEngine) -> dict[str, Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        with engine.gathered([parameter]):
            if ".lora_" not in name:
                found[name] = parameter.detach().clone()
    return found


def learn(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    engine = adapted(kind, dtype)
    found: dict[str, Any] = {"start": (score(engine), without(engine)), "memory": engine.memory_bytes()}
    base = frozen(engine)
    reports = train(engine, range(2))
    found["after two steps"] = (score(engine), without(engine))
    saved, at_save = engine.state_dict(), weights(engine)
    reports += train(engine, range(2, 4))
    found["losses"] = [report["loss"] for report in reports]
    found["norms"] = [report["grad_norm"] for report in reports]
    straight_on = weights(engine)
    engine.load_state_dict(saved)
    found["restored"] = same(weights(engine), at_save) and not same(at_save, straight_on)
    train(engine, range(2, 4))
    found["goes on as before"] = same(weights(engine), straight_on)
    found["base stays"] = same(frozen(engine), base)
    # the merged weights in a model without adapters
    merged = make_engine("torch", dtype, module=TokenLogProbs(_plain(straight_on), micro_batch_tokens=1024))
    found["merged"] = (score(merged), score(engine))
    found["exported"] = {weight.dtype for weight in straight_on.values()}
    # passes of a reference in between change nothing, nor do activations that are computed anew
    other = adapted(kind, dtype, activation_checkpointing=True)
    train(other, range(4))
    found["uninterrupted and recomputed"] = same(weights(other), straight_on)
    return found


def _plain(merged: dict[str, Tensor]) -> Any:
    model = tiny_model()
    model.load_state_dict({name: weight.float() for name, weight in merged.items()}, strict=False)
    return model


def all_learn(cases: list[tuple[str, torch.dtype]]) -> dict[Any, Any]:
    return {case: learn(*case) for case in cases}


@pytest.fixture(scope="module")
def by_world(request: pytest.FixtureRequest) -> dict[int, list[Any]]:
    cases: dict[int, list[Any]] = {1: [GATE[0]], 2: []}
    for world, kind, dtype in asked(request, "world", "kind", "dtype"):
        cases[world].append((kind, dtype))
    return {world: run_ranks(all_learn, world, list(dict.fromkeys(of))) for world, of in cases.items() if of}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_the_adapter_learns_and_the_model_stays(by_world: Any, world: int, kind: str, dtype: torch.dtype) -> None:
    for rank in by_world[world]:
        found = rank[kind, dtype]
        start, reference = found["start"]
        assert start == reference  # B is zero
        learnt, reference_later = found["after two steps"]
        assert reference_later == reference
        assert abs(learnt - start) > 0.01
        assert all(found[name] for name in ("restored", "goes on as before", "base stays"))
        assert found["uninterrupted and recomputed"]
        merged, with_adapter = found["merged"]
        assert merged == pytest.approx(with_adapter, abs=1e-4 if dtype == torch.float32 else 0.05)
        assert found["exported"] == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("kind", "dtype"), [case for case in CASES if case.values[1] == torch.float32])
def test_engines_agree(by_world: Any, world: int, kind: str, dtype: torch.dtype) -> None:
    expected = by_world[1][0]["torch", torch.float32]
    ranks = [rank[kind, dtype] for rank in by_world[world]]
    for step, loss in enumerate(expected["losses"]):
        assert sum(rank["losses"][step] for rank in ranks) == pytest.approx(loss, rel=1e-4)
        assert ranks[0]["norms"][step] == pytest.approx(expected["norms"][step], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_gradients_and_optimizer_are_the_adapters_alone(
    by_world: Any, world: int, kind: str, dtype: torch.dtype
) -> None:
    model = tiny_model()
    add_lora(model, LoRA(rank=RANK), seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    every = sum(p.numel() for p in model.parameters())
    assert trained < every / 5
    memory = by_world[world][0][kind, dtype]["memory"]
    # two moments, and masters where the weights are bf16, in fp32; DeepSpeed pads what it cuts
    assert memory["optimizer"] <= 3 * 4 * trained + 4096
    assert memory["gradients"] <= 4 * trained + 4096
    wide = 4 * trained if dtype == torch.bfloat16 and kind in ("torch", "zero0") else 0
    assert memory["parameters"] <= every * dtype.itemsize + wide + 4096
