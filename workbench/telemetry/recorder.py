"""Records spans, transfers and syncs in the process where the work is done.

A host binds the labels of a stage call once; code below it, down to the engines, names only the kind:

    with recorder.bind(stage="update_actor", run=7, role="actor", pool="main", rank=0, device="cpu:0"):
        with recorder.span("compute"):
            with span("forward", tokens=1700):      # workbench.telemetry.span: no recorder at hand
                ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from workbench.telemetry.spans import Span, Transfer, check_kind
from workbench.telemetry.syncs import OpenSync, Sync, SyncEvent

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class Gauge(NamedTuple):
    """A high-water mark. peak_bytes: the highest use since the last `reset`, which sets the mark to the present use."""

    peak_bytes: Callable[[], int]
    reset: Callable[[], object]


def _cuda_peak_bytes() -> int:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call,unused-ignore]


def _reset_cuda_peak() -> None:
    import torch

    # measuring must not initialize CUDA
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call,unused-ignore]
        torch.cuda.reset_peak_memory_stats()


def _resident_peak_bytes() -> int:
    with _STATUS.open() as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


# torch's allocator: most bytes in live tensors on the current CUDA device. Engines with an allocator of their own, and
# the CUDA context, are outside it.
CUDA = Gauge(_cuda_peak_bytes, _reset_cuda_peak)
# The kernel's own mark of the resident set (VmHWM), set back by writing 5 to `clear_refs` (Linux manual, proc(5)): a
# true peak of the whole process. Reading takes about 25 us and resetting 150 us.
LINUX = Gauge(_resident_peak_bytes, lambda: _CLEAR_REFS.write_text("5"))
# Where the mark cannot be reset: the resident set now. A peak between two samples goes unseen.
SAMPLED = Gauge(lambda: int(psutil.Process().memory_info().rss), lambda: None)


def gauge(device: str) -> Gauge:
    """The best gauge for work on `device` ("cuda:0", "cpu:1"): CUDA's allocator on a GPU, else the resident set."""
    if device.startswith("cuda"):
        return CUDA
    with suppress(OSError):  # not Linux, or a container that forbids it
        LINUX.reset()
        if LINUX.peak_bytes():
            return LINUX
    return SAMPLED


