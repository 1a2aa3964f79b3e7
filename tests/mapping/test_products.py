"""Products by shape: tiles, waves, bytes, and the kernels that others have timed."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from benchmarks.mapping_products import TABLE, off
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.mapping.hardware import PRESETS, TILES, ProductRates


def seconds(rates: ProductRates, m: int, n: int, k: int, memory_bytes_s: float = 1e15) -> float:
    return rates.seconds(m, n, k, flop_s=1e12, memory_bytes_s=memory_bytes_s, item_bytes=2)


def test_a_device_without_tiles_is_at_its_peak_or_reads() -> None:
    rates = ProductRates()
    assert seconds(rates, 1000, 100, 10) == pytest.approx(2e6 / 1e12)
    assert seconds(rates, 10, 20, 30, 1e6) == pytest.approx(2 * (300 + 600 + 200) / 1e6)
    assert seconds(ProductRates(share=0.5, launch_s=3.0), 1000, 100, 10) == pytest.approx(3 + 4e6 / 1e12)


def test_waves_and_edges_of_tiles() -> None:
    rates = ProductRates(units=10, tiles=True)
    full = seconds(rates, 256 * 10, 128, 64)
    assert full == pytest.approx(2 * 2560 * 128 * 64 / 1e12)  # ten tiles: one whole wave
    assert seconds(rates, 256 * 10 + 1, 128, 64) > 1.04 * full  # the quickest tile needs another wave
    for m, n in ((1, 1), (65, 200), (1000, 700), (4096, 11008)):
        by_hand = min(
            math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / 10) * 10 * rows * columns
            for rows, columns in TILES
        )
        assert seconds(rates, m, n, 64) == pytest.approx(2 * by_hand * 64 / 1e12)
        assert seconds(rates, m, n, 64) >= 2 * m * n * 64 / 1e12  # never quicker than its operations


def test_the_presets_are_close_to_kernels_that_were_timed() -> None:
    table = pd.read_csv(TABLE)
    assert set(table["device"]) == {"a100-80g", "h100"} and len(table) > 200
    for device, most in (("a100-80g", 0.08), ("h100", 0.11)):
        part = table[(table["device"] == device) & (table["model"] != "Llama-2-7b-hf")]  # fitted to that one
        assert off(part, PRESETS[device]).abs().mean() < most


def test_rates_are_checked() -> None:
    for wrong in ({"units": 0}, {"share": 0.0}, {"launch_s": -1.0}):
        with expect_error(BadInput, value="ProductRates"):
            ProductRates(**wrong)
