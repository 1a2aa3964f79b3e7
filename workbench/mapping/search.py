"""The search for the mapping of least time (HybridFlow, algorithm 1), exact, without walking through all mappings.

    seconds of an iteration = sum over the stages of  max over the sets of  sum over the set's roles of  seconds

A set of roles on n devices has a list of (generation, preparation, training) seconds, one for each way to lay its roles
out, of which those count that no other beats in all three. Two sets side by side take the larger of each number. So for
a partition of the roles the best of all allocations is found by adding one set after another and keeping, for each
number of devices, the triples that no other beats: what is dropped can end in no better plan, whatever comes after it,
as sums and maxima grow with their parts. Within a set, roles are joined one after another in the same way: of those
that generate nothing, what others beat in seconds, in lasting and in passing bytes is dropped. `tests/mapping` holds
this against walking through all mappings.

The printed algorithm tries layouts for `t = t_min` up to a machine's devices and for each `p` from `p_min` up to
`devices / machine`: none at all below a machine, and some whose sizes do not divide. Here every (p, t, d) is tried.

What is said where nothing fits: the bytes, and the settings that would help, each of which has been tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from workbench.display.html import bytes_text
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.mapping.costs import Constants
from workbench.mapping.hardware import Hardware
from workbench.mapping.hardware import hardware as hardware_of
from workbench.mapping.options import Option, RoleOptions, options_of, undominated
from workbench.mapping.plan import Plan, Plans, ranked, seconds_of
from workbench.mapping.predict import set_plan, transfers
from workbench.mapping.workload import Workload, role_models
from workbench.placement.role_model import RoleModel
from workbench.settings.roles import ROLLOUT, check_role
from workbench.support.checked_calls import checked_call
from workbench.support.validation import one_of, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


Fits = Callable[[Workload, Mapping[str, RoleModel], int], bool]
TIMES = (2, 4, 8)  # as many devices as were asked about


def nothing_fits(options: Mapping[str, RoleOptions], devices: int, placement: str, unit: int, fits: Fits) -> BadInput:
    """The error. unit: devices that allocations are multiples of. fits: whether something would fit."""
    model = next(iter(options.values())).model
    roles, hardware = {name: one.role for name, one in options.items()}, model.hardware
    sizes = range(unit, devices + 1, unit)
    if unit > 1 and not any(one.layouts(n, fit=False) for n in sizes for one in options.values()):
        return BadInput(
            f"granularity={unit}", f"no layout cuts these models over {unit} devices, or a multiple up to {devices}",
            "take one that divides a machine's devices, or leave it out",
        )  # fmt: skip
    needs = {name: role.elements * (16 if role.trained else role.frozen_bytes) for name, role in roles.items()}
    told = ", ".join(f"{name} {bytes_text(n)}" for name, n in needs.items())
    remedies = settings_that_fit(fits, model.workload, roles, devices)
    return BadInput(
        f"{len(roles)} models on {devices} devices of {bytes_text(hardware.memory_bytes)} ({hardware.name}), "
        f"placement {placement!r}",
        f"no layout was found that fits: weights, gradients and optimizers take {bytes_text(sum(needs.values()))} "
        f"({told}), and the devices have {bytes_text(devices * hardware.usable_bytes)} for them",
        f"with {', or '.join(remedies)} they fit" if remedies else "take smaller models, or many more devices",
    )


def settings_that_fit(fits: Fits, workload: Workload, roles: Mapping[str, RoleModel], devices: int) -> list[str]:
    """What to write so that the models fit, as sentences: each setting that is enough by itself, or all of them
    together, and how many devices are enough without any."""
    changes = list(_changes(workload, roles))
    found = [text for text, *change in changes if fits(*_changed(workload, roles, *change), devices)]
    if not found and len(changes) > 1:
        every = workload, roles
        for _, *change in changes:
            every = _changed(*every, *change)
        if fits(*every, devices):
            found.append(" and ".join(text for text, *_ in changes))
    count = next((times * devices for times in TIMES if fits(workload, roles, times * devices)), None)
    return found if count is None else [*found, f"{count} devices"]


def _changes(workload: Workload, roles: Mapping[str, RoleModel]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(what to write, engine of the workload, settings of training)."""
    trained = [role for role in roles.values() if role.trained]
    if workload.engine == "workbench" and any(role.engine == "torch" for role in trained):
        yield 'Workload(engine="cluster"), whose optimizer is cut over replicas', "cluster", {}
    if not all(role.training.activation_checkpointing for role in trained):
        yield "Training(activation_checkpointing=True)", workload.engine, {"activation_checkpointing": True}
    longest = workload.prompt_tokens + max(workload.lengths)
    if any(role.micro_batch_tokens > longest for role in roles.values()):
        yield f"Training(micro_batch_tokens={longest})", workload.engine, {"micro_batch_tokens": longest}
    if any(role.engine in ("zero0", "zero1", "zero2") for role in trained):
        yield "Training(zero_stage=3)", workload.engine, {"zero_stage": 3}


