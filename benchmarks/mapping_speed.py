"""Seconds of the search against devices, beside those that HybridFlow's authors published (arXiv:2409.19256).

python benchmarks/mapping_speed.py
"""

from __future__ import annotations

import time
from typing import Any

import pandas as pd

from workbench.mapping import Workload, search
from workbench.mapping.workload import config_of

ROLES = ("actor", "critic", "reference", "reward", "cost")
PUBLISHED_S = {("7b", 8): 11, ("7b", 16): 33, ("13b", 24): 66, ("13b", 32): 112, ("34b", 48): 235, ("34b", 64): 395,
               ("70b", 96): 862, ("70b", 128): 1505}  # fmt: skip
MORE = [("7b", 512, 4), ("7b", 10_000, 4), ("70b", 1024, 5), ("70b", 10_000, 4), ("70b", 10_000, 5)]
CHANGED: list[tuple[str, dict[str, Any]]] = [  # of four models of 70B on 128 devices
    ("by call", {"by_call": True}), ("ahead by 1", {"workload": Workload().with_rollout(1)}),
]  # fmt: skip


def main() -> None:
    rows = []
    cases: list[tuple[str, int, int, str, dict[str, Any]]] = [
        *((size, devices, 4, "", {}) for size, devices in PUBLISHED_S),
        *((*one, "", {}) for one in MORE),
        *(("70b", 128, 4, name, changes) for name, changes in CHANGED),
    ]
    for size, devices, count, name, changes in cases:
        config = config_of(f"llama-{size}")
        asked = {"workload": "ppo" if count == 4 else "safe-rlhf", **changes}
        start_s = time.process_time()
        plans = search(dict.fromkeys(ROLES[:count], config), devices=devices, **asked)
        cpu_s = time.process_time() - start_s
        published_s = None if name else PUBLISHED_S.get((size, devices))
        rows.append({"models": f"{count} x {size} {name}".strip(), "devices": devices, "published_s": published_s,
                     "search_s": round(plans.search_s, 2), "cpu_s": round(cpu_s, 2), "exact": plans.exact,
                     "gap_%": round(100 * plans.gap, 2), "placements": plans.placements_considered})  # fmt: skip
        print(rows[-1], flush=True)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
