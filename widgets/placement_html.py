"""Parts of the placement editor's picture: a change of placement, memory, what is on offer, an opened card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from workbench.display.html import bytes_text, seconds_text, table
from workbench.display.memory_bars import DeviceMemory, memory_svg
from workbench.placement import Layout, Placement
from workbench.placement.change import PlacementChange
from workbench_widgets.placement_costs import Offer
from workbench_widgets.placement_edits import same
from workbench_widgets.view import button, entry

_CELL = (
    "text-align:left;padding:2px 12px 2px 4px;border-bottom:1px solid color-mix(in srgb,currentColor 20%,transparent)"
)


def note_of(role: str, draft: Placement, live: Placement) -> str:
    """What a draft makes of a role, in words; "" for nothing."""
    if role not in live.roles:
        return "is added"
    old, pool = live.pool_of(role), draft.pool_of(role)
    if old.name != pool.name:
        return f"moves from {old.name}"
    if old.devices != pool.devices:
        return f"moves from {old.devices} device{'s' if old.devices > 1 else ''} to {pool.devices}"
    layout = live.layout_of(role)
    return "" if layout == draft.layout_of(role) else f"rebuilt: was p={layout.p} t={layout.t} d={layout.d}"


def inside_of_card(role: str, layout: Layout, *, cut: bool, ranks: Sequence[Mapping[str, Any]]) -> str:
    """The fields of a layout, and where the live ranks are. cut: whether p and t can be chosen."""
    fields = ""
    if cut:
        fields = '<div style="display:flex;gap:8px;align-items:center;margin-top:5px">' + "".join(
            [
                *(entry(a, "lay_out", getattr(layout, a), kind="number", size=3, role=role, axis=a) for a in "pt"),
                f"<span>d = {layout.d}</span>",
            ]
        )
        fields += "</div>"
    rows = [
        {
            "rank": row["rank"],
            "host": row["host"],
            "device": row["device"],
            "process": row["process"],
            "holds": bytes_text(sum(n for key, n in row.items() if key.endswith("_bytes") and key[:5] != "host_")),
        }
        for row in ranks
    ]
    return fields + (table(rows, caption="live ranks") if rows else "")


def verdict(change: PlacementChange) -> str:
    """Whether it can be done, with a sign, and why not."""
    if change.refusal is not None:
        return f"\N{MULTIPLICATION X} cannot be done now: {change.refusal}"
    if change.problem:
        return f"\N{MULTIPLICATION X} does not fit: it {change.problem}"
    return "\N{CHECK MARK} fits" if change.fits else "? room unknown"


def change_html(change: PlacementChange) -> str:
    """What becomes of each role, the bytes and the time in all, and whether there is room."""
    rows = [
        {
            "role": role.role,
            "action": role.action,
            "from": _where(role.old_pool, role.old_layout),
            "to": _where(role.new_pool, role.new_layout),
            "bytes": bytes_text(role.moved_bytes),
        }
        for role in change.roles
    ]
    told = f"{bytes_text(change.total_bytes)} between processes, {change.expected_text} in all"
    told += f" ({change.expected_parts})" if change.expected_parts else ""
    ends = [pool.name for pool in change.old.pools if pool.name not in change.kept]
    told += f"; ends the processes of {', '.join(ends)}" if ends else "; no process ends"
    traffic = ""
    if change.total_bytes:
        traffic = f"<details><summary>who sends to whom</summary>{change.traffic()._repr_html_()}</details>"
    return (
        f'<section aria-label="what the draft would change">{table(rows, caption="what would change")}'
        f"<div><b>{escape(verdict(change))}</b></div><div>{escape(told)}</div>{traffic}</section>"
    )


def _where(pool: str, layout: Layout | None) -> str:
    return f"{pool} p={layout.p} t={layout.t} d={layout.d}" if layout is not None else ""


def memory_html(change: PlacementChange, *, moves: bool) -> str:
    """The memory of each device as bars. The slots of a CPU share the machine's: all together are shown too.

    moves: whether the change is one.
    """
    each = [DeviceMemory(*row) for row in change.memory().itertuples(index=False)]
    if change.device == "cuda":
        each = [DeviceMemory(d.name, *d.all_bytes, change.has_bytes, change.capacity_bytes) for d in each]
    else:
        before, during, after, peak = (sum(figures) for figures in zip(*(d.all_bytes for d in each), strict=True))
        room = change.has_bytes, change.capacity_bytes
        each = [DeviceMemory("this machine", before, during, after, peak, *room), *each]
    rows = [{"device": d.name, **{when: bytes_text(held) for when, held in d.bars(moves=moves)}} for d in each]
    return (
        '<section aria-label="memory"><div style="font-weight:600;margin-top:8px">memory of each device, estimated: '
        f"models and batches, without what processes need for themselves</div>"
        f'<div data-scrolls tabindex="0" aria-label="memory, device by device" '
        f'style="max-height:460px;overflow:auto">{memory_svg(each, moves=moves)}</div>'
        f"<details><summary>The memory as a table</summary>{table(rows)}</details></section>"
    )


def offers_html(offers: Iterable[Offer], live: Placement, *, known: bool, controls: bool) -> str:
    """A table of what is on offer. known: else the figures are of an earlier state, and not shown. controls: with
    buttons that take one as the draft."""
    offers = list(offers)
    rows = "".join(_offer(offer, live, known=known, controls=controls) for offer in offers)
    if not rows:
        return ""
    names = ("plan", "placement", "iteration", "moves", "time", "room", *([""] if controls else []))
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in names)
    told = "fit the cost model to the last iteration, and search for the quickest placements"
    suggest = button("Suggest", "suggest", title=told) if controls else ""
    does = " Suggest calibrates it by the last iteration." if controls else ""
    unpredicted = "".join(f"<div>No iteration is predicted: {escape(why)}{does}</div>" for why in _unpredicted(offers))
    return (
        '<section aria-label="plans"><table style="border-collapse:collapse;font-size:13px;margin-top:8px">'
        '<caption style="text-align:left;font-weight:600">placements with a name, and the quickest; an iteration as '
        "predicted from what was timed here, what would move from what is live, and how long that takes</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{unpredicted}{suggest}</section>"
    )


def _unpredicted(offers: Iterable[Offer]) -> list[str]:
    """Why iterations are not predicted, each reason once."""
    return list(dict.fromkeys(offer.plan.unpredicted for offer in offers if offer.plan.unpredicted))


def _offer(offer: Offer, live: Placement, *, known: bool, controls: bool) -> str:
    plan, change = offer.plan, offer.change
    if change is None:
        cells = ["", "", "", "", f"\N{MULTIPLICATION X} {offer.why}"]
        off = offer.why
    else:
        off = "it is live" if same(change.new, live) else ""
        figures = [bytes_text(change.total_bytes), change.expected_text, "live" if off else verdict(change)]
        iteration = "not predicted" if plan.predicted_s is None else seconds_text(plan.predicted_s)
        cells = [str(change.new), iteration, *(figures if known else ["...", "...", "asking the hosts"])]
    wraps = [False, True, False, False, False, True]
    shown = "".join(
        f'<td style="{_CELL}{"" if wrap else ";white-space:nowrap"}">{escape(cell)}</td>'
        for cell, wrap in zip((plan.name, *cells), wraps, strict=True)
    )
    take = button("take", "take", off=off, title=f"draft {plan.name}", name=plan.name)
    shown += f'<td style="{_CELL}">{take}</td>' if controls else ""
    return f'<tr data-plan="{escape(plan.name)}">{shown}</tr>'