def _changed(
    workload: Workload, roles: Mapping[str, RoleModel], engine: Any, settings: dict[str, Any]
) -> tuple[Workload, Mapping[str, RoleModel]]:
    changed = {name: replace(role, training=replace(role.training, **settings)) for name, role in roles.items()}
    return replace(workload, engine=engine, training=replace(workload.training, **settings)), changed


MOST_SIZES = 128  # of a set, in the grid of allocations: so fine is the granularity that is chosen
COARSE = 16  # allocations of each set that are tried to tell whether a setting makes a placement fit
POLICY = ("actor", "reference")
Named = Literal["auto", "colocate", "split", "standalone"]

Sets = tuple[tuple[str, ...], ...]
_Set = tuple[tuple[str, ...], int, tuple[Option, ...]]  # roles, devices, and how each role is laid out there
# [ways, 5]: seconds by stage, lasting and passing bytes; DeepSpeed's tensor ranks, 0: none; an option for each role
_Ways = tuple["NDArray[np.float64]", "NDArray[np.int64]", list[tuple[Option, ...]]]


@dataclass(frozen=True, eq=False)
class Front:
    """Triples of stage seconds that no other beats, and where each comes from."""

    seconds: NDArray[np.float64]  # [k, 3]
    origins: tuple[tuple[_Set, ...], ...]


