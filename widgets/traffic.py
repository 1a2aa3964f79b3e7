"""How many bytes each process sends to each other: measured, the minimum, and what other strategies would move."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from workbench.display.html import bytes_text, seconds_text, table
from workbench.display.traffic import changed_map
from workbench.errors import NotFound
from workbench.session.changed import barely_visible
from workbench.telemetry.syncs import changed_frame
from workbench_widgets.view import View, choice

KINDS = {"weights": "weights for generation", "batch": "rows for stages", "move": "changes of placement", "": "all"}
EVERY_STAGE = "every stage"
BUCKETS, NOTES = 16, 100  # rows of the table; notes of what updates changed, of all ranks


class TrafficView(View):
    """Bytes between processes by kind and stage: as a matrix, by bucket, by strategy; and what updates changed, once
    `lab.changed()` has been called."""

    name, title = "traffic", "Traffic"
    fields = ("stage",)

    def __init__(self, lab: Any, driver: Any) -> None:
        super().__init__(lab, driver)
        self.kind, self.stage = "", EVERY_STAGE
        self._transfers, self._syncs, self._changed = map(lab.telemetry.follow, ("transfers", "syncs", "changed"))
        self._notes: list[dict[str, Any]] = []
        self._whole_bytes = self._saved_bytes = 0

    def depends_on(self) -> Hashable:
        sizes = self._transfers.size_bytes, self._changed.size_bytes, self._syncs.size_bytes
        return sizes, self.kind, self.stage, str(self.lab.placement)

    def _moved(self) -> Any:
        return self.lab.telemetry.transfer_sums.frame(self.kind or None)

    def controls(self) -> str:
        stages = [EVERY_STAGE, *sorted(set(self._moved()["stage"]))]
        return choice("what moved", "kind", KINDS, self.kind) + choice("for", "stage", stages, self.stage)

    def picture(self) -> str:
        traffic = self._traffic()
        if traffic is None:
            return "<p>Nothing of this kind has moved between processes yet.</p>" + self._strategies() + self._changes()
        return str(traffic._repr_html_()) + self._buckets() + self._strategies() + self._changes()

    def svg(self) -> str | None:
        traffic = self._traffic()
        return None if traffic is None else traffic.svg

    def text(self) -> str:
        traffic = self._traffic()
        return "traffic: nothing has moved" if traffic is None else traffic.figures

    def _traffic(self) -> Any:
        try:
            found = self.lab.traffic(self.kind or None, stage=None if self.stage == EVERY_STAGE else self.stage)
        except NotFound:  # of this kind nothing moved for that stage
            return None
        return found if found.total_bytes else None

    def _buckets(self) -> str:
        """Durations of transfers: of a layer's weights, or of a batch's columns."""
        moved = self._moved()
        if self.stage != EVERY_STAGE:
            moved = moved[moved["stage"] == self.stage]
        grouped = moved.groupby("columns", sort=False).agg(
            times=("transfers", "sum"), moved=("moved_bytes", "sum"), took=("duration_s", "sum")
        )
        grouped = grouped.sort_values("took", ascending=False)
        most = max(float(grouped["took"].max()), 1e-12)
        rows = [
            {
                "bucket": str(name)[:60] or "state",
                "transfers": int(row["times"]),
                "bytes": bytes_text(int(row["moved"])),
                "took": seconds_text(float(row["took"])),
                "": "\N{FULL BLOCK}" * max(1, round(24 * float(row["took"]) / most)),
            }
            for name, row in grouped.iterrows()
        ]
        return table(rows, caption="duration by bucket", max_rows=BUCKETS)

    def _strategies(self) -> str:
        """The strategies side by side, for the actor's current layouts."""
        if self.kind not in ("weights", "") or not len(plans := self.lab.sync_plans()):
            return ""
        rows = [
            {
                "strategy": row["strategy"] + (" (in use)" if row["in_use"] else ""),
                "moved in a sync": bytes_text(row["moved_bytes"]),
                "relative to the least": f"{row['moved_bytes'] / row['least_bytes']:.2f} times"
                if row["least_bytes"]
                else "",
                "received by a rank, at most": bytes_text(row["received_bytes"]),
                "parameters of a rank, at most": bytes_text(row["peak_parameter_bytes"]),
                "kept twice": bytes_text(row["kept_twice_bytes"]),
            }
            for row in plans.to_dict("records")
        ]
        return table(rows, caption="a sync of the actor's weights, by strategy (planned)")

    def _changes(self) -> str:
        """What updates changed, by layer, as far as it was recorded, and the bytes that syncs saved."""
        self._notes += self._changed.new()
        if self.kind not in ("weights", "") or not self._notes:
            return ""
        runs = sorted({note["run"] for note in self._notes})[-NOTES:]
        self._notes = [note for note in self._notes if note["run"] >= runs[0]]
        for sync in self._syncs.new():
            if whole := sync.get("whole_bytes", 0):
                self._whole_bytes += whole
                self._saved_bytes += whole - sync["moved_bytes"]
        changed = changed_frame(self._notes)
        doubt = barely_visible(changed, self.lab.groups["actor"].spec.dtype)
        saved = f"Syncs saved {bytes_text(self._saved_bytes)} of {bytes_text(self._whole_bytes)}."
        return changed_map(changed) + f"<p>{saved if self._whole_bytes else ''} {doubt}</p>"

    def receive(self, kind: str = "", stage: str = EVERY_STAGE, **_: Any) -> None:
        """Show transfers of a kind ("" for all), for a stage."""
        self.kind, self.stage = kind, stage

    def on_kind(self, value: str) -> None:
        self.kind, self.stage = value, EVERY_STAGE
