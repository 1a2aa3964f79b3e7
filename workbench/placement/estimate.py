"""Estimate a placement's memory on each device, by role, and the sizes that depend on a GPU's memory.

The memory of a placement does not depend on the size of the device; the key-value cache and the tokens of a micro-batch
do. So the controller computes the memory (`rooms`), and a host, which knows its device, computes the cache and the
tokens from it (`Room`). Pure: nothing is started, no weights are read.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workbench.display.devices import DeviceBox, DeviceMap
from workbench.display.html import bytes_text
from workbench.errors import BadInput
from workbench.placement.memory import (
    GIB,
    LASTING,
    PASSING,
    RankMemory,
    activation_bytes,
    rank_memory,
    row_bytes,
    useful_cache_bytes,
    working_bytes,
)
from workbench.placement.placement import Placement
from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

if TYPE_CHECKING:
    import pandas as pd

# The share of a pass's estimated memory that it needs in any case.
SURE = 0.8
# A GPU's memory that roles cannot use: CUDA's context, libraries' workspaces, fragmentation.
RESERVED_BYTES, RESERVED_SHARE = int(1.5 * GIB), 0.04
# The most tokens of an automatic micro-batch (more do not make a pass faster), and the step of its size.
MOST_TOKENS, TOKENS_STEP = 32_768, 512

Models = Mapping[str, RoleModel | None]
"""Role -> its memory facts; None: a function, or a worker class of unknown size."""
Numbers = Mapping[str, Sequence[int]]
"""Pool -> the device numbers of its ranks."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes on the devices of a role: of each figure, the largest over these devices.

    lasting: of all roles of the device, with the optimizer states of the first step, without vLLM's cache; if roles
    take turns, only of this role while it is trained or run. generating: the same while vLLM decodes. weights: vLLM's.
    passing: the most that any role of the device needs while it computes; 0 if roles take turns. useful_cache: the
    largest useful cache of vLLM, 0 without vLLM. fraction: `Generation.gpu_memory_fraction`. turns: whether roles take
    turns.
    """

    lasting: int = 0
    generating: int = 0
    weights: int = 0
    passing: int = 0
    useful_cache: int = 0
    fraction: float | None = None
    turns: bool = False

    def cache_bytes(self, device_bytes: int) -> int:
        """Return the bytes of vLLM's cache on a device: `fraction` minus its weights; without a fraction, what the
        placement leaves minus `passing`, but at least half of what it leaves, and at most `useful_cache`."""
        if not self.useful_cache:
            return 0
        if self.fraction is not None:
            return max(0, int(self.fraction * device_bytes) - self.weights)
        left = usable_bytes(device_bytes) - self.generating
        return max(0, min(self.useful_cache, max(left - self.passing, left // 2)))

    def pass_bytes(self, device_bytes: int) -> int:
        """Return the bytes that a device has left for the gradients and activations of one role."""
        return usable_bytes(device_bytes) - self.lasting - (0 if self.turns else self.cache_bytes(device_bytes))

    def __or__(self, other: Room) -> Room:
        figures = ("lasting", "generating", "weights", "passing", "useful_cache")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in figures}
        return replace(self, **most, fraction=self.fraction if self.fraction is not None else other.fraction)


def usable_bytes(device_bytes: int) -> int:
    """Return the part of a GPU's memory that roles can use."""
    return device_bytes - max(RESERVED_BYTES, int(RESERVED_SHARE * device_bytes))


def rooms(placement: Placement, models: Models, numbers: Numbers, *, take_turns: bool) -> dict[str, Room]:
    """Return the `Room` of each role with a known model, for micro-batches of `RoleModel.micro_batch_tokens`.

    Raises `BadInput` if a layout cannot divide its model.
    """
    held: dict[int, dict[str, RankMemory]] = {}
    for role, model, layout, rank, number in placed(placement, models, numbers):
        held.setdefault(number, {})[role] = rank_memory(model, layout, rank, cache_bytes=0)
    found: dict[str, Room] = {}
    for of in held.values():
        for role in of:
            room = _room(role, of, models, take_turns=take_turns)
            found[role] = found[role] | room if role in found else room
    return found


