"""The sizes that a GPU's memory decides: a key-value cache, and the tokens of a micro-batch. Pure arithmetic.

What a placement holds on a device does not depend on the size of the device; the rest does. So the controller gives the
first (`rooms`), and the host that knows its device computes the second (`Room`), with the figures of the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.placement.generation_memory import row_bytes, useful_cache_bytes, working_bytes
from workbench.placement.placement import Placement
from workbench.placement.rank_memory import RankMemory, rank_memory
from workbench.placement.role_model import RoleModel
from workbench.settings.layout import Layout

GIB = 2**30
# What no role gets of a GPU: CUDA's context, libraries' workspaces, what the allocator cannot use for its holes.
RESERVED_BYTES, RESERVED_SHARE = int(1.5 * GIB), 0.04
# Automatic micro-batches have at most so many tokens, beyond which no pass is any faster, and a multiple of so many.
MOST_TOKENS, TOKENS_STEP = 32_768, 512


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes on the devices of a role, the most of all devices.

    lasting: of all roles of the device, with the optimizer states of the first step, without vLLM's cache; where roles
    take turns, of this one while it is trained or run. generating: the same while vLLM decodes. weights: of vLLM.
    passing: most that a role there needs while it computes; 0 where they take turns. useful_cache: the largest useful
    cache of vLLM, 0 without vLLM; row: of one sequence. fraction: `Generation.gpu_memory_fraction`. turns: whether
    roles take turns.
    """

    lasting: int = 0
    generating: int = 0
    weights: int = 0
    passing: int = 0
    useful_cache: int = 0
    row: int = 0
    fraction: float | None = None
    turns: bool = False

    def cache_bytes(self, device_bytes: int) -> int:
        """vLLM's cache on a device: what the fraction leaves beside its weights; or what the placement leaves, at least
        half of which may be needed for computing."""
        if not self.useful_cache:
            return 0
        if self.fraction is not None:
            return max(0, int(self.fraction * device_bytes) - self.weights)
        left = usable_bytes(device_bytes) - self.generating
        return max(0, min(self.useful_cache, max(left - self.passing, left // 2)))

    def pass_bytes(self, device_bytes: int) -> int:
        """What a device leaves for the gradients and activations of one role."""
        return usable_bytes(device_bytes) - self.lasting - (0 if self.turns else self.cache_bytes(device_bytes))

    def __or__(self, other: Room) -> Room:
        """The larger of each figure: what holds for two devices."""
        figures = ("lasting", "generating", "weights", "passing", "useful_cache", "row")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in figures}
        return replace(self, **most, fraction=self.fraction if self.fraction is not None else other.fraction)


def usable_bytes(device_bytes: int) -> int:
    """The part of a GPU's memory that roles can use."""
    return device_bytes - max(RESERVED_BYTES, int(RESERVED_SHARE * device_bytes))


def rooms(
    placement: Placement,
    models: Mapping[str, RoleModel | None],
    numbers: Mapping[str, Sequence[int]],
    *,
    take_turns: bool,
) -> dict[str, Room]:
    """The room of each role whose model is known, with micro-batches of `RoleModel.micro_batch_tokens`.

    numbers: the device numbers of each pool's ranks. Raises `BadInput` where a layout does not cut its model.
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


def placed(
    placement: Placement, models: Mapping[str, RoleModel | None], numbers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, RoleModel, Layout, int, int]]:
    """(role, model, layout, rank, device number) of every rank of the roles whose models are known."""
    for pool in placement.pools:
        for role in pool.roles:
            model = models[role]
            if model is not None:
                layout = model.standing(placement.layout_of(role))
                for rank in range(pool.devices):
                    yield role, model, layout, rank, numbers[pool.name][rank]


def _room(role: str, of: Mapping[str, RankMemory], models: Mapping[str, RoleModel | None], *, take_turns: bool) -> Room:
    """On one device, with what roles hold there, `of`."""
    engines = [(m, held) for other, held in of.items() if (m := models[other]) is not None and useful_cache_bytes(m)]
    lasting = sum(memory.lasting for memory in of.values())
    room = Room(lasting=lasting, generating=lasting, passing=max(memory.passing for memory in of.values()))
    for model, held in engines:  # one at most: a process has one engine
        assert model.generation is not None
        room = replace(room, useful_cache=useful_cache_bytes(model), weights=held.generation_weights,
                       row=row_bytes(model), fraction=model.generation.gpu_memory_fraction)  # fmt: skip
        if take_turns:
            room = replace(room, generating=held.generation_weights + working_bytes(model))
    if not take_turns:
        return room
    return replace(room, lasting=of[role].lasting - of[role].generation_weights, passing=0, turns=True)


def fitting_tokens(model: RoleModel, layout: Layout, rank: int, left_bytes: int) -> int:
    """The tokens of an automatic micro-batch for which gradients and activations fit into so many bytes by the
    estimate: a multiple of 512 up to 32,768, and 512 where nothing fits."""

    def passing(steps: int) -> int:
        sized = replace(model, generation=None, automatic_tokens=steps * TOKENS_STEP)
        return rank_memory(sized, layout, rank).passing

    low, high = 1, MOST_TOKENS // TOKENS_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if passing(middle) <= left_bytes else (low, middle - 1)
    return low * TOKENS_STEP
