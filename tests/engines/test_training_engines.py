"""What an engine promises besides the right update: snapshots, failed steps, bf16, threads, two engines at a time."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.training_ranks import (
    CPU,
    asked,
    everyone,
    loss_now,
    make_engine,
    negative_log_likelihood,
    replicas,
    run_ranks,
    same,
    sequences,
    squared_values,
    tiny_model,
    train,
    value_module,
    weights,
)
from workbench.engines.training.steps import make_moments
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput
from workbench.models.heads import TokenLogProbs
from workbench.settings.training import Training

DTYPES = (torch.float32, torch.bfloat16)
LINEAR = torch.nn.functional.linear  # which DeepSpeed's ZeRO-3 replaces
# ZeRO-3 takes seconds where the others take tenths
CASES = [
    *((kind, dtype) for kind in ("torch", "zero1") for dtype in DTYPES),
    ("zero2", torch.bfloat16),
    ("zero3", torch.bfloat16),
    pytest.param("zero3", torch.float32, marks=pytest.mark.thorough),
    *(pytest.param("zero0", dtype, marks=pytest.mark.thorough) for dtype in DTYPES),
    pytest.param("zero2", torch.float32, marks=pytest.mark.thorough),
]
OTHERS = ["torch", "zero1", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("zero0", "zero2", "zero3"))]


def snapshots(kind: str, dtype: torch.dtype) -> dict[str, bool]:
    engine = make_engine(kind, dtype)
    start, untouched = engine.state_dict(), weights(engine)
    train(engine, range(2))
    saved, at_save = engine.state_dict(), weights(engine)
    train(engine, range(2, 4))
    straight_on = weights(engine)
    found = {"moved": not same(at_save, straight_on)}
    for attempt in ("first load", "second load"):  # the second fails where training writes into the snapshot
        engine.load_state_dict(saved)
        found[f"{attempt}: weights"] = same(weights(engine), at_save) and engine.steps == 2
        train(engine, range(2, 4))
        found[f"{attempt}: two steps on"] = same(weights(engine), straight_on)
    engine.load_state_dict(start)
    found["start: weights"] = same(weights(engine), untouched) and engine.steps == 0
    train(engine, range(4))
    found["start: four steps on"] = same(weights(engine), straight_on)
    other = make_engine(kind, dtype)
    other.load_state_dict(saved)
    train(other, range(2, 4))
    found["into another engine"] = same(weights(other), straight_on)
    found["other models compute as before"] = torch.nn.functional.linear is LINEAR
    return found


def failures(kind: str, dtype: torch.dtype) -> dict[str, bool]:
    clean, engine = make_engine(kind, dtype), make_engine(kind, dtype)
    train(clean, range(2))
    made = {"the first moments have no memory": no_memory_for_moments(engine)}
    train(engine, range(1))
    before = weights(engine)
    skipped = train(engine, range(1, 2), scale=float("nan"))[0]
    found = made | {
        "says so": skipped["skipped"] and skipped["steps"] == 1,
        "skip changes nothing": same(weights(engine), before),
    }

    def broken(output: Any) -> Tensor:
        raise ZeroDivisionError

    batch = sequences(7)
    try:
        engine.step([negative_log_likelihood(batch[:3]), replace(negative_log_likelihood(batch[3:]), loss=broken)])
    except ZeroDivisionError:
        found["error comes through"] = engine.steps == 1 and same(weights(engine), before)

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    hook = next(engine.module.parameters()).register_hook(out_of_memory)  # the embeddings': all others are complete
    try:
        engine.step([negative_log_likelihood(batch[:3]), negative_log_likelihood(batch[3:])])
    except torch.OutOfMemoryError:
        hook.remove()
        found["backward pass breaks off"] = engine.steps == 1 and same(weights(engine), before)
    train(engine, range(1, 2))
    found["next step is clean"] = same(weights(engine), weights(clean))
    state, adam = engine.state_dict(), getattr(engine, "_adam", None) or engine._optimizer  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "step", out_of_memory)
        with contextlib.suppress(torch.OutOfMemoryError):
            train(engine, range(1))
    engine.load_state_dict(state)
    found["the optimizer breaks off"] = same(weights(engine), weights(clean))
    train(clean, range(1))
    train(engine, range(1))
    found["and can step again"] = same(weights(engine), weights(clean))
    return found


def no_memory_for_moments(engine: Any) -> bool:
    """Whether a step that finds no memory for the second moment of a weight leaves none."""
    room = iter((True, False))

    def zeros_like(*arguments: Any, **options: Any) -> Tensor:
        if not next(room):
            raise torch.OutOfMemoryError
        return torch.zeros_like(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_moments, "__defaults__", (zeros_like,))
        try:
            train(engine, range(1))
        except torch.OutOfMemoryError:
            return not engine.has_moments and engine.steps == 0
    return False


def bf16_training(kind: str) -> dict[str, Any]:
    engine = make_engine(kind, torch.bfloat16, schedule="constant", warmup_steps=0)
    losses = [train(engine, range(1))[0]["loss"] for _ in range(8)]
    exported = {weight.dtype for weight in weights(engine).values()}
    state = engine.state_dict()
    masters = state["held"]["parameters"].values()
    return {"losses": losses, "exported": exported, "masters": {master.dtype for master in masters}}


def interleaved(kind: str) -> dict[str, bool]:
    """Actor and critic in one process, a step each in turn, in a thread; then each alone."""
    together: dict[str, Any] = {}

    def work() -> None:
        actor, critic = make_engine(kind), make_engine(kind, module=value_module())
        for step in range(3):
            train(actor, range(step, step + 1))
            train(critic, range(step, step + 1), loss=squared_values)
            with torch.no_grad():
                together["log_probs"] = loss_now(actor, negative_log_likelihood(sequences(9)))
        together.update(actor=weights(actor), critic=weights(critic))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    actor, critic = make_engine(kind), make_engine(kind, module=value_module())
    train(actor, range(3))
    train(critic, range(3), loss=squared_values)
    return {"actor": same(together["actor"], weights(actor)), "critic": same(together["critic"], weights(critic))}


def recomputed(kind: str) -> dict[str, bool]:
    plain, saving = make_engine(kind), make_engine(kind, activation_checkpointing=True)
    model: Any = saving.module.model
    attention_runs = 0

    def count(*_: Any) -> None:
        nonlocal attention_runs
        attention_runs += 1

    model.model.layers[0].self_attn.register_forward_pre_hook(count)
    for engine in (plain, saving):
        train(engine, range(2), cuts=(1, 2))
    steps, micro_batches, forward_and_recomputed = 2, 3, 2
    return {
        "recomputes": attention_runs == steps * micro_batches * forward_and_recomputed,
        "same weights": same(weights(saving), weights(plain)),
        "eval": not any(part.training for part in model.modules() if not list(part.children())),
    }


def unequal_start() -> str:
    module = TokenLogProbs(tiny_model(seed=everyone().rank))
    try:
        TorchEngine(module, Training(), replicas(), device=CPU, dtype=torch.float32)
    except BadInput as error:
        return str(error)
    return "accepted"


def everything(cases: list[tuple[str, torch.dtype]], engines: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"unequal start": unequal_start()}
    for kind, dtype in cases:
        found[f"{kind} snapshots {dtype}"] = snapshots(kind, dtype)
        found[f"{kind} failures {dtype}"] = failures(kind, dtype)
    for kind in engines:
        found[f"{kind} bf16"] = bf16_training(kind)
        found[f"{kind} interleaved"] = interleaved(kind)
        found[f"{kind} recomputed"] = recomputed(kind)
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(everything, 2, asked(request, "kind", "dtype"), asked(request, "engine"))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_snapshot_restores_to_the_last_bit(found: Any, kind: str, dtype: torch.dtype) -> None:
    for rank in found:
        assert all(rank[f"{kind} snapshots {dtype}"].values()), rank[f"{kind} snapshots {dtype}"]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_failed_step_leaves_no_trace(found: Any, kind: str, dtype: torch.dtype) -> None:
    for rank in found:
        assert all(rank[f"{kind} failures {dtype}"].values()), rank[f"{kind} failures {dtype}"]


@pytest.mark.parametrize("engine", OTHERS)
def test_bf16_trains_on_fp32_masters(found: Any, engine: str) -> None:
    result = found[0][f"{engine} bf16"]
    assert result["losses"][-1] < 0.9 * result["losses"][0]
    assert result["exported"] == {torch.bfloat16}
    assert result["masters"] == {torch.float32}


@pytest.mark.parametrize("engine", OTHERS)
def test_two_engines_interleave_in_a_thread(found: Any, engine: str) -> None:
    assert found[1][f"{engine} interleaved"] == {"actor": True, "critic": True}


@pytest.mark.parametrize("engine", OTHERS)
def test_activation_checkpointing_changes_nothing_but_memory(found: Any, engine: str) -> None:
    assert found[0][f"{engine} recomputed"] == {"recomputes": True, "same weights": True, "eval": True}


def test_ranks_that_start_apart_are_refused(found: Any) -> None:
    assert all("equal weights" in rank["unequal start"] for rank in found)


@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
def test_clipping(limit: float) -> None:
    """With AdamW's eps far above the gradients the update is proportional to the clipped gradient."""
    moves, norms = [], []
    for max_grad_norm in (0.0, limit):
        engine = make_engine("torch", max_grad_norm=max_grad_norm, eps=1e6, learning_rate=1e6, weight_decay=0.0)
        before = weights(engine)
        norms.append(train(engine, range(1))[0]["grad_norm"])
        moved = [(weight - before[name]).square().sum() for name, weight in weights(engine).items()]
        moves.append(float(torch.stack(moved).sum().sqrt()))
    assert norms[0] == norms[1] > 0.5
    expected = min(1.0, limit / norms[0]) if limit else 1.0
    assert moves[1] / moves[0] == pytest.approx(expected, rel=1e-3)


def test_untrained_module_is_only_run() -> None:
    engine = TorchEngine(TokenLogProbs(tiny_model()), None, replicas(), device=CPU, dtype=torch.bfloat16)
    assert {weight.dtype for weight in weights(engine).values()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in engine.module.buffers()} == {torch.float32}, "rotary frequencies stay exact"
    assert not loss_now(engine, negative_log_likelihood(sequences(0))).requires_grad
    assert engine.memory_bytes()["gradients"] == engine.memory_bytes()["optimizer"] == 0
