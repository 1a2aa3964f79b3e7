"""Micro-batches as large as fit: what a trial says of a pass of any size, and what happens where it was too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.memory import a_pass, peak_on_cpu
from tests.cases import TINY, stored
from tests.workers.update_ranks import context_here
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.placement.estimate import MOST_TOKENS, Room
from workbench.settings.training import Training
from workbench.workers.passes import TokenBudget
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.reference import ReferenceWorker

MB = 10**6
TRAINING = Training(engine="torch", minibatches=2)


def worker_with(room: Room | None, trained: bool = True, tokens: int | None = None) -> Any:
    spec = Model(name=TINY, dtype="float32", training=replace(TRAINING, micro_batch_tokens=tokens))
    context = replace(context_here(), room=room)
    worker: Any = ActorWorker(spec, context) if trained else ReferenceWorker(spec, context)
    return worker


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], TokenBudget]:
    """The budget that a worker would have on a GPU of some size, with torch's CPU allocator in place of the GPU's."""
    monkeypatch.setattr("workbench.workers.passes.peak_bytes", lambda work, recorder: peak_on_cpu(work))

    def budget(worker: Any, device_bytes: int) -> TokenBudget:
        monkeypatch.setattr("workbench.workers.passes.own_gpu_bytes", lambda: device_bytes)
        module, trained = worker.engine.module, isinstance(worker, ActorWorker)
        worker.budget = TokenBudget(None, worker.context, worker.engine, module, trained=trained)
        return worker.budget

    return budget


def shard_of(rows: int) -> Shard:
    table = stored(rows)
    return Shard(columns=table, rows=np.arange(rows), minibatch_sizes=(rows // 2, rows - rows // 2), meta={})


@pytest.mark.parametrize("trained", [True, False])
def test_a_pass_of_as_many_tokens_as_fit_fits(trained: bool, on_a_device: Callable[[Any, int], TokenBudget]) -> None:
    worker = worker_with(Room(lasting=10 * MB), trained)
    reserved, left = int(1.5 * 2**30), 150 * MB
    budget = on_a_device(worker, reserved + 10 * MB + left)
    assert worker.describe()["micro_batch_tokens"] is None, "nobody has asked"
    tokens = worker.budget.tokens
    assert (tokens % 512, worker.describe()["micro_batch_tokens"]) == (0, tokens)
    one = a_pass(worker.engine.module, tokens, torch.device("cpu"))
    assert worker.engine.module.micro_batch_tokens == tokens

    def work() -> None:
        if trained:
            list(worker.engine.gradients([one, one]))
        else:
            with torch.no_grad():
                worker.engine.forward(**one.inputs)

    assert 0.75 * left < peak_on_cpu(work) <= left, "and hardly more would"
    assert all(parameter.grad is None for parameter in worker.engine.module.parameters())
    assert budget.tokens == tokens
    assert on_a_device(worker, reserved + 10 * MB + 2 * left).tokens >= min(1.7 * tokens, MOST_TOKENS)
    assert on_a_device(worker, 400 * 2**30).tokens == MOST_TOKENS
    assert on_a_device(worker, reserved).tokens == 512, "then a pass says that there is no memory"


def test_numbers_are_as_set_or_fixed_where_no_gpu_decides() -> None:
    assert worker_with(None).budget.tokens == 2048
    assert worker_with(None, tokens=700).budget.tokens == 700
    assert worker_with(Room(), tokens=700).budget.tokens == 700
    assert worker_with(None, trained=False).budget.tokens == 2048


def updated(worker: Any, rows: int = 24) -> dict[str, float]:
    output = worker.update_actor(shard_of(rows), epochs=2)
    assert not any(parameter.grad is not None for parameter in worker.engine.module.parameters())
    weights = [w.double().abs().sum() for _, w in worker.engine.named_weights()]
    return {"norm": output.metrics["grad_norm"].value, "loss": output.metrics["loss"].value,
            "ratio": output.metrics["ratio/mean"].value, "weights": float(sum(weights))}  # fmt: skip


def fails_above(worker: Any, most: int, failed: list[int]) -> None:
    """Let passes of more tokens have no memory, as a device would: in the middle of the micro-batches of a step."""
    forward = worker.engine.forward

    def limited(**inputs: Any) -> Any:
        if len(inputs["input_ids"]) > most:
            failed.append(len(inputs["input_ids"]))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(**inputs)

    worker.engine.forward = limited


def automatic(tokens: int) -> Any:
    worker = worker_with(Room())
    worker.budget.known = tokens
    return worker


def test_a_step_without_memory_begins_anew_with_half_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.workers.passes.TOKENS_STEP", 16)
    plain, failed = updated(worker_with(None, tokens=64)), list[int]()
    worker = automatic(128)
    fails_above(worker, 64, failed)
    assert updated(worker) == pytest.approx(plain, rel=1e-5)
    assert (len(failed), worker.budget.tokens, worker.engine.steps) == (1, 64, 4)
    (note,) = worker.take_notes()
    assert "out of memory with micro-batches of 128 tokens: from now on they have 64" in note
    assert worker.take_notes() == ()


def test_scoring_without_memory_begins_anew_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.workers.passes.TOKENS_STEP", 16)
    expected = worker_with(None, tokens=64).compute_log_prob(shard_of(24))
    worker, failed = automatic(256), list[int]()
    fails_above(worker, 64, failed)
    found = worker.compute_log_prob(shard_of(24))
    assert torch.equal(found.columns["old_log_prob"].values, expected.columns["old_log_prob"].values)
    assert (len(failed), worker.budget.tokens) == (2, 64)


def test_where_smaller_is_not_ours_to_choose_the_error_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in (worker_with(Room(), tokens=128), worker_with(None), automatic(512)):
        fails_above(worker, 16, [])
        for call in (lambda w: w.compute_log_prob(shard_of(24)), lambda w: w.update_actor(shard_of(24))):
            with pytest.raises(torch.OutOfMemoryError):
                call(worker)
        assert worker.engine.steps == 0
