"""The current state of a workbench, read from the live hosts, and what another placement would need and would move."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import pandas as pd

from workbench.backends.base import Pending
from workbench.backends.hosts import Hosts
from workbench.config.description import Description
from workbench.display.devices import DeviceMap, device_map
from workbench.display.html import table
from workbench.errors import BadInput
from workbench.placement import ENVIRONMENT, ROLLOUT, Placement
from workbench.placement.change import PlacementChange
from workbench.placement.estimate import MemoryEstimate, estimate_memory
from workbench.placement.moves import STATE_MOVES
from workbench.session.rates import Rates
from workbench.stages.group import Groups
from workbench.stages.ledger import Counters, Ownership
from workbench.support.validation import PositiveFloat
from workbench.telemetry.memory import MemoryReading, capacity_bytes
from workbench.telemetry.store import MOVES, TelemetryStore

# In the order of `topology`'s columns; a role without one of these uses has 0 bytes.
USES = ("parameters", "gradients", "optimizer", "generation_weights", "generation_kv_cache", "sync_copy")
ANSWER_S = 2.0  # how long a picture of memory waits for a host


class Topology:
    """Reads the current state of a workbench, and computes what another placement would need and would move."""

    def __init__(
        self, hosts: Hosts, ownership: Ownership, groups: Groups, counters: Counters, telemetry: TelemetryStore
    ) -> None:
        self._hosts, self._ownership, self._groups = hosts, ownership, groups
        self._counters, self._telemetry = counters, telemetry
        self._described: dict[str, Pending] = {}  # the last "describe" call, by host
        self.rates = Rates(hosts, ownership, groups, telemetry)
        self._events, self._events_lock = telemetry.follow("events"), threading.Lock()
        self._moves: list[dict[str, Any]] = []

    def _seen(self, without: Collection[str] = ()) -> list[dict[str, Any]]:
        self._ownership.check_open()
        return self._hosts.describe(without)

    def frame(self) -> pd.DataFrame:
        """Return one row per role and rank, from the live processes: the rank's place in the role's layout (replica,
        pipeline stage, tensor rank), host, process, machine, rack (a label of its Ray node), device, how sequences run,
        tokens of a micro-batch (none before the role's first pass), and bytes by use. `lab.memory()` draws it."""
        answers = self._seen()  # first: it refuses a closed workbench, whose backend may be gone
        rows, racks = [], self._hosts.backend.racks()
        for info, seen in zip(self._hosts.infos, answers, strict=True):
            for role, held in seen["roles"].items():
                if role == "numeric":
                    continue
                replica, stage, tensor = seen["layouts"][role].coordinates(info.rank)
                row = {
                    "role": role,
                    "model": held["model"],
                    "sequences": held.get("sequences"),
                    "micro_batch_tokens": held.get("micro_batch_tokens"),
                    "pool": info.pool,
                    "rank": info.rank,
                    "replica": replica,
                    "stage": stage,
                    "tensor_rank": tensor,
                    "host": info.name,
                    "device": info.device,
                    "process": seen["process"],
                    "machine": seen["machine"],
                    "rack": racks.get(seen["machine"], ""),
                    "host_resident_bytes": seen["resident_bytes"],
                    "host_batch_bytes": seen["batch_bytes"],
                    "host_published_bytes": seen["published_bytes"],
                }
                named = {use.replace(" ", "_"): n for use, n in held.items()}
                known = {"role", "model", "sequences", "micro_batch_tokens"}
                uses = {f"{use}_bytes": n for use, n in named.items() if use not in known}
                nothing = {f"{use}_bytes": 0 for use in USES}
                rows.append({**row, **nothing, **uses})
                # a role without workers of its own uses the bytes of the role whose workers it uses
                sharing = [g for g in self._groups.by_role.values() if g.worker_role == role != g.role]
                rows += [{**row, **nothing, "role": group.role, "model": group.model} for group in sharing]
        frame = pd.DataFrame(rows)
        use = [c for c in frame.columns if c.endswith("_bytes")]
        frame[use] = frame[use].fillna(0).astype("int64")
        host = [c for c in use if c.startswith("host_")]
        return frame[[*(c for c in frame.columns if c not in use), *(c for c in use if c not in host), *host]]

    def summary_html(self, caption: str) -> str:
        """Return a table of the roles: model, engines, pool, devices. Calls no process."""
        rows = []
        for pool in self._hosts.placement.pools:
            devices = ", ".join(info.device for info in self._hosts.infos if info.pool == pool.name)
            for role, group in self._groups.by_role.items():
                if group.pool is not pool:
                    continue
                spec = group.spec
                engines: list[str] = [spec.training.engine] if spec.training and spec.trained else []
                if role in ("actor", ROLLOUT) and spec.generation:
                    engines.append(spec.generation.engine)
                rows.append({
                    "role": role, "model": group.model, "engines": " + ".join(engines),
                    "dtype": spec.dtype if spec.name else "", "pool": pool.name, "devices": devices,
                })  # fmt: skip
        if (environments := self._hosts.placement.environments) is not None:
            devices = f"{environments.devices} processes"
            rows.append({"role": ENVIRONMENT, "pool": environments.name, "devices": devices})
        return table(rows, caption=caption)

    def memory(self) -> DeviceMap:
        """Draw what each device holds now, from the live processes: a box per device, a bar per role. A host that does
        not answer has an empty box that says why."""
        return device_map(self._memory_now(ANSWER_S), f"memory of {self._hosts.description.name}")

    def read_memory(self, timeout_s: PositiveFloat = ANSWER_S) -> list[MemoryReading]:
        """Return what each host holds now, in the order of the placement, and keep it in `telemetry.memory()`. Hosts
        answer while they compute. A host that is gone, or silent for `timeout_s` seconds, is a reading with an
        error."""
        readings = self._memory_now(timeout_s)
        self._telemetry.append_memory(readings)
        return readings

    def _memory_now(self, timeout_s: float) -> list[MemoryReading]:
        self._ownership.check_open()
        infos = list(self._hosts.infos)
        asked = [self._asked(info.name) for info in infos]
        self._hosts.backend.wait(asked, timeout_s)
        now: dict[str, Any] = {"time_s": time.time(), "iteration": self._counters.iteration}
        readings: list[MemoryReading] = []
        for info, answer in zip(infos, asked, strict=True):
            silent = MemoryReading(**now, host=info.name, device=info.device, error=f"no answer in {timeout_s:g} s")
            try:
                readings.append(MemoryReading.of(answer.result(), **now) if answer.done() else silent)
            except Exception as error:  # one host failed; the figures of the others count
                readings.append(replace(silent, error=f"{error}"))
        return readings

    def _asked(self, host: str) -> Pending:
        """Return the "describe" call to a host: a new one, or the last one while that has no answer."""
        asked = self._described.get(host)
        if asked is None or asked.done():
            asked = self._described[host] = self._hosts.backend.ask(host, "describe")
        return asked

    def estimate(self, placement: Placement | None = None) -> MemoryEstimate:
        """Estimate the memory that this workbench's roles need on each device. placement: None: the present one."""
        self._ownership.check_open()
        description = self._hosts.description if placement is None else self._hosts.description.placed(placement)
        seen = self._seen(without=self._hosts.lost)  # hosts of lost pools do not answer
        tokens = {role: held["micro_batch_tokens"] for of in seen for role, held in of["roles"].items()
                  if held.get("micro_batch_tokens")}  # fmt: skip
        return estimate_memory(
            description.placement, description.role_models(), device=description.device,
            device_bytes=seen[0]["device_bytes"] if seen else None, take_turns=description.takes_turns,
            numbers=self._numbers() if placement is None else None, tokens=tokens if placement is None else None,
        )  # fmt: skip

    def diff(self, placement: Placement, **models: Any) -> PlacementChange:
        """Return what a change to another placement would move: which roles, how many bytes between which processes,
        the memory needed on each device, and the expected time. Nothing is changed.

        models: the models of roles that the placement has and the workbench lacks:
        `lab.diff(lab.placement.with_role("cost", "policy"), cost=too_long)` says what `lab.add` would do. Raises
        `BadInput` for a placement that this workbench could not be opened with. `.fits` says whether there is memory,
        and devices for new processes beside the old ones; `.require_fit()` raises if not.
        """
        return self.change(self._hosts.description.placed(placement, self._hosts.description.declaring(models)))

    def change(self, description: Description) -> PlacementChange:
        """Return the change from the current description to another one."""
        lost = self.given_up(description)
        seen = self._seen(without=lost)
        room = self._room(seen)
        change = PlacementChange(
            old=self._hosts.placement,
            new=description.placement,
            models=self._hosts.description.role_models(),
            new_models=description.role_models(),
            numbers=self._numbers(),
            batch_bytes={s["host"]: s["batch_bytes"] for s in seen},
            lost=lost,
            fresh=set(self._counters.weights).difference(*(s["moments"] for s in seen)),
            device=description.device,
            earlier_pools=self._hosts.pools_ended | {info.pool: info.again for info in self._hosts.infos},
            has_bytes=room,
            capacity_bytes=None if room is None else min(map(capacity_bytes, seen)),
        )
        machines, refusal = {s["host"]: s["machine"] for s in seen}, self._refusal(change)
        if refusal is None:
            try:
                new = self._hosts.starting(change, description)
                planned = dict(zip((info.name for info in new), self._hosts.backend.machines(new), strict=False))
                known = {**machines, **planned}  # machines of new processes only where the backend knows them
                change = replace(change, machines=tuple(known.get(name, "") for name in change.names))
            except BadInput as error:  # the free devices are not on one machine
                refusal = error
        change = self.rates.with_rates(change, machines)
        rest_s = self._rest_s(starts=any(place.new for place in change.places))
        return replace(change, refusal=refusal, start_s=_start_s(change, seen), rest_s=rest_s)

    def given_up(self, description: Description) -> set[str]:
        """Return the lost pools whose roles are all missing from another description: they need not be restarted."""
        wanted = set(description.placement.roles)
        return {
            pool.name
            for pool in self._hosts.placement.pools
            if pool.name in self._hosts.lost and not wanted & set(pool.roles)
        }

    def _refusal(self, change: PlacementChange) -> BadInput | None:
        if any(info.offloads for info in self._hosts.infos) and any(role.action != "stays" for role in change.roles):
            return BadInput(
                f"a change of placement with share_memory={self._hosts.description.share_memory!r}",
                "during a move the moved state exists twice, and roles that take turns leave no room for that",
                "open the workbench without share_memory, or open it with the new placement",
            )
        try:
            self._hosts.backend.check_free(
                [place.pool for place in change.places if place.new], self._hosts.infos[0].gpus
            )
        except BadInput as error:
            return error
        return None

    def _numbers(self) -> dict[str, list[int]]:
        """The device numbers of each pool's ranks."""
        found: dict[str, list[int]] = {}
        for info in self._hosts.infos:
            found.setdefault(info.pool, []).append(int(info.device.rpartition(":")[2]))
        return found

    def _room(self, seen: Sequence[dict[str, Any]]) -> int | None:
        """Return `PlacementChange.has_bytes`; None where slots are on several machines."""
        if self._hosts.description.device == "cuda":
            return int(min(s["device_bytes"] for s in seen))
        if len({s["machine"] for s in seen}) > 1:
            return None
        held = sum(tenant.memory.least_bytes(on_cpu=True) for tenant in self.estimate().tenants)
        return int(min(s["available_bytes"] for s in seen)) + held + sum(s["batch_bytes"] for s in seen)

    def _rest_s(self, *, starts: bool) -> float | None:
        """Return `PlacementChange.rest_s`: the mean of the last moves that started processes, or of the other moves."""
        with self._events_lock:
            self._moves += [row["details"] for row in self._events.new() if row["event"] == "move"]
            moves = [move for move in self._moves if move["starts_processes"] == starts]
        rests_s = [max(0.0, m["seconds"] - m["transfer_seconds"] - m["start_seconds"]) for m in moves[-MOVES:]]
        return mean(rests_s) if rests_s else None


def _start_s(change: PlacementChange, seen: Sequence[dict[str, Any]]) -> float:
    """Return `PlacementChange.start_s`: pools start and load in parallel, the roles of one pool one after the other."""
    starting, loading = max((s["start_s"] for s in seen), default=0.0), dict[str, float]()
    for said in seen:
        for role, seconds in said["load_s"].items():
            loading[role] = max(seconds, loading.get(role, 0.0))
    found = dict.fromkeys((place.pool for place in change.places if place.new), starting)
    for role in change.roles:
        if role.action in (*STATE_MOVES, "added"):
            found[role.new_pool] = found.get(role.new_pool, 0.0) + loading.get(role.role, 0.0)
    return max(found.values(), default=0.0)
