"""Memory of each device over time by owner, against what the device has; and what is where now."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Sequence
from html import escape
from typing import Any

from workbench.display.curves import Chart, Curve, Stroke
from workbench.display.devices import device_map
from workbench.display.html import bytes_text
from workbench.display.palette import role_styles
from workbench.telemetry.memory import MemoryReading
from workbench_widgets.charts import Charts
from workbench_widgets.view import button, entry

MOST_POINTS = 500
Owner = tuple[str, str]  # role and use
Peak = tuple[float, int, str]  # unix time, bytes, the stage


class MemoryHistory:
    """Readings of one device, and the highest use within each stage: of both at most `MOST_POINTS`.

    Where there are more, the highest of each `each` readings, or `each_peak` stages, stays, and of both the last one.

    times_s, iterations, held_bytes: columns of the readings, the last by owner. last: the last reading, whole.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.iterations: list[int] = []
        self.held_bytes: dict[Owner, list[int]] = {}
        self.last: MemoryReading | None = None
        self.peaks: list[Peak] = []
        self.each = self.each_peak = 1
        self._numbers: list[int] = []  # of the readings that stayed, and of such stages, counted from the first
        self._peak_numbers: list[int] = []

    def add(self, reading: MemoryReading) -> None:
        shares = reading.shares()
        for owner, n in shares.items():
            if n:
                self.held_bytes.setdefault(owner, [0] * len(self.times_s))
        for owner, column in self.held_bytes.items():
            column.append(shares.get(owner, 0))
        self.times_s.append(reading.time_s)
        self.iterations.append(reading.iteration)
        self._numbers.append(self._numbers[-1] + 1 if self._numbers else 0)
        self.last = reading
        if len(self.times_s) > MOST_POINTS:
            self.each = _stretch(self._numbers[-1] + 1)
            used_bytes = [sum(held) for held in zip(*self.held_bytes.values(), strict=True)]
            kept = _highest(self._numbers, used_bytes, self.each)
            self.times_s = [self.times_s[n] for n in kept]
            self.iterations = [self.iterations[n] for n in kept]
            self.held_bytes = {owner: [column[n] for n in kept] for owner, column in self.held_bytes.items()}
            self._numbers = [self._numbers[n] for n in kept]

    def add_peak(self, peak: Peak) -> None:
        """Take in the highest use within a stage."""
        self.peaks.append(peak)
        self._peak_numbers.append(self._peak_numbers[-1] + 1 if self._peak_numbers else 0)
        if len(self.peaks) > MOST_POINTS:
            self.each_peak = _stretch(self._peak_numbers[-1] + 1)
            kept = _highest(self._peak_numbers, [held for _, held, _ in self.peaks], self.each_peak)
            self.peaks = [self.peaks[n] for n in kept]
            self._peak_numbers = [self._peak_numbers[n] for n in kept]


def _stretch(count: int) -> int:
    """Of how many one stays: the power of two that leaves at most half of `MOST_POINTS`, so that stretches of one
    thinning lie within those of the next."""
    each = 1
    while count > each * MOST_POINTS // 2:
        each *= 2
    return each


