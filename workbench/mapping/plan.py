"""A mapping with its predicted time (`Plan`), and the ranked results of a search (`Plans`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from workbench.display.html import bytes_text, seconds_text, table
from workbench.errors import BadInput
from workbench.mapping.costs import Terms
from workbench.mapping.hardware import Hardware
from workbench.mapping.workload import STAGES, Workload
from workbench.placement.placement import Placement
from workbench.settings.layout import Layout
from workbench.settings.roles import ROLLOUT

SURE = 0.95  # from this chance on, `Plans.advice` suggests no trial


@dataclass(frozen=True)
class CallPlan:
    """A call of a role, or a move of its weights before a call, with its terms and seconds."""

    name: str
    stage: str
    terms: Terms
    seconds: float


@dataclass(frozen=True)
class RolePlan:
    """A role of a set. inference, own_t_g: the layout of its forward passes and the tensor ranks of its generation, if
    they differ from `layout`. calls: in the order of the iteration. recomputed: whether its activations are.
    """

    role: str
    layout: Layout
    inference: Layout | None
    own_t_g: int | None
    calls: tuple[CallPlan, ...]
    lasting_bytes: int
    passing_bytes: int
    generation_bytes: int = 0
    recomputed: bool = False

    @property
    def t_g(self) -> int | None:
        """Tensor ranks of generation; None if the role does not generate."""
        return self.own_t_g or self.layout.t_g

    def seconds(self, stage: str) -> float:
        """Return the seconds of the role's calls in a stage."""
        return sum(call.seconds for call in self.calls if call.stage == stage)

    def layouts(self) -> dict[str, int]:
        """Return the sizes of the role's layouts, as plain values."""
        found = {"p": self.layout.p, "t": self.layout.t, "d": self.layout.d}
        if self.t_g is not None:
            found |= {"p_g": 1, "t_g": self.t_g}
        if self.inference is not None:
            one = self.inference
            found |= {"inference_p": one.p, "inference_t": one.t, "inference_d": one.d}
        return found


@dataclass(frozen=True)
class SetPlan:
    """Roles that share devices. transfers: by stage, rows from other sets. cache_bytes: for keys and values."""

    roles: tuple[RolePlan, ...]
    devices: int
    transfers: Mapping[str, CallPlan]
    cache_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the set's roles."""
        return tuple(role.role for role in self.roles)

    def seconds(self, stage: str) -> float:
        """Return the seconds that the set works in a stage, one role after another."""
        return sum(role.seconds(stage) for role in self.roles) + self.transfers[stage].seconds

    @property
    def memory_bytes(self) -> int:
        """The peak bytes on one of the set's devices, without the cache, which takes the rest of the memory."""
        generating = max(role.generation_bytes for role in self.roles)
        return self._lasting_bytes + max(generating, *(role.passing_bytes for role in self.roles))

    @property
    def cached_bytes(self) -> int:
        """The bytes on a device while the set generates, including the cache."""
        generating = max(role.generation_bytes for role in self.roles)
        return self._lasting_bytes + generating + (self.cache_bytes if generating else 0)

    @property
    def _lasting_bytes(self) -> int:
        return sum(role.lasting_bytes for role in self.roles)


