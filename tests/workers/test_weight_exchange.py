"""Weights published on some hosts and taken by others: each rank receives its slices, each element once, by plan."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.expected import expect_error
from tests.resharding.patch_ranks import stepped
from workbench.batches.columns import array_of, tensor_over
from workbench.errors import NotFound
from workbench.models.loading import load_causal_lm, load_config
from workbench.placement import Layout
from workbench.resharding.engine import fill
from workbench.resharding.plan import Distribution, Reshard, WeightShard
from workbench.resharding.weights import ModelWeights, Weight
from workbench.telemetry import Recorder
from workbench.workers.weight_exchange import (
    Contents,
    Published,
    Snapshot,
    WeightExchange,
    plan_of_taking,
    published_parts,
    take_snapshot,
    weights_of,
)
from workbench.workers.weight_intake import AHEAD, WeightIntake
from workbench.workers.weight_transition import PatchDecision

MODELS = ("tiny-llama-tied-4kv", "tiny-qwen2")
CONTENTS = Contents(
    version=3,
    restored=0,
    shapes={},
    probe_ids=torch.zeros(0),
    log_probs=torch.zeros(0),
    aliases={},
    vocabulary=frozenset(),
)


def held_by(name: str, layout: Layout, rank: int) -> Iterator[tuple[str, Tensor]]:
    """What a rank trains in a layout, cut out of the model's whole weights."""
    weights = weights_of(load_config(name), "float32", layout)
    held = Distribution(weights, layout, tuple(range(layout.size)))
    module = dict(load_causal_lm(name, dtype=torch.float32).named_parameters())
    for weight in weights:
        shard = held.shard(weight, rank)
        if shard is not None:
            tensor = torch.empty(shard.shape)
            fill(tensor, shard, module[weight.name].detach(), _whole(weight))
            yield weight.name, tensor


def _whole(weight: Any) -> WeightShard:
    rows, columns = weight.matrix
    return WeightShard(((0, rows, 0, columns),), weight.shape)


