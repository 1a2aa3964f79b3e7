"""Syncs of an actor that ZeRO-3 shards: exact slices, on the ledger, and a changed bit is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engines.training_ranks import run_ranks
from tests.workers.update_ranks import ROWS, Case, shard_of, worker_of
from workbench.errors import BadInput, SyncError
from workbench.telemetry import Transfer
from workbench.telemetry.syncs import Sync, sync_frame
from workbench.workers.weight_transition import plan_of

pytestmark = pytest.mark.slow


def test_shards_go_to_the_engine_and_a_bit_that_changes_on_its_way_is_named() -> None:
    found = run_ranks(syncs, 2)
    for seen, refused in found:
        assert seen.differ == []
        assert seen.moved == seen.planned
        assert all(sum(moved.values()) > 0 for moved in seen.moved)
        assert seen.stamps == [1, 1, 1, -1, 2]
        assert "with p*t = 1 and without ZeRO-3" in refused
    ledger = sync_frame([part.row() for seen, _ in found for part in seen.parts])
    assert ledger["verdict"].to_list() == ["ok", "synced twice", "synced twice", "checksum differs", "ok"]
    assert ledger["strategy"].to_list() == [*STRATEGIES, "hybridflow", "hybridflow"]
    assert ledger["culprit"].to_list()[1] == "sync_weights: version 1 came with run 0"
    culprit = ledger["culprit"].to_list()[3]
    assert culprit.startswith(f"rank 1: {FLIPPED}.")
    assert culprit.endswith(" from rank 0")
    assert "sync again" in ledger["remedy"].to_list()[3]
    same = ledger["checksum_sent"] == ledger["checksum_received"]
    assert same.to_list() == [True, True, True, False, True]
    moved = [sum(sum(seen.moved[n].values()) for seen, _ in found) for n in range(len(STRATEGIES) + 1)]
    assert ledger["moved_bytes"].to_list() == [*moved[:3], moved[3], moved[3]]
    first, second = (seen.raised for seen, _ in found)
    assert first == second  # whoever raised, the message names the weight and both ranks
    weight = culprit.split()[2]
    assert f"weights version 2 did not arrive as it was sent: {weight} on rank 1, from rank 0." in first


STRATEGIES = ("hybridflow", "v", "full")
FLIPPED = "model.layers.1"


@dataclass
class Seen:
    """On one rank: what its ledger says, what the plans count, weights that the engine does not have, what was raised.

    moved: by run, bytes from each rank as recorded; planned: the plan's. stamps: the engine's weights version.
    """

    parts: list[Sync] = field(default_factory=list)
    moved: list[dict[int, int]] = field(default_factory=list)
    planned: list[dict[int, int]] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    raised: str = ""
    stamps: list[int] = field(default_factory=list)


def syncs_of_zero() -> Seen:
    """An update and a sync by each strategy; another update, and a sync in which a bit changes on its way to rank 1;
    then a sound one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    worker, seen = worker_of(Case(engine="zero3", check_sync=True)), Seen()
    recorder, generation = worker.context.recorder, worker.spec.generation

    def sync(run: int, strategy: str | None) -> None:
        with recorder.bind(stage="sync_weights", run=run, role="actor", pool="main", rank=rank):
            worker.sync_weights(strategy=strategy)

    def look(strategy: str) -> None:
        _, transfers, parts = recorder.drain()
        seen.parts += parts
        seen.moved.append(_by_source(transfers))
        config = worker.engine.module.get_backbone().config
        figures = plan_of(config, worker.context.layout, generation, "float32", strategy, "zero").figures()
        seen.planned.append({source: int(n) for source, n in enumerate(figures.matrix[:, rank]) if n})
        held = worker.generator.readable_weights()
        seen.differ += [name for name, weight in worker.engine.named_weights() if not torch.equal(held[name], weight)]
        seen.stamps.append(worker.generator.weights_version)

    def update() -> None:
        worker.update_actor(shard_of(list(range(rank, ROWS, size)), ()))
        recorder.drain()

    update()
    for run, strategy in enumerate(STRATEGIES):
        sync(run, strategy)
        look(strategy)
    update()
    _change_a_bit(worker.context.communicator)
    try:
        sync(len(STRATEGIES), None)
    except SyncError as error:
        seen.raised = str(error)
    seen.parts += recorder.drain()[2]
    seen.stamps.append(worker.generator.weights_version)
    sync(len(STRATEGIES) + 1, None)
    look("hybridflow")
    return seen


def refused() -> str:
    """What an actor says of strategies whose ranks hold it whole."""
    try:
        worker_of(Case(engine="zero2")).sync_weights(strategy="v")
    except BadInput as error:
        return str(error)
    return ""


def syncs() -> tuple[Seen, str]:
    return syncs_of_zero(), refused()


def _by_source(transfers: list[Transfer]) -> dict[int, int]:
    found: Counter[int] = Counter()
    for transfer in transfers:
        assert (transfer.kind, transfer.destination) == ("weights", f"main-{dist.get_rank()}")
        found[int(transfer.source.rpartition("-")[2])] += transfer.bytes
    return dict(found)


def _change_a_bit(communicator: Any) -> None:
    exchange = communicator.exchange

    def changing(sends: Any, receives: Any, weights: str = "") -> None:
        exchange(sends, receives, weights)
        if weights == FLIPPED:
            communicator.exchange = exchange
            for _, buffer in receives if communicator.rank == 1 else ():
                buffer.view(-1).view(torch.int32)[-1] ^= 1

    communicator.exchange = changing
