"""The ledger of weights: which weights each sync gave an engine, and with which weights each generation was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import pandas

SyncEvent = Literal["sync", "generation", "change"]
SYNC_COLUMNS = {
    "run": "int64", "stage": "str", "role": "str", "event": "str", "version": "int64", "trained_version": "int64",
    "strategy": "str", "duration_s": "float64", "moved_bytes": "int64", "whole_bytes": "int64", "taken_bytes": "int64",
    "checksum_sent": "str", "checksum_received": "str", "verdict": "str", "culprit": "str", "remedy": "str",
}  # fmt: skip
CHANGED_COLUMNS = {
    "run": "int64", "since": "int64", "version": "int64", "weight": "str", "layer": "str", "elements": "int64",
    "trained": "float64", "visible": "float64", "norm": "float64",
}  # fmt: skip
REMEDIES = {
    "checksum differs": "memory or network of these ranks changes bits: sync again, and if it recurs remove "
    "the hosts; nothing is generated until a sync succeeds",
    "not synced": "these rollouts are off-policy: generate them again after lab.actor.sync_weights(), or weight them "
    "with wb.Correction",
    "synced twice": "leave this sync out: the engine had these weights already",
    "failed": "the next generation syncs again; lab.logs() has the error",
}


@dataclass(kw_only=True)
class OpenSync:
    """An event that has not ended: the fields that may become known only at its end, see `Sync`.

    changed: for a "change", noted by the trainer: what its updates changed since `version`. By weight: its layer, its
    elements (0: as many as all ranks compared), how many of them this rank compared, how many of these differ in
    float32 and how many after rounding, and the squared norm of the difference.
    """

    version: int
    trained_version: int
    restored: int = 0
    lacked: bool = False
    strategy: str = ""
    moved_bytes: int = 0
    whole_bytes: int = 0
    taken_bytes: int = 0
    sent: int | None = None
    received: int | None = None
    differ: tuple[str, ...] = ()
    changed: Mapping[str, tuple[str, int, int, int, int, float]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Sync(OpenSync):
    """One rank's part in one event.

    event: "sync", the engine takes weights; "generation", it draws responses. version: of the engine's weights, after a
    sync; trained_version: of the trainer's, both in optimizer steps. restored: how often the trainer's weights had been
    put back to an earlier state; after that, equal versions need not be equal weights. lacked: the engine had no
    weights, as after its sleep or when it was new. strategy: how slices moved between ranks; "patches": rollout workers
    got only the changes; "": they did not, or each rank had whole weights. moved_bytes: arrived from other ranks;
    whole_bytes: of the whole slices, changed or not. taken_bytes: given to the engine. sent, received: checksums of the
    arrived weights, at the senders and here; None: not computed. differ: weights whose checksums differ, as "weight
    from rank n". failed: the type of the error that ended it.
    """

    stage: str
    run: int
    role: str
    rank: int
    start_s: float
    end_s: float
    event: SyncEvent
    failed: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def sync_frame(parts: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return one row per event, over all its ranks, in order: `SYNC_COLUMNS`; see `TelemetryStore.syncs`."""
    import pandas

    events: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for part in parts:  # a rank's parts are in order; parts of one run with the same number are one event
        key = (part["run"], part["role"], part["event"])
        counts[*key, part["rank"]] = number = counts.get((*key, part["rank"]), 0) + 1
        events.setdefault((*key, number), []).append(part)
    rows, given = [], dict[str, tuple[tuple[int, int], int]]()
    for ranks in sorted(events.values(), key=lambda ranks: min(part["start_s"] for part in ranks)):
        first, starts = ranks[0], [part["start_s"] for part in ranks]
        verdict, culprit = _verdict(ranks, given.get(first["role"]))
        if first["event"] == "sync" and verdict in ("ok", "synced twice"):
            given[first["role"]] = (first["trained_version"], first["restored"]), first["run"]
        taken = all(part["sent"] is not None for part in ranks)
        sent, received = (
            f"{sum(part[side] for part in ranks) % 2**64:016x}" if taken else "" for side in ("sent", "received")
        )
        rows.append(
            {
                **{name: first[name] for name in ("run", "stage", "role", "event", "trained_version", "strategy")},
                "version": min(part["version"] for part in ranks),
                "duration_s": max(part["end_s"] for part in ranks) - min(starts),
                "moved_bytes": sum(part["moved_bytes"] for part in ranks),
                "whole_bytes": sum(part.get("whole_bytes", 0) for part in ranks),
                "taken_bytes": sum(part["taken_bytes"] for part in ranks),
                "checksum_sent": sent,
                "checksum_received": received,
                "verdict": verdict,
                "culprit": culprit,
                "remedy": REMEDIES.get(verdict, ""),
            }
        )
    return pandas.DataFrame(rows, columns=list(SYNC_COLUMNS)).astype(SYNC_COLUMNS)


def changed_frame(parts: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return one row per note and weight, over all ranks, in order: `CHANGED_COLUMNS`. Ranks that replicate a weight
    hold all its elements equally often, so the shares are as for one copy."""
    import pandas

    keys, sums = ["run", "since", "version", "weight", "layer"], ["held", "trained", "visible", "norm"]
    notes = ((part["run"], part["version"], part["trained_version"], part["changed"]) for part in parts)
    rows = [(*note, name, *counts) for *note, changed in notes for name, counts in changed.items()]
    frame = pandas.DataFrame(rows, columns=[*keys, "elements", *sums]).astype(CHANGED_COLUMNS)
    frame = frame.groupby(keys, sort=False, as_index=False).agg({"elements": "max", **dict.fromkeys(sums, "sum")})
    held = frame.pop("held")
    frame["elements"] = frame["elements"].where(frame["elements"] > 0, held)
    frame["norm"] = (frame["norm"] * frame["elements"] / held) ** 0.5
    return frame.assign(trained=frame["trained"] / held, visible=frame["visible"] / held).astype(CHANGED_COLUMNS)


def newest(changed: pandas.DataFrame, notes: int | None) -> pandas.DataFrame:
    """Return the rows of the newest notes. notes: how many; None: all."""
    number = changed.groupby(["run", "since", "version"], sort=False).ngroup()
    return changed[number > number.max() - (notes or len(changed))].reset_index(drop=True)


def _verdict(ranks: list[Mapping[str, Any]], given: tuple[tuple[int, int], int] | None) -> tuple[str, str]:
    """Return verdict and culprit of an event. given: the weights of the previous sync, and its run."""
    for part in ranks:
        if part["differ"]:
            return "checksum differs", f"rank {part['rank']}: {'; '.join(part['differ'])}"
    failed = next((part for part in ranks if part["failed"]), None)
    if failed is not None and failed["event"] == "sync":
        return "failed", f"rank {failed['rank']}: {failed['failed']}"
    for part in ranks:
        if part["version"] != part["trained_version"]:
            return "not synced", (
                f"rank {part['rank']}: its engine has weights version {part['version']}, the trainer's is "
                f"{part['trained_version']}"
            )
    weights = (ranks[0]["trained_version"], ranks[0]["restored"])
    lacked = any(part.get("lacked") for part in ranks)
    if ranks[0]["event"] == "sync" and given is not None and given[0] == weights and not lacked:
        return "synced twice", f"{ranks[0]['stage']}: version {weights[0]} came with run {given[1]}"
    return "ok", ""
