"""How long a call takes: sums of terms that hardware and workload decide, each times a constant that is fitted.

    seconds of a call = sum over terms of  constant x term

A term of the kinds in seconds is what the hardware's peak rates would take; its constant says how many times as long it
really takes (1 / efficiency). A term that counts things has a constant in seconds each. The sum is linear in the
constants, so that measured spans, or published figures, give them by least squares (`calibration`).

With T tokens a replica, F(T) their forward operations, R the matrix rate of a device, p stages, t tensor ranks, d
replicas, m micro-batches, L layers, h hidden elements of b bytes, W weights of a replica's device:

| term | unit | training, each update | inference | generation |
| --- | --- | --- | --- | --- |
| training | s | (3 or, recomputing, 4) F / (p t R) x (m+p-1)/m | | |
| inference | s | | F / (p t R) x (m+p-1)/m | F / (t_g R) of prefill and of decoding |
| memory | s | optimizer: 28 bytes a trained weight / (p t) | | steps x W / t_g + key-value bytes read, / bandwidth |
| tensor | s | all-reduces, 4 (6) a layer and micro-batch | 2 a layer and micro-batch | 2 a layer and step |
| data | s | all-reduce of fp32 gradients over d | (ZeRO-3: gather of weights) | |
| passes | layers | layers x (m+p-1) / p, forward and backward | layers x (m+p-1) / p | |
| steps | layers | | | layers x decoding steps |
| updates | 1 | 1 | | |
| calls | 1 | 1 for the call | 1 | 1 |
| transition | s | | | bytes that a rank receives / link |
| transitions | 1 | | | 1 where weights are resharded |
| transfer | s | bytes of its rows from other pools / network | same | same |

An all-reduce of n bytes over r ranks takes 2 (r-1)/r n / bandwidth + 2 (r-1) hops (a ring; Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields

from workbench.mapping.hardware import Hardware
from workbench.mapping.shapes import Shape
from workbench.mapping.workload import Workload
from workbench.settings.layout import Layout
from workbench.support.validation import at_least, check_fields

OPTIMIZER_BYTES = 28  # Adam, a weight: gradient, weight and two moments are read, and the last three written, in fp32
COLUMN_BYTES = 8  # of a token in a batch: ids and masks are int64, numbers fp32 beside their offsets


@dataclass(frozen=True)
class Terms:
    """The terms of one call; see the table above."""

    training: float = 0.0
    inference: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    passes: float = 0.0
    steps: float = 0.0
    updates: float = 0.0
    calls: float = 0.0
    transition: float = 0.0
    transitions: float = 0.0
    transfer: float = 0.0

    def __add__(self, other: Terms) -> Terms:
        return Terms(*map(operator.add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> Terms:
        return Terms(*(factor * value for value in _values(self)))


_values = operator.attrgetter(*(field.name for field in fields(Terms)))


@dataclass(frozen=True)
class Constants:
    """What each term costs: how many times its ideal seconds, or seconds each. The defaults were fitted to the
    published 7B measurements of HybridFlow on A100s (`benchmarks/mapping_published.py`)."""

    training: float = 1.78
    inference: float = 1.36
    memory: float = 1.0
    tensor: float = 2.70
    data: float = 1.62
    passes: float = 1.10e-4
    steps: float = 2.76e-5
    updates: float = 0.091
    calls: float = 0.745
    transition: float = 100.6
    transitions: float = 0.705
    transfer: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self, "Constants.")
        for field in fields(self):
            at_least(f"Constants.{field.name}", getattr(self, field.name), 0)

    def seconds(self, terms: Terms) -> float:
        return sum(map(operator.mul, _values(self), _values(terms)))


@dataclass(frozen=True, eq=False)
class CostModel:
    """Terms of calls on a hardware, for a workload."""

    hardware: Hardware
    workload: Workload

    def _all_reduce(self, nbytes: float, ranks: int, stride: int) -> float:
        if ranks == 1:
            return 0.0
        rate, hop_s = self.hardware.link(ranks, stride)
        return 2 * (ranks - 1) / ranks * nbytes / rate + 2 * (ranks - 1) * hop_s

    def _passes(self, shape: Shape, layout: Layout, rows: float) -> tuple[float, float, float]:
        """(tokens of a replica, micro-batches, pipeline slots) of rows that are dealt out; none is cut."""
        dealt = math.ceil(rows / layout.d)
        together = max(1, int(shape.role.micro_batch_tokens // self.workload.row_tokens))
        micro = math.ceil(dealt / together)
        return dealt * self.workload.row_tokens, micro, micro + layout.p - 1

    def _links(self, shape: Shape, layout: Layout, tokens: float, micro: float, slots: float, reduces: int) -> float:
        """Seconds of all-reduces over tensor ranks and of sends between stages, along the pipeline: activations, and
        gradients back."""
        nbytes = tokens / micro * shape.hidden * shape.role.frozen_bytes
        sent = 0.0
        if layout.p > 1:
            rate, hop_s = self.hardware.link(layout.p, layout.t)
            sent = (1 if reduces == 2 else 2) * (nbytes / rate + hop_s)
        return slots * (reduces * shape.layers / layout.p * self._all_reduce(nbytes, layout.t, 1) + sent)

    def infer(self, shape: Shape, layout: Layout) -> Terms:
        work, hardware = self.workload, self.hardware
        tokens, micro, slots = self._passes(shape, layout, work.rows)
        flop = shape.forward_flop(tokens, work.mean_context)
        gathered = 0.0
        if shape.role.engine == "zero3" and layout.d > 1:
            rate, _ = hardware.link(layout.d, layout.t)
            gathered = micro * (layout.d - 1) / layout.d * shape.elements / layout.t * shape.role.frozen_bytes / rate
        return Terms(
            inference=flop / (layout.p * layout.t * hardware.flop_s(work.dtype)) * slots / micro,
            tensor=self._links(shape, layout, tokens, micro, slots, 2),
            data=gathered,
            passes=shape.layers / layout.p * slots,
            calls=1,
        )

    def train(self, shape: Shape, layout: Layout) -> Terms:
        work, hardware, training = self.workload, self.hardware, shape.training
        tokens, micro, slots = self._passes(shape, layout, work.rows / work.updates)
        again = training.activation_checkpointing
        flop = shape.forward_flop(tokens, work.mean_context)
        own = shape.trained_elements / (layout.p * layout.t)
        sharded = shape.role.engine in ("zero1", "zero2", "zero3")
        gathers = 0.0
        if shape.role.engine == "zero3" and layout.d > 1:
            rate, _ = hardware.link(layout.d, layout.t)
            gathers = (2 + again) * micro * (layout.d - 1) / layout.d * own * shape.role.stored_bytes / rate
        count = work.updates * work.epochs
        return Terms(
            training=(3 + again) * flop / (layout.p * layout.t * hardware.flop_s(work.dtype)) * slots / micro,
            tensor=self._links(shape, layout, tokens, micro, slots, 6 if again else 4),
            data=self._all_reduce(4 * own, layout.d, layout.p * layout.t) + gathers,
            memory=OPTIMIZER_BYTES * own / (layout.d if sharded else 1) / hardware.memory_bytes_s,
            passes=(2 + again) * shape.layers / layout.p * slots,
            updates=1,
        ) * count + Terms(calls=1)  # fmt: skip

    def row_bytes(self, shape: Shape, t_g: int) -> float:
        """Bytes of keys and values of the longest row on one device; key-value heads that are fewer than ranks are
        copied."""
        longest = self.workload.prompt_tokens + max(self.workload.lengths)
        return shape.kv_bytes_per_token * longest / min(t_g, shape.key_heads)

    def replica_rows(self, devices: int, t_g: int) -> int:
        """Rows of the generation replica that has most."""
        return math.ceil(self.workload.rows / (devices // t_g))

    def generate(self, shape: Shape, devices: int, t_g: int, waves: int) -> Terms:
        """Prefill and decoding of all rows by replicas of `t_g` devices, whose cache is filled so many times: rows of
        one length in one wave after another, else a new row replaces one that has ended."""
        work, hardware = self.workload, self.hardware
        rows = self.replica_rows(devices, t_g)
        longest, mean = max(work.lengths), work.mean_response
        steps = max(float(longest), waves * mean if len(work.lengths) > 1 else waves * longest)
        drawn = rows * mean
        squares = sum(n * n for n in work.lengths) / len(work.lengths)
        heads = t_g / min(t_g, shape.key_heads)  # ranks beyond the heads read them once more
        read = heads * rows * (mean * work.prompt_tokens + squares / 2) * shape.kv_bytes_per_token
        bandwidth, rate = t_g * hardware.memory_bytes_s, t_g * hardware.flop_s(work.dtype)
        memory = (steps * shape.nbytes + read) / bandwidth
        products = shape.forward_flop(drawn, work.prompt_tokens + mean / 2) / rate
        prefill = shape.forward_flop(rows * work.prompt_tokens, work.prompt_tokens / 2) / rate
        hidden = shape.hidden * shape.role.frozen_bytes
        reduced = self._all_reduce(drawn / steps * hidden, t_g, 1) * steps
        reduced += self._all_reduce(rows / waves * work.prompt_tokens * hidden, t_g, 1) * waves
        return Terms(
            inference=prefill + products,
            memory=memory,
            tensor=2 * shape.layers * reduced,
            steps=shape.layers * steps,
            calls=1,
        )

    def transition(self, shape: Shape, layout: Layout, strategy: str = "hybridflow") -> Terms:
        """From the training layout to that of generation, once an iteration: the bytes that the resharding planner
        counts for the rank that receives most. layout: with p_g and t_g."""
        if layout.p * layout.t == 1 and shape.role.engine != "zero3":
            return Terms()
        received = received_bytes(shape, layout, strategy)
        if not received:
            return Terms()
        inside = Layout(layout.p, layout.t).size
        rate, _ = self.hardware.link(inside if strategy == "hybridflow" else layout.size)
        return Terms(transition=received / rate, transitions=1)

    def transfer(self, sent: float, devices: int) -> Terms:
        """Rows from other pools. sent: columns a token."""
        if not sent:
            return Terms()
        work, hardware = self.workload, self.hardware
        machines = max(1, devices // hardware.devices_per_machine)
        return Terms(transfer=sent * COLUMN_BYTES * work.rows * work.row_tokens / machines / hardware.machine_bytes_s)


def received_bytes(shape: Shape, layout: Layout, strategy: str) -> int:
    """Most bytes that a rank receives in a transition, as the resharding planner (`plan_transition`) counts them,
    without its schedule. With `hybridflow` a rank's slices in training lie inside those of generation; with the others
    it gathers the whole model, of which with `full` it has a run of equal parts, the last rank's being the smallest."""
    weights = shape.role.weights
    if strategy == "full":
        size = layout.size
        own = sum(max(0, w.numel - (size - 1) * -(-w.numel // size)) * w.item_bytes for w in weights)
        return shape.nbytes - own
    p_g, t_g = layout.p_g or layout.p, layout.t_g or layout.t
    most = 0
    for i in {0, layout.p // 2, layout.p - 1}:
        for j in {0, layout.t - 1}:
            own, needed = shape.held_bytes(layout.p, layout.t, i, j), shape.nbytes
            if strategy == "hybridflow":
                needed = shape.held_bytes(p_g, t_g, i // (layout.p // p_g), j // (layout.t // t_g))
            most = max(most, needed - own)
    return most