def placed(placement: Placement, models: Models, numbers: Numbers) -> Iterator[tuple[str, RoleModel, Layout, int, int]]:
    """Yield (role, model, layout, rank, device number) of every rank of the roles with known models."""
    for pool in placement.pools:
        for role in pool.roles:
            model = models[role]
            if model is not None:
                layout = model.rank_layout(placement.layout_of(role))
                for rank in range(pool.devices):
                    yield role, model, layout, rank, numbers[pool.name][rank]


def _room(role: str, of: Mapping[str, RankMemory], models: Models, *, take_turns: bool) -> Room:
    """Return the room of a role on one device. of: the memory of each role there."""
    engines = [(m, held) for other, held in of.items() if (m := models[other]) is not None and useful_cache_bytes(m)]
    lasting = sum(memory.lasting for memory in of.values())
    room = Room(lasting=lasting, generating=lasting, passing=max(memory.passing for memory in of.values()))
    for model, held in engines:  # one at most: a process has one engine
        assert model.generation is not None
        room = replace(room, useful_cache=useful_cache_bytes(model), weights=held.generation_weights,
                       fraction=model.generation.gpu_memory_fraction)  # fmt: skip
        if take_turns:  # plus the trainer's parameters, which are there when `check_sync` compares both
            generating = held.generation_weights + working_bytes(model) + held.parameters
            room = replace(room, generating=generating)
    if not take_turns:
        return room
    return replace(room, lasting=of[role].lasting - of[role].generation_weights, passing=0, turns=True)


