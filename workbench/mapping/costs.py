"""The cost model: how long a call takes, from the shapes, bytes and counts of its kernels, transfers and starts.

    seconds of a call = sum over terms of  constant x term

| term | unit | contains |
| --- | --- | --- |
| passes | s | forward and backward passes: matrix products by role, attention, memory traffic; optimizer states |
| decoding | s | decoding steps: products or reads of weights, keys and values, the host's start of each layer |
| links | s | all-reduces of tensor ranks and of gradients, sends between stages, moves of weights and rows |
| calls | ranks | the fixed cost of a call per rank: messages of the controller, rows sent and collected |

The first three terms are computed from the hardware's measured rates for isolated kernels and collectives. Their
constants, the slowdown inside a model, are therefore close to 1. The sum is linear in the constants, so they are fitted
to measured spans or published figures, by least squares of relative errors, none below zero (`fit`).

A pass of a micro-batch through a stage takes the seconds of its products (`hardware`), of attention (4 operations per
query element and visible token) and of norms, sums and activations, which are memory-bound. A backward pass has two
products for each product of the forward pass, 2.5 times its attention, and the forward work again if activations are
recomputed. For m micro-batches, a pipeline takes one pass through all stages and m - 1 through the slowest stage, the
last, which has the head (1F1B; Narayanan et al. 2021, arXiv:2104.04473, section 2.2). A decoding step multiplies one
token of each active row: its products are bound by reading the weights or by computing, whichever takes longer for the
shapes; keys and values are read in addition.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from workbench.errors import BadInput
from workbench.mapping.hardware import Hardware
from workbench.mapping.workload import Workload
from workbench.placement.role_model import RoleModel, held_bytes, matrices
from workbench.settings.layout import Layout
from workbench.support.validation import NonNegativeFloat, settings

OPTIMIZER_BYTES = 28  # Adam, per weight, fp32: reads gradient, weight and two moments, writes the last three
COLUMN_BYTES = 8  # per token and column of a batch: ids and masks are int64, numbers are fp32 with offsets


@dataclass(frozen=True)
class Terms:
    """The terms of one call; see the table in the module's docstring."""

    passes: float = 0.0
    decoding: float = 0.0
    links: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        return Terms(*map(operator.add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> Terms:
        return Terms(*(factor * value for value in _values(self)))


_values = operator.attrgetter(*(field.name for field in fields(Terms)))


@settings(kw_only=False)
class Constants:
    """The constant of each term: a factor of the kernels' seconds, or (calls) seconds per called rank. The defaults are
    fitted to published measurements of HybridFlow on A100s (`benchmarks/mapping.py`)."""

    passes: NonNegativeFloat = 1.06
    decoding: NonNegativeFloat = 1.81
    links: NonNegativeFloat = 1.01
    calls: NonNegativeFloat = 0.021

    def seconds(self, terms: Terms) -> float:
        return sum(map(operator.mul, _values(self), _values(terms)))

    @property
    def findings(self) -> tuple[str, ...]:
        """A sentence for each constant outside its plausible range: then the measurements contain other costs than the
        constant's, or the description of the hardware is wrong."""
        told = []
        for name, (least, most, meaning) in PLAUSIBLE.items():
            if not least <= (value := getattr(self, name)) <= most:
                told.append(f"{name}={value:.3g} is outside {least:g} to {most:g}: {meaning}")
        return tuple(told)


PLAUSIBLE = {
    "passes": (0.9, 1.8, "time of passes, relative to kernels timed alone"),
    "decoding": (0.9, 2.5, "time of decoding steps, relative to reading weights, keys and values at the memory's rate"),
    "links": (0.7, 2.5, "time of collectives within a model, relative to collectives timed alone"),
    "calls": (0.0, 0.1, "fixed seconds of a call for each rank"),
}
"""The plausible range of GPU constants: least, most, meaning."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """Computes the terms of a workload's calls on given hardware."""

    hardware: Hardware
    workload: Workload

    def __post_init__(self) -> None:
        for name in ("_forward", "_backward", "infer", "train"):
            object.__setattr__(self, name, lru_cache(16_384)(getattr(self, name)))  # ends with the model

    def _product(self, m: int, n: int, k: int, item_bytes: int) -> float:
        hardware = self.hardware
        return hardware.products.seconds(m, n, k, flop_s=hardware.flop_s(self.workload.dtype),
                                         memory_bytes_s=hardware.memory_bytes_s, item_bytes=item_bytes)  # fmt: skip

    def _streamed(self, nbytes: float) -> float:
        """Return the seconds to stream bytes through a device's memory."""
        return nbytes / (self.hardware.memory_bytes_s * self.hardware.products.stream_share)

    def _forward(self, role: RoleModel, t: int, tokens: int, context: float) -> tuple[float, float, float]:
        """Return the seconds of one of t tensor ranks for all layers without attention, for attention, and the head."""
        item, (layers, head) = role.frozen_bytes, matrices(role, t)
        multiplied = sum(count * self._product(tokens, n, k, item) for (n, k), count in layers.items())
        streamed = role.layers * self._streamed(tokens * item * self._passed(role, t))
        rate = self.hardware.flop_s(self.workload.dtype) * self.hardware.products.attention_share
        attention = 4.0 * role.layers * role.queries / t * tokens * context / rate
        ends = sum(count * self._product(self._headed(tokens), n, k, item) for (n, k), count in head.items())
        return multiplied + streamed, attention, ends

    def _decode(self, role: RoleModel, t: int, rows: Any) -> Any:
        """Return the seconds of a decoding step of `rows` rows, without attention."""
        hardware, item, (layers, head) = self.hardware, role.frozen_bytes, matrices(role, t)
        multiplied = sum(
            count * hardware.products.few(rows, n, k, flop_s=hardware.flop_s(self.workload.dtype),
                                          memory_bytes_s=hardware.memory_bytes_s, item_bytes=item)
            for (n, k), count in (layers + head).items()
        )  # fmt: skip
        return multiplied + role.layers * self._streamed(rows * item * self._passed(role, t))

    def _passed(self, role: RoleModel, t: int) -> float:
        """Return the elements per token that a layer reads and writes outside its products: two norms (each twice), two
        sums; rotations; gate, up and their product."""
        return 14 * role.hidden + (2 * (role.queries + role.keys) + 3 * role.inner) / t

    def _backward(self, role: RoleModel, t: int, tokens: int, context: float) -> tuple[float, float, float]:
        """Like `_forward`, for the backward pass. With an adapter, the frozen matrices have no gradient."""
        item, seconds = role.frozen_bytes, list[float]()
        for cut, rows in zip(matrices(role, t), (tokens, self._headed(tokens)), strict=True):
            of_inputs = sum(count * self._product(rows, k, n, item) for (n, k), count in cut.items())
            of_weights = sum(count * self._product(n, k, rows, item) for (n, k), count in cut.items())
            seconds.append(of_inputs + (of_weights if role.adapter is None else 0.0))
        multiplied, ends = seconds
        streamed = 2 * role.layers * self._streamed(tokens * item * self._passed(role, t))
        return multiplied + streamed, 2.5 * self._forward(role, t, tokens, context)[1], ends

    def _headed(self, tokens: int) -> int:
        """Return the number of tokens that reach the head: in this workbench's engine, only response tokens."""
        work = self.workload
        return max(1, round(tokens * work.mean_response / work.row_tokens)) if work.engine == "workbench" else tokens

    def _pipeline(self, layout: Layout, micro: int, parts: tuple[float, float, float]) -> float:
        """Return the seconds of all micro-batches: one through all stages, the others through the last, with head."""
        layers, attention, head = parts
        return layers + attention + head + (micro - 1) * ((layers + attention) / layout.p + head)

    def _all_reduce(self, nbytes: Any, ranks: int, stride: int) -> Any:
        """Return the seconds by a ring, 2 (r-1)/r n / bandwidth + 2 (r-1) hops, or by two trees, 2 n / bandwidth +
        2 log2 r hops, whichever is faster (Patarasuk and Yuan 2009; Sanders et al. 2009; NCCL has both)."""
        if ranks == 1:
            return 0.0
        rate, hops_s = self.hardware.link(ranks, stride), self.hardware.hops(ranks, stride)
        ring = 2 * (ranks - 1) / ranks * nbytes / rate + 2 * hops_s
        tree = 2 * nbytes / rate + 2 * math.ceil(math.log2(ranks)) * self.hardware.hop(ranks, stride)
        return np.minimum(ring, tree)

    def _gather(self, nbytes: float, ranks: int, stride: int) -> float:
        """Return the seconds of a ring's all-gather or reduce-scatter of n bytes in total."""
        if ranks == 1:
            return 0.0
        hops_s = self.hardware.hops(ranks, stride)
        return (ranks - 1) / ranks * nbytes / self.hardware.link(ranks, stride) + hops_s

    def _passes(self, role: RoleModel, layout: Layout, rows: float) -> tuple[int, int, int]:
        """Divide rows, none split, over replicas: (tokens of a micro-batch, micro-batches, pipeline slots) of each."""
        dealt = math.ceil(rows / layout.d)
        together = max(1, int(role.micro_batch_tokens // self.workload.row_tokens))
        micro = math.ceil(dealt / together)
        return round(dealt * self.workload.row_tokens / micro), micro, micro + layout.p - 1

    def _links(self, role: RoleModel, layout: Layout, tokens: int, slots: int, reduces: int) -> float:
        """Return the seconds, along the pipeline, of all-reduces over tensor ranks and of sends between stages:
        activations forward, and gradients back."""
        nbytes = tokens * role.hidden * role.frozen_bytes
        sent = 0.0
        if layout.p > 1:
            rate, hop_s = self.hardware.link(layout.p, layout.t), self.hardware.hop(layout.p, layout.t)
            sent = (1 if reduces == 2 else 2) * (nbytes / rate + hop_s)
        return slots * (reduces * role.layers / layout.p * self._all_reduce(nbytes, layout.t, 1) + sent)

    def _starts(self, layers: float) -> float:
        """Return the host's seconds to start the layers of passes; 0 if the host runs ahead of the device."""
        return 0.0 if self.hardware.runs_ahead else layers * self.hardware.layer_start_s

    def infer(self, role: RoleModel, layout: Layout) -> Terms:
        work = self.workload
        tokens, micro, slots = self._passes(role, layout, work.rows)
        gathered = 0.0
        if role.engine == "zero3":
            own = role.elements / layout.t * role.frozen_bytes
            gathered = micro * self._gather(own, layout.d, layout.t)
        passed_s = self._pipeline(layout, micro, self._forward(role, layout.t, tokens, work.mean_context))
        return Terms(
            passes=passed_s + self._starts(role.layers / layout.p * slots),
            links=self._links(role, layout, tokens, slots, 2) + gathered,
            calls=layout.size,
        )

    def train(self, role: RoleModel, layout: Layout, recomputed: bool | None = None) -> Terms:
        """Return the terms of an update. recomputed: whether activations are; None: as in the settings."""
        work = self.workload
        tokens, micro, slots = self._passes(role, layout, work.rows / work.updates)
        recomputed = role.training.activation_checkpointing if recomputed is None else recomputed
        forward = self._forward(role, layout.t, tokens, work.mean_context)
        backward = self._backward(role, layout.t, tokens, work.mean_context)
        passed_s = (1 + recomputed) * self._pipeline(layout, micro, forward) + self._pipeline(layout, micro, backward)
        own = role.trained_elements / (layout.p * layout.t)
        stride = layout.p * layout.t
        summed = self._all_reduce(4 * own, layout.d, stride)
        sharded = role.engine in ("zero1", "zero2", "zero3") or (role.engine == "torch" and work.engine == "cluster")
        if sharded:  # reduce-scatter of gradients, all-gather of weights
            gathered = self._gather(role.frozen_bytes * own, layout.d, stride)
            summed = self._gather(4 * own, layout.d, stride) + gathered
            if role.engine == "zero3":
                summed += (2 + recomputed) * micro * gathered
        stepped = self._streamed(OPTIMIZER_BYTES * own / (layout.d if sharded else 1))
        return Terms(
            passes=passed_s + stepped + self._starts((2 + recomputed) * role.layers / layout.p * slots),
            links=self._links(role, layout, tokens, slots, 6 if recomputed else 4) + summed,
        ) * (work.updates * work.epochs) + Terms(calls=layout.size)

    def row_bytes(self, role: RoleModel, t_g: int) -> float:
        """Return the bytes of the longest row's keys and values on one device. If there are fewer key-value heads than
        ranks, the heads are copied."""
        return role.kv_bytes_per_token * self.workload.longest_row / min(t_g, role.key_heads)

    def replica_rows(self, devices: int, t_g: int) -> int:
        """Return the number of rows of the generation replica with the most rows."""
        return math.ceil(self.workload.rows / (devices // t_g))

    def generate(self, role: RoleModel, devices: int, t_g: int, waves: Any) -> Terms:
        """Return the terms of prefill and decoding of all rows by replicas of `t_g` devices. waves: rows / rows that
        the cache holds at a time, at least 1 (a new row replaces a finished one); an array gives terms of arrays."""
        work = self.workload
        rows = self.replica_rows(devices, t_g)
        longest, mean = max(work.lengths), work.mean_response
        steps = np.maximum(float(longest), waves * mean)
        together = rows * mean / steps  # active rows
        squares = sum(n * n for n in work.lengths) / len(work.lengths)
        heads = t_g / min(t_g, role.key_heads)  # more ranks than heads: copies of heads are read again
        read = heads * rows * (mean * work.prompt_tokens + squares / 2) * role.kv_bytes_per_token / t_g
        prompt = work.prompt_tokens
        first, seen, _ = self._forward(role, t_g, prompt, work.prompt_tokens / 2)
        hidden, started = role.hidden * role.frozen_bytes, role.layers * self.hardware.layer_start_s
        reduced = steps * self._all_reduce(together * hidden, t_g, 1) + rows * self._all_reduce(prompt * hidden, t_g, 1)
        return Terms(
            passes=rows * (first + seen),
            decoding=steps * (self._decode(role, t_g, together) + started) + self._streamed(read),
            links=2 * role.layers * reduced,
            calls=devices,
        )

    def transition(self, role: RoleModel, layout: Layout, strategy: str = "hybridflow") -> Terms:
        """Return the terms of an iteration's transition from training to generation: the bytes that the resharding
        planner counts for the rank that receives most, and the load into the engine. layout: with p_g and t_g."""
        if layout.p * layout.t == 1 and role.engine != "zero3":
            return Terms()
        replica = layout if strategy == "full" else replace(layout, d=1)
        received: float = received_bytes(role, replica, strategy)
        if not received:
            return Terms()
        ranks = layout.p * layout.t if strategy == "hybridflow" else layout.size
        received *= self.workload.sync_share
        return self.moved(role, received, ranks, (layout.p_g or 1) * (layout.t_g or 1))

    def moved(self, role: RoleModel, received: float, ranks: int, parts: int) -> Terms:
        """Return the terms of receiving weights from other ranks, then loading 1 of `parts` parts into an engine."""
        loaded = role.elements * role.frozen_bytes / parts
        return Terms(links=received / self.hardware.link(ranks) + loaded / self.hardware.load_bytes_s)

    def transfer(self, sent: float, devices: int) -> Terms:
        """Return the terms of receiving rows from other pools. sent: columns per token."""
        if not sent:
            return Terms()
        work, hardware = self.workload, self.hardware
        machines = max(1, devices // hardware.devices_per_machine)
        return Terms(links=sent * COLUMN_BYTES * work.rows * work.row_tokens / machines / hardware.machine_bytes_s)


def received_bytes(role: RoleModel, layout: Layout, strategy: str) -> int:
    """Return the most bytes that a rank receives in a transition, as the resharding planner (`plan_transition`) counts
    them, without its schedule. With `hybridflow`, a rank's training slices lie inside its generation slices. With the
    other strategies, a rank gathers the whole model; with `full`, the ranks have equal parts, the last the smallest."""
    weights = role.weights
    if strategy == "full":
        size = layout.size
        own = sum(max(0, w.numel - (size - 1) * -(-w.numel // size)) * w.item_bytes for w in weights)
        return role.weights.nbytes - own
    p_g, t_g = layout.p_g or layout.p, layout.t_g or layout.t
    most = 0
    for i in {0, layout.p // 2, layout.p - 1}:
        for j in {0, layout.t - 1}:
            own, needed = held_bytes(role, layout.p, layout.t, i, j), role.weights.nbytes
            if strategy == "hybridflow":
                needed = held_bytes(role, p_g, t_g, i // (layout.p // p_g), j // (layout.t // t_g))
            most = max(most, needed - own)
    return most


@dataclass(frozen=True)
class Sample:
    """A measurement: the terms of what was measured, and its seconds."""

    terms: Terms
    seconds: float
    name: str = ""


def fit(samples: Sequence[Sample], start: Constants | None = None, *, pull: float = 1e-3) -> Constants:
    """Minimise, over c >= 0,  sum over samples of (terms . c / seconds - 1)^2 + pull * sum of (c / start - 1)^2.

    The errors are relative, so that short and long calls count equally. pull: how strongly constants stay near `start`,
    which alone decides a constant if no sample has its term. The fit solves each choice of the constants that are above
    0 (there are few) and takes the best. The caller judges whether the result is plausible. Raises `BadInput` without a
    sample, or for a sample that took no time.
    """
    start = start or Constants()
    if not samples:
        raise BadInput("nothing was measured", "constants are fitted to timed calls", "run an iteration first")
    for sample in samples:
        if not sample.seconds > 0:
            raise BadInput(f"{sample.name or 'a sample'} took {sample.seconds} s", "it must be more than 0")
    scale = np.array([constant or 1e-9 for constant in _values(start)])
    terms = np.array([_values(sample.terms) for sample in samples])
    matrix = terms * scale / np.array([[sample.seconds] for sample in samples])
    gram = matrix.T @ matrix + pull * np.eye(len(scale))
    aim = matrix.sum(axis=0) + pull
    tried = []
    for chosen in product((False, True), repeat=len(scale)):
        free, found = np.array(chosen), np.zeros(len(scale))
        found[free] = np.linalg.solve(gram[np.ix_(free, free)], aim[free])
        if (found >= 0).all():
            tried.append(found)
    found = min(tried, key=lambda one: float(one @ gram @ one - 2 * aim @ one))
    return Constants(*(float(value) for value in found * scale))


def spread(
    samples: Mapping[tuple[str, int, str], Sample], between_s: Mapping[tuple[str, int], float], start: Constants
) -> float:
    """Return the relative error to expect when predicting an iteration. samples: by placement, iteration and call.
    between_s: by placement and iteration, the seconds in which no call ran, if known.

    Each placement's iterations are predicted with constants fitted to the samples of the other placements; the result
    is the root mean square of log(predicted / measured). With only one placement, it is the error of single calls, with
    constants fitted to all of them.
    """
    placements = dict.fromkeys(placement for placement, _, _ in samples)
    errors: list[float] = []
    for left_out in placements if len(placements) > 1 else ():
        constants = fit([sample for key, sample in samples.items() if key[0] != left_out], start)
        others_s = [taken for (placement, _), taken in between_s.items() if placement != left_out]
        sums = {n: (float(np.mean(others_s)), taken) for (placement, n), taken in between_s.items()
                if placement == left_out and others_s}  # fmt: skip
        for (placement, iteration, _), sample in samples.items():
            if placement == left_out:
                predicted, measured = sums.get(iteration, (0.0, 0.0))
                sums[iteration] = predicted + constants.seconds(sample.terms), measured + sample.seconds
        errors += [math.log(predicted / measured) for predicted, measured in sums.values()]
    if not errors:
        constants = fit(list(samples.values()), start)
        errors = [math.log(constants.seconds(one.terms) / one.seconds) for one in samples.values()]
    return math.sqrt(sum(error * error for error in errors) / len(errors))
