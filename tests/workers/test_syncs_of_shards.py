"""Syncs of an actor that ZeRO-3 shards: exact slices, on the ledger, and a changed bit is named."""

from __future__ import annotations

import pytest

from tests.engines.training_ranks import run_ranks
from tests.workers.sync_ranks import FLIPPED, STRATEGIES, syncs
from workbench.telemetry.syncs import judged

pytestmark = pytest.mark.slow


def test_shards_go_to_the_engine_and_a_bit_that_changes_on_its_way_is_named() -> None:
    found = run_ranks(syncs, 2)
    for seen, refused in found:
        assert seen.differ == []
        assert seen.moved == seen.planned
        assert all(sum(moved.values()) > 0 for moved in seen.moved)
        assert seen.stamps == [1, 1, 1, -1, 2]
        assert "with p*t = 1 and without ZeRO-3" in refused
    ledger = judged([part.row() for seen, _ in found for part in seen.parts])
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
