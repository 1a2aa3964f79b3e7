"""What a change of placement would move, how long it would take, and whether there is enough memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.display.html import bytes_text, seconds_text, table
from workbench.errors import BadInput
from workbench.placement.estimate import MemoryEstimate, Tenant, estimate_memory, largest, remedy
from workbench.placement.moves import Moves

if TYPE_CHECKING:
    import pandas as pd

    from workbench.display.traffic import Traffic

# The most bytes of sent and received slices that a process holds at a time.
BUFFER_BYTES = 64 * 2**20
# The sign for each value of `PlacementChange.fits`.
SIGNS = {True: "\N{CHECK MARK}", False: "\N{MULTIPLICATION X}", None: "?"}


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementChange(Moves):
    """The effects of a change of placement, `old` -> `new`: `.frame()` by role, `.traffic()` by pair of processes,
    `.memory()` by device, `.seconds`, `.fits`.

    device: "cpu" or "cuda". has_bytes: the memory of one GPU, or the memory that all slots of a CPU machine together
    can have, including what they hold now; None: unknown. capacity_bytes: all the memory of that GPU or machine.
    refusal: why the change is impossible now, whatever the memory; None: it is possible. took_s, transfer_s: for a
    completed change, its time, and the time of its transfers with their checksums, to compare with `expected_s` and
    `seconds`. machines: the machine of each place; "": unknown. bandwidth_bytes_s, measured: the bandwidth inside a
    machine that `seconds` assumes, and its source; link_bytes_s, link_measured: the same for a machine's network link.
    start_s: the time to start new processes and load models, taken from the current ones. rest_s: the further time of
    earlier moves of this kind, without start_s and their bytes; None: there was no such move.
    """

    has_bytes: int | None = None
    capacity_bytes: int | None = None
    bandwidth_bytes_s: float | None = None
    measured: str = ""
    machines: tuple[str, ...] = ()
    link_bytes_s: float | None = None
    link_measured: str = ""
    start_s: float = 0.0
    rest_s: float | None = None
    refusal: BadInput | None = None
    took_s: float | None = None
    transfer_s: float | None = None

    @cached_property
    def before(self) -> MemoryEstimate:
        return self._estimate(self.old, self.models, self.old_numbers)

    @cached_property
    def after(self) -> MemoryEstimate:
        return self._estimate(self.new, self.models_after, self.new_numbers)

    def _estimate(self, placement: Any, models: Any, numbers: Any) -> MemoryEstimate:
        known = self.has_bytes if self.device == "cuda" else None
        return estimate_memory(placement, models, device=self.device, device_bytes=known, numbers=numbers)

    @cached_property
    def between(self) -> np.ndarray:
        """int64 [places, places]: the part of `matrix` that goes between machines."""
        machines = np.array(self.machines or [""] * len(self.places))
        known = machines != ""
        apart = (machines[:, None] != machines) & known[:, None] & known
        return self.matrix * apart

    @cached_property
    def link_bytes(self) -> int:
        """The most bytes that a machine sends to others, or receives from them."""
        if not self.machines:
            return 0
        _, number = np.unique(self.machines, return_inverse=True)
        return int(max(np.bincount(number, weights=self.between.sum(axis=axis)).max() for axis in (0, 1)))

    @property
    def seconds(self) -> float | None:
        """The time of the transfers, without the start of processes and engines: bytes inside machines one after the
        other, plus bytes over the busiest network link. None: unknown."""
        terms = [
            (self.total_bytes - int(self.between.sum()), self.bandwidth_bytes_s), (self.link_bytes, self.link_bytes_s)
        ]  # fmt: skip
        if any(nbytes and not rate for nbytes, rate in terms):
            return None
        return sum(nbytes / rate for nbytes, rate in terms if rate)

    @property
    def expected_s(self) -> float | None:
        """The expected time of the change: transfers, new processes and models, and `rest_s`. None: unknown. If
        `rest_s` is None, because there was no such move yet, this is a lower bound."""
        if all(role.action == "stays" for role in self.roles):
            return 0.0
        return None if self.seconds is None else self.seconds + self.start_s + (self.rest_s or 0.0)

    @property
    def expected_text(self) -> str:
        """`expected_s` as a text: "about 3.1 s", or "at least 3.1 s" if there was no such move yet."""
        if self.expected_s is None:
            return "time unknown"
        if not self.expected_s:
            return seconds_text(0.0)
        return f"{'at least' if self.rest_s is None else 'about'} {seconds_text(self.expected_s)}"

    @property
    def expected_parts(self) -> str:
        """The parts of `expected_s`, as a text."""
        parts = []
        if self.total_bytes and self.seconds is not None:
            rates = [(self.bandwidth_bytes_s, "", self.measured)]
            rates += [(self.link_bytes_s, f"{bytes_text(self.link_bytes)} over a network link at ", self.link_measured)]
            said = " and ".join(f"{at}{bytes_text(rate)}/s ({by})" for rate, at, by in rates if rate)
            parts.append(f"the bytes {seconds_text(self.seconds)} at {said}")
        if self.start_s:
            parts.append(f"new processes and models {seconds_text(self.start_s)}, as the current ones took")
        if self.rest_s:
            parts.append(f"the rest {seconds_text(self.rest_s)}, as in earlier moves")
        if self.rest_s is None and self.expected_s:
            kind = "that starts processes" if any(place.new for place in self.places) else "without new processes"
            parts.append(f"the rest is known after the first move {kind}")
        return "; ".join(parts)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({place.device for place in self.places}))

    def during(self, device: int, *, certain: bool = False) -> int:
        """Return the peak bytes on a device during the change: roles that stay, roles that leave, new roles, batches,
        buffers. certain: count only bytes that are needed in any case, see `RankMemory.least_bytes`."""
        actions = {change.role: change.action for change in self.roles}

        def held(tenants: Iterable[Tenant]) -> int:
            memories = [tenant.memory for tenant in tenants]
            return sum(m.least_bytes(on_cpu=self.device == "cpu") if certain else m.lasting for m in memories)

        def engine(tenant: Tenant) -> int:
            cache = 0 if certain and self.device == "cpu" else tenant.memory.generation_kv_cache
            return tenant.memory.generation_weights + cache

        total = held(self.before.on(device))
        total += held(t for t in self.after.on(device) if actions[t.role] not in ("stays", "engine"))
        engines = {tenant.role: engine(tenant) for tenant in self.before.on(device)}
        for tenant in self.after.on(device):
            # a new generation engine starts only after the old one is closed
            if actions[tenant.role] == "rebuilt":
                total -= min(engine(tenant), engines.get(tenant.role, 0))
            elif actions[tenant.role] == "engine":
                total += max(0, engine(tenant) - engines.get(tenant.role, 0))
        moved = self.matrix.sum(axis=0) + self.matrix.sum(axis=1)
        for n, place in enumerate(self.places):
            if place.device == device:
                kept = 0 if place.new else self.batch_bytes.get(self.names[n], 0)
                total += kept + int(self.batch_matrix[:, n].sum()) + min(int(moved[n]), BUFFER_BYTES)
        return total

    @cached_property
    def problem(self) -> str:
        """A text on why there is not enough memory; "" if there is enough, or if the memory is unknown."""
        if self.has_bytes is None:
            return ""
        for devices in [self.devices] if self.device == "cpu" else [(n,) for n in self.devices]:
            where = "this machine" if self.device == "cpu" else f"cuda:{devices[0]}"
            moving = sum(self.during(n, certain=True) for n in devices)
            afterwards = self.after.least_bytes(*devices)
            for when, needs in (("during the move", moving), ("afterwards", afterwards)):
                if needs > self.has_bytes:
                    has = bytes_text(self.has_bytes)
                    if self.capacity_bytes is not None and self.has_bytes < self.capacity_bytes:
                        has += f" left of {bytes_text(self.capacity_bytes)}"
                    return (
                        f"needs {bytes_text(needs)} on {where} {when} "
                        f"({largest(self.after, devices, certain=True)}), which has {has}: "
                        f"{bytes_text(needs - self.has_bytes)} too little"
                    )
        return ""

    @property
    def fits(self) -> bool | None:
        """Whether the change is possible: `refusal` is None, and the memory suffices during the change and afterwards;
        None: the memory is unknown."""
        if self.refusal is not None:
            return False
        return None if self.has_bytes is None else not self.problem

    @property
    def verdict(self) -> str:
        """`fits` as a text, with the reason if the change is not possible."""
        if self.refusal is not None:
            return f"cannot be done now: {self.refusal.value}: {self.refusal.rule}"
        return {True: "fits", False: f"does not fit: it {self.problem}", None: "room unknown"}[self.fits]

    def require_fit(self) -> None:
        """Raise `BadInput` if the change is not possible; if memory is missing, with the figures."""
        if self.refusal is not None:
            raise self.refusal
        if self.problem:
            raise BadInput(
                f"a change from {self.old} to {self.new}",
                self.problem,
                remedy(self.after, self.devices, self.models_after, certain=True),
            )

    def frame(self) -> pd.DataFrame:
        """Return a frame with one row per role: action, pools and layouts before and after, and the bytes moved."""
        import pandas as pd

        rows = [
            {**vars(change), "old_layout": str(change.old_layout or ""), "new_layout": str(change.new_layout or "")}
            for change in self.roles
        ]
        return pd.DataFrame(rows).rename(columns={"old_pool": "pool", "old_layout": "layout"})

    def traffic(self) -> Traffic:
        """Return a picture of the bytes sent between processes; its `.matrix` and `.frame()` have them as tables."""
        import pandas as pd

        from workbench.display.traffic import Traffic

        names = list(self.names)
        matrix = pd.DataFrame(self.matrix, index=pd.Index(names, name="source"), columns=names)
        matrix.columns.name = "destination"
        return Traffic(matrix, {}, "a change of placement")

    def memory(self) -> pd.DataFrame:
        """Return a frame with one row per device: bytes before the change, the peak during the change, bytes after it
        while nothing computes, and the bound for the new placement while it computes."""
        import pandas as pd

        rows = [
            {
                "device": f"{self.device}:{n}",
                "before_bytes": self.before.lasting(n),
                "during_bytes": self.during(n),
                "after_bytes": self.after.lasting(n),
                "peak_bytes": self.after.peak(n),
            }
            for n in self.devices
        ]
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        told = f"{bytes_text(self.total_bytes)} between processes"
        if self.expected_s is None:
            told += ", time unknown"
        elif self.expected_s:
            told += f", {self.expected_text} in all ({self.expected_parts})"
        if self.took_s is not None and self.transfer_s is not None:
            told += f"; took {seconds_text(self.took_s)}, the bytes {seconds_text(self.transfer_s)} of it"
        rest = [change.role for change in self.roles if change.action == "stays"]
        untouched, kept = ", ".join(rest) or "none", ", ".join(self.kept) or "none"
        return f"{told}; untouched: {untouched}; pools kept: {kept}; {self.verdict}"

    def __repr__(self) -> str:
        moving = [change.role for change in self.roles if change.action != "stays"]
        return f"<PlacementChange of {', '.join(moving) or 'nothing'}: {bytes_text(self.total_bytes)}>"[:79]

    def _repr_html_(self) -> str:
        return self.words_html() + (self.traffic()._repr_html_() if self.total_bytes else "")

    def words_html(self) -> str:
        """Return html: the action of each role, the total bytes and time, and whether there is enough memory."""
        roles: Any = self.frame().to_dict("records")
        roles = [row | {"moved_bytes": bytes_text(row["moved_bytes"])} for row in roles]
        head = f'<div style="font-size:13px"><b>{SIGNS[self.fits]}</b> {escape(str(self))}</div>'
        return head + table(roles, caption=f"{self.old}  \N{RIGHTWARDS ARROW}  {self.new}") + self.memory_html()

    def memory_html(self, *, moves: bool = True) -> str:
        """Return a table of each device's memory as html; the slots of a CPU machine share its memory, so the table
        also has their sum. moves: whether anything changes."""
        frame, room = self.memory().set_index("device"), self.capacity_bytes
        frame.columns = ["before", "during the move", "after", "peak"]
        if self.device != "cuda":
            frame.loc["this machine"] = frame.sum()
        shown = frame if moves else frame[["after", "peak"]].rename(columns={"after": "held"})
        rows = [{"device": name, **row.map(bytes_text)} for name, row in shown.iterrows()]
        whose = "a device" if self.device == "cuda" else "the machine"
        has = f"; {whose} has {bytes_text(room)}, {bytes_text(self.has_bytes or room)} of it for them" if room else ""
        caption = f"estimated memory of models and batches{has}"
        return table(rows, caption=caption)
