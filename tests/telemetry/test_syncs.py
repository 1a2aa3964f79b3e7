"""The ledger of weights: which verdict each event has, and whom it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.telemetry import Recorder, TelemetryStore
from workbench.telemetry.syncs import SYNC_COLUMNS, Sync, sync_frame


def part(event: str, run: int, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "stage": "generate_sequences", "role": "actor", "rank": 0, "version": 1, "trained_version": 1,
        "start_s": float(run), "end_s": run + 0.5,
    }  # fmt: skip
    return Sync(event=event, run=run, **given | more).row()  # type: ignore[arg-type]


def verdicts(*parts: dict[str, Any]) -> list[str]:
    return list(sync_frame(parts)["verdict"])


def test_the_ranks_of_an_event_are_one_row():
    moved = {"strategy": "hybridflow", "taken_bytes": 100}
    frame = sync_frame(
        [
            part("sync", 3, **moved, moved_bytes=40, sent=2**64 - 1, received=2**64 - 1),
            part("generation", 3, start_s=4.0, end_s=5.0),
            part("sync", 3, rank=1, start_s=3.25, end_s=4.0, **moved, moved_bytes=60, sent=3, received=3),
            part("generation", 3, rank=1, start_s=4.0, end_s=6.0),
        ]
    )
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == SYNC_COLUMNS
    assert frame["event"].to_list() == ["sync", "generation"]
    assert frame["duration_s"].to_list() == [1.0, 2.0]
    assert frame["moved_bytes"].to_list() == [100, 0]
    assert frame["taken_bytes"].to_list() == [200, 0]
    assert frame["checksum_sent"].to_list() == ["0000000000000002", ""]
    assert frame["checksum_received"].to_list() == ["0000000000000002", ""]
    assert frame["verdict"].to_list() == ["ok", "ok"]
    assert frame["culprit"].to_list() == frame["remedy"].to_list() == ["", ""]
    assert sync_frame([]).dtypes.astype(str).to_dict() == SYNC_COLUMNS


def test_the_same_weights_again_are_named_unless_they_were_lost_or_put_back():
    again = sync_frame([part("sync", 1), part("generation", 1, start_s=1.5), part("sync", 4, stage="sync_weights")])
    assert again["verdict"].to_list() == ["ok", "ok", "synced twice"]
    assert again["culprit"].to_list()[2] == "sync_weights: version 1 came with run 1"
    assert "leave this sync out" in again["remedy"].to_list()[2]
    assert verdicts(part("sync", 1), part("sync", 1)) == ["ok", "synced twice"]  # twice in one run
    assert verdicts(part("sync", 1), part("sync", 2, restored=1)) == ["ok", "ok"]
    assert verdicts(part("sync", 1), part("sync", 2, lacked=True)) == ["ok", "ok"]
    assert verdicts(part("sync", 1), part("sync", 2, version=2, trained_version=2)) == ["ok", "ok"]
    assert verdicts(part("sync", 1, failed="SyncError"), part("sync", 2)) == ["failed", "ok"]
    assert verdicts(part("sync", 1, role="actor"), part("sync", 2, role="other")) == ["ok", "ok"]


def test_a_generation_with_other_weights_than_the_trainers_is_named():
    frame = sync_frame([part("generation", 2), part("generation", 2, rank=1, version=0)])
    assert frame["verdict"].to_list() == ["not synced"]
    assert frame["version"].to_list() == [0]
    assert frame["culprit"].to_list() == ["rank 1: its engine has weights version 0, the trainer's is 1"]
    assert "wb.Correction" in frame["remedy"].to_list()[0]


def test_what_did_not_arrive_as_sent_is_named_before_the_error_that_it_raised():
    frame = sync_frame(
        [
            part("sync", 1, failed="SyncError", sent=5, received=5),
            part("sync", 1, rank=1, failed="SyncError", sent=1, received=0, differ=("model.norm.weight from rank 0",)),
        ]
    )
    assert frame["verdict"].to_list() == ["checksum differs"]
    assert frame["culprit"].to_list() == ["rank 1: model.norm.weight from rank 0"]
    assert frame.loc[0, "checksum_sent"] == f"{6:016x}" != frame.loc[0, "checksum_received"]


def test_what_a_recorder_notes_comes_back_from_the_store(tmp_path: Path):
    recorder, store = Recorder(), TelemetryStore(tmp_path)
    assert len(store.syncs()) == 0
    with recorder.bind(stage="sync_weights", run=5, role="actor", pool="main", rank=0, device="cpu"):
        with pytest.raises(ZeroDivisionError), recorder.sync("sync", version=2, trained_version=2):
            _ = 1 / 0
        with recorder.sync("sync", version=2, trained_version=2) as noted:
            noted.taken_bytes, noted.strategy = 64, "full"
    _, _, syncs = recorder.drain()
    store.append_syncs(syncs)
    frame = store.syncs()
    assert frame["verdict"].to_list() == ["failed", "ok"]
    assert frame["culprit"].to_list() == ["rank 0: ZeroDivisionError", ""]
    assert list(frame.loc[1, ["run", "stage", "strategy", "taken_bytes"]]) == [5, "sync_weights", "full", 64]