class PeakMeter:
    """Peaks of any number of open intervals from one shared mark.

    Each opening and closing reads the mark, credits it to every interval open until then, and resets it. So an outer
    interval keeps the peak of an inner one, and an inner interval does not inherit an earlier peak.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._lock = threading.Lock()
        self._peaks: dict[int, int] = {}
        self._next = 0

    def open(self) -> int:
        """Begin an interval; returns its key for `close`."""
        with self._lock:
            self._credit()
            key, self._next = self._next, self._next + 1
            self._peaks[key] = 0
            return key

    def close(self, key: int) -> int:
        """End an interval; returns its peak, bytes."""
        with self._lock:
            self._credit()
            return self._peaks.pop(key)

    def _credit(self) -> None:
        peak = self._gauge.peak_bytes()
        self._peaks = {key: max(before, peak) for key, before in self._peaks.items()}
        self._gauge.reset()


_UNBOUND: dict[str, Any] = {"stage": "", "run": -1, "role": "", "pool": "", "rank": 0, "device": ""}


@dataclass
class OpenSpan:
    """A span or a transfer that has not ended: add to its counts while the work goes on."""

    bytes: int = 0
    tokens: int = 0
    note: str = ""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.labels: dict[str, Any] = dict(_UNBOUND)
        self.kinds: list[str] = []
        self.unix_shift_s = time.time() - time.perf_counter()


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


class Recorder:
    """Collects spans, transfers and syncs until `drain`. Labels and nesting belong to the thread that set them.

    Times are read from the monotonic clock and shifted to unix time once per stage call, so that a step of the system's
    clock never moves a child out of its parent.
    """

    def __init__(self) -> None:
        self._here = _ThreadState()
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._transfers: list[Transfer] = []
        self._syncs: list[Sync] = []
        self._meter: PeakMeter | None = None
        # the note of the innermost open span that has one, for the line that shows what a stage waits for
        self.doing = ""

    @property
    def pool(self) -> str:
        """The pool label of this thread's work; "" outside a stage."""
        return str(self._here.labels["pool"])

    @property
    def _parent(self) -> str:
        return (self._here.kinds or [""])[-1]

    def now_s(self) -> float:
        """Unix time on the recorder's clock, for `add`."""
        return time.perf_counter() + self._here.unix_shift_s

    @contextmanager
    def bind(self, **labels: Any) -> Iterator[None]:
        """Set stage, run, role, pool, rank, device (all or some) for what this thread records inside the block, and
        make this the recorder of `workbench.telemetry.span`."""
        before, recorder_before = self._here.labels, _active.recorder
        if not self._here.kinds:
            self._here.unix_shift_s = time.time() - time.perf_counter()
        self._here.labels, _active.recorder = {**before, **labels}, self
        try:
            yield
        finally:
            self._here.labels, _active.recorder = before, recorder_before

    @contextmanager
    def span(self, kind: str, *, bytes: int = 0, tokens: int = 0, note: str = "") -> Iterator[OpenSpan]:
        """Time the block as `kind` inside the enclosing span, with its peak memory. An error is noted and re-raised."""
        check_kind(kind)
        meter = self.peak_meter()
        parent, counts = self._parent, OpenSpan(bytes=bytes, tokens=tokens, note=note)
        self._here.kinds.append(kind)
        before, self.doing = self.doing, note or self.doing
        watch, start_s = meter.open(), self.now_s()
        try:
            yield counts
        except BaseException as error:
            counts.note = f"{counts.note} {type(error).__name__}".strip()
            raise
        finally:
            end_s, peak = self.now_s(), meter.close(watch)
            self._here.kinds.pop()
            self.doing = before
            self._add(kind, start_s, end_s, counts, peak, parent)

    def begin(self, kind: str, *, bytes: int = 0, note: str = "") -> Callable[[float | None], None]:
        """Begin a span for work that goes on while other spans open and close. Call the returned function to end it:
        with the span's seconds, or None for until now. Labels and parent are those of the beginning."""
        check_kind(kind)
        labels, parent, start_s = self._here.labels, self._parent, self.now_s()

        def end(seconds: float | None) -> None:
            end_s = self.now_s() if seconds is None else start_s + seconds
            self._add(kind, start_s, end_s, OpenSpan(bytes=bytes, note=note), 0, parent, labels)

        return end

    def add(self, kind: str, start_s: float, end_s: float, *, note: str = "") -> None:
        """Record a span whose times are known, such as the queue time of a call stamped by the controller. A start
        after the end (clocks of two machines differ) counts as zero seconds."""
        self._add(kind, min(start_s, end_s), end_s, OpenSpan(note=note), 0, self._parent)

    @contextmanager
    def transfer(self, source: str, destination: str, **what: Any) -> Iterator[OpenSpan]:
        """Time the block as one movement of bytes; set `.bytes` on the yielded object. what: batch, columns and kind,
        see `Transfer`. A block that raises is not recorded, because it is unknown what arrived."""
        moved, start_s = OpenSpan(), self.now_s()
        yield moved
        self.add_transfer(source, destination, start_s, self.now_s(), bytes=moved.bytes, **what)

    def add_transfer(
        self, source: str, destination: str, start_s: float, end_s: float, *, bytes: int, **what: Any
    ) -> None:
        """Record a transfer whose times are known, such as one of several that ran at the same time. what: see
        `transfer`."""
        labels = self._here.labels
        made = Transfer(stage=labels["stage"], run=labels["run"], source=source, destination=destination,
                        bytes=int(bytes), start_s=start_s, end_s=end_s, **what)  # fmt: skip
        with self._lock:
            self._transfers.append(made)

    @contextmanager
    def sync(self, event: SyncEvent, *, version: int, trained_version: int, restored: int = 0) -> Iterator[OpenSync]:
        """Time the block as an event of the ledger of weights, see `Sync`; set the findings on the yielded object. An
        error is noted and re-raised."""
        found = OpenSync(version=version, trained_version=trained_version, restored=restored)
        start_s, failed = self.now_s(), ""
        try:
            yield found
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            labels = {name: self._here.labels[name] for name in ("stage", "run", "role", "rank")}
            made = Sync(**labels, **vars(found), event=event, start_s=start_s, end_s=self.now_s(), failed=failed)
            with self._lock:
                self._syncs.append(made)

    def drain(self) -> tuple[list[Span], list[Transfer], list[Sync]]:
        """Return what all threads recorded since the last call; spans that are open come with a later call."""
        with self._lock:
            spans, self._spans = self._spans, []
            transfers, self._transfers = self._transfers, []
            syncs, self._syncs = self._syncs, []
        return spans, transfers, syncs

    def peak_meter(self) -> PeakMeter:
        """Return the meter of the peaks of spans and other intervals."""
        with self._lock:  # only one meter: two would reset each other's mark
            if self._meter is None:
                self._meter = PeakMeter(gauge(self._here.labels["device"]))
            return self._meter

    def _add(
        self, kind: str, start_s: float, end_s: float, counts: OpenSpan, peak: int, parent: str,
        labels: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        made = Span(
            **(labels or self._here.labels), kind=kind, parent=parent, start_s=start_s, end_s=end_s,
            bytes=int(counts.bytes), tokens=int(counts.tokens), peak_memory_bytes=peak, note=counts.note,
        )  # fmt: skip
        with self._lock:
            self._spans.append(made)


def begin_span(kind: str, *, bytes: int = 0, note: str = "") -> Callable[[float | None], None]:
    """`Recorder.begin` of the recorder bound to this thread; outside a stage nothing is recorded."""
    if _active.recorder is None:
        return lambda seconds: None
    return _active.recorder.begin(kind, bytes=bytes, note=note)


@contextmanager
def span(kind: str, *, bytes: int = 0, tokens: int = 0, note: str = "") -> Iterator[OpenSpan]:
    """`Recorder.span` of the recorder bound to this thread; outside a stage the block runs unrecorded."""
    if _active.recorder is None:
        yield OpenSpan(bytes=bytes, tokens=tokens, note=note)
        return
    with _active.recorder.span(kind, bytes=bytes, tokens=tokens, note=note) as counts:
        yield counts
