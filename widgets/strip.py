"""The strip: one line that stays in sight, with the running stage, speed, reward, memory and problems."""

from __future__ import annotations

from collections.abc import Hashable
from html import escape
from typing import Any

from workbench.display.headlines import looked_at
from workbench.display.html import bytes_text, numbers_table
from workbench.display.results import sparkline
from workbench.telemetry.memory import MemoryReading
from workbench.telemetry.spans import union_s
from workbench_widgets.metrics import MetricCurves, Points
from workbench_widgets.view import View

REWARD, SHOWN = "rewards/mean", 30  # iterations in the sparkline
_ITEM = "display:inline-flex;gap:5px;align-items:center;margin-right:16px;white-space:nowrap"


class Strip(View):
    """One line with the state of a run. It asks no host: it reads what stages have recorded.

    Tokens a second: those of generation and forward passes of the newest iteration, on all ranks, divided by the time
    in which any of its stages ran. Memory: the fullest device, from the last reading.
    """

    name, title = "strip", "Strip"
    sticks = True

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self._curves = MetricCurves(lab.telemetry)
        self._spans, self._memory = lab.telemetry.follow("spans"), lab.telemetry.follow("memory")
        self._tokens: dict[int, int] = {}  # by run
        self._held: dict[str, MemoryReading] = {}  # by host
        self._rows = 0

    def depends_on(self) -> Hashable:
        self._read()
        running = tuple((r.run, r.state, r.done_units) for r in self._records(self.lab.iteration))
        return running, self._rows, self._curves.rows, self.lab.iteration, self.driver.busy, tuple(self._warnings())

    def _read(self) -> None:
        self._curves.read()
        for row in self._spans.new():
            self._rows += 1
            self._tokens[row["run"]] = self._tokens.get(row["run"], 0) + row["processed_tokens"]
        for row in self._memory.new():
            self._rows += 1
            self._held[row["host"]] = MemoryReading(**row)

    def text(self) -> str:
        self._read()
        told = {"": self._runs(), "tokens/s": self._rate()[0], "reward": self._reward()[0], "memory": self._fullest()}
        warnings = "; ".join(self._warnings()) or "no warnings"
        return " | ".join([*(f"{name} {value}".strip() for name, value in told.items() if value), warnings])

    def html(self, *, live: bool) -> str:
        self._read()
        rate, told = self._rate()
        last, curve, numbers = self._reward()
        warnings = self._warnings()
        lamp = '<b class="wb-live" style="color:#009e73">\N{BLACK CIRCLE}</b><span class="wb-live">connected</span>'
        parts = [_item(lamp, "the kernel answers this page")] if live else []
        parts.append(_item(f"<b>{escape(self._runs())}</b>", "what runs now, and how far it is"))
        parts += [_item(f"{rate} tokens/s", told)] if rate else []
        head = f'<summary style="{_ITEM};margin:0;cursor:pointer">reward {curve}{last}</summary>'
        folds = f'<details data-key="reward">{head}{numbers}</details>'
        parts += [_item(folds, f"{REWARD} of the last iterations")] if last else []
        held = self._fullest()
        parts += [_item(f"memory {escape(held)}", "the fullest device, at the last reading")] if held else []
        sign = f"<b>! {escape('; '.join(warnings))}</b>" if warnings else "no warnings"
        return f'<div style="display:flex;flex-wrap:wrap">{"".join([*parts, _item(sign, "")])}</div>'

    # --- its figures --------------------------------------------------------------------------------------------------

    def _records(self, iteration: int) -> list[Any]:
        return [record for record in self.lab.run_log.records(iteration) if not record.aside]

    def _runs(self) -> str:
        running = [record for record in self._records(self.lab.iteration) if record.state == "running"]
        told = ", ".join(
            record.stage + (f" {record.done_units}/{record.total_units}" if record.total_units else "")
            for record in running
        )
        return f"iteration {self.lab.iteration}: {told or self.driver.busy or 'nothing runs'}"

    def _rate(self) -> tuple[str, str]:
        """Tokens a second of the newest iteration that has any, and their description; empty if there are none."""
        for iteration in (self.lab.iteration, self.lab.iteration - 1):
            ended = [record for record in self._records(iteration) if record.ended_s and record.started_s]
            tokens = sum(self._tokens.get(record.run, 0) for record in ended)
            if tokens:
                took_s = union_s((record.started_s, record.ended_s) for record in ended)
                told = f"{tokens:,} tokens generated, or in forward passes, of iteration {iteration} in {took_s:.2f} s"
                return f"{tokens / max(took_s, 1e-9):,.0f}", told
        return "", ""

    def _reward(self) -> tuple[str, str, str]:
        """The last reward, and the rewards of recent iterations as a small curve and as a table."""
        found = self._curves.by_name.items()
        there = {"/".join(name): points for name, points in found if name[1] == REWARD and points.values}
        points = there.get(looked_at(there).get("reward", ""), Points())
        iterations, values = points.iterations[-SHOWN:], points.values[-SHOWN:]
        if not values:
            return "", "", ""
        rows = [[n, f"{value:.4g}"] for n, value in zip(iterations, values, strict=True)]
        return (
            f"{values[-1]:.4g}",
            sparkline(values, f"reward of the last {len(values)} iterations"),
            numbers_table(["iteration", REWARD], rows),
        )

    def _fullest(self) -> str:
        held = [(sum(r.shares().values()), r) for r in self._living() if r.capacity_bytes and not r.error]
        if not held:
            return ""
        n, reading = max(held, key=lambda one: one[0] / one[1].capacity_bytes)
        return f"{bytes_text(n)} of {bytes_text(reading.capacity_bytes)} on {reading.device}"

    def _living(self) -> list[MemoryReading]:
        """The last readings of the hosts of the current placement."""
        return [self._held[info.name] for info in self.lab.hosts.infos if info.name in self._held]

    def _warnings(self) -> list[str]:
        told = [f"pool {pool} is lost" for pool in self.lab.hosts.lost]
        newest = {record.stage: record for record in self._records(self.lab.iteration)}
        told += [f"{stage} {record.state}" for stage, record in newest.items() if record.state == "failed"]
        told += [f"{reading.host} did not answer" for reading in self._living() if reading.error]
        unwritten = self.lab.telemetry.unwritten
        told += [f"{unwritten:,} rows of telemetry are not on the disk"] if unwritten else []
        return told + (["another kernel drives this workbench"] if self.lab.looks else [])


def _item(html: str, title: str) -> str:
    return f'<span style="{_ITEM}" title="{escape(title)}">{html}</span>'