@checked_call("wb.mapping.search")
def search(
    models: Mapping[str, Any],
    *,
    devices: int,
    hardware: str | Hardware = "a100-80g",
    workload: Workload | str = "ppo",
    placement: Named = "auto",
    granularity: int | None = None,
    strategy: str = "hybridflow",
    t_g: int | None = None,
    by_call: bool = False,
    uncalled: bool = False,
    dependencies: bool = False,
    constants: Constants | None = None,
    top: int | None = None,
) -> Plans:
    """The plans for these models on so many devices, the quickest first: the best of each partition of the roles.

    models: role -> size preset ("llama-7b", ...), a model's name or folder, a transformers config; None: a function,
    which is not placed. hardware, workload: presets by name, or as described. placement: only this one of the named
    placements: "split" gives each half of the devices. granularity: devices that allocations are multiples of; None:
    so fine that a set has at most 128 sizes, 1 up to 128 devices. A plan may leave devices idle. strategy: of the
    transition, as of `wb reshard`. t_g: tensor ranks of generation; None: the best. by_call: generation, forward passes
    and training of a role each have a layout of their own, to which weights are copied each iteration (ReaLHF's
    question, arXiv:2406.14088); such a plan is no placement of a workbench yet. uncalled: models of roles that the
    workload does not call are placed as well, and take memory; else they are refused. dependencies: a call also waits
    for calls of its own stage whose rows it reads; each partition's best plan is then weighed by its simulation, and
    the answer is `exact` where the best of them waits for none. constants: of the cost model, such as `lab.calibrate()`
    gives. top: so many plans.

    Raises `BadInput`, before anything is searched, for what does not go together; where nothing fits, with the bytes.
    """
    whole("devices", devices, 1)
    for name, number in {"granularity": granularity, "top": top, "t_g": t_g}.items():
        if number is not None:
            whole(name, number, 1)
    one_of("placement", placement, ("auto", "colocate", "split", "standalone"))
    one_of("strategy", strategy, ("hybridflow", "v", "full"))
    workload = workload if isinstance(workload, Workload) else Workload(algorithm=workload)
    if not isinstance(models, Mapping):
        raise BadInput(f"models={shown(models)}", "a model for each role", 'write {"actor": "llama-7b", ...}')
    if "cost_critic" not in models:
        workload = workload.with_roles(set(workload.roles) - {"cost_critic"})
    for role in models:
        check_role(role)
    machine, constants = hardware_of(hardware), constants or Constants()
    machine.flop_s(workload.dtype)
    placed = role_models(models, workload)
    if not uncalled and (idle := [role for role in placed if role not in workload.roles]):
        raise BadInput(f"a model for {idle[0]}", f"{workload.algorithm} has no call of {idle[0]}",
                       f"leave it out, or take an algorithm that uses it: {', '.join(workload.roles)}")  # fmt: skip
    start_s = time.perf_counter()
    alone = ((ROLLOUT,),) if ROLLOUT in placed else ()
    partitions = [(*sets, *alone) for sets in partitions_of(tuple(r for r in placed if r != ROLLOUT), placement)]
    unit = granularity or _granularity(devices)
    if unit > devices:
        raise BadInput(f"granularity={unit}", f"there are {devices} devices", "take a smaller one")
    if (most := min(map(len, partitions))) * unit > devices:
        raise BadInput(f"placement {placement!r} on {devices} devices", f"{most} sets of at least {unit} each",
                       "take more devices, or a smaller granularity")  # fmt: skip
    if t_g is not None and machine.devices_per_machine % t_g:
        raise BadInput(f"t_g={t_g}", f"tensor ranks divide the {machine.devices_per_machine} devices of a machine")
    functions = tuple(role for role, model in models.items() if model is None)

    def searched(work: Workload, roles: Mapping[str, RoleModel], count: int, step: int) -> Iterator[Plan | None]:
        """The best plan of each partition, None where none fits."""
        options = options_of(roles, machine, work, constants, strategy=strategy, t_g=t_g, by_call=by_call)
        one = _Search(options, count, step, functions)
        return (one.best(sets, count // 2 // step if placement == "split" else None) for sets in partitions)

    found = [plan for plan in searched(workload, placed, devices, unit) if plan is not None]
    if not found:

        def fits(work: Workload, roles: Mapping[str, RoleModel], count: int) -> bool:
            return any(plan is not None for plan in searched(work, roles, count, max(unit, count // COARSE)))

        options = options_of(placed, machine, workload, constants, strategy=strategy, t_g=t_g, by_call=by_call)
        raise nothing_fits(options, devices, placement, unit, fits)
    least_s = min(plan.iteration_s for plan in found)
    found = ranked(replace(plan, dependencies=dependencies) for plan in found)
    proven = found[0].iteration_s <= least_s * (1 + 1e-9)
    return Plans(
        plans=tuple(found[:top]), workload=workload, hardware=machine, devices=devices, granularity=unit,
        placements_considered=len(partitions), search_s=time.perf_counter() - start_s, exact=unit == 1 and proven,
    )  # fmt: skip


def partitions_of(roles: tuple[str, ...], placement: Named = "auto") -> list[Sets]:
    """All ways to part the roles into sets: 5 of three, 15 of four, 52 of five; or the one of that name."""
    if placement == "auto":
        return list(_partitions(roles))
    if placement == "colocate":
        return [(roles,)]
    if placement == "standalone":
        return [tuple((role,) for role in roles)]
    halves = tuple(role for role in roles if role in POLICY), tuple(role for role in roles if role not in POLICY)
    if not all(halves):
        raise BadInput("placement 'split'", "actor and reference on one half, the others on the other half",
                       f"there are {', '.join(roles)}: take another placement")  # fmt: skip
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


def _granularity(devices: int) -> int:
    unit = 1
    while devices // unit > MOST_SIZES:
        unit *= 2
    return unit


class _Search:
    """What partitions share: the times of sets, and of several sets side by side."""

    def __init__(self, options: Mapping[str, RoleOptions], devices: int, unit: int, functions: tuple[str, ...]) -> None:
        self.options, self.functions = options, functions
        self.model = next(iter(options.values())).model
        self.devices, self.units, self.unit = devices, devices // unit, unit
        self._sets: dict[tuple[str, ...], list[Front]] = {}
        self._several: dict[Sets, list[Front]] = {}
        self._ways: dict[tuple[tuple[str, ...], int], _Ways] = {}

    def best(self, sets: Sets, exactly: int | None = None) -> Plan | None:
        """The quickest plan of a partition; None where none fits. exactly: units of each set."""
        # those that generate come last, with most triples; the merges of the others are shared by partitions
        order = tuple(sorted(sets, key=lambda one: (any(self.options[r].generates for r in one), len(one), one)))
        if exactly is not None:
            fronts = [self._alone(one, exactly * self.unit) for one in order]
            last = fronts[0]
            for front in fronts[1:]:
                last = _both([last], [front], 0)
        elif len(order) == 1:
            last = self._times(order[0])[self.units]
        else:
            last = _both(self._side_by_side(order[:-1]), self._times(order[-1]), self.units)
        if not len(last.seconds):
            return None
        n = int(seconds_of(last.seconds.T, self.model.workload).argmin())
        return self._plan(last.origins[n])

    def _side_by_side(self, sets: Sets) -> list[Front]:
        """The fronts of several sets together, by the units that they have at most."""
        if len(sets) == 1:
            return self._times(sets[0])
        if sets not in self._several:
            before, times = self._side_by_side(sets[:-1]), self._times(sets[-1])
            self._several[sets] = [_both(before, times, units) for units in range(self.units + 1)]
        return self._several[sets]

    def _times(self, roles: tuple[str, ...]) -> list[Front]:
        """The fronts of a set, by the units that it has at most."""
        if roles not in self._sets:
            fronts = [Front(np.zeros((0, 3)), ())]
            for units in range(1, self.units + 1):
                key, before = (roles, units * self.unit), fronts[-1]
                known = self.model.fronts
                own = known[key] = known[key] if key in known else self._alone(*key)
                fronts.append(_front(np.concatenate([before.seconds, own.seconds]), (*before.origins, *own.origins))
                              if len(own.seconds) else before)  # fmt: skip
            self._sets[roles] = fronts
        return self._sets[roles]

    def _alone(self, roles: tuple[str, ...], devices: int) -> Front:
        """The ways of a set on exactly so many devices."""
        makers = [role for role in roles if self.options[role].generates]
        others = tuple(role for role in roles if role not in makers)
        figures, tensor, ways = self._together(others, devices)
        index = np.arange(len(figures))
        chosen: list[NDArray[np.int64]] = []
        for role in makers:
            figures, tensor, before, own = self._joined(figures, tensor, role, devices)
            index, chosen = index[before], [*(picks[before] for picks in chosen), own]
        seconds = figures[:, :3].copy()
        for role, picks in zip(makers, chosen, strict=True):
            sizes = np.array([option.t_g for option in self.options[role].on(devices)], dtype=np.int64)[picks]
            seconds[:, 0] += self._generation(role, devices, sizes, figures[:, 3])
        moved = transfers(roles, devices, self.options)
        seconds += [one.seconds for one in moved.values()]
        possible = np.flatnonzero(np.isfinite(seconds).all(axis=1))
        kept, origins = possible[undominated(seconds[possible])], []
        for k in kept:
            found = dict(zip(others, ways[index[k]], strict=True))
            for role, picks in zip(makers, chosen, strict=True):
                found[role] = self.options[role].on(devices)[picks[k]]
            origins.append(((roles, devices, tuple(found[role] for role in roles)),))
        return Front(seconds[kept], tuple(origins))

    def _together(self, roles: tuple[str, ...], devices: int) -> _Ways:
        """Roles that generate nothing: their layouts that no others beat in seconds and bytes, whatever comes to them
        in a set: the set's seconds grow with theirs, and with what they leave to a cache. Those of several sizes of
        DeepSpeed's tensor groups stand apart."""
        if not roles:
            return np.zeros((1, 5)), np.zeros(1, dtype=np.int64), [()]
        if (roles, devices) not in self._ways:
            figures, tensor, ways = self._together(roles[:-1], devices)
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
        """Ways with each option of one more role, where they fit: figures [ways, 5], DeepSpeed's tensor ranks (0: none;
        it knows one size of groups a process), and for each the number of the way and of the option."""
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
        """Seconds of generation, by its tensor ranks and by what the set's models leave to the cache."""
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


def _front(seconds: NDArray[np.float64], origins: Sequence[Any]) -> Front:
    kept = undominated(seconds)
    return Front(seconds[kept], tuple(origins[k] for k in kept))


def _both(one: Sequence[Front], other: Sequence[Front], units: int) -> Front:
    """Two groups of sets side by side on at most so many units in all: of each stage the larger seconds."""
    seconds: list[NDArray[np.float64]] = []
    pairs: list[tuple[int, int, int, int]] = []
    for mine in range(units + 1):
        a, b = one[mine].seconds, other[units - mine].seconds
        if not len(a) or not len(b):
            continue
        # where one more unit changes nothing on either side, it is the pair before
        if mine and one[mine] is one[mine - 1]:
            continue
        seconds.append(np.maximum(a[:, None, :], b[None, :, :]).reshape(-1, 3))
        pairs += [(mine, i, units - mine, j) for i, j in product(range(len(a)), range(len(b)))]
    if not seconds:
        return Front(np.zeros((0, 3)), ())
    every = np.concatenate(seconds)
    kept = undominated(every)
    origins = []
    for k in kept:
        mine, i, theirs, j = pairs[k]
        origins.append((*one[mine].origins[i], *other[theirs].origins[j]))
    return Front(every[kept], tuple(origins))
