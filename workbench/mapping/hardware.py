"""The hardware for which a mapping is searched: machines of equal devices, with rates from a data sheet or a short
measurement.

The result of a product [m, k] x [k, n] is split into tiles. A device computes as many tiles at a time as it has units,
so the last wave may be nearly empty (wave quantisation), and so may a tile at an edge (tile quantisation; both in
NVIDIA's "Matrix Multiplication Background User's Guide"). A small tile reads more operands per operation, so its rate
is lower. The library uses the fastest tile. For few rows, reading the weights takes longer than computing.

There are three links: a device's memory, the fabric inside a machine, and the network between machines, which the
devices of a machine share. If measurements are public, a rate is the measured one, not the data sheet's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.validation import NonNegativeFloat, Number, PositiveFloat, PositiveInt, settings

GIB = 2**30

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tile sizes (rows, columns of the result) of cuBLAS kernels for 16-bit products."""


@settings()
class ProductRates:
    """The efficiency of a device's matrix products. The defaults describe a device without tiles, at its peak.

    units: tiles computed at a time: the multiprocessors of a GPU. share: of the peak rate, for infinite tiles. edge: in
    elements; tiles of m x n reach  share / (1 + edge (1/m + 1/n)). memory_share: of the memory's bandwidth, in
    products. stream_share: of the memory's bandwidth, for plain reads and writes. attention_share: of the peak rate, in
    attention. launch_s: seconds of a product of size 0. tiles: whether results are split into tiles.
    """

    units: PositiveInt = 1
    share: PositiveFloat = 1.0
    edge: NonNegativeFloat = 0.0
    memory_share: PositiveFloat = 1.0
    stream_share: PositiveFloat = 1.0
    attention_share: PositiveFloat = 1.0
    launch_s: NonNegativeFloat = 0.0
    tiles: bool = False

    @lru_cache(maxsize=100_000)  # noqa: B019 (instances are small, and equal by value)
    def seconds(self, m: int, n: int, k: int, *, flop_s: float, memory_bytes_s: float, item_bytes: int) -> float:
        """Return the seconds of a product [m, k] x [k, n] on a device of this peak rate and memory bandwidth."""
        read = item_bytes * (m * k + n * k + m * n) / (memory_bytes_s * self.memory_share)
        computed = 2.0 * m * n * k * (1 + self.edge * (1 / m + 1 / n))
        if self.tiles:
            computed = min(self._tiled(m, n, k, *tile) for tile in TILES)
        return self.launch_s + max(read, computed / (flop_s * self.share))

    def _tiled(self, m: int, n: int, k: int, rows: int, columns: int) -> float:
        """Return the operations of all waves, including empty places and the lower rate of a small tile."""
        waves = -(-(-(-m // rows) * -(-n // columns)) // self.units)
        return 2.0 * waves * self.units * rows * columns * k * (1 + self.edge * (1 / rows + 1 / columns))

    def few(self, m: Any, n: int, k: int, *, flop_s: float, memory_bytes_s: float, item_bytes: int) -> Any:
        """Return the seconds of a product of few rows, averaged over row counts near m: at the smallest tile's rate,
        without waves; m may be an array. Two halves of the rows never take less time than all rows at once."""
        read = item_bytes * (m * k + n * k + m * n) / (memory_bytes_s * self.memory_share)
        slower = 1 + self.edge * sum(1 / side for side in (TILES[-1] if self.tiles else (m, n)))
        return self.launch_s + np.maximum(read, 2.0 * m * n * k * slower / (flop_s * self.share))


@settings()
class Hardware:
    """Equal machines of equal devices. Bandwidths are in bytes per second, in one direction.

    devices_per_machine: devices that share a machine's fabric and network. memory_bytes: of one device, or of its share
    of a CPU machine. matrix_flop_s: one device's peak rate of matrix products by dtype, in floating-point operations
    per second. products: the share of this peak that products reach, by shape. memory_bytes_s: bandwidth of a device's
    memory. inside_bytes_s: from one device to others of its machine. machine_bytes_s: of one machine's network, shared
    by its devices. load_bytes_s: of a generation engine that loads weights, on one device. host_bytes_s: between one
    device and the host's memory. inside_latency_s, between_latency_s: of one hop of a collective, inside a machine and
    between machines. runs_ahead: whether the host starts kernels before the device has finished earlier ones, so that
    starts take no extra time. layer_start_s: the host's time to start a layer's kernels; it counts in decoding steps,
    which wait for each token, and in passes if the host does not run ahead. usable: the share of the memory that models
    may fill; the framework needs the rest. cores: how many devices of a CPU machine compute at the same time; further
    devices wait for each other; None: all.
    """

    name: str
    devices_per_machine: PositiveInt
    memory_bytes: PositiveInt
    matrix_flop_s: Annotated[Mapping[str, PositiveFloat], Field(min_length=1)]
    memory_bytes_s: PositiveFloat
    inside_bytes_s: PositiveFloat
    machine_bytes_s: PositiveFloat
    products: ProductRates = field(default_factory=ProductRates)
    load_bytes_s: PositiveFloat = 2.7e9
    host_bytes_s: PositiveFloat = 25e9
    inside_latency_s: NonNegativeFloat = 4e-6
    between_latency_s: NonNegativeFloat = 25e-6
    runs_ahead: bool = True
    layer_start_s: NonNegativeFloat = 7e-5
    usable: Annotated[Number, Field(gt=0, le=1)] = 0.92
    cores: PositiveInt | None = None

    def flop_s(self, dtype: str) -> float:
        """Return the peak rate of one device in a dtype. `BadInput` if `matrix_flop_s` does not have it."""
        if dtype not in self.matrix_flop_s:
            raise BadInput(
                f"dtype {dtype!r} on {self.name}",
                f"rates are known for {', '.join(self.matrix_flop_s)}",
                "add it to Hardware.matrix_flop_s",
            )
        return self.matrix_flop_s[dtype]

    @property
    def usable_bytes(self) -> int:
        """The bytes of one device's memory that models may fill."""
        return int(self.memory_bytes * self.usable)

    def link(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes per second of one rank in a ring over `ranks` ranks that are `stride` devices apart, while
        all other such rings of the machines run too. Inside one machine, the ring uses the fabric. Over machines, a
        ring uses one entry to each machine's network, and the rings of a machine share its bandwidth."""
        if ranks * stride <= self.devices_per_machine:
            return self.inside_bytes_s
        return min(self.inside_bytes_s, self.machine_bytes_s / min(stride, self.devices_per_machine))

    def hop(self, ranks: int, stride: int = 1) -> float:
        """Return the seconds of the longest hop of such a ring."""
        return self.inside_latency_s if ranks * stride <= self.devices_per_machine else self.between_latency_s

    def hops(self, ranks: int, stride: int = 1) -> float:
        """Return the seconds of all hops from the first to the last rank of such a ring; hops between machines take
        longer."""
        borders = min(ranks, -(-ranks * stride // self.devices_per_machine)) - 1
        return borders * self.between_latency_s + (ranks - 1 - borders) * self.inside_latency_s

    @classmethod
    def this_machine(cls, devices: int | None = None) -> Hardware:
        """Measure this machine, see `probe.this_machine`."""
        from workbench.mapping.probe import this_machine

        return this_machine(devices)


# Peaks, memory: NVIDIA's data sheets (dense rates, SXM). Products, all-reduces: fitted to the kernels that Vidur's
# authors timed on DGX machines (Agrawal et al. 2024, arXiv:2405.05465; data/profiling of microsoft/vidur, MIT licence);
# products only to Llama-2-7B's: on the other sizes, up to 72B, the mean error is 6 to 7 % on A100 and 8 to 10 % on H100
# (`benchmarks/mapping_products.py`). Attention: FlashAttention-2's figures for causal rows of 2k (Dao 2023,
# arXiv:2307.08691). Loading: HybridFlow's transitions of 7B and 13B (arXiv:2409.19256, figure 14), which include the
# gather, the engine's start and its cache. Network: DGX machines have eight NICs of 200 Gbit/s (A100) or 400 Gbit/s;
# the A100 machines of HybridFlow's section 8 have one of 200 Gbit/s; we assume nine tenths of it. To the host: PCIe
# with 16 lanes, generations 4 and 5, of which we assume eight tenths.
_A100 = ProductRates(units=108, share=0.857, edge=6.82, memory_share=0.752, stream_share=0.9,
                     attention_share=0.55, launch_s=5.5e-6, tiles=True)  # fmt: skip
_H100 = ProductRates(units=132, share=0.985, edge=18.2, memory_share=0.855, stream_share=0.9,
                     attention_share=0.4, launch_s=6.6e-6, tiles=True)  # fmt: skip
PRESETS: dict[str, Hardware] = {
    one.name: one
    for one in (
        Hardware(name="a100-80g", devices_per_machine=8, memory_bytes=80 * GIB, products=_A100,
                 matrix_flop_s={"bfloat16": 312e12, "float32": 19.5e12}, memory_bytes_s=2.039e12,
                 inside_bytes_s=200e9, machine_bytes_s=22.5e9),
        Hardware(name="h100", devices_per_machine=8, memory_bytes=80 * GIB, products=_H100,
                 matrix_flop_s={"bfloat16": 989e12, "float32": 67e12}, memory_bytes_s=3.35e12,
                 inside_bytes_s=380e9, machine_bytes_s=360e9, host_bytes_s=50e9, inside_latency_s=2.7e-6),
        Hardware(name="h200", devices_per_machine=8, memory_bytes=141 * 10**9, products=_H100,
                 matrix_flop_s={"bfloat16": 989e12, "float32": 67e12}, memory_bytes_s=4.8e12,
                 inside_bytes_s=380e9, machine_bytes_s=360e9, host_bytes_s=50e9, inside_latency_s=2.7e-6),
    )
}  # fmt: skip


def hardware(given: str | Hardware) -> Hardware:
    """Return a preset by name, "this machine" (measured), or the given hardware; `BadInput` for other names."""
    if isinstance(given, Hardware):
        return given
    if given in ("this machine", "this-machine"):
        return Hardware.this_machine()
    if given not in PRESETS:
        raise BadInput(f"hardware {shown(given)}", f"the names are {', '.join(PRESETS)} and 'this machine'",
                       "use one of these, or a wb.mapping.Hardware(...)")  # fmt: skip
    return PRESETS[given]
