"""The search for the fastest mapping (HybridFlow, algorithm 1): exact, without enumerating all mappings.

    seconds of an iteration = sum over the stages of  max over the sets of  sum over the set's roles of  seconds

A set of roles on n devices has a list of (generation, preparation, training) seconds, one for each way to lay out its
roles; only ways that no other way beats in all three matter. Two sets side by side take the larger of each number, and
the sum of the devices. So for a partition of the roles, the best allocation is found by adding one set after another
and keeping the rows (devices, seconds by stage) that no other row beats. A dropped row cannot lead to a better plan,
because sums and maxima grow with their parts. Within a set, roles are joined one after another in the same way: among
ways of roles that do not generate, those that others beat in seconds, lasting and passing bytes are dropped.

Bounds exclude most sizes of a set before that, with coarse multiples of devices first; docs/mapping.md says why the
plan is still the best, and how seconds are rounded beyond `MOST_EXACT` devices. `tests/mapping` compares the search
with enumerating all mappings.

The paper's algorithm tries layouts for `t = t_min` up to a machine's devices and for each `p` from `p_min` up to
`devices / machine`: none at all below a machine, and some whose sizes do not divide. Here every (p, t, d) is tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from workbench.errors import BadInput
from workbench.mapping.costs import Constants
from workbench.mapping.hardware import Hardware
from workbench.mapping.hardware import hardware as hardware_of
from workbench.mapping.options import Option, RoleOptions, options_of, undominated
from workbench.mapping.plan import Plan, Plans, gap_of, ranked, seconds_of
from workbench.mapping.predict import set_plan, transfers
from workbench.mapping.refusal import nothing_fits
from workbench.mapping.workload import Workload, role_models
from workbench.placement.role_model import RoleModel
from workbench.settings.engines import SyncStrategy
from workbench.settings.roles import ROLLOUT
from workbench.support.checked_calls import checked_call
from workbench.support.validation import PositiveInt

MOST_SIZES = 16_384  # of a set, in the grid of allocations: so fine is the granularity that is chosen
MOST_EXACT = 2048  # devices up to which seconds are not rounded
LOG_STEP = math.log(1.01)  # of the logarithm of seconds, where they are
FEW_SIZES, FINER = 8, 4  # sizes that are tried without a plan that bounds them; how much finer the next multiples are
MOST_PAIRS = 100_000  # of rows that are weighed at a time
SLACK = 1e-9  # relative, of what is compared: far above what summing in another order changes
MOST_TIMES, DOUBLING_STEPS = 8, 16  # where nothing fits: as many devices at most, and steps from half to all of them
POLICY = ("actor", "reference")
Named = Literal["auto", "colocate", "split", "standalone"]

Sets = tuple[tuple[str, ...], ...]
_Found = tuple[Plan | None, float]  # of a partition: the best plan, seconds than which none takes less
_Set = tuple[tuple[str, ...], int, tuple[Option, ...]]  # roles, devices, and how each role is laid out there
_Sized = tuple[NDArray[np.float64], list[_Set]]  # rows of ways of a set; where each comes from
# [ways, 5]: seconds by stage, lasting and passing bytes; DeepSpeed's tensor ranks, 0: none; an option for each role
_Ways = tuple[NDArray[np.float64], NDArray[np.int64], list[tuple[Option, ...]]]


@checked_call("wb.mapping.search")
def search(
    models: Mapping[str, Any],
    *,
    devices: PositiveInt,
    hardware: str | Hardware = "a100-80g",
    workload: Workload | str = "ppo",
    placement: Named = "auto",
    granularity: PositiveInt | None = None,
    strategy: SyncStrategy = "hybridflow",
    t_g: PositiveInt | None = None,
    by_call: bool = False,
    uncalled: bool = False,
    dependencies: bool = False,
    constants: Constants | None = None,
    top: PositiveInt | None = None,
) -> Plans:
    """Return the best plan of each partition of the roles into sets, the fastest first.

    models: role -> size preset ("llama-7b", ...), a model's name or folder, a transformers config; None: a function,
    which is not placed and costs nothing. hardware, workload: presets by name, or descriptions. placement: search only
    this named placement; "split" gives each set half of the devices, unless there are rollout workers. granularity:
    allocations are multiples of this many devices; None: 1 up to 16,384 devices. A plan may leave devices idle. With a
    granularity of 1, the best plan is the optimum up to 2048 devices, and within 1 % of it beyond: see `Plans.gap`.
    strategy: of the transition, as in `wb reshard`. t_g: tensor ranks of generation; None: the best. by_call:
    generation, forward passes and training of a role may each have their own layout, to which weights are copied in
    each iteration (as in ReaLHF, arXiv:2406.14088); a workbench cannot carry out such a plan yet. uncalled: also place
    models of roles that the workload does not call, which take memory; else such roles are refused. dependencies: a
    call also waits for calls of its own stage whose rows it reads; each partition's best plan is then compared by its
    simulation, and the answer is `exact` if the best plan has no such waits. constants: of the cost model, for example
    from `lab.calibrate()`. top: return at most this many plans.

    Raises `BadInput` before the search if arguments do not fit together, and, with the bytes, if no plan fits.
    """
    workload = workload if isinstance(workload, Workload) else Workload(algorithm=workload)
    machine, constants = hardware_of(hardware), constants or Constants()
    machine.flop_s(workload.dtype)
    workload = workload.with_models(models)
    placed = role_models(models, workload)
    if not uncalled and (idle := [role for role in placed if role not in workload.roles]):
        raise BadInput(f"a model for {idle[0]}", f"{workload.algorithm} has no call of {idle[0]}",
                       f"leave it out: {workload.algorithm} uses {', '.join(workload.roles)}")  # fmt: skip
    start_s = time.perf_counter()
    alone = ((ROLLOUT,),) if ROLLOUT in placed else ()
    partitions = [(*sets, *alone) for sets in partitions_of(tuple(r for r in placed if r != ROLLOUT), placement)]
    unit = granularity or 1 << ((devices - 1) // MOST_SIZES).bit_length()
    if unit > devices:
        raise BadInput(f"granularity={unit}", f"there are {devices} devices", "use a smaller one")
    if (most := min(map(len, partitions))) * unit > devices:
        raise BadInput(f"placement {placement!r} on {devices} devices", f"it needs {most} sets of {unit}+ devices",
                       f"use more devices{', or a smaller granularity' * (unit > 1)}")  # fmt: skip
    if t_g is not None and machine.devices_per_machine % t_g:
        raise BadInput(f"t_g={t_g}", f"t_g must divide the {machine.devices_per_machine} devices of a machine")
    functions = tuple(role for role, model in models.items() if model is None)

    def prepared(work: Workload, roles: Mapping[str, RoleModel]) -> _Search:
        options = options_of(roles, machine, work, constants, strategy=strategy, t_g=t_g, by_call=by_call)
        return _Search(options, devices, functions, halves=placement == "split" and not alone)

    one, steps = prepared(workload, placed), [unit]
    while devices // steps[0] > FEW_SIZES and not one.halves:
        steps.insert(0, steps[0] * FINER)
    every: list[_Found] = [(None, math.inf)] * len(partitions)
    for step in steps:
        every = one.refine(partitions, step, every)
    if all(plan is None for plan, _ in every):
        raise nothing_fits(lambda *other: prepared(*other).fewest(partitions, unit), one.options, devices, placement,
                           unit)  # fmt: skip
    found = ranked(replace(plan, dependencies=dependencies) for plan, _ in every if plan is not None)
    gap = math.inf if unit > 1 else gap_of(found[0].iteration_s / min(seconds for _, seconds in every))
    return Plans(
        plans=tuple(found[:top]), workload=workload, hardware=machine, devices=devices, granularity=unit,
        placements_considered=len(partitions), search_s=time.perf_counter() - start_s, gap=gap,
    )  # fmt: skip


def partitions_of(roles: tuple[str, ...], placement: Named = "auto") -> list[Sets]:
    """Return all partitions of the roles into sets (5 of three roles, 15 of four, 52 of five), or the named one."""
    if placement == "auto":
        return list(_partitions(roles))
    if placement == "colocate":
        return [(roles,)]
    if placement == "standalone":
        return [tuple((role,) for role in roles)]
    halves = tuple(role for role in roles if role in POLICY), tuple(role for role in roles if role not in POLICY)
    if not all(halves):
        raise BadInput("placement 'split'", "both halves need roles: actor and reference on one, others on the other",
                       f"the roles are {', '.join(roles)}: use another placement")  # fmt: skip
    return [halves]


def _partitions(roles: tuple[str, ...]) -> Iterator[Sets]:
    if not roles:
        yield ()
        return
    first, rest = roles[0], roles[1:]
    for sets in _partitions(rest):
        yield ((first,), *sets)
        for n, one in enumerate(sets):
            yield (*sets[:n], (first, *one), *sets[n + 1 :])


class _Search:
    """Computes and caches, for all partitions, the ways of sets by number of devices, and their bounds. halves: whether
    each of two sets has half of the devices."""

    def __init__(self, options: Mapping[str, RoleOptions], devices: int, functions: tuple[str, ...], *,
                 halves: bool) -> None:  # fmt: skip
        self.options, self.functions, self.devices, self.halves = options, functions, devices, halves
        self.model = next(iter(options.values())).model
        self._least: dict[tuple[str, int], NDArray[np.float64]] = {}
        self._sized: dict[tuple[tuple[str, ...], int], _Sized] = {}
        self._ways: dict[tuple[tuple[str, ...], int], _Ways] = {}

    def refine(self, partitions: Sequence[Sets], unit: int, found: Sequence[_Found]) -> list[_Found]:
        """Return, for each partition, the best plan in multiples of `unit` devices, and a lower bound of the seconds.
        found: the results so far, which bound the search."""
        limits = [np.inf if plan is None else plan.iteration_s * (1 + SLACK) for plan, _ in found]
        # sets that generate have the most ways: add them last
        orders = [sorted(sets, key=lambda one: (any(self.options[r].generates for r in one), len(one), one))
                  for sets in partitions]  # fmt: skip
        windows = [self._windows(sets, unit, limit) for sets, limit in zip(orders, limits, strict=True)]
        sizes: dict[tuple[str, ...], Any] = {}
        for sets, (within, _) in zip(orders, windows, strict=True):
            for one, mask in zip(sets, within, strict=True):
                sizes[one] = sizes.get(one, False) | mask
        rows = {one: self._rows(one, np.flatnonzero(mask).tolist(), unit) for one, mask in sizes.items()}
        better = []
        for sets, (within, after), limit, (plan, _) in zip(orders, windows, limits, found, strict=True):
            least_s, picks = self._side_by_side([rows[one][0] for one in sets], within, after, limit)
            if len(picks):
                other = self._plan([rows[one][1][k] for one, k in zip(sets, picks, strict=True)])
                plan = other if plan is None or other.iteration_s < plan.iteration_s else plan
            better.append((plan, least_s))
        return better

    def fewest(self, partitions: Sequence[Sets], unit: int) -> float:
        """Return the least number of devices on which a partition fits, found in steps of at most one sixteenth of this
        number; infinite if no partition fits on up to `MOST_TIMES` as many devices as requested."""

        def fit(one: tuple[str, ...], devices: int) -> bool:
            least = [min((way.lasting for way in self.options[role].on(devices)), default=math.inf) for role in one]
            return sum(least) <= self.model.hardware.usable_bytes and bool(len(self._ways_of_set(one, devices)[0]))

        def found(*sets: tuple[str, ...]) -> float:
            last = unit
            while not (fits := all(fit(one, last) for one in sets)) and last < MOST_TIMES * self.devices:
                last *= 2
            between = range(last // 2, last, max(unit, last // 2 // DOUBLING_STEPS)) if last > unit else ()
            near = (n for n in between if all(fit(one, n) for one in sets))
            return next(near, last) if fits else math.inf

        if self.halves:
            return 2 * found(*partitions[0])
        counts = {one: found(one) for one in dict.fromkeys(chain(*partitions))}
        return min(sum(counts[one] for one in sets) for sets in partitions)

    def least(self, roles: tuple[str, ...], unit: int) -> NDArray[np.float64]:
        """Return lower bounds [units + 1, 3] of a set's seconds by stage, for each exact number of units: the sum of
        its roles' lower bounds. Infinite if the set does not fit."""
        for role in roles:
            if (role, unit) not in self._least:
                rows = [self._least_of(role, devices) for devices in range(unit, self.devices + 1, unit)]
                self._least[role, unit] = np.array([(np.inf,) * 4, *rows])
        found = np.sum([self._least[role, unit] for role in roles], axis=0)
        found[found[:, 3] > self.model.hardware.usable_bytes] = np.inf
        return self._rounded(found[:, :3] * (1 - SLACK))

    def _least_of(self, role: str, devices: int) -> tuple[float, ...]:
        """Return a role's least seconds of each stage, and its least lasting bytes, over all options."""
        options = self.options[role].on(devices)
        if not options:
            return (np.inf,) * 4
        figures = np.array([(*option.seconds, option.lasting) for option in options])
        if self.options[role].generates:
            figures[:, 0] += self._generation(role, devices, np.array([o.t_g for o in options]), figures[:, 3])
        return tuple(figures.min(axis=0))

    def _rounded(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.devices <= MOST_EXACT:
            return seconds
        with np.errstate(divide="ignore"):
            return np.exp(np.floor(np.log(seconds) / LOG_STEP) * LOG_STEP)

    def _windows(self, sets: Sequence[tuple[str, ...]], unit: int, limit: float) -> tuple[list[Any], list[Any]]:
        """Return, for each set, a mask of the units with which a plan can stay within `limit`; and lower bounds for the
        sets after it, by the units left for them."""
        least = [self.least(one, unit) for one in sets]
        falling = [np.minimum.accumulate(one) for one in least]
        before = list(accumulate(falling, _beside, initial=np.zeros_like(least[0])))
        after = list(accumulate(falling[::-1], _beside, initial=np.zeros_like(least[0])))[::-1]
        within = []
        for n, one in enumerate(least):
            others = _beside(before[n], after[n + 1])[::-1]
            bound = seconds_of(np.maximum(one, others).T, self.model.workload)
            mask = (bound <= limit) & np.isfinite(bound)
            within.append(mask & (np.arange(len(one)) == self.devices // 2 // unit) if self.halves else mask)
        return within, after[1:]

    def _rows(self, roles: tuple[str, ...], sizes: Sequence[int], unit: int) -> _Sized:
        """Return (units, seconds by stage) of a set's ways on the given numbers of units, without ways that others
        beat, and the `_Set` of each row."""
        least, found, origins = self.least(roles, unit), np.zeros((0, 4)), list[_Set]()
        for units in sizes:
            if (found[:, 1:] <= least[units]).all(axis=1).any():
                continue
            exact, made = self._ways_of_set(roles, units * unit)
            seconds = self._rounded(exact)
            kept = [k for k in undominated(seconds) if not (found[:, 1:] <= seconds[k]).all(axis=1).any()]
            found = np.concatenate([found, np.column_stack([np.full(len(kept), units), seconds[kept]])])
            origins += [made[k] for k in kept]
        return found, origins

    def _side_by_side(
        self, rows: Sequence[NDArray[np.float64]], within: Sequence[Any], after: Sequence[Any], limit: float
    ) -> tuple[float, NDArray[np.int64]]:
        """Return the least seconds of an iteration with sets side by side (the slowest set decides each stage), and the
        chosen row of each set; if nothing is within the limit: the limit, and no rows."""
        units, joint, picks = len(after[0]) - 1, np.zeros((1, 5)), np.zeros((1, 0), dtype=np.int64)
        for own, mask, rest in zip(rows, within, after, strict=True):
            numbers = np.flatnonzero(mask[own[:, 0].astype(int)])
            every, chosen = [joint[:0]], [np.zeros((0, picks.shape[1] + 1), dtype=np.int64)]
            for part in np.array_split(np.arange(len(joint)), len(joint) * len(numbers) // MOST_PAIRS + 1):
                a, b = np.nonzero(joint[part, None, 0] + own[None, numbers, 0] <= units)
                a, b = part[a], numbers[b]
                taken, seconds = joint[a, 0] + own[b, 0], np.maximum(joint[a, 1:4], own[b, 1:])
                bound = seconds_of(np.maximum(seconds, rest[units - taken.astype(int)]).T, self.model.workload)
                kept = np.flatnonzero(bound <= limit)
                if rest is after[-1]:
                    kept = kept[np.argsort(bound[kept])[:1]]
                new = np.column_stack([taken, seconds, bound])[kept]
                best = undominated(new[:, :4])
                every.append(new[best])
                chosen.append(np.column_stack([picks[a], b])[kept[best]])
            joint, picks = np.concatenate(every), np.concatenate(chosen)
            best = undominated(joint[:, :4])
            joint, picks = joint[best], picks[best]
        if not len(joint):
            return limit, np.zeros(0, dtype=np.int64)
        n = joint[:, 4].argmin()
        return float(joint[n, 4]), picks[n]

    def _ways_of_set(self, roles: tuple[str, ...], devices: int) -> _Sized:
        """Return the ways of a set on exactly `devices` devices."""
        if (roles, devices) in self._sized:
            return self._sized[roles, devices]
        makers = [role for role in roles if self.options[role].generates]
        others = tuple(role for role in roles if role not in makers)
        figures, tensor, ways = self._ways_without_generation(others, devices)
        index = np.arange(len(figures))
        chosen: list[NDArray[np.int64]] = []
        for role in makers:
            figures, tensor, before, own = self._joined(figures, tensor, role, devices)
            index, chosen = index[before], [*(picks[before] for picks in chosen), own]
        seconds = figures[:, :3].copy()
        for role, picks in zip(makers, chosen, strict=True):
            sizes = np.array([option.t_g for option in self.options[role].on(devices)], dtype=np.int64)[picks]
            seconds[:, 0] += self._generation(role, devices, sizes, figures[:, 3])
        seconds += [one.seconds for one in transfers(roles, devices, self.options).values()]
        possible = np.flatnonzero(np.isfinite(seconds).all(axis=1))
        kept, origins = possible[undominated(seconds[possible])], []
        for k in kept:
            found = dict(zip(others, ways[index[k]], strict=True))
            for role, picks in zip(makers, chosen, strict=True):
                found[role] = self.options[role].on(devices)[picks[k]]
            origins.append((roles, devices, tuple(found[role] for role in roles)))
        self._sized[roles, devices] = seconds[kept], origins
        return seconds[kept], origins

    def _ways_without_generation(self, roles: tuple[str, ...], devices: int) -> _Ways:
        """Return the ways of roles that do not generate, without ways that others beat in seconds and bytes. A beaten
        way cannot be better in any set, because a set's seconds grow with its roles' seconds, and with the memory that
        they take from a cache. Ways with different sizes of DeepSpeed's tensor groups are not compared."""
        if not roles:
            return np.zeros((1, 5)), np.zeros(1, dtype=np.int64), [()]
        if (roles, devices) not in self._ways:
            figures, tensor, ways = self._ways_without_generation(roles[:-1], devices)
            figures, tensor, before, own = self._joined(figures, tensor, roles[-1], devices)
            kept: list[int] = []
            for size in np.unique(tensor):
                alike = np.flatnonzero(tensor == size)
                kept += alike[undominated(figures[alike])].tolist()
            options = self.options[roles[-1]].on(devices)
            found = [(*ways[before[k]], options[own[k]]) for k in kept]
            self._ways[roles, devices] = figures[kept], tensor[kept], found
        return self._ways[roles, devices]

    def _joined(self, figures: NDArray[np.float64], tensor: NDArray[np.int64], role: str, devices: int) -> Any:
        """Combine ways with each option of one more role, if both fit: return figures [ways, 5], DeepSpeed's tensor
        ranks (0: none; a process has groups of one size only), and the index of each result's way and option."""
        options, deepspeed = self.options[role].on(devices), self.options[role].by_deepspeed
        own = np.array([(*one.seconds, one.lasting, one.passing) for one in options], dtype=np.float64).reshape(-1, 5)
        ranks = np.array([one.layout.t if deepspeed else 0 for one in options], dtype=np.int64)
        joint = figures[:, None, :] + own[None]
        joint[..., 4] = np.maximum(figures[:, None, 4], own[None, :, 4])
        fits = joint[..., 3] + joint[..., 4] <= self.model.hardware.usable_bytes
        fits &= (tensor[:, None] == 0) | (ranks[None] == 0) | (tensor[:, None] == ranks[None])
        before, added = np.nonzero(fits)
        return joint[before, added], np.maximum(tensor[before], ranks[added]), before, added

    def _generation(
        self, role: str, devices: int, sizes: NDArray[np.int64], lasting: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the seconds of generation, by its tensor ranks and the memory that the models leave to the cache."""
        options, seconds = self.options[role], np.zeros(len(sizes))
        for t_g in np.unique(sizes):
            mine = sizes == t_g
            caches = self.model.hardware.usable_bytes - lasting[mine] - options.generation_bytes(int(t_g))
            seconds[mine] = options.generation_seconds(devices, int(t_g), caches)
        return seconds

    def _plan(self, chosen: Sequence[_Set]) -> Plan:
        sets = [set_plan(roles, options, devices, self.options) for roles, devices, options in chosen]
        sets.sort(key=lambda one: [list(self.options).index(role.role) for role in one.roles])
        return Plan(tuple(sets), devices=self.devices, workload=self.model.workload, hardware=self.model.hardware,
                    functions=self.functions)  # fmt: skip


def _beside(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return lower bounds of two groups of sets side by side, by the units that they share: for each stage separately,
    the least seconds of the slower group. one, other: [units + 1, 3], falling with the units."""
    found, units = np.full(one.shape, np.inf), np.arange(len(one))
    for a, b in ((one, other), (other, one)):
        for stage in range(a.shape[1]):
            taken = units + np.searchsorted(-b[:, stage], -a[:, stage])  # the units with which b is not slower than a
            fits = taken < len(units)
            np.minimum.at(found[:, stage], taken[fits], a[fits, stage])
    return np.minimum.accumulate(found)
