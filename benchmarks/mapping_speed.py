"""Seconds of the search against devices, beside those that HybridFlow's authors published (arXiv:2409.19256).

python benchmarks/mapping_speed.py
"""

from __future__ import annotations

import time

import pandas as pd

from workbench.mapping import search
from workbench.mapping.workload import config_of

ROLES = ("actor", "critic", "reference", "reward", "cost")
PUBLISHED_S = {("7b", 8): 11, ("7b", 16): 33, ("13b", 24): 66, ("13b", 32): 112, ("34b", 48): 235, ("34b", 64): 395,
               ("70b", 96): 862, ("70b", 128): 1505}  # fmt: skip
MORE = [("7b", 512, 4), ("70b", 256, 4), ("70b", 256, 5), ("70b", 1024, 5), ("70b", 4096, 4)]


def main() -> None:
    rows = []
    cases = [(size, devices, 4) for size, devices in PUBLISHED_S] + MORE
    for size, devices, count in cases:
        config = config_of(f"llama-{size}")
        algorithm = "ppo" if count == 4 else "safe-rlhf"
        start_s = time.process_time()
        plans = search(dict.fromkeys(ROLES[:count], config), devices=devices, workload=algorithm)
        cpu_s = time.process_time() - start_s
        rows.append({"models": f"{count} x {size}", "devices": devices, "published_s": PUBLISHED_S.get((size, devices)),
                     "search_s": round(plans.search_s, 2), "cpu_s": round(cpu_s, 2), "granularity": plans.granularity,
                     "exact": plans.exact, "placements": plans.placements_considered})  # fmt: skip
        print(rows[-1], flush=True)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
