from __future__ import annotations

import mmap
import pickle
import threading
import time
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.telemetry import Recorder, Span, span
from workbench.telemetry.recorder import CUDA, LINUX, SAMPLED, Gauge, PeakMeter, gauge

CALL: dict[str, Any] = {
    "stage": "update_actor", "run": 7, "role": "actor", "pool": "main", "rank": 1, "device": "slot:1",
}  # fmt: skip


def test_a_span_is_a_row_with_units_in_its_names():
    made = Span(**CALL, kind="compute", start_s=10.0, end_s=12.0, bytes=5, tokens=3)
    assert made.row()["moved_bytes"] == 5
    assert made.row()["processed_tokens"] == 3
    assert pickle.loads(pickle.dumps(made)) == made


def test_nested_spans_name_their_parents_and_lie_inside_them():
    recorder = Recorder()
    with recorder.bind(**CALL), recorder.span("compute") as compute:
        with recorder.span("optimizer"), recorder.span("communication", bytes=64):
            time.sleep(0.002)
        with recorder.span("forward", tokens=10) as forward:
            forward.tokens += 5
        compute.tokens = 15
    spans, transfers, _ = recorder.drain()
    by_kind = {made.kind: made for made in spans}
    assert {kind: made.parent for kind, made in by_kind.items()} == {
        "compute": "", "optimizer": "compute", "communication": "optimizer", "forward": "compute",
    }  # fmt: skip
    for made in spans:
        assert {name: getattr(made, name) for name in CALL} == CALL
        if made.parent:
            outer = by_kind[made.parent]
            assert outer.start_s <= made.start_s <= made.end_s <= outer.end_s
    assert by_kind["communication"].end_s - by_kind["communication"].start_s >= 0.002
    assert (by_kind["communication"].bytes, by_kind["forward"].tokens, by_kind["compute"].tokens) == (64, 15, 15)
    assert abs(by_kind["compute"].start_s - time.time()) < 60
    assert transfers == []
    assert recorder.drain() == ([], [], [])


def test_a_failing_span_is_kept_with_the_error_and_the_next_is_no_child_of_it():
    recorder = Recorder()
    with recorder.bind(**CALL):
        with pytest.raises(ZeroDivisionError), recorder.span("compute", note="epoch 2"):
            raise ZeroDivisionError
        with recorder.span("queue"):
            pass
    failed, after = recorder.drain()[0]
    assert failed.note == "epoch 2 ZeroDivisionError"
    assert after.parent == ""


def test_an_unknown_kind_is_refused_before_the_work():
    recorder = Recorder()
    rule = "must be one of queue, transfer, compute"
    with expect_error(BadInput, value="'thinking'", rule=rule), recorder.span("thinking"):
        pytest.fail("the block must not run")


def test_span_without_a_recorder_at_hand_finds_the_bound_one():
    with span("forward", tokens=4) as counts:  # outside a stage: nothing to record to
        counts.tokens += 1
    recorder = Recorder()
    with recorder.bind(**CALL), recorder.span("compute"), span("forward", tokens=4) as counts:
        counts.tokens += 1
    assert [(made.kind, made.tokens, made.parent) for made in recorder.drain()[0]] == [
        ("forward", 5, "compute"),
        ("compute", 0, ""),
    ]


def test_labels_and_nesting_belong_to_their_thread():
    recorder = Recorder()

    def serve() -> None:
        with recorder.bind(stage="update_critic", run=8), recorder.transfer("main:0", "critic:0", batch="b") as moved:
            moved.bytes = 100
        recorder.add("transfer", 1.0, 2.0)

    with recorder.bind(**CALL), recorder.span("compute"):
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    spans, transfers, _ = recorder.drain()
    assert [(made.kind, made.parent, made.stage) for made in spans] == [
        ("transfer", "", ""),
        ("compute", "", "update_actor"),
    ]
    (moved,) = transfers
    assert (moved.stage, moved.run, moved.bytes, moved.source, moved.destination) == (
        "update_critic", 8, 100, "main:0", "critic:0",
    )  # fmt: skip


def test_a_transfer_that_failed_counts_no_bytes():
    recorder = Recorder()

    def pull() -> None:
        with recorder.bind(**CALL), recorder.transfer("a:0", "b:0") as moved:
            moved.bytes = 10
            raise ConnectionError

    with pytest.raises(ConnectionError):
        pull()
    assert recorder.drain() == ([], [], [])


def test_a_queue_time_across_two_clocks_is_never_negative():
    recorder = Recorder()
    recorder.add("queue", 100.5, 100.0)
    (made,) = recorder.drain()[0]
    assert (made.start_s, made.end_s) == (100.0, 100.0)


class _Scripted:
    """A gauge whose use is set by hand."""

    def __init__(self) -> None:
        self.use = self.mark = 0

    def set(self, use: int) -> None:
        self.use, self.mark = use, max(self.mark, use)

    def peak_bytes(self) -> int:
        return self.mark

    def reset(self) -> None:
        self.mark = self.use


def test_outer_and_inner_intervals_have_their_own_true_peak():
    scripted = _Scripted()
    meter = PeakMeter(Gauge(scripted.peak_bytes, scripted.reset))
    scripted.set(900)
    scripted.set(10)
    outer = meter.open()
    scripted.set(500)
    scripted.set(20)
    inner = meter.open()
    scripted.set(300)
    scripted.set(20)
    assert meter.close(inner) == 300
    last = meter.open()
    assert meter.close(last) == 20
    assert meter.close(outer) == 500


def test_a_spans_peak_holds_memory_that_was_freed_before_its_end():
    if gauge("cpu:0") is not LINUX:
        pytest.skip("this machine's gauge samples")
    recorder = Recorder()
    size = 200_000_000
    with recorder.bind(**{**CALL, "device": "cpu:0"}), recorder.span("compute"):
        with recorder.span("forward"):
            block = mmap.mmap(-1, size)  # the allocator may hold as much that is free
            for page in range(0, size, mmap.PAGESIZE):
                block[page] = 1
            block.close()
        with recorder.span("optimizer"):
            pass
    peaks = {made.kind: made.peak_memory_bytes for made in recorder.drain()[0]}
    assert peaks["forward"] > peaks["optimizer"] + 0.9 * size
    assert peaks["compute"] == peaks["forward"]


def test_the_device_of_the_work_chooses_the_gauge(monkeypatch: pytest.MonkeyPatch):
    import torch

    for there in (True, False):  # a GPU that the host was not given is nothing to it
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert gauge("cuda:1") is CUDA
        assert gauge("cpu:0") is not CUDA
        recorder = Recorder()
        with recorder.bind(**{**CALL, "device": "cpu:0"}), recorder.span("compute"):
            pass
        assert recorder.drain()[0][0].peak_memory_bytes > 10_000_000  # this process's resident set


def test_the_sampling_gauge_reads_the_resident_set():
    before = SAMPLED.peak_bytes()
    with mmap.mmap(-1, 100_000_000) as block:  # fresh pages: the heap may have as much free already
        block.write(b"x" * 100_000_000)
        assert SAMPLED.peak_bytes() - before > 90_000_000


@pytest.mark.gpu
def test_on_a_cuda_device_the_peak_is_the_allocators():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    recorder = Recorder()
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_allocated()
    with recorder.bind(**{**CALL, "device": "cuda:0"}), recorder.span("compute"):
        block = torch.zeros(50_000_000, device="cuda")
        del block
    assert 200_000_000 <= recorder.drain()[0][0].peak_memory_bytes - before < 300_000_000