def fitting_tokens(model: RoleModel, layout: Layout, rank: int, left_bytes: int) -> int:
    """Return the tokens of an automatic micro-batch whose estimated gradients and activations fit into `left_bytes`:
    a multiple of 512 up to 32,768; 512 if nothing fits."""

    def passing(steps: int) -> int:
        sized = replace(model, generation=None, automatic_tokens=steps * TOKENS_STEP)
        return rank_memory(sized, layout, rank).passing

    larger = range(2, MOST_TOKENS // TOKENS_STEP + 1)
    return (1 + bisect(larger, left_bytes, key=passing)) * TOKENS_STEP


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One rank of a role on a device, and its memory there."""

    role: str
    pool: str
    rank: int
    device: int
    memory: RankMemory


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryEstimate:
    """The bytes of a placement by role and device, without the memory of the processes themselves and of batches.

    device: "cpu" (slots share the machine's memory) or "cuda". device_bytes: of one GPU, if known. take_turns: whether
    the roles of a device use it one after another, see `workbench.open(share_memory=...)`.
    """

    placement: Placement
    tenants: tuple[Tenant, ...]
    device: str
    device_bytes: int | None
    take_turns: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({tenant.device for tenant in self.tenants}))

    def on(self, device: int) -> list[Tenant]:
        return [tenant for tenant in self.tenants if tenant.device == device]

    def lasting(self, device: int) -> int:
        """Return the bytes held on a device while nothing computes."""
        held = [tenant.memory for tenant in self.on(device)]
        if self.take_turns:
            return max((max(memory.lasting - memory.generating, memory.generating) for memory in held), default=0)
        return sum(memory.lasting for memory in held)

    def peak(self, device: int) -> int:
        """Return a bound of a device's peak: the lasting bytes, and the most that one role needs while it computes."""
        if self.take_turns:
            return max((tenant.memory.turn_peak for tenant in self.on(device)), default=0)
        return self.lasting(device) + max((tenant.memory.passing for tenant in self.on(device)), default=0)

    def least_bytes(self, *devices: int) -> int:
        """Return the least bytes that devices together need: without activations and (on a CPU) without caches and
        mapped files, with the gradients of the role that has most."""
        lasting, gradients, generating = Counter[str](), Counter[str](), Counter[str]()
        for tenant in self.tenants:
            if tenant.device in devices:
                role, memory = tenant.role, tenant.memory
                lasting[role] += memory.least_bytes(on_cpu=self.device == "cpu")
                gradients[role] += memory.gradients
                generating[role] += memory.generating
        if self.take_turns:
            turns = (max(lasting[role] - generating[role] + gradients[role], generating[role]) for role in lasting)
            return max(turns, default=0)
        return sum(lasting.values()) + max(gradients.values(), default=0)

    def frame(self) -> pd.DataFrame:
        """Return a frame with one row per role and rank: role, pool, rank, device, and bytes by use."""
        import pandas as pd

        rows = [
            {"role": tenant.role, "pool": tenant.pool, "rank": tenant.rank, "device": f"{self.device}:{tenant.device}"}
            | {f"{use}_bytes": getattr(tenant.memory, use) for use in (*LASTING, *PASSING)}
            for tenant in self.tenants
        ]
        return pd.DataFrame(rows)

    def by_device(self) -> pd.DataFrame:
        """Return a frame with one row per device: lasting bytes, and the peak."""
        import pandas as pd

        rows = [
            {"device": f"{self.device}:{n}", "lasting_bytes": self.lasting(n), "peak_bytes": self.peak(n)}
            for n in self.devices
        ]
        return pd.DataFrame(rows)

    def picture(self) -> DeviceMap:
        """Return a picture: devices as boxes, roles in them, bytes as bars."""
        boxes = []
        for n in self.devices:
            tenants = self.on(n)
            held = {tenant.role: Counter[str]() for tenant in tenants}
            for tenant in tenants:
                for use in (*LASTING, *PASSING):
                    held[tenant.role][use.removeprefix("kept_")] += getattr(tenant.memory, use)
            label = f"{tenants[0].pool}-{tenants[0].rank}"
            boxes.append(
                DeviceBox(f"{self.device}:{n}", label, held, self.device_bytes, f"peak {bytes_text(self.peak(n))}")
            )
        return DeviceMap(tuple(boxes), "memory, estimated")

    def __repr__(self) -> str:
        most = max(map(self.peak, self.devices), default=0)
        return f"<MemoryEstimate: {len(self.devices)} devices, peak {bytes_text(most)} on one>"

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def estimate_memory(
    placement: Placement,
    models: Models,
    *,
    device: str = "cpu",
    device_bytes: int | None = None,
    numbers: Numbers | None = None,
    take_turns: bool = False,
    tokens: Mapping[str, int] | None = None,
) -> MemoryEstimate:
    """Return the estimate of a placement whose roles are all in `models`.

    numbers: the device numbers of each pool's ranks; None: counted up, pool by pool. take_turns: see `MemoryEstimate`.
    Automatic sizes of vLLM's cache and micro-batches are computed by `Room` for a GPU of `device_bytes`. tokens: the
    measured micro-batch sizes of roles that have measured them. Raises `BadInput` if a layout cannot divide its model.
    """
    numbers = device_numbers(placement) if numbers is None else numbers
    caches: dict[str, int] = {}
    if device == "cuda":
        found = rooms(placement, models, numbers, take_turns=take_turns)
        if device_bytes is not None:
            models = {
                role: _fitted(role, model, placement, found, device_bytes, (tokens or {}).get(role))
                for role, model in models.items()
            }
            caches = {role: room.cache_bytes(device_bytes) for role, room in found.items()}
        else:
            caches = {role: room.useful_cache for role, room in found.items()}
    tenants = [
        Tenant(role=role, pool=placement.pool_of(role).name, rank=rank, device=number,
               memory=rank_memory(model, layout, rank, cache_bytes=caches.get(role)))
        for role, model, layout, rank, number in placed(placement, models, numbers)
    ]  # fmt: skip
    return MemoryEstimate(placement=placement, tenants=tuple(tenants), device=device, device_bytes=device_bytes,
                          take_turns=take_turns)  # fmt: skip


def _fitted(
    role: str, model: RoleModel | None, placement: Placement, found: Mapping[str, Room], device_bytes: int,
    tokens: int | None,
) -> RoleModel | None:  # fmt: skip
    """Return the model with automatic micro-batches as large as all ranks can hold."""
    if model is None or model.training.micro_batch_tokens is not None or role not in found:
        return model
    if tokens is not None:
        return replace(model, automatic_tokens=tokens)
    layout, left = model.rank_layout(placement.layout_of(role)), found[role].pass_bytes(device_bytes)
    ranks = range(placement.pool_of(role).devices)
    return replace(model, automatic_tokens=min(fitting_tokens(model, layout, rank, left) for rank in ranks))


def device_numbers(placement: Placement) -> dict[str, tuple[int, ...]]:
    """Return the device numbers of a new workbench, by pool: counted up, pool by pool."""
    found, first = {}, 0
    for pool in placement.pools:
        found[pool.name] = tuple(range(first, first + pool.devices))
        first += pool.devices
    return found


def check_fit(estimate: MemoryEstimate, *, has_bytes: int, models: Models) -> str:
    """Raise `BadInput` for a placement that cannot fit; else return a warning if its peak may not fit, or "".

    has_bytes: of one GPU, or what a CPU machine has left for all of its slots.
    """
    doubt = ""
    for tenant in estimate.tenants if estimate.device == "cuda" else ():
        _check_cache(estimate, tenant, models[tenant.role], has_bytes)
    for devices in [estimate.devices] if estimate.device == "cpu" else [(n,) for n in estimate.devices]:
        certain, peak = estimate.least_bytes(*devices), sum(map(estimate.peak, devices))
        where = f"{estimate.device}:{devices[0]}" if estimate.device != "cpu" else "this machine"
        if certain > has_bytes:
            raise BadInput(
                f"the placement {estimate.placement} needs {bytes_text(certain)} on {where}: "
                f"{largest(estimate, devices, certain=True)}",
                f"it has {bytes_text(has_bytes)}, {bytes_text(certain - has_bytes)} too little",
                remedy(estimate, devices, models, certain=True),
            )
        for tenant in estimate.tenants if estimate.device == "cuda" else ():
            if tenant.device in devices:
                _check_micro_batch(estimate, tenant, models[tenant.role], has_bytes)
        if peak > has_bytes and not doubt:
            doubt = (
                f"{where} may run out of memory: up to {bytes_text(peak)} at the peak ({largest(estimate, devices)}), "
                f"of {bytes_text(has_bytes)}; {remedy(estimate, devices, models)}"
            )
    return doubt


def _check_cache(estimate: MemoryEstimate, tenant: Tenant, model: RoleModel | None, has_bytes: int) -> None:
    """Raise `BadInput` if vLLM's cache on a GPU is too small for one sequence."""
    if model is None or not useful_cache_bytes(model):
        return
    assert model.generation is not None
    memory, settings, row = tenant.memory, model.generation, row_bytes(model)
    if memory.generation_kv_cache >= row:
        return
    fraction = settings.gpu_memory_fraction
    where, needs = f"cuda:{tenant.device}", memory.generation_weights + row
    if fraction is not None:
        least = -(-100 * needs // has_bytes) / 100
        raise BadInput(
            f"Generation.gpu_memory_fraction={fraction:g}: {bytes_text(int(fraction * has_bytes))} of {where}",
            f"vLLM needs {bytes_text(needs)}: {bytes_text(memory.generation_weights)} for weights, "
            f"{bytes_text(row)} for one sequence of {settings.max_model_tokens} tokens",
            f"use {least:g} or more, or leave out gpu_memory_fraction: vLLM gets what the placement leaves",
        )
    others = estimate.lasting(tenant.device) - memory.generation_kv_cache
    raise BadInput(
        f"the placement {estimate.placement} leaves vLLM no key-value cache on {where}: "
        f"{bytes_text(others)} of {bytes_text(usable_bytes(has_bytes))} are in use: "
        f"{largest(estimate, [tenant.device], certain=True)}",
        f"one sequence of {settings.max_model_tokens} tokens needs {bytes_text(row)}, and computation needs more",
        "use wb.open(share_memory=True), a smaller Generation.max_model_tokens, or more devices",
    )


def _check_micro_batch(estimate: MemoryEstimate, tenant: Tenant, model: RoleModel | None, has_bytes: int) -> None:
    """Raise `BadInput` if a trained model on a GPU has too little memory for the given micro-batch size."""
    if model is None or not model.trained or model.training.micro_batch_tokens is None:
        return
    memory, layout = tenant.memory, model.rank_layout(estimate.placement.layout_of(tenant.role))
    needs = int(SURE * activation_bytes(model, layout, tenant.rank))
    beside = memory.lasting - memory.generating if estimate.take_turns else estimate.lasting(tenant.device)
    if (most := beside + memory.gradients + needs) > has_bytes:
        raise BadInput(
            f"Training.micro_batch_tokens={model.training.micro_batch_tokens:,} for {tenant.role}: a pass needs "
            f"{bytes_text(needs)} at least, beside {bytes_text(beside + memory.gradients)}",
            f"cuda:{tenant.device} has {bytes_text(has_bytes)}, {bytes_text(most - has_bytes)} too little",
            "use fewer, or leave it out (then as many as fit), or Training(activation_checkpointing=True)",
        )


def _items(estimate: MemoryEstimate, devices: Sequence[int], certain: bool) -> list[tuple[int, str, str]]:
    """Return (bytes, role, use) of these devices together, the largest first. certain: without activations, copies for
    syncs and (on a CPU) caches and mapped files, as in `least_bytes`, but with the gradients of all roles."""
    on_cpu = estimate.device == "cpu"
    unsure = {"sync_copy", "activations", *(["generation_kv_cache"] if on_cpu else [])}
    found = Counter[tuple[str, str]]()
    for tenant in estimate.tenants:
        for use in (*LASTING, *PASSING) if tenant.device in devices else ():
            if certain and use in unsure:
                continue
            mapped = tenant.memory.may_be_mapped if certain and on_cpu and use == "parameters" else 0
            found[tenant.role, use.removeprefix("kept_")] += getattr(tenant.memory, use) - mapped
    return sorted(((n, *key) for key, n in found.items() if n), reverse=True)


def largest(estimate: MemoryEstimate, devices: Sequence[int], *, certain: bool = False) -> str:
    """Return the largest items of some devices, as a text."""
    items = _items(estimate, devices, certain)[:4]
    return ", ".join(f"{role} {use.replace('_', ' ')} {bytes_text(n)}" for n, role, use in items)


def remedy(estimate: MemoryEstimate, devices: Sequence[int], models: Models, *, certain: bool = False) -> str:
    """Return a text on how to make the largest item smaller."""
    items = _items(estimate, devices, certain)
    if not items:
        return ""
    _, role, use = items[0]
    model = models[role]
    assert model is not None
    if use == "generation_kv_cache":
        return f"use a smaller Generation.{'kv_cache_gib' if estimate.device == 'cpu' else 'gpu_memory_fraction'}"
    if use == "activations":
        return "use a smaller Training.micro_batch_tokens (and Generation.max_rows), or activation_checkpointing=True"
    choices = []
    if use == "generation_weights":
        choices.append("a larger Generation.tensor_parallel_size")
    elif model.trained and estimate.placement.layout_of(role).d > 1 and model.engine != "zero3":
        choices.append(f"Training(engine='deepspeed', zero_stage=3) for {role}")
    if role == "actor" and model.adapter is None and use in ("optimizer", "gradients"):
        choices.append("an adapter, wb.Model(..., adapter=wb.LoRA())")
    in_dtype = use == "generation_weights" or (use == "parameters" and model.engine not in ("torch", "zero0"))
    if model.dtype == "float32" and in_dtype:
        choices.append("dtype='bfloat16'")
    if estimate.device == "cuda":
        choices.append(f"more devices: a pool only for {role}, or a layout (p, t, d) that shards it")
    return "use " + ", or ".join(choices or ["a smaller model"])
