"""What devices did, from spans as rows: slow and plain, to hold what is computed from columns against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.display.idle import Row
from workbench.telemetry.spans import union_s


def device_times(spans: Sequence[Row], device: str, pool: str, start_s: float, end_s: float) -> dict[str, Any]:
    """What `device` did between two times, seconds; busy_s + transfer_s + idle_s = window_s.

    busy_s: some role computed. transfer_s: inputs were pulled and nothing computed. idle_s: neither.
    queued_s: the part of idle_s in which a stage was called on the device and waited for other stages.
    idle_share: idle_s / window_s, between 0 and 1.
    """
    here = [row for row in spans if row["device"] == device and row["pool"] == pool]

    def covered(*, without: tuple[str, ...]) -> float:
        within = (
            (max(row["start_s"], start_s), min(row["end_s"], end_s)) for row in here if row["kind"] not in without
        )
        return union_s(within)

    busy = covered(without=("queue", "transfer"))
    working = covered(without=("queue",))
    window = end_s - start_s
    return {
        "pool": pool,
        "device": device,
        "window_s": window,
        "busy_s": busy,
        "transfer_s": working - busy,
        "idle_s": window - working,
        "queued_s": covered(without=()) - working,
        "idle_share": (window - working) / window if window > 0 else 0.0,
    }
