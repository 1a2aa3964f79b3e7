from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.telemetry import Span, TelemetryStore, Transfer
from workbench.telemetry.store import EVENT_COLUMNS, METRIC_COLUMNS, SPAN_COLUMNS, TRANSFER_COLUMNS

CALL: dict[str, Any] = {
    "stage": "update_actor", "run": 7, "role": "actor", "pool": "main", "rank": 1, "device": "slot:1",
}  # fmt: skip
COMPUTE = Span(**CALL, kind="compute", start_s=101.0, end_s=104.0, tokens=1700, peak_memory_bytes=4_400_000_000)
FORWARD = Span(**CALL, kind="forward", parent="compute", start_s=101.5, end_s=102.0, note='a "quoted" → note\n')
QUEUE = Span(**CALL, kind="queue", start_s=100.0, end_s=101.0)
MOVED = Transfer(
    stage="update_actor", run=7, source="main:0", destination="main:1", bytes=120, start_s=101.0, end_s=101.25,
    batch="rollouts", columns="advantages, returns",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> TelemetryStore:
    return TelemetryStore(tmp_path / "run")


def dtypes(frame: Any) -> dict[str, str]:
    return {name: str(dtype) for name, dtype in frame.dtypes.items()}


def test_empty_frames_have_all_columns_and_dtypes(store: TelemetryStore):
    assert dtypes(store.spans()) == SPAN_COLUMNS
    assert dtypes(store.transfers()) == TRANSFER_COLUMNS
    assert dtypes(store.metrics()) == METRIC_COLUMNS
    assert dtypes(store.events()) == EVENT_COLUMNS
    assert [len(frame) for frame in (store.spans(), store.transfers(), store.metrics(), store.events())] == [0] * 4


def test_spans_come_back_by_start_with_units_in_the_names(store: TelemetryStore):
    store.append_spans([COMPUTE])
    store.append_spans([])
    store.append_spans([FORWARD, QUEUE])
    frame = store.spans()
    assert dtypes(frame) == SPAN_COLUMNS
    assert frame["kind"].to_list() == ["queue", "compute", "forward"]
    assert frame["duration_s"].to_list() == [1.0, 3.0, 0.5]
    assert frame.loc[1, "processed_tokens"] == 1700
    assert frame.loc[1, "peak_memory_bytes"] == 4_400_000_000
    assert frame.loc[2, "note"] == FORWARD.note


def test_transfers_come_back(store: TelemetryStore):
    store.append_transfers([MOVED])
    frame = store.transfers()
    assert dtypes(frame) == TRANSFER_COLUMNS
    assert frame.loc[0].to_dict() == {
        "stage": "update_actor", "run": 7, "kind": "batch", "source": "main:0", "destination": "main:1",
        "batch": "rollouts", "columns": "advantages, returns", "start_s": 101.0, "end_s": 101.25, "duration_s": 0.25,
        "moved_bytes": 120,
    }  # fmt: skip


def test_metrics_are_wide_and_a_stage_shows_only_its_own(store: TelemetryStore):
    store.append_metrics("update_critic", 1, 0, {"loss": 0.5, "value_error": 2})
    store.append_metrics("update_actor", 2, 0, {"loss": 0.25, "kl": 0.01})
    store.append_metrics("update_actor", 4, 1, {"loss": 0.125, "kl": 0.02})
    frame = store.metrics()
    assert list(frame.columns) == ["time_s", "iteration", "stage", "run", "loss", "value_error", "kl"]
    assert frame["loss"].to_list() == [0.5, 0.25, 0.125]
    assert math.isnan(frame["kl"].to_list()[0])
    actor = store.metrics("update_actor")
    assert list(actor.columns) == ["time_s", "iteration", "stage", "run", "loss", "kl"]
    assert actor["iteration"].to_list() == [0, 1]
    assert set(dtypes(actor[["loss", "kl"]]).values()) == {"float64"}
    assert len(store.metrics("compute_values")) == 0


def test_a_metric_may_not_take_the_name_of_a_column(store: TelemetryStore):
    with expect_error(BadInput, remedy="choose another name"):
        store.append_metrics("update_actor", 1, 0, {"stage": 1.0})


def test_nan_and_infinities_survive_and_the_file_is_strict_json(store: TelemetryStore):
    store.append_metrics("update_actor", 1, 0, {"kl": math.nan, "ratio": math.inf, "loss": -math.inf, "x": 1e-300})
    (row,) = store.metrics().to_dict("records")
    assert math.isnan(row["kl"])
    assert (row["ratio"], row["loss"], row["x"]) == (math.inf, -math.inf, 1e-300)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    json.loads((store.folder / "metrics.jsonl").read_text(), parse_constant=refuse)


def test_numpy_and_torch_numbers_are_taken_as_metrics(store: TelemetryStore):
    import numpy as np
    import torch

    store.append_metrics("s", 1, 0, {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": np.float64("inf")})
    assert store.metrics()[["a", "b", "c"]].to_numpy().tolist() == [[0.5, 0.25, math.inf]]


def test_events_keep_their_details(store: TelemetryStore):
    store.append_event("iteration", iteration=3, lr=math.nan, pools=["main"])
    frame = store.events()
    assert frame.loc[0, "event"] == "iteration"
    assert frame.loc[0, "details"] == {"iteration": 3, "lr": "nan", "pools": ["main"]}


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_torn_last_line_is_passed_over_and_harms_no_later_line(store: TelemetryStore, cut: int):
    store.append_spans([QUEUE, COMPUTE])
    path = store.folder / "spans.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[0][:-cut])
    assert store.spans()["kind"].to_list() == ["queue", "compute"]
    store.append_spans([FORWARD])
    assert store.spans()["kind"].to_list() == ["queue", "compute", "forward"]


def test_a_line_cut_inside_a_character_is_torn_too(store: TelemetryStore):
    store.append_event("ok")
    with (store.folder / "events.jsonl").open("ab") as file:
        file.write('{"event":"Größe'.encode()[:-3])
    assert store.events()["event"].to_list() == ["ok"]


def test_a_new_process_reads_and_goes_on(store: TelemetryStore):
    store.append_spans([QUEUE])
    script = (
        "import sys; from workbench.telemetry import TelemetryStore; store = TelemetryStore(sys.argv[1]);"
        "store.append_metrics('s', 1, 0, {'kl': float('nan')}); print(store.spans()['kind'].to_list())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(store.folder)], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout.strip() == "['queue']"
    assert math.isnan(store.metrics()["kl"].to_list()[0])


def test_the_trace_is_strict_json_with_nested_events_in_microseconds(store: TelemetryStore, tmp_path: Path):
    store.append_spans([QUEUE, COMPUTE, FORWARD])
    store.append_transfers([MOVED])
    path = store.chrome_trace(tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    complete = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (complete["update_actor"]["ts"], complete["update_actor"]["dur"]) == (1_000_000, 3_000_000)
    outer, inner = complete["update_actor"], complete["forward"]
    assert (outer["pid"], outer["tid"]) == (inner["pid"], inner["tid"])
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    opened = {event["id"]: event for event in events if event["ph"] == "b"}
    closed = {event["id"]: event for event in events if event["ph"] == "e"}
    assert opened.keys() == closed.keys()
    assert sorted(event["name"] for event in opened.values()) == ["main:0 to main:1", "update_actor queue"]
    moved = next(event for event in opened.values() if " to " in event["name"])
    assert moved["args"]["moved_bytes"] == 120
    assert closed[moved["id"]]["ts"] - moved["ts"] == 250_000
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"main slot:1", "actor rank 1", "transfers", "main:0"}
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"bytes": 4_400_000_000}]


def test_the_trace_of_nothing_is_valid(store: TelemetryStore, tmp_path: Path):
    assert json.loads(store.chrome_trace(tmp_path / "t.json").read_text())["traceEvents"] == []


def test_a_follower_says_when_there_is_more_without_reading_it(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path)
    follower = store.follow("events")
    assert (follower.size_bytes, follower.new()) == (0, [])
    store.append_event("iteration", iteration=1)
    size = follower.size_bytes
    assert size > 0
    assert [row["event"] for row in follower.new()] == ["iteration"]
    assert (follower.size_bytes, follower.new()) == (size, [])


def test_the_spans_of_one_run_are_those_of_all_with_its_number(store: TelemetryStore) -> None:
    given: Any = {"role": "actor", "pool": "train", "rank": 0, "device": "cpu:0", "kind": "compute"}
    assert len(store.spans(run=1)) == 0
    tricky: Any = {"stage": '"run":1,', "note": '{"run":1,"role":2}'}
    store.append_spans(Span(run=run, start_s=200.0 - run, end_s=300.0, **given, **tricky) for run in (0, 1, 11, 1, 111))
    assert len(store.spans(run=1)) == 2
    store.append_spans([Span(run=1, stage="other", start_s=1.0, end_s=2.0, **given)])
    path = store.folder / "spans.jsonl"
    with path.open("ab") as file:
        file.write(b'{"stage":"torn","run":1,"ro')
    every = store.spans()
    mine = store.spans(run=1)
    assert len(mine) == 3
    assert mine.to_dict("records") == every[every["run"] == 1].to_dict("records")
    assert len(store.spans(run=5)) == 0
    assert dtypes(store.spans(run=5)) == SPAN_COLUMNS
    assert store.spans(since_s=300.0).to_dict("records") == every[every["end_s"] >= 300.0].to_dict("records")
    assert len(store.spans(since_s=301.0)) == 0
    assert len(store.spans(since_s=2.0)) == len(every)


def blocked(store: TelemetryStore) -> Path:
    """A file in the place of the store's folder: nothing can be written until it is gone."""
    store.folder.parent.mkdir(parents=True, exist_ok=True)
    store.folder.write_bytes(b"")
    return store.folder


def test_rows_that_wait_are_kept_when_there_is_no_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.telemetry.store.KEEP_BYTES", 1000)
    store = TelemetryStore(tmp_path / "run")
    block = blocked(store)
    with pytest.warns(UserWarning, match="rows wait in memory"):
        store.append_event("first")
    store.append_event("large", text="x" * 2000)
    assert store.unwritten == 2
    store.append_event("small")
    assert store.unwritten == 3
    block.unlink()
    store.append_event("last")
    assert store.events()["event"].to_list() == ["first", "small", "last"]
    assert len((store.folder / "events.jsonl").read_bytes().splitlines()) == 3
    assert store.unwritten == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, BadInput("a", "b", "c")])
def test_rows_wait_whatever_ends_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """In the middle of the row that waits, and of the new one; and before anything is written."""
    for cut in (0, 10, 150):
        store = TelemetryStore(tmp_path / str(cut))
        block = blocked(store)
        with pytest.warns(UserWarning, match="rows wait in memory"):
            store.append_event("first", text="x" * 50)
        block.unlink()
        limits = iter([functools.partial(write_some, os.write, cut)] if cut else [])
        with monkeypatch.context() as there:
            there.setattr(os, "write", lambda *given, limits=limits: next(limits, stopped_at(error))(*given))
            if error is OSError:
                store.append_event("second", text="y" * 50)
            else:
                with pytest.raises(error if isinstance(error, type) else BadInput):
                    store.append_event("second", text="y" * 50)
        assert store.events()["event"].to_list() == ["first", "second"]
        store.flush()
        assert store.unwritten == 0
        assert TelemetryStore(store.folder).events()["event"].to_list() == ["first", "second"]


def write_some(write: Any, cut: int, descriptor: int, data: bytes) -> int:
    written: int = write(descriptor, data[:cut])
    return written


def stopped_at(error: Any) -> Any:
    def write(descriptor: int, data: bytes) -> int:
        raise error

    return write