@dataclass
class Hosts:
    """The hosts of a publisher and of a taker in this process, and what was asked of whom."""

    name: str
    publisher: Layout
    taker: Layout
    dtype: str = "float32"
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        everyone = [f"train-{rank}" for rank in range(self.publisher.size)]
        self.exchanges = {
            host: WeightExchange(host, self.recorder, self.ask)
            for host in (*everyone, *(f"rollout-{rank}" for rank in range(self.taker.size)))
        }
        self.published = Published(key="k", hosts=tuple(everyone), layout=self.publisher)
        weights = weights_of(load_config(self.name), self.dtype, self.publisher)
        for rank, host in enumerate(everyone):
            held = held_by(self.name, self.publisher, rank)
            dtype = getattr(torch, self.dtype)
            self.exchanges[host].publish("k", take_snapshot(held, weights, self.publisher, rank, dtype, CONTENTS))

    def ask(self, host: str, method: str, *args: Any) -> Any:
        self.asked.append(host)
        if method == "cut_weights":
            return self.exchanges[host].served(*args)
        return self.exchanges[host].snapshot(*args).contents

    def plan(self) -> Reshard:
        weights = weights_of(load_config(self.name), self.dtype, self.publisher, self.taker)
        return plan_of_taking(weights, self.publisher, self.taker, vocabulary_multiple=64)

    def intake(self, rank: int) -> WeightIntake:
        return WeightIntake(self.plan(), rank, self.exchanges[f"rollout-{rank}"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("publisher", "taker"),
    [
        pytest.param(
            publisher,
            taker,
            id=f"{publisher}-{taker}".replace(" ", ""),
            marks=() if publisher in (Layout(), Layout(2, 1, 2)) and taker != Layout(d=2) else pytest.mark.thorough,
        )
        for publisher in (Layout(), Layout(d=3), Layout(1, 2, 1), Layout(2, 1, 2), Layout(2, 2, 2))
        for taker in (Layout(), Layout(d=2), Layout(t=2), Layout(t=4, d=2))
    ],
)
def test_each_rank_receives_its_slices_by_the_plan(name: str, publisher: Layout, taker: Layout) -> None:
    hosts = Hosts(name, publisher, taker)
    plan, module = hosts.plan(), dict(load_causal_lm(name, dtype=torch.float32).named_parameters())
    for rank in range(taker.size):
        intake, seen = hosts.intake(rank), []
        for weight, (given, tensor) in zip(
            plan.weights, intake.weights(hosts.published, torch.device("cpu")), strict=True
        ):
            shard = plan.destination.shard(weight, plan.destination.ranks[rank])
            assert shard is not None
            assert given == weight.name
            mine, expected = torch.empty(shard.shape), torch.empty(shard.shape)
            fill(mine, shard, tensor, _whole(weight))
            fill(expected, shard, module[weight.name].detach(), _whole(weight))
            assert torch.equal(mine, expected)
            seen.append(mine.nbytes)
        assert intake.received_bytes == sum(seen)  # each element once
    figures, transfers = plan.figures(), hosts.recorder.drain()[1]
    assert {transfer.kind for transfer in transfers} == {"weights"}
    matrix = np.zeros_like(figures.matrix)
    for transfer in transfers:
        (source, j), (_, k) = transfer.source.split("-"), transfer.destination.split("-")
        assert source == "train"
        matrix[int(j), publisher.size + int(k)] += transfer.bytes
    assert (matrix == figures.matrix).all()
    sent = figures.sent[: publisher.size].reshape(publisher.d, -1).sum(1)
    assert sent.max() < 1.1 * sent.mean()  # the replicas share the work


def test_the_ranks_of_an_actor_publish_one_copy_between_them() -> None:
    for layout in (Layout(d=3), Layout(2, 2, 2)):
        hosts = Hosts(MODELS[1], layout, Layout())
        weights = weights_of(load_config(MODELS[1]), "float32", layout)
        held = [hosts.exchanges[f"train-{rank}"].held_bytes for rank in range(layout.size)]
        # what every tensor rank holds whole, such as norms, each of them publishes
        copies = sum(w.nbytes * (layout.t if w.axis is None else 1) * len(weights.stages(w, layout.p)) for w in weights)
        assert sum(held) == copies < 1.05 * weights.nbytes
        assert max(held) < 1.3 * weights.nbytes / layout.size
        parts = published_parts(weights, layout)
        assert parts.sharding == "fsdp"


def test_a_layer_is_pulled_when_it_is_asked_for() -> None:
    hosts = Hosts(MODELS[0], Layout(d=2), Layout(), dtype="bfloat16")
    layers = {weight.group for weight in hosts.plan().weights}
    pulled = hosts.intake(0).weights(hosts.published, torch.device("cpu"))
    name, tensor = next(pulled)
    assert len(hosts.asked) <= 2 + AHEAD  # one message a host and layer, and the next ones on their way
    module = dict(load_causal_lm(MODELS[0], dtype=torch.float32).named_parameters())
    assert torch.equal(tensor, module[name].to(torch.bfloat16))
    for name, tensor in pulled:
        assert torch.equal(tensor, module[name].to(torch.bfloat16))
    assert sorted(set(hosts.asked)) == ["train-0", "train-1"]
    assert len(hosts.asked) <= 2 * len(layers)


@pytest.mark.parametrize("publisher", [Layout(), Layout(2, 2, 2)], ids=str)
def test_what_is_on_its_way_is_bounded(publisher: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.workers.weight_intake.BUCKET_BYTES", 4096)
    hosts = Hosts(MODELS[0], publisher, Layout())
    exchange, plan = hosts.exchanges["rollout-0"], hosts.plan()
    pull, lock, cut, bytes_cut = exchange.pull, threading.Lock(), 0, list[int]()

    def counted(published: Published, rank: int, wanted: Any, checksums: bool, since: str) -> Any:
        nonlocal cut
        with lock:
            cut += 1
        pulled = pull(published, rank, wanted, checksums, since)
        bytes_cut.append(pulled.nbytes)
        return pulled

    monkeypatch.setattr(exchange, "pull", counted)
    intake, me = WeightIntake(plan, 0, exchange, checksums=True), plan.destination.ranks[0]
    used, record = 0, exchange.record

    def in_turn(*args: Any) -> int:
        nonlocal used
        time.sleep(0.001)  # those ahead would go on
        used += 1
        assert cut <= used + AHEAD
        return record(*args)

    monkeypatch.setattr(exchange, "record", in_turn)
    held = {}
    for weight in plan.weights:
        shard = plan.destination.shard(weight, me)
        assert shard is not None
        held[weight.name] = torch.full(shard.shape, torch.nan), shard
    intake.place(hosts.published, held)
    module = dict(load_causal_lm(MODELS[0], dtype=torch.float32).named_parameters())
    for weight in plan.weights:
        expected = torch.empty(held[weight.name][1].shape)
        fill(expected, held[weight.name][1], module[weight.name].detach(), _whole(weight))
        assert torch.equal(held[weight.name][0], expected)
    assert used > 50
    assert max(bytes_cut) <= 4096
    assert sum(bytes_cut) == intake.received_bytes == sum(tensor.nbytes for tensor, _ in held.values())
    assert not intake.arrival.differ
    assert intake.arrival.sent == intake.arrival.received


def test_what_was_written_elsewhere_than_it_belongs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are of what lies in place in the end."""
    hosts = Hosts(MODELS[0], Layout(), Layout())
    exchange, plan = hosts.exchanges["rollout-0"], hosts.plan()
    name = next(weight.name for weight in plan.weights if len(weight.shape) == 2)
    held = {weight.name: (torch.empty(weight.shape), _whole(weight)) for weight in plan.weights}
    copy = torch.Tensor.copy_

    def upside_down(self: Tensor, source: Tensor, **more: Any) -> Tensor:
        mine = self.data_ptr() == held[name][0].data_ptr()
        return copy(self, source.flip(0) if mine else source, **more)

    monkeypatch.setattr(Tensor, "copy_", upside_down)
    intake = WeightIntake(plan, 0, exchange, checksums=True)
    intake.place(hosts.published, held)
    assert intake.arrival.differ == ((name, 0),)


@pytest.mark.parametrize(
    ("publisher", "taker"),
    [
        (Layout(), Layout(t=2)),
        pytest.param(Layout(2, 2, 2), Layout(t=2), marks=pytest.mark.thorough),
        pytest.param(Layout(d=3), Layout(t=2, d=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_after_200_syncs_every_bit_is_the_publishers(publisher: Layout, taker: Layout) -> None:
    """By patches, but for the first one and those that a taker has missed the version before of."""
    hosts = Hosts(MODELS[0], publisher, taker, dtype="bfloat16")
    weights = weights_of(load_config(MODELS[0]), "bfloat16", publisher)
    held = Distribution(weights, publisher, tuple(range(publisher.size)))
    whole = {n: w.detach().bfloat16() for n, w in load_causal_lm(MODELS[0], dtype=torch.float32).named_parameters()}
    plan = hosts.plan()
    takers = [WeightIntake(plan, n, hosts.exchanges[f"rollout-{n}"], checksums=True) for n in range(taker.size)]
    has: list[tuple[str, dict[str, Tensor]]] = [("", {}) for _ in takers]
    kept: list[dict[str, Tensor]] = [{} for _ in range(publisher.size)]
    needed, before = {weight.name for weight in plan.weights}, ""
    for version in range(200):
        published = replace(hosts.published, key=f"v{version}")
        for rank in range(publisher.size):
            cut = {w.name: s for w in weights if (s := held.shard(w, rank)) is not None}
            mine = {name: torch.empty(shard.shape, dtype=torch.bfloat16) for name, shard in cut.items()}
            for weight in weights:
                if weight.name in cut:
                    fill(mine[weight.name], cut[weight.name], whole[weight.name], _whole(weight))
            contents = replace(CONTENTS, version=version, keeps=True, since=before)
            snapshot = take_snapshot(mine.items(), weights, publisher, rank, torch.bfloat16, contents, kept[rank])
            hosts.exchanges[f"train-{rank}"].publish(published.key, snapshot)
        for rank, intake in enumerate(takers):
            if version % 50 == 20 + rank:
                continue
            (known, mine), sent = has[rank], (intake.received_bytes, intake.whole_bytes)
            patched = known == before != ""
            changed = [
                n for n, _ in intake.weights(published, torch.device("cpu"), mine, since=known if patched else "")
            ]
            moved, of = intake.received_bytes - sent[0], intake.whole_bytes - sent[1]
            assert moved < 0.03 * of if patched else moved == of
            assert set(changed) == needed or patched
            assert not intake.arrival.differ
            has[rank] = published.key, mine
        for exchange in hosts.exchanges.values():
            exchange.release([published.key])
        before, final, whole = published.key, whole, stepped(whole, version, 0.005)
    for rank, (key, mine) in enumerate(has):
        assert key == "v199"
        for weight in plan.weights:
            shard = plan.destination.shard(weight, plan.destination.ranks[rank])
            assert shard is not None
            given, expected = (torch.empty(shard.shape, dtype=torch.bfloat16) for _ in range(2))
            fill(given, shard, mine[weight.name], _whole(weight))
            fill(expected, shard, final[weight.name], _whole(weight))
            assert torch.equal(given.view(torch.int16), expected.view(torch.int16))  # a step from zero may be NaN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_what_goes_to_another_process_is_copied_there_alone(dtype: torch.dtype) -> None:
    tensor = torch.arange(600).to(dtype).view(20, 30)
    snapshot = Snapshot(contents=None, slices={"w": (tensor, WeightShard(((0, 20, 0, 30),), (20, 30)))})
    rows, columns = ("w", (5, 11, 0, 30)), ("w", (0, 20, 2, 7))
    cut = snapshot.cut([rows, columns])
    assert cut[0].data_ptr() == tensor[5].data_ptr()
    buffers = list[Any]()
    message = pickle.dumps([array_of(part) for part in cut], protocol=5, buffer_callback=buffers.append)
    assert len(message) < 1000  # the elements are not in it
    assert buffers[0].raw().nbytes == tensor[5:11].nbytes
    read_only = [bytes(buffer.raw()) for buffer in buffers]
    arrived = [tensor_over(array) for array in pickle.loads(message, buffers=read_only)]
    assert torch.equal(arrived[0].view(6, 30), tensor[5:11])
    assert torch.equal(arrived[1].view(20, 5), tensor[:, 2:7])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("here", "there"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_between_gpus_it_goes_by_host_memory(here: str, there: str) -> None:
    weights = ModelWeights((Weight(name="w", shape=(9000, 1024), item_bytes=4),), 1)
    plan = Reshard(*(Distribution(weights, Layout(), (rank,)) for rank in (0, 1)))
    source, target = torch.randn(9000, 1024, device=here), torch.empty(9000, 1024, device=there)
    publisher = WeightExchange("a", Recorder(), lambda *asked: None)
    publisher.publish("k", Snapshot(contents=None, slices={"w": (source, _whole(weights.weights[0]))}))
    taker = WeightExchange("b", Recorder(), lambda host, method, *args: publisher.served(*args))
    intake = WeightIntake(plan, 0, taker, checksums=True)
    intake.place(Published(key="k", hosts=("a", "b"), layout=Layout()), {"w": (target, _whole(weights.weights[0]))})
    assert torch.equal(target.cpu(), source.cpu())
    assert not intake.arrival.differ
    cut = publisher.snapshot("k").cut([("w", (0, 10, 0, 1024))])[0]
    assert not cut.is_cuda
    assert cut.is_pinned() == (here == "cuda")


def test_what_is_published_stays_as_it_was_until_it_is_released() -> None:
    weights = weights_of(load_config(MODELS[0]), "float32", Layout())
    live = [(name, tensor.clone()) for name, tensor in held_by(MODELS[0], Layout(), 0)]
    exchange = WeightExchange("train-0", Recorder(), lambda *asked: pytest.fail("nobody else is asked"))
    exchange.publish("k", take_snapshot(live, weights, Layout(), 0, torch.float32, CONTENTS))
    before = live[0][1].clone()
    live[0][1].add_(1)
    here = Published(key="k", hosts=("train-0",), layout=Layout())
    intake = WeightIntake(
        plan_of_taking(weights_of(load_config(MODELS[0]), "float32", Layout()), Layout(), Layout()), 0, exchange
    )
    name, whole = next(intake.weights(here, torch.device("cpu")))
    assert (name, torch.equal(whole, before)) == (live[0][0], True)
    assert exchange.contents(here).version == 3
    exchange.release(["k", "another"])
    assert exchange.held_bytes == 0
    with expect_error(NotFound, value="published weights k on host train-0", rule="released"):
        exchange.contents(here)


def test_auto_goes_by_the_median_of_three() -> None:
    choice, asked = PatchDecision("auto"), []
    for took in (9.0, 1.0, 1.0, 2.0, 2.0, 2.0):
        asked.append(choice.patches)
        choice.note(took, patches=choice.patches)
    assert asked == [True] * 3 + [False] * 3
    assert choice.patches
    for _ in range(4):
        choice.note(3.0, patches=True)
    assert not choice.patches
    assert (PatchDecision("delta").patches, PatchDecision("whole").patches) == (True, False)
