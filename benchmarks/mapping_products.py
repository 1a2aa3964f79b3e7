"""The cost model's matrix products beside kernels that were timed on A100 and H100.

    python benchmarks/mapping_products.py

`mapping_products.csv` has some of the products that Vidur's authors timed, at regular intervals: the projections of
five models' layers by tensor ranks and tokens, medians (Agrawal et al. 2024, arXiv:2405.05465). They are in the folder
data/profiling/compute of microsoft/vidur (MIT licence). The efficiencies of the presets were fitted to all of
Llama-2-7B's; the others are predicted.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from workbench.mapping.hardware import PRESETS, Hardware

TABLE = Path(__file__).with_suffix(".csv")


def off(table: pd.DataFrame, hardware: Hardware) -> pd.Series:
    """Predicted by timed seconds, less 1."""
    seconds = [
        hardware.products.seconds(m, n, k, flop_s=hardware.flop_s("bfloat16"), memory_bytes_s=hardware.memory_bytes_s,
                                  item_bytes=2)
        for m, n, k in table[["m", "n", "k"]].itertuples(index=False)
    ]  # fmt: skip
    return pd.Series(seconds, index=table.index) / table["seconds"] - 1


def main() -> None:
    table = pd.read_csv(TABLE)
    for device, part in table.groupby("device"):
        told = part.assign(error=100 * off(part, PRESETS[str(device)]))
        for axis in (told["model"], pd.cut(told["m"], [0, 128, 512, 2048, 4096]).rename("rows")):
            found = told.groupby(axis, observed=True)["error"]
            print(device, "error in %:")
            print(found.agg(absolute=lambda one: one.abs().mean(), mean="mean", products="size").round(1).to_string())


if __name__ == "__main__":
    main()