@dataclass(frozen=True, eq=False)
class Plan:
    """A mapping. devices: the available devices; `placement` has only the used ones. functions: roles without a model,
    which cost nothing and are placed with the actor. dependencies: whether calls wait for calls of their own stage.
    why: a sentence on what decides the plan's time."""

    sets: tuple[SetPlan, ...]
    devices: int
    workload: Workload
    hardware: Hardware
    functions: tuple[str, ...] = ()
    dependencies: bool = False
    why: str = ""

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of the sets: each is named after its first role; "shared" if there is only one set."""
        return ("shared",) if len(self.sets) == 1 else tuple(one.names[0] for one in self.sets)

    @cached_property
    def placement(self) -> Placement:
        """The placement for `wb.open` and `lab.move`. Generation's tensor ranks are a setting of the engine: see `t_g`.
        Raises `BadInput` if calls of a role have different layouts, because a placement has only one per role."""
        for role in (role for one in self.sets for role in one.roles):
            if role.inference is not None or (role.own_t_g is not None and role.layout.p * role.layout.t > 1):
                raise BadInput(
                    f"the plan {describe(self)}", f"{role.role}'s calls have several layouts, a placement has one",
                    "search with by_call=False for a plan that can be used",
                )  # fmt: skip
        pools: dict[str, tuple[int, tuple[str, ...]]] = {}
        layouts: dict[str, Any] = {}
        for name, one in zip(self.pools, self.sets, strict=True):
            led = "actor" in one.names or (one is self.sets[0] and "actor" not in sum((s.names for s in self.sets), ()))
            pools[name] = (one.devices, one.names + (self.functions if led else ()))
            layouts |= {
                role.role: (role.layout.p, role.layout.t, role.layout.d) for role in one.roles if role.role != ROLLOUT
            }
        return Placement.of(pools, layouts)

    @property
    def t_g(self) -> int:
        """Tensor ranks of generation, for `Generation(tensor_parallel_size=...)`."""
        return next((role.t_g for one in self.sets for role in one.roles if role.t_g is not None), 1)

    @cached_property
    def stage_s(self) -> dict[str, float]:
        """Seconds of each stage: of its slowest set; with `dependencies`, including waits inside the stage."""
        if self.dependencies:
            from workbench.mapping.simulate import simulate

            return simulate(self, barriers=True).stage_s
        return {stage: max(one.seconds(stage) for one in self.sets) for stage in STAGES}

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration. If the workload generates ahead: of generation or of the rest, the longer one."""
        return float(seconds_of(tuple(self.stage_s.values()), self.workload))

    @property
    def throughput_tokens_per_s(self) -> float:
        """Prompt and response tokens of the global batch, divided by the seconds of an iteration."""
        return self.workload.tokens / self.iteration_s

    def slowest(self, stage: str) -> SetPlan:
        """Return the set that takes longest in a stage."""
        return max(self.sets, key=lambda one: one.seconds(stage))

    @property
    def used(self) -> int:
        """The number of devices that have a set."""
        return sum(one.devices for one in self.sets)

    @property
    def idle_share(self) -> float:
        """The share of the time in which devices are idle, over all devices, including unused ones."""
        busy = sum(one.devices * one.seconds(stage) for one in self.sets for stage in STAGES)
        return max(0.0, 1 - busy / (self.devices * self.iteration_s))

    @property
    def memory_bytes(self) -> int:
        """The bytes of the fullest device, see `SetPlan.memory_bytes`."""
        return max(one.memory_bytes for one in self.sets)

    @property
    def fits(self) -> bool:
        """Whether each device has room for its models, their computations, and a cache of one row."""
        return max(self.memory_bytes, *(one.cached_bytes for one in self.sets)) <= self.hardware.usable_bytes

    def memory(self) -> pd.DataFrame:
        """Return a frame with one row per role: its set and devices, whether it recomputes activations, and bytes per
        device by use. Passing bytes are held only while the role computes; the cache takes what the models leave."""
        rows = [
            {"role": role.role, "set": one.names[0], "devices": one.devices, "recomputed": role.recomputed,
             "lasting_bytes": role.lasting_bytes, "passing_bytes": role.passing_bytes,
             "generation_bytes": role.generation_bytes,
             "cache_bytes": one.cache_bytes if role.generation_bytes else 0}
            for one in self.sets for role in one.roles
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def reason(self, other: Plan | None) -> str:
        """Return a sentence on what decides the plan's time, compared with another plan."""
        told = []
        for stage, seconds in self.stage_s.items():
            if seconds:
                slowest = self.slowest(stage)
                where = f" on the devices of {', '.join(slowest.names)}" if len(self.sets) > 1 else ""
                told.append(f"{stage} takes {seconds_text(seconds)}{where}")
        if self.workload.between_s:
            told.append(f"no call runs for {seconds_text(self.workload.between_s)}")
        if self.workload.sync_share < 1:
            told.append(f"weight syncs send {self.workload.sync_share:.2%} of the weights' bytes")
        text = "; ".join(told) + f"; devices are idle {self.idle_share:.0%} of the time"
        if self.used < self.devices:
            text += f", {self.devices - self.used} of {self.devices} all the time"
        if not self.fits:
            text += f"; it does not fit: devices have {bytes_text(self.hardware.usable_bytes)} for models, see memory()"
        if other is None:
            return text + "."
        gap = {stage: seconds - other.stage_s[stage] for stage, seconds in self.stage_s.items()}
        if self.iteration_s <= other.iteration_s:
            most = min(gap, key=lambda stage: gap[stage])
            slower = other.iteration_s / self.iteration_s - 1
            much = f"{slower:.1%} slower, most of it in {most}" if slower >= 0.0005 else "as fast"
            return f"{text}; the next plan, {describe(other)}, is {much}."
        most = max(gap, key=lambda stage: gap[stage])
        slower = self.iteration_s / other.iteration_s - 1
        return f"{text}; {slower:.1%} slower than the best, most of it in {most}."

    def to_dict(self) -> dict[str, Any]:
        return {
            "sets": [
                {"roles": list(one.names), "devices": one.devices, "memory_bytes": one.memory_bytes,
                 "cache_bytes": one.cache_bytes, "layouts": {role.role: role.layouts() for role in one.roles}}
                for one in self.sets
            ],
            "iteration_s": self.iteration_s,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "stage_s": dict(self.stage_s),
            "memory_bytes": self.memory_bytes,
            "idle_share": self.idle_share,
            "why": self.why,
        }  # fmt: skip

    def row(self) -> dict[str, Any]:
        stages = {f"{stage}_s": seconds for stage, seconds in self.stage_s.items()}
        return {"plan": describe(self), "iteration_s": self.iteration_s, **stages,
                "throughput_tokens_per_s": self.throughput_tokens_per_s, "idle_share": self.idle_share,
                "memory_bytes": self.memory_bytes, "devices": self.used, "why": self.why}  # fmt: skip

    def shown(self) -> dict[str, Any]:
        """Return the plan's row as texts for display."""
        stages = {stage: seconds_text(seconds) for stage, seconds in self.stage_s.items()}
        memory = f"{bytes_text(self.memory_bytes)}{'' if self.fits else ', does not fit'}"
        return {"plan": describe(self), "iteration": seconds_text(self.iteration_s), **stages,
                "tokens/s": f"{self.throughput_tokens_per_s:,.0f}", "idle": f"{self.idle_share:.0%}",
                "memory": memory}  # fmt: skip

    def __repr__(self) -> str:
        told = "" if self.fits else ", but it does not fit"
        return f"<Plan {describe(self)}: {seconds_text(self.iteration_s)} per iteration{told}>"

    def _repr_html_(self) -> str:
        where = f"{self.workload.algorithm} on {self.devices} devices ({self.hardware.name})"
        return f"{table([self.shown()], caption=where)}<p>{escape(self.why)}</p>"


def seconds_of(stages: Any, workload: Workload) -> Any:
    """Return the seconds of an iteration. stages: the seconds of each of `STAGES`, as numbers or arrays."""
    generation, *others = stages
    return workload.between_s + (np.maximum(generation, sum(others)) if workload.ahead else generation + sum(others))


def gap_of(times: float) -> float:
    """Return `Plans.gap` of a best plan that takes `times` times as long as the bound: 0 if only rounding differs."""
    return max(0.0, round(times - 1, 8))


def describe(plan: Plan) -> str:
    """Describe a plan in one line: its sets with their devices and layouts."""

    def role(one: RolePlan) -> str:
        def sizes(layout: Layout) -> str:
            return f"{layout.p}, {layout.t}, {layout.d}"

        generation = f", t_g={one.t_g}" if one.t_g else ""
        inference = f", inference {sizes(one.inference)}" if one.inference else ""
        return f"{one.role} ({sizes(one.layout)}{generation}{inference})"

    return " | ".join(f"[{one.devices}] {', '.join(map(role, one.roles))}" for one in plan.sets)


@dataclass(frozen=True, eq=False)
class Plans:
    """The result of a search: plans with different sets, the fastest first, and how they were searched.

    granularity: allocations are multiples of this many devices. placements_considered: partitions of the roles into
    sets. gap: how much longer, at most, the best plan takes than the optimum of the cost model over all numbers of
    devices, as a share; infinite if not known, as with a granularity above 1. error: the relative error of a predicted
    iteration, if a workbench has measured it. findings: about the constants, see `Constants.findings`.
    """

    plans: tuple[Plan, ...]
    workload: Workload
    hardware: Hardware
    devices: int
    granularity: int
    placements_considered: int
    search_s: float
    gap: float
    error: float | None = None
    findings: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether no plan is faster, by the cost model."""
        return self.gap == 0

    @property
    def chance(self) -> float | None:
        """The probability that the best plan is really faster than the next, if the errors log(predicted / true) are
        normal, independent, and have the standard deviation `error`:  Phi(log(next / best) / (error sqrt 2)). None if
        the error is not known, or there is only one plan."""
        if self.error is None or len(self.plans) < 2:
            return None
        apart = math.log(self.plans[1].iteration_s / self.best.iteration_s)
        return 0.5 * (1 + math.erf(apart / (2 * max(self.error, 1e-9))))

    @property
    def advice(self) -> str:
        """A text on how sure the best plan is, and what one trial would decide; "" if the error is not known."""
        if self.chance is None:
            return ""
        after = self.plans[1]
        told = (f"Predictions have an error of {self.error:.0%} here: the best is faster than the next with probability"
                f" {self.chance:.0%}.{''.join(f' A finding: {one}.' for one in self.findings)}")  # fmt: skip
        if self.chance >= SURE:
            return told
        return (f"{told} Run one iteration under the best: if it takes more than "
                f"{seconds_text(after.iteration_s)}, the next, {describe(after)}, is probably better.")  # fmt: skip

    @property
    def best(self) -> Plan:
        return self.plans[0]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, n: int) -> Plan:
        return self.plans[n]

    def frame(self) -> pd.DataFrame:
        """Return one row per plan: seconds by stage, tokens per second, idle share, the fullest device's bytes, why."""
        return pd.DataFrame([plan.row() for plan in self.plans])

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.to_dict(),
            "alternatives": [plan.to_dict() for plan in self.plans[1:]],
            "placements_considered": self.placements_considered,
            "granularity": self.granularity,
            "search_s": self.search_s,
            "exact": self.exact,
            "gap": self.gap if math.isfinite(self.gap) else None,
            **({} if self.chance is None else {"chance": self.chance}),
        }

    def _caption(self) -> str:
        how = f"allocations in multiples of {self.granularity} devices, " if self.granularity > 1 else ""
        bound = f"at most {self.gap:.1%} slower than the optimum" if math.isfinite(self.gap) else "without a bound"
        how += "exact" if self.exact else bound
        where = f"{self.workload.algorithm} on {self.devices} devices ({self.hardware.name})"
        count = f"{self.placements_considered} placement{'s' * (self.placements_considered != 1)}"
        return f"{where}: {count}, {how}, searched in {seconds_text(self.search_s)}"

    def __repr__(self) -> str:
        lines = [
            "  " + "  ".join(str(value) if name == "plan" else f"{name} {value}" for name, value in row.items())
            for row in (plan.shown() for plan in self.plans)
        ]
        return "\n".join(filter(None, [self._caption(), *lines, self.best.why, self.advice]))

    def _repr_html_(self) -> str:
        told = "".join(f"<p>{text}</p>" for text in (self.best.why, self.advice) if text)
        return table([plan.shown() for plan in self.plans], caption=self._caption()) + told


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """Sort plans by their seconds, and set `why` of each: the best plan is compared with the second, the others with
    the best."""
    found = sorted(plans, key=lambda plan: plan.iteration_s)
    beside: list[Plan | None] = [*found[1:2], *(found[0] for _ in found[1:])] or [None]
    return [replace(plan, why=plan.reason(other)) for plan, other in zip(found, beside, strict=True)]
