"""Memory goes away and comes back: storages are really empty, and afterwards every bit and every sharing is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engines.layout_ranks import engine_of, groups_of
from tests.engines.training_ranks import (
    CPU,
    ENGINES,
    Alone,
    loss_now,
    make_engine,
    negative_log_likelihood,
    run_ranks,
    sequences,
    settings,
    tiny_model,
    train,
    weights,
)
from workbench.engines.host_memory import HostMemory, distinct_storages
from workbench.engines.training import TrainingEngine
from workbench.engines.training.torch_engine import TorchEngine
from workbench.models.heads import TokenLogProbs
from workbench.placement import Layout
from workbench.telemetry import Recorder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_what_shares_memory_shares_it_again(device: str) -> None:
    flat = torch.randn(100, device=device)
    view, tied, apart = flat[20:50].view(3, 10), flat.view(10, 10).T, torch.arange(7, device=device)
    before = [tensor.clone() for tensor in (flat, view, tied, apart)]
    memory, recorder = HostMemory(), Recorder()
    with recorder.bind(stage="update", role="actor"):
        parts = {"weights": [flat, view], "numbers": [tied, apart]}
        assert memory.take(parts, ["numbers"]) == apart.nbytes  # what it shares with the part before belongs to that
        assert memory.take(parts, parts) == flat.nbytes
        assert [t.untyped_storage().nbytes() for t in (flat, view, tied, apart)] == [0, 0, 0, 0]
        assert memory.nbytes == flat.nbytes + apart.nbytes
        assert memory.take(parts, parts) == 0  # away already
        assert memory.give_back(["weights"]) == flat.nbytes
        assert ("weights" in memory, "numbers" in memory) == (False, True)
        assert memory.give_back(["weights", "numbers"]) == apart.nbytes
        assert memory.give_back(["weights", "numbers"]) == memory.nbytes == 0
    assert all(torch.equal(t, kept) for t, kept in zip((flat, view, tied, apart), before, strict=True))
    view += 1
    assert torch.equal(flat[20:50], before[0][20:50] + 1)
    assert torch.equal(tied.T.flatten(), flat)
    spans = [(span.kind, span.bytes, span.note) for span in recorder.drain()[0]]
    assert spans == [
        ("offload", apart.nbytes, "numbers"),
        ("offload", flat.nbytes, "weights"),
        ("load", flat.nbytes, "weights"),
        ("load", apart.nbytes, "numbers"),
    ]


def test_what_is_not_kept_has_room_again() -> None:
    weight, memory = torch.ones(1000), HostMemory()
    assert memory.take({"weights": [weight]}, ["weights"], keep=False) == weight.nbytes
    assert weight.untyped_storage().nbytes() == memory.nbytes == 0
    assert memory.give_back(["weights"]) == weight.nbytes == weight.untyped_storage().nbytes()
    assert torch.equal(weight.fill_(2), torch.full((1000,), 2.0))


def test_weights_of_a_mapped_file_move_too(tmp_path: Path) -> None:
    weight = torch.randn(4, 5)
    save_file({"weight": weight}, tmp_path / "weights.safetensors")
    mapped = load_file(tmp_path / "weights.safetensors")["weight"]
    tied, memory = mapped[1:].detach(), HostMemory()
    assert not mapped.untyped_storage().resizable()
    memory.take({"weights": [mapped, tied]}, ["weights"])
    assert memory.nbytes == weight.nbytes == sum(t.untyped_storage().nbytes() for t in (weight, mapped, tied))
    memory.give_back(["weights"])
    assert torch.equal(mapped, weight)
    assert tied.data_ptr() == mapped[1:].data_ptr()


def compare(plain: TrainingEngine, moving: TrainingEngine, **options: Any) -> dict[str, bool]:
    """A few steps of two engines that are alike, one of which is away between any two calls."""
    found: dict[str, bool] = {}

    def note(name: str, holds: bool) -> None:
        found[name] = found.get(name, True) and holds

    ties = {name: tensor.data_ptr() for name, tensor in moving.module.named_parameters(remove_duplicate=False)}
    shared = len(set(ties.values()))
    for step in range(3):
        note(
            "reports", train(plain, range(step, step + 1), **options) == train(moving, range(step, step + 1), **options)
        )
        before = moving.memory_bytes()
        total = sum(before.values())
        note("all bytes move", moving.offload() == total == moving.offloaded_bytes > 0)
        note("nothing is left", not any(distinct_storages(moving.tensors()).values()))
        note("and is counted so", sum(moving.memory_bytes().values()) == 0)
        note("nothing moves twice", moving.offload() == 0)
        note("parameters alone", moving.load("parameters") == before["parameters"])
        note("weights are the same", same(weights(plain), weights(moving)))
        note("optimizer still away", moving.offloaded_bytes == total - before["parameters"])
        moving.offload()
    with torch.no_grad():
        micro = negative_log_likelihood(sequences(9))
        note("forward finds its weights", torch.equal(read(plain, micro), read(moving, micro)))
    saved = moving.state_dict()
    moving.offload()
    moving.load_state_dict(saved)
    moving.offload("gradients", "optimizer")
    train(plain, range(3, 4), **options)
    train(moving, range(3, 4), **options)
    note("steps after a snapshot", same(weights(plain), weights(moving)))
    moving.offload()
    moving.load()
    ties = {name: tensor.data_ptr() for name, tensor in moving.module.named_parameters(remove_duplicate=False)}
    note("ties", len(set(ties.values())) == shared)
    return found


def read(engine: TrainingEngine, micro: Any) -> Tensor:
    return engine.everywhere(engine.forward(**micro.inputs)[0])


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def data_parallel() -> dict[str, dict[str, bool]]:
    cases = [(kind, dtype) for kind in ENGINES for dtype in (torch.float32, torch.bfloat16)]
    return {f"{kind} {dtype}": compare(make_engine(kind, dtype), make_engine(kind, dtype)) for kind, dtype in cases}


def three_d() -> dict[str, dict[str, bool]]:
    found = {}
    for layout in (Layout(p=2), Layout(t=2)):  # the embedding is tied over both stages, or cut in 49 and 48 rows
        groups = groups_of(layout)
        plain, moving = engine_of("tied llama", groups), engine_of("tied llama", groups)
        found[str(layout)] = compare(plain, moving, replica=(0, 1))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engines", [data_parallel, three_d])
def test_a_training_engine_computes_as_if_it_had_never_been_away(engines: Any) -> None:
    for rank in run_ranks(engines, 2):
        assert {case: [name for name, holds in found.items() if not holds] for case, found in rank.items()} == {
            case: [] for case in rank
        }


def test_without_optimizer_state_or_gradients_nothing_else_moves() -> None:
    engine = TorchEngine(TokenLogProbs(tiny_model()), None, Alone(), device=CPU, dtype=torch.float32)
    micro = negative_log_likelihood(sequences(0))
    before = loss_now(engine, micro)
    assert engine.offload("gradients", "optimizer") == 0
    assert engine.offload() == sum({p.data_ptr(): p.nbytes for p in tiny_model().parameters()}.values())
    assert torch.equal(loss_now(engine, micro), before)
    assert engine.offloaded_bytes == 0


@needs_gpu
def test_a_gpu_has_its_memory_back() -> None:
    device = torch.device("cuda")

    def engine() -> TorchEngine:
        module = TokenLogProbs(tiny_model(), micro_batch_tokens=1024)
        return TorchEngine(module, settings("torch"), Alone(), device=device, dtype=torch.float32)

    def step(engine: TorchEngine, number: int) -> None:
        micro = negative_log_likelihood(sequences(number))
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in micro.inputs.items()}
        engine.step([type(micro)(inputs=inputs, loss=micro.loss)])

    plain, moving = engine(), engine()
    for number in range(2):
        step(plain, number)
        step(moving, number)
        before, held = torch.cuda.memory_allocated(), sum(moving.memory_bytes().values())
        assert moving.offload() == held
        assert before - torch.cuda.memory_allocated() >= held
        assert sum(moving.memory_bytes().values()) == 0
    moving.load("parameters")
    assert same(weights(plain), weights(moving))