def _highest(numbers: Sequence[int], held_bytes: Sequence[int], each: int) -> list[int]:
    """The place of the highest of each stretch of numbers, and of the last of all."""
    places: dict[int, int] = {}
    for place, number in enumerate(numbers):
        best = places.setdefault(number // each, place)
        if held_bytes[place] > held_bytes[best]:
            places[number // each] = place
    return sorted({*places.values(), len(numbers) - 1})


EVERY_S = 2.0
# Use -> hatch; the colour is that of the role.
USE_HATCHES = {
    "parameters": "", "gradients": "/", "optimizer": "\\", "generation weights": "-", "generation kv_cache": "|",
    "batches": "x", "published weights": "+",
}  # fmt: skip
OTHER = Stroke("#8c8c8c")
PEAK = Stroke("#222222", marker="diamond")


class Memory(Charts):
    """A chart a device: areas are what hosts said that they hold, marks the highest use within a stage.

    Marks come from the spans that every stage records. Areas come from readings: while this view is shown, hosts are
    asked after something has happened, at most every two seconds, and their answers are kept with the telemetry. A
    reading does not slow down a stage. Of a long record the highest of several readings, or stages, is drawn.

    capacity: whether charts go up to all that the device has, as they do at first on GPUs, or only to what was used.
    """

    name, title = "memory", "Memory"
    fields = ("capacity",)

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.capacity = lab.description.device == "cuda"
        self.error = ""
        self._memory, self._spans = lab.telemetry.follow("memory"), lab.telemetry.follow("spans")
        self._devices: dict[str, MemoryHistory] = {}
        self._silent: dict[str, MemoryReading] = {}  # by host, until it answers
        self._start_s = math.inf  # of all that was recorded
        self._rows, self._asked_s = 0, 0.0
        self._asked_at: tuple[Hashable, ...] = ()
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None

    # --- what it reads ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        if self._due():
            self._asking = threading.Thread(target=self._ask, name="workbench-memory", daemon=True)
            self._asking.start()
        self._read()
        return self._rows, self.error

    def _activity(self) -> tuple[Hashable, ...]:
        """Changes when memory may have."""
        runs = tuple((record.run, record.state) for record in self.lab.run_log.records(self.lab.iteration))
        return self.lab.iteration, runs, str(self.lab.placement), tuple(self.lab.groups)

    def _due(self) -> bool:
        """Whether hosts should be asked again."""
        if time.time() - self._asked_s < EVERY_S or (self._asking is not None and self._asking.is_alive()):
            return False
        running = any(run.state == "running" for run in self.lab.open_runs())
        return running or self._activity() != self._asked_at

    def _ask(self) -> None:
        self._asked_s, self._asked_at = time.time(), self._activity()
        try:
            self.lab.read_memory()
            self.error = ""
        except Exception as error:  # a workbench that was closed: what was read before stays
            self.error = str(error)

    def _read(self) -> None:
        with self._lock:
            for row in self._memory.new():
                reading = MemoryReading(**row)
                self._rows += 1
                if reading.error:
                    self._silent[reading.host] = reading
                    continue
                self._silent.pop(reading.host, None)
                self._devices.setdefault(reading.device, MemoryHistory()).add(reading)
                self._start_s = min(self._start_s, reading.time_s)
                self._asked_s = max(self._asked_s, reading.time_s)  # by whichever view of this workbench
            for row in self._spans.new():
                if not row["parent"] and row["peak_memory_bytes"]:
                    self._rows += 1
                    words = f"{row['stage']} on {row['role']}, run {row['run']}"
                    peak = (row["end_s"], row["peak_memory_bytes"], words)
                    self._devices.setdefault(row["device"], MemoryHistory()).add_peak(peak)
                    self._start_s = min(self._start_s, row["end_s"])

    # --- what it shows ------------------------------------------------------------------------------------------------

    def still(self) -> str:
        if self._activity() != self._asked_at:
            self._ask()  # what is held at the end belongs to it
        return super().still()

    def picture(self) -> str:
        if not any(device.last for device in self._devices.values()) and self._due():
            self._ask()
        return super().picture()

    def charts(self) -> list[Chart]:
        self._read()
        with self._lock:
            return [self._chart(name, self._devices[name]) for name in sorted(self._devices, key=_by_number)]

    def _chart(self, name: str, device: MemoryHistory) -> Chart:
        styles = role_styles(role for role, _ in device.held_bytes)
        x = [time_s - self._start_s for time_s in device.times_s]
        words = [f"iteration {iteration}" for iteration in device.iterations]
        curves = [
            Curve(
                name=f"{role}: {use.replace('_', ' ')}",
                x=x,
                y=list(held_bytes),
                kind="area",
                stroke=OTHER if role == "other" else Stroke(styles[role].colour),
                hatch="." if role == "other" else USE_HATCHES.get(use, "."),
                words=words,
            )
            for (role, use), held_bytes in sorted(device.held_bytes.items(), key=lambda item: item[0][0] == "other")
        ]
        if device.peaks:
            times, tops, stages = zip(*device.peaks, strict=True)
            x = [time_s - self._start_s for time_s in times]
            curves.append(Curve(name="peak in a stage", x=x, y=tops, kind="points", stroke=PEAK, words=stages))
        title, note, limit = name, "", None
        if device.last is not None:
            last = device.last
            title = f"{name}, {last.host}"
            note = f"{bytes_text(sum(last.shares().values()))} of {bytes_text(last.capacity_bytes)}"
            if device.each > 1:
                note += f"; older points: the highest of {device.each} readings"
            whose = "of the GPU" if last.on_gpu else f"of the machine {last.machine}, for all its processes"
            limit = (last.capacity_bytes, f"{bytes_text(last.capacity_bytes)} {whose}") if self.capacity else None
        return Chart(
            title=title, curves=tuple(curves), x="seconds since the first record", y="memory in use", unit="bytes",
            note=note, limit=limit,
        )  # fmt: skip

    def notes(self) -> str:
        there = {info.name for info in self.lab.hosts.infos}
        silent = [reading for host, reading in self._silent.items() if host in there]
        told = [f"{reading.host} ({reading.device}): {reading.error}" for reading in silent]
        told += [self.error] if self.error else []
        return "".join(f"<div><b>!</b> {escape(text)}</div>" for text in told)

    def below(self) -> str:
        there = {info.name for info in self.lab.hosts.infos}
        now = [self._devices[name].last for name in sorted(self._devices, key=_by_number)]
        shown = [self._silent.get(one.host, one) for one in now if one is not None and one.host in there]
        return str(device_map(shown, f"memory of {self.lab.name} by role")._repr_html_()) if shown else ""

    def empty(self) -> str:
        return "<p>Asking the hosts what they hold ...</p>"

    def controls(self) -> str:
        return entry("up to capacity", "capacity", self.capacity, kind="checkbox") + button(
            "Read now", "read", title="ask the hosts what they hold"
        )

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_read(self) -> None:
        self._ask()


def _by_number(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number) if number.isdigit() else 0
