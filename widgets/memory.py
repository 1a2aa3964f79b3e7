"""Memory of each device over time by owner, against its capacity; and its current content."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter
from typing import Any

from workbench.display.curves import Chart, Curve, Stroke
from workbench.display.devices import device_map
from workbench.display.html import bytes_text
from workbench.display.palette import role_styles
from workbench.telemetry.memory import MemoryReading
from workbench_widgets.charts import Charts
from workbench_widgets.view import button, entry

MOST_POINTS = 500
Peak = tuple[float, int, str]  # unix time, bytes, the stage


class Thinned:
    """A long record in at most `MOST_POINTS`: the highest row of each `each` rows, and the last row."""

    def __init__(self) -> None:
        self.each, self._count = 1, 0
        self._stretches: list[tuple[int, Any]] = []  # how high the highest row is, and the row
        self._last: Any = None

    def add(self, height: int, row: Any) -> None:
        new = self._stretches.pop() if self._count % self.each else (height, row)
        self._stretches.append(max(new, (height, row), key=itemgetter(0)))
        self._last, self._count = row, self._count + 1
        if len(self._stretches) == MOST_POINTS:
            self.each *= 2
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [max(pair, key=itemgetter(0)) for pair in pairs]

    def rows(self) -> list[Any]:
        rows = [row for _, row in self._stretches]
        return rows if not rows or rows[-1] is self._last else [*rows, self._last]


@dataclass
class MemoryHistory:
    """The history of one device. readings: seconds, iteration, and bytes by role and use; last: the last reading in
    full. peaks: the highest use within each stage, see `Peak`."""

    readings: Thinned = field(default_factory=Thinned)
    peaks: Thinned = field(default_factory=Thinned)
    last: MemoryReading | None = None

    def add(self, reading: MemoryReading) -> None:
        shares, self.last = reading.shares(), reading
        self.readings.add(sum(shares.values()), (reading.time_s, reading.iteration, shares))


EVERY_S = 2.0
# Use -> hatch; the colour is that of the role.
USE_HATCHES = {
    "parameters": "", "gradients": "/", "optimizer": "\\", "generation weights": "-", "generation kv_cache": "|",
    "batches": "x", "published weights": "+", "sync_copy": ".",
}  # fmt: skip
OTHER = Stroke("#8c8c8c")
PEAK = Stroke("#222222", marker="diamond")


class Memory(Charts):
    """One chart a device: areas show what hosts reported to hold, marks the highest use within a stage.

    Marks come from the spans that every stage records. Areas come from readings: while this view is shown, hosts are
    asked after activity, at most every two seconds, and their answers are stored with the telemetry. A reading does not
    slow down a stage. A long record is drawn by the highest of several readings, or stages.

    capacity: whether charts extend to the device's capacity (the default on GPUs), or only to the memory in use.
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
        self._asking: threading.Thread | None = None

    # --- what it reads ------------------------------------------------------------------------------------------------

    def depends_on(self) -> Hashable:
        if self._due():
            self._asking = threading.Thread(target=self._ask, name="workbench-memory", daemon=True)
            self._asking.start()
        self._read()
        return self._rows, self.error

    def _activity(self) -> tuple[Hashable, ...]:
        """A value that changes when memory use may have changed."""
        runs = tuple((record.run, record.state) for record in self.lab.run_log.records(self.lab.iteration))
        return self.lab.iteration, runs, str(self.lab.placement), tuple(self.lab.groups)

    def _due(self) -> bool:
        """Whether hosts should be asked again."""
        if time.time() - self._asked_s < EVERY_S or (self._asking is not None and self._asking.is_alive()):
            return False
        return any(run.state == "running" for run in self.lab.open_runs()) or self._activity() != self._asked_at

    def _ask(self) -> None:
        self._asked_s, self._asked_at = time.time(), self._activity()
        try:
            self.lab.read_memory()
            self.error = ""
        except Exception as error:  # a workbench that was closed: what was read before stays
            self.error = str(error)

    def _read(self) -> None:
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
                peak: Peak = (row["end_s"], row["peak_memory_bytes"], words)
                self._devices.setdefault(row["device"], MemoryHistory()).peaks.add(peak[1], peak)
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
        return [self._chart(name, self._devices[name]) for name in sorted(self._devices, key=_by_number)]

    def _chart(self, name: str, device: MemoryHistory) -> Chart:
        readings = device.readings.rows()
        owners = dict.fromkeys(owner for *_, shares in readings for owner, held in shares.items() if held)
        styles = role_styles(role for role, _ in owners)
        x = [time_s - self._start_s for time_s, *_ in readings]
        words = [f"iteration {iteration}" for _, iteration, _ in readings]
        curves = [
            Curve(
                name=f"{role}: {use.replace('_', ' ')}",
                x=x,
                y=[shares.get((role, use), 0) for *_, shares in readings],
                kind="area",
                stroke=OTHER if role == "other" else Stroke(styles[role].colour),
                hatch="." if role == "other" else USE_HATCHES.get(use, "."),
                words=words,
            )
            for role, use in sorted(owners, key=lambda owner: owner[0] == "other")
        ]
        if peaks := device.peaks.rows():
            times, tops, stages = zip(*peaks, strict=True)
            x = [time_s - self._start_s for time_s in times]
            curves.append(Curve(name="peak in a stage", x=x, y=tops, kind="points", stroke=PEAK, words=stages))
        title, note, limit = name, "", None
        if device.last is not None:
            last = device.last
            title = f"{name}, {last.host}"
            note = f"{bytes_text(sum(last.shares().values()))} of {bytes_text(last.capacity_bytes)}"
            if (each := device.readings.each) > 1:
                note += f"; older points: the highest of {each} readings"
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
        return "<p>Asking the hosts for their memory use ...</p>"

    def controls(self) -> str:
        return entry("up to capacity", "capacity", self.capacity, kind="checkbox") + button(
            "Read now", "read", title="ask the hosts for their memory use"
        )

    # --- actions ------------------------------------------------------------------------------------------------------

    def on_read(self) -> None:
        self._ask()


def _by_number(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return kind, int(number) if number.isdigit() else 0
