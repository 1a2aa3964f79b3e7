"""What lies in a range of a timeline, added up: by stage, role and kind, and idle time by its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.display.device_spans import Row
from workbench.display.html import bytes_text, seconds_text, table
from workbench.display.idle import CAUSES, UNCALLED, Gaps, Life, within
from workbench.display.timeline_svg import percent

GROUPED = ("role", "stage", "kind", "parent")
ADDED = ("span_s", "processed_tokens", "moved_bytes")
MOST_SHOWN = 64  # rows


@dataclass(frozen=True)
class Sums:
    """Sums of a range: from_s and to_s, seconds from the start of what is drawn.

    stages: a row for each role, stage and kind, the longest role and stage first. spans: how many lie in the range, at
    least in part. span_s: their seconds in it, of all devices; processed_tokens and moved_bytes: a span that the range
    cuts counts by its share of time, so that the sums of two halves are those of the whole. parent: the kind of the
    span that these lie in, "" for none; so a token is in the row of its stage, and once more in that of its pass.

    idle: a row for each cause, seconds of all devices. device_s: seconds of all devices in the range; what is neither
    in idle is busy_s.
    """

    from_s: float
    to_s: float
    device_s: float
    devices: int
    stages: list[dict[str, Any]]
    idle: list[dict[str, Any]]

    @property
    def busy_s(self) -> float:
        """Seconds of all devices in which some role computed."""
        return self.device_s - sum(row["idle_s"] for row in self.idle)

    @property
    def called_s(self) -> float:
        """Seconds of all devices in which something was called: what shares are of."""
        return self.device_s - sum(row["idle_s"] for row in self.idle if row["cause"] == CAUSES[UNCALLED].words)

    @property
    def title(self) -> str:
        devices = f"{self.devices} device{'s' if self.devices != 1 else ''}"
        taken = f"{seconds_text(self.to_s - self.from_s)} on {devices}: busy {percent(self.busy_s, self.called_s)}"
        return f"from {self.from_s:,.3f} s to {self.to_s:,.3f} s, {taken}"

    def __repr__(self) -> str:
        lines = [f"<{self.title}>"]
        for row in self.stages:
            if not row["parent"]:
                name = f"{row['role']}.{row['stage']}".lstrip(".")
                lines.append(f"  {name[:32]:32} {row['kind'][:12]:12} {seconds_text(row['span_s']):>12}")
        lines += [f"  idle: {row['cause'][:26]:26} {'':12} {seconds_text(row['idle_s']):>12}" for row in self.idle]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def row_of(row: Mapping[str, Any]) -> dict[str, str]:
            return {
                "role": row["role"],
                "stage": row["stage"],
                "kind": row["kind"] + (f" in {row['parent']}" if row["parent"] else ""),
                "spans": f"{row['spans']:,}",
                "time": seconds_text(row["span_s"]),
                "tokens": f"{row['processed_tokens']:,.0f}" if row["processed_tokens"] else "",
                "bytes": bytes_text(row["moved_bytes"]) if row["moved_bytes"] else "",
            }

        waits = [
            {
                "idle": row["cause"],
                "time": seconds_text(row["idle_s"]),
                "share": "" if row["cause"] == CAUSES[UNCALLED].words else percent(row["idle_s"], self.called_s),
            }
            for row in self.idle
        ]
        stages = table([row_of(row) for row in self.stages], caption=self.title, max_rows=MOST_SHOWN)
        return f"<div>{stages}{table(waits, caption='idle time by its cause, all devices') if waits else ''}</div>"


def sums_of(
    rows: Sequence[Row], gaps: Gaps, present: Mapping[int, Life], start_s: float, range_s: tuple[float, float]
) -> Sums:
    """Sums of a range, unix times. present: by lane, from when to when it is there. start_s: what `Sums.from_s` counts
    from."""
    from_s, to_s = range_s
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        whole_s = row["end_s"] - row["start_s"]
        inside_s = max(min(row["end_s"], to_s) - max(row["start_s"], from_s), 0.0)
        if not inside_s and not (whole_s <= 0 and from_s <= row["start_s"] < to_s):
            continue
        share, key = inside_s / whole_s if whole_s > 0 else 1.0, tuple(row[name] for name in GROUPED)
        sums = found.setdefault(key, dict(zip(GROUPED, key, strict=True)) | dict.fromkeys(ADDED, 0.0) | {"spans": 0})
        sums["spans"] += 1
        sums["span_s"] += inside_s
        for name in ADDED[1:]:
            sums[name] += row.get(name, 0) * share
    waits = (
        gaps.seconds(max(present, default=-1) + 1, from_s, to_s)[list(present)].sum(axis=0).tolist() if present else []
    )
    there_s = [end_s - begin_s for begin_s, end_s in (within(life, from_s, to_s) for life in present.values())]
    return Sums(
        from_s=from_s - start_s,
        to_s=to_s - start_s,
        device_s=sum(there_s),
        devices=sum(length_s > 0 for length_s in there_s),
        stages=_longest_first(list(found.values())),
        idle=[
            {"cause": cause.words, "idle_s": idle_s} for cause, idle_s in zip(CAUSES, waits, strict=False) if idle_s > 0
        ],
    )


def _longest_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a stage together; the stage whose own spans took longest first."""
    took: dict[tuple[str, str], float] = {}
    for row in rows:
        if not row["parent"]:
            took[row["role"], row["stage"]] = took.get((row["role"], row["stage"]), 0.0) + row["span_s"]

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        name = (row["role"], row["stage"])
        return -took.get(name, 0.0), name, row["parent"], -row["span_s"]

    return sorted(rows, key=order)
