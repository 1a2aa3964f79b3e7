"""The layouts that a role can have on a number of devices, with their costs and memory (HybridFlow, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from workbench.errors import BadInput
from workbench.mapping.costs import Constants, CostModel, Terms
from workbench.mapping.hardware import Hardware
from workbench.mapping.plan import CallPlan
from workbench.mapping.workload import STAGES, Workload
from workbench.placement.memory import rank_memory
from workbench.placement.role_model import RoleModel
from workbench.resharding.weights import ModelWeights
from workbench.settings.layout import Layout

FEW_ROWS = 100  # up to this many rows, `undominated` compares all pairs
WAVE_PARTS = 8  # waves of generation are rounded up to this fraction of a wave


@dataclass(frozen=True)
class Option:
    """One way to lay out a role on the devices of its set.

    layout: of training, and of all calls without their own layout; with t_g if training's ranks gather to generation's.
    inference, own_t_g: the layout of forward passes and the tensor ranks of generation, if they differ from `layout`.
    lasting, passing: bytes on the fullest device: always, or only while the role computes. seconds: of the role's calls
    by stage, without generation, whose time depends on the cache. recomputed: whether training recomputes activations.
    """

    layout: Layout
    lasting: int
    passing: int
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    inference: Layout | None = None
    own_t_g: int | None = None
    recomputed: bool = False

    @property
    def t_g(self) -> int:
        return self.own_t_g or self.layout.t_g or 1


class RoleOptions:
    """The options of one role, by number of devices; computed once for each number.

    strategy: of the transition to generation. t_g: the only allowed tensor size of generation; None: any. by_call:
    whether inference and generation may have layouts independent of training's, to which weights are copied.
    """

    def __init__(self, name: str, role: RoleModel, model: CostModel, constants: Constants, *, strategy: str,
                 t_g: int | None, by_call: bool) -> None:  # fmt: skip
        self.role, self.model, self.constants = role, model, constants
        self.strategy, self._t_g, self._by_call = strategy, t_g, by_call
        self.calls = model.workload.of(name)
        # the search counts generation's memory; a row longer than a micro-batch is a micro-batch of its own
        self.tokens_bound = max(role.micro_batch_tokens, model.workload.longest_row)
        training = replace(role.training, micro_batch_tokens=self.tokens_bound)
        self._alone = replace(role, generation=None, training=training)
        self._running = replace(self._alone, trained=False)
        self._found: dict[int, tuple[Option, ...]] = {}

    @property
    def by_deepspeed(self) -> bool:
        return self.role.trained and self.role.training.engine == "deepspeed"

    @property
    def _cuts_optimizer(self) -> bool:
        """Whether to compute the torch engine's memory as a cluster's engine would use it."""
        return self.model.workload.engine == "cluster" and self.role.engine == "torch"

    @cached_property
    def recompute_modes(self) -> tuple[bool, ...]:
        """The allowed values of `Option.recomputed`: keep activations (False), recompute (True), or both to try."""
        set_to = self.role.training.activation_checkpointing
        trains = any(call.kind == "train" for call in self.calls)
        return (False, True) if self._cuts_optimizer and set_to and trains else (set_to,)

    @cached_property
    def generates(self) -> bool:
        return any(call.kind == "generate" for call in self.calls)

    def on(self, devices: int) -> tuple[Option, ...]:
        """Return the options on `devices` devices that no other option dominates in all seconds and bytes, among
        options with the same tensor sizes of generation and of DeepSpeed's groups."""
        if devices not in self._found:
            groups: dict[tuple[int, int], list[Option]] = {}
            for option in self._options(devices):
                groups.setdefault((option.t_g, option.layout.t if self.by_deepspeed else 0), []).append(option)
            kept: list[Option] = []
            for _, group in sorted(groups.items()):
                figures = np.array([(*option.seconds, option.lasting, option.passing) for option in group])
                kept += [group[n] for n in undominated(figures)]
            self._found[devices] = tuple(kept)
        return self._found[devices]

    def _options(self, devices: int) -> Iterator[Option]:
        kinds = [call.kind for call in self.calls]
        several = self._by_call and "infer" in kinds and "train" in kinds
        # fit=False: a copy for forward passes takes less memory than training does
        others = self.layouts(devices, fit=False) if several else []
        for layout, recomputed in product(self.layouts(devices), self.recompute_modes):
            held = self._in_turns(self._held(layout, recomputed))
            if sum(held) > self.model.hardware.usable_bytes:
                continue
            for generating, own in self._generating(layout):
                yield self._option(Option(generating, *held, own_t_g=own, recomputed=recomputed))
                for other in others:
                    if other != layout:
                        copy = self.role.elements * self.role.frozen_bytes // (other.p * other.t)
                        passing = max(held[1], copy + self._forward_bytes(other))
                        yield self._option(Option(generating, held[0], passing, inference=other, own_t_g=own,
                                                  recomputed=recomputed))  # fmt: skip

    def as_given(self, layout: Layout, t_g: int, room: float = math.inf) -> Option:
        """Return the option of a given layout, also if it does not fit. room: free bytes on a device while the role
        computes; if its activations take more, they are recomputed, if that is allowed."""
        self.role.weights.check(layout.p, layout.t)
        every = {mode: self._in_turns(self._held(layout, mode)) for mode in self.recompute_modes}
        recomputed = next((mode for mode, held in every.items() if held[1] <= room), self.recompute_modes[-1])
        whole = layout.p * layout.t == 1
        own = t_g if self.generates and whole and t_g > 1 and self._groups(t_g, layout.size) else None
        if self.generates and own is None:
            layout = layout.generating(1 if whole else t_g)
        return self._option(Option(layout, *every[recomputed], own_t_g=own, recomputed=recomputed))

    def _in_turns(self, held: tuple[int, int]) -> tuple[int, int]:
        """Return (lasting, passing); if roles take turns in the memory, all bytes count as passing."""
        return (0, sum(held)) if self.model.workload.take_turns else held

    def _option(self, option: Option) -> Option:
        seconds = dict.fromkeys(STAGES, 0.0)
        for call in self.calls_of(option):
            seconds[call.stage] += call.seconds
        first, second, third = seconds.values()
        return replace(option, seconds=(first, second, third))

    def calls_of(self, option: Option, cache_bytes: int | None = None) -> tuple[CallPlan, ...]:
        """Return the role's calls under an option, and the moves of weights before them. cache_bytes: of a device, for
        generation; None: leave generation out."""
        found, layout, model = [], option.layout, self.model

        def add(name: str, stage: str, terms: Terms) -> None:
            if terms != Terms():
                plain = Terms(*map(float, vars(terms).values()))  # Python floats, not numpy's
                found.append(CallPlan(name, stage, plain, self.constants.seconds(plain)))

        if option.own_t_g is not None and not self.role.samples_only:
            add("relayout", STAGES[0], self._moved(layout, Layout(1, option.own_t_g, layout.size // option.own_t_g)))
        if self.role.samples_only:
            received = self.generation_bytes(option.t_g) * model.workload.sync_share
            add("sync", STAGES[0], model.moved(self.role, received, layout.size + 1, option.t_g))
        elif self.generates and option.own_t_g is None:
            add("transition", STAGES[0], model.transition(self.role, layout, self.strategy))
        if option.inference is not None:
            add("relayout", STAGES[1], self._moved(layout, option.inference))
        computed = {call.stage: call.kind for call in self.calls if call.kind != "generate"}
        for stage, kind in computed.items() if model.workload.take_turns else ():  # load to the device, and unload
            cut = option.inference or layout
            weights = self.role.elements * self.role.frozen_bytes / (cut.p * cut.t)
            nbytes = self._held(layout, option.recomputed)[0] if kind == "train" else weights
            add("load", stage, Terms(links=2 * nbytes / model.hardware.host_bytes_s))
        for call in self.calls:
            if call.kind == "infer":
                add(call.name, call.stage, model.infer(self.role, option.inference or layout))
            elif call.kind == "train":
                add(call.name, call.stage, model.train(self.role, layout, option.recomputed))
            elif cache_bytes is not None:
                waves = float(self._waves(layout.size, option.t_g, np.array([cache_bytes]))[0])
                add(call.name, call.stage, model.generate(self.role, layout.size, option.t_g, waves))
        return tuple(found)

    def _moved(self, train: Layout, other: Layout) -> Terms:
        """Return the terms of moving weights from training's layout to another one on the same ranks: at most all that
        a rank holds in the other layout; none if each rank already has the whole model."""
        if train.p * train.t == 1 and self.role.engine != "zero3":
            return Terms()
        nbytes = self.role.elements * self.role.frozen_bytes / (other.p * other.t)
        return self.model.moved(self.role, nbytes, train.size, other.p * other.t)

    def _forward_bytes(self, layout: Layout) -> int:
        return _held(self._running, False, layout.p, layout.t, 1, False)[1]

    def layouts(self, devices: int, *, fit: bool = True) -> list[Layout]:
        """Return every (p, t, d) on `devices` devices that divides the model, that its engine supports, and (fit) whose
        memory fits without other roles. Rollout workers hold only an engine: the whole model on each."""
        if self.role.samples_only:
            return [Layout(1, 1, devices)]
        hardware, found = self.model.hardware, []
        deepspeed = self.by_deepspeed
        zero3, adapted = self.role.engine == "zero3", self.role.adapter is not None
        whole = self.role.trained and self.role.training.optimizer in ("muon", "adamw_8bit")
        for t in range(1, min(devices, hardware.devices_per_machine) + 1):
            if devices % t or hardware.devices_per_machine % t or ((zero3 or adapted or whole) and t > 1):
                continue
            for p in range(1, min(devices // t, self.role.layers) + 1):
                if (devices // t) % p or self.role.layers % p or ((deepspeed or adapted) and p > 1):
                    continue
                layout = Layout(p, t, devices // (p * t))
                if _divides(self.role.weights, p, t) and (
                    not fit or sum(self._held(layout, self.recompute_modes[-1])) <= hardware.usable_bytes
                ):
                    found.append(layout)
        return found

    def _generating(self, layout: Layout) -> Iterator[tuple[Layout, int | None]]:
        """Yield (layout, own t_g) for each t_g; own t_g is None if training's ranks can gather to it. Replicas of the
        whole model form groups of any size, at no cost; other layouts have an own t_g only with `by_call`."""
        if not self.generates:
            yield layout, None
            return
        whole = layout.p * layout.t == 1
        for t_g in range(1, self.model.hardware.devices_per_machine + 1):
            if self._t_g not in (None, t_g):
                continue
            if layout.t % t_g == 0:
                yield layout.generating(t_g), None
            elif (whole or self._by_call) and self._groups(t_g, layout.size):
                yield layout, t_g

    def _groups(self, t_g: int, devices: int) -> bool:
        per_machine = self.model.hardware.devices_per_machine
        return devices % t_g == 0 and per_machine % t_g == 0 and _divides(self.role.weights, 1, t_g)

    def _held(self, layout: Layout, recomputed: bool) -> tuple[int, int]:
        """Return (lasting, passing) of the fullest rank, without generation."""
        if self.role.samples_only:
            return 0, 0
        replicas = layout.d if self.role.engine.startswith("zero") else min(layout.d, 2)
        lasting, passing, optimizer = _held(self._alone, self._cuts_optimizer, layout.p, layout.t, replicas, recomputed)
        return lasting - optimizer // replicas + math.ceil(optimizer / layout.d), passing

    def passing_bytes(self, devices: int) -> int:
        """Return the least bytes of a device that the longest row, or a micro-batch, takes, in the finest layout."""
        layouts = self.layouts(1 << devices.bit_length() - 1, fit=False)
        cached = min(self.model.row_bytes(self.role, one.t) for one in layouts) if self.generates else 0
        return max(math.ceil(cached), min(self._held(one, self.recompute_modes[-1])[1] for one in layouts))

    def generation_bytes(self, t_g: int) -> int:
        """Return the bytes of the generation engine's weights on one device."""
        return math.ceil(self.role.elements * self.role.frozen_bytes / t_g)

    def generation_seconds(self, devices: int, t_g: int, cache_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the role's generations, for each size of a device's cache; infinite if no row fits."""
        waves = self._waves(devices, t_g, cache_bytes)
        terms = self.model.generate(self.role, devices, t_g, np.maximum(waves, 1.0))
        count = sum(call.kind == "generate" for call in self.calls)
        return np.where(waves > 0, count * self.constants.seconds(terms), np.inf)

    def _waves(self, devices: int, t_g: int, cache_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return rows of a replica / rows that its cache holds at a time, rounded up to eighths; 0 if the longest row
        does not fit. A row is in the cache while it grows, so on average it has half its response."""
        work, longest = self.model.workload, self.model.row_bytes(self.role, t_g)
        share = (work.prompt_tokens + work.mean_response / 2) / work.longest_row
        rows = self.model.replica_rows(devices, t_g)
        held = np.maximum(cache_bytes, longest) / (longest * share)
        waves = np.ceil(WAVE_PARTS * np.maximum(1.0, rows / held)) / WAVE_PARTS
        return np.where(cache_bytes >= longest, waves, 0.0)


@lru_cache(maxsize=16_384)
def _divides(weights: ModelWeights, p: int, t: int) -> bool:
    """Whether p stages of t tensor ranks can divide a model."""
    try:
        weights.check(p, t)
    except BadInput:
        return False
    return True


@lru_cache(maxsize=16_384)
def _held(role: RoleModel, cut: bool, p: int, t: int, replicas: int, recomputed: bool) -> tuple[int, int, int]:
    """Return (lasting, passing, optimizer) bytes of the fullest rank. cut: whether replicas share the optimizer."""
    if cut:  # as with DeepSpeed's ZeRO-1, where each of the `replicas` has an equal share of the optimizer
        training = replace(role.training, engine="deepspeed", zero_stage=1, activation_checkpointing=recomputed)
        role = replace(role, training=training)
    ends = [rank_memory(role, Layout(p, t, replicas), rank) for rank in {0, (p - 1) * t}]
    most = max(ends, key=lambda end: end.lasting)
    return most.lasting, max(end.passing for end in ends), most.optimizer * replicas if cut else 0


def undominated(figures: NDArray[np.float64]) -> list[int]:
    """Return the rows (finite figures, smaller is better) that no other row matches or beats in all columns; of equal
    rows the first."""
    # sorted by their sums, no row beats an earlier one: keep the first, drop the rows it beats, repeat with the rest
    scaled = figures / np.maximum(np.abs(figures).max(axis=0, initial=0.0), 1e-300)
    left, found = np.lexsort((*figures.T[::-1], scaled.sum(axis=1))), []
    rows = figures[left]
    while len(left) > FEW_ROWS:
        found.append(int(left[0]))
        others = ~(rows[0] <= rows).all(axis=1)
        left, rows = left[others], rows[others]
    beats = np.ones((len(rows),) * 2, dtype=bool)
    for column in rows.T:  # few rows: compare all pairs at once
        beats &= column[:, None] <= column
    return sorted(found + left[~np.triu(beats, 1).any(axis=0)].tolist())


def options_of(
    roles: Mapping[str, RoleModel], hardware: Hardware, workload: Workload, constants: Constants, *, strategy: str,
    t_g: int | None, by_call: bool,
) -> dict[str, RoleOptions]:  # fmt: skip
    model = CostModel(hardware, workload)
    return {name: RoleOptions(name, role, model, constants, strategy=strategy, t_g=t_g, by_call=by_call)
            for name, role in roles.items()}  # fmt: skip
