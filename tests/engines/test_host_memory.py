"""Memory goes away and comes back: storages are really empty, and afterwards every bit and every sharing is there."""

from __future__ import annotations

import time
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
    loss_now,
    make_engine,
    negative_log_likelihood,
    replicas,
    run_ranks,
    same,
    sequences,
    settings,
    tiny_model,
    train,
    weights,
)
from workbench.engines import host_memory
from workbench.engines.host_memory import HostMemory, distinct_storages, overlapping
from workbench.engines.training import TrainingEngine
from workbench.engines.training.torch_engine import TorchEngine
from workbench.models.heads import TokenLogProbs
from workbench.placement import Layout
from workbench.telemetry import Recorder

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[needs_gpu, pytest.mark.gpu])]


def test_where_not_all_of_it_finds_room_none_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [torch.randn(1000) for _ in range(3)]
    before, memory, resize, room = [t.clone() for t in held], HostMemory(), torch.UntypedStorage.resize_, iter((1, 0))
    memory.offload({"parameters": held}, ["parameters"])

    def resized(storage: Any, size: int) -> Any:
        if size and not next(room):
            raise torch.OutOfMemoryError
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resized)
        with pytest.raises(torch.OutOfMemoryError):
            memory.load(["parameters"])
    assert not any(t.untyped_storage().nbytes() for t in held)
    memory.load(["parameters"])
    assert all(torch.equal(t, kept) for t, kept in zip(held, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_what_shares_memory_shares_it_again(device: str) -> None:
    flat = torch.randn(100, device=device)
    view, tied, apart = flat[20:50].view(3, 10), flat.view(10, 10).T, torch.arange(7, device=device)
    before = [tensor.clone() for tensor in (flat, view, tied, apart)]
    memory, recorder = HostMemory(), Recorder()
    with recorder.bind(stage="update", role="actor"):
        parts = {"weights": [flat, view], "numbers": [tied, apart]}
        assert memory.offload(parts, ["numbers"]) == apart.nbytes  # what it shares with the part before belongs to that
        assert memory.offload(parts, parts) == flat.nbytes
        assert [t.untyped_storage().nbytes() for t in (flat, view, tied, apart)] == [0, 0, 0, 0]
        assert memory.nbytes == flat.nbytes + apart.nbytes
        assert memory.offload(parts, parts) == 0  # away already
        assert memory.load(["weights"]) == flat.nbytes
        assert ("weights" in memory, "numbers" in memory) == (False, True)
        assert memory.load(["weights", "numbers"]) == apart.nbytes
        assert memory.load(["weights", "numbers"]) == memory.nbytes == 0
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


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_lie_end_to_end_in_pieces(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages that are smaller and larger than a piece of host memory, and none of them a multiple of one."""
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 1024)
    sizes = (1, 255, 256, 257, 3000, 7, 0, 1024)
    going, coming = ([torch.randn(n, device=device) for n in sizes] for _ in range(2))
    before = [tensor.clone() for tensor in (*going, *coming)]
    memory = HostMemory()
    memory.offload({"coming": coming}, ["coming"])
    with overlapping():
        assert memory.offload({"going": going}, ["going"]) == sum(sizes) * 4
        assert memory.load(["coming"]) == sum(sizes) * 4
        with overlapping():  # is the same one
            memory.load(["going"])
    assert all(torch.equal(t, kept) for t, kept in zip((*going, *coming), before, strict=True))


def test_what_is_not_kept_has_room_again() -> None:
    weight, memory = torch.ones(1000), HostMemory()
    assert memory.offload({"weights": [weight]}, ["weights"], keep=False) == weight.nbytes
    assert weight.untyped_storage().nbytes() == memory.nbytes == 0
    assert memory.load(["weights"]) == weight.nbytes == weight.untyped_storage().nbytes()
    assert torch.equal(weight.fill_(2), torch.full((1000,), 2.0))


def test_weights_of_a_mapped_file_move_too(tmp_path: Path) -> None:
    weight = torch.randn(4, 5)
    save_file({"weight": weight}, tmp_path / "weights.safetensors")
    mapped = load_file(tmp_path / "weights.safetensors")["weight"]
    tied, memory = mapped[1:].detach(), HostMemory()
    assert not mapped.untyped_storage().resizable()
    memory.offload({"weights": [mapped, tied]}, ["weights"])
    assert memory.nbytes == weight.nbytes == sum(t.untyped_storage().nbytes() for t in (weight, mapped, tied))
    memory.load(["weights"])
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


def data_parallel() -> dict[str, dict[str, bool]]:
    return of_replicas([("torch", torch.float32), *((kind, torch.bfloat16) for kind in ("torch", "zero1", "zero3"))])


def every_engine() -> dict[str, dict[str, bool]]:
    return of_replicas([(kind, dtype) for kind in ENGINES for dtype in (torch.float32, torch.bfloat16)])


def of_replicas(cases: list[tuple[str, torch.dtype]]) -> dict[str, dict[str, bool]]:
    return {f"{kind} {dtype}": compare(make_engine(kind, dtype), make_engine(kind, dtype)) for kind, dtype in cases}


def three_d() -> dict[str, dict[str, bool]]:
    found = {}
    for layout in (Layout(p=2), Layout(t=2)):  # the embedding is tied over both stages, or cut in 49 and 48 rows
        groups = groups_of(layout)
        plain, moving = engine_of("tied llama", groups), engine_of("tied llama", groups)
        found[str(layout)] = compare(plain, moving, replica=(0, 1))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engines", [data_parallel, three_d, pytest.param(every_engine, marks=pytest.mark.thorough)])
def test_a_training_engine_computes_as_if_it_had_never_been_away(engines: Any) -> None:
    for rank in run_ranks(engines, 2):
        assert {case: [name for name, holds in found.items() if not holds] for case, found in rank.items()} == {
            case: [] for case in rank
        }


def test_without_optimizer_state_or_gradients_nothing_else_moves() -> None:
    engine = TorchEngine(TokenLogProbs(tiny_model()), None, replicas(), device=CPU, dtype=torch.float32)
    micro = negative_log_likelihood(sequences(0))
    before = loss_now(engine, micro)
    assert engine.offload("gradients", "optimizer") == 0
    assert engine.offload() == sum({p.data_ptr(): p.nbytes for p in tiny_model().parameters()}.values())
    assert torch.equal(loss_now(engine, micro), before)
    assert engine.offloaded_bytes == 0


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_has_its_memory_back() -> None:
    device = torch.device("cuda")

    def engine() -> TorchEngine:
        module = TokenLogProbs(tiny_model(), micro_batch_tokens=1024)
        return TorchEngine(module, settings("torch"), replicas(), device=device, dtype=torch.float32)

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


def a_model(nbytes: int) -> list[Tensor]:
    """Tensors of a transformer's sizes, 50 MB and 4 kB in turn."""
    one, device = 50 * 2**20, torch.device("cuda")
    return [torch.empty(n, dtype=torch.uint8, device=device) for _ in range(nbytes // one) for n in (one, 4096)]


def plain_copy_s(nbytes: int, *, back: bool) -> float:
    """Seconds of one copy of as many bytes from page-locked memory, or to it."""
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    (there if back else here).copy_(here if back else there)
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def moves_s() -> dict[str, list[float]]:
    """Seconds of a plain copy, of an offload and a load of 4 GB, and of both of two models at the same time."""
    nbytes, memory, other = 2**32, HostMemory(), HostMemory()
    first, second = a_model(nbytes), a_model(nbytes)
    other.offload({"weights": second}, ["weights"])
    found: dict[str, list[float]] = {"out": [], "in": [], "offload": [], "load": [], "change": []}

    def timed(what: str, work: Any) -> None:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found[what].append(time.perf_counter() - start_s)

    def change(leaving: HostMemory, tensors: list[Tensor], arriving: HostMemory) -> None:
        with overlapping():
            leaving.offload({"weights": tensors}, ["weights"])
            arriving.load(["weights"])

    for _ in range(5):
        found["out"].append(plain_copy_s(nbytes, back=False))
        found["in"].append(plain_copy_s(nbytes, back=True))
        timed("offload", lambda: memory.offload({"weights": first}, ["weights"]))
        timed("load", lambda: memory.load(["weights"]))
        timed("change", lambda: change(memory, first, other))
        change(other, second, memory)
    return found


@pytest.mark.gpu
@needs_gpu
def test_offload_and_load_run_at_the_speed_of_the_bus() -> None:
    found = {what: sorted(seconds)[len(seconds) // 2] for what, seconds in moves_s().items()}
    assert found["out"] / found["offload"] > 0.8, found
    assert found["in"] / found["load"] > 0.8, found
    # one leaves while the other comes: less than one after the other, where the bus carries both directions
    assert found["change"] < 0.85 * (found["out"] + found["in"]), found


@pytest.mark.gpu
@needs_gpu
def test_spans_say_how_long_the_bytes_were_under_way() -> None:
    memory, recorder, tensors = HostMemory(), Recorder(), a_model(2**31)
    with recorder.bind(stage="update", role="actor", device="cuda:0"):
        memory.offload({"weights": tensors}, ["weights"])  # page-locks its pieces
        memory.load(["weights"])
        memory.offload({"weights": tensors}, ["weights"])
        memory.load(["weights"])
    plain = min(plain_copy_s(2**31, back=back) for back in (False, True))
    for span in recorder.drain()[0][2:]:
        assert 0.3 < plain / (span.end_s - span.start_s) < 3, span


@pytest.mark.gpu
@needs_gpu
def test_bits_survive_while_the_device_goes_on_computing() -> None:
    """What leaves is overwritten at once by others, and what comes is read at once."""
    going = [torch.randn(2**20, device="cuda") for _ in range(64)]
    coming = [torch.randn(2**20, device="cuda") for _ in range(64)]
    sums = [tensor.double().sum().item() for tensor in (*going, *coming)]
    memory, other = HostMemory(), HostMemory()
    other.offload({"weights": coming}, ["weights"])
    for _ in range(10):
        with overlapping():
            memory.offload({"weights": going}, ["weights"])
            trash = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
            other.load(["weights"])
            assert [tensor.double().sum().item() for tensor in coming] == sums[64:]
        del trash
        with overlapping():
            other.offload({"weights": coming}, ["weights"])
            memory.load(["weights"])
            assert [tensor.double().sum().item() for tensor in going] == sums[:64]
