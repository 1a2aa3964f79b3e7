"""How long a matrix product takes, by its shape: tiles in waves over a device's multiprocessors, or its bytes.

A product [m, k] x [k, n] is cut into tiles of the result. A device computes as many tiles at a time as it has units, so
the last wave may be nearly empty (wave quantisation), and a tile at an edge may be (tile quantisation; both in NVIDIA's
"Matrix Multiplication Background User's Guide"). A small tile reads more operands for each operation, so that its rate
is lower. The library takes the quickest tile. Where few rows are multiplied, reading the weights takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from workbench.support.validation import at_least, check_fields, whole

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the result that a kernel computes at a time: those of cuBLAS for 16-bit products."""


@dataclass(frozen=True, kw_only=True)
class ProductRates:
    """The efficiency of a device's products. The defaults are a device without tiles, at its peak.

    units: tiles at a time: the multiprocessors of a GPU. share: of the peak rate, with endless tiles. edge: elements;
    tiles of m x n reach  share / (1 + edge (1/m + 1/n)). memory_share: of the memory's bandwidth, in
    products. stream_share: of that, where bytes are only read or written. attention_share: of the peak rate, in
    attention. launch_s: seconds of a product of no size. tiles: whether results are cut into tiles.
    """

    units: int = 1
    share: float = 1.0
    edge: float = 0.0
    memory_share: float = 1.0
    stream_share: float = 1.0
    attention_share: float = 1.0
    launch_s: float = 0.0
    tiles: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "ProductRates.")
        whole("ProductRates.units", self.units, 1)
        for name in ("share", "memory_share", "stream_share", "attention_share"):
            at_least(f"ProductRates.{name}", getattr(self, name), 0, strictly=True)
        for name in ("edge", "launch_s"):
            at_least(f"ProductRates.{name}", getattr(self, name), 0)

    def seconds(self, m: int, n: int, k: int, *, flop_s: float, memory_bytes_s: float, item_bytes: int) -> float:
        """Of a product [m, k] x [k, n] on a device of this peak rate and memory bandwidth."""
        return _seconds(self, m, n, k, flop_s, memory_bytes_s, item_bytes)

    def few(self, m: float, n: int, k: int, *, flop_s: float, memory_bytes_s: float, item_bytes: int) -> float:
        """Of a product of few rows, in the mean over numbers of rows near m: at the rate of the smallest tile, without
        waves. Rows in two halves never take less time than at once."""
        read = item_bytes * (m * k + n * k + m * n) / (memory_bytes_s * self.memory_share)
        slower = 1 + self.edge * sum(1 / side for side in TILES[-1]) if self.tiles else 1.0
        return self.launch_s + max(read, 2.0 * m * n * k * slower / (flop_s * self.share))


@lru_cache(maxsize=100_000)
def _seconds(
    rates: ProductRates, m: int, n: int, k: int, flop_s: float, memory_bytes_s: float, item_bytes: int
) -> float:
    read = item_bytes * (m * k + n * k + m * n) / (memory_bytes_s * rates.memory_share)
    computed = 2.0 * m * n * k
    if rates.tiles:
        computed = min(_tiled(rates, m, n, k, *tile) for tile in TILES)
    return rates.launch_s + max(read, computed / (flop_s * rates.share))


def _tiled(rates: ProductRates, m: int, n: int, k: int, rows: int, columns: int) -> float:
    """Operations of all waves, those of empty places and of a small tile's lower rate included."""
    waves = -(-(-(-m // rows) * -(-n // columns)) // rates.units)
    return 2.0 * waves * rates.units * rows * columns * k * (1 + rates.edge * (1 / rows + 1 / columns))
