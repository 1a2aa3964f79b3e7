"""A long run: is memory flat, do iterations stay as fast, and are the views still quick?

    python benchmarks/long_run.py                         # 1,000 iterations inline; --backend ray, --iterations

PPO on a tiny model. Printed at every tenth of the run: resident memory of the kernel and of each host, milliseconds an
iteration, and MiB of the run folder; at its end, how long `lab.spans()` takes. The exit code is 1 where memory grew by
more than `GROWTH_MIB` after the first tenth, or `lab.spans()` took longer than `SPANS_S`.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import workbench as wb
from tests.cases import tiny_lab

GROWTH_MIB = 8.0  # of a process, from the first tenth of the run to its end
SPANS_S = 0.5


def measured(backend: str, iterations: int, folder: Path) -> tuple[pd.DataFrame, int, float]:
    """One row a tenth of the run; how many spans there are at its end, and how long `lab.spans()` takes."""
    rows = []
    with tiny_lab("long", folder, backend=backend, if_exists="replace") as lab:
        ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
        processes = {"kernel": psutil.Process()}
        if backend == "ray":
            hosts = lab.hosts.backend.processes  # type: ignore[attr-defined]
            processes |= {name: psutil.Process(process.pid) for name, process in hosts.items()}
        for part in range(1, 11):
            began = time.perf_counter()
            for _ in range(iterations // 10):
                ppo.iterate()
            iteration_ms = 1000 * (time.perf_counter() - began) / (iterations // 10)
            # what the allocator holds free is not in use; of hosts on Ray it stays in the figure
            getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
            resident = {
                f"{name} resident MiB": process.memory_info().rss / 2**20 for name, process in processes.items()
            }
            folder_mib = sum(path.stat().st_size for path in lab.run_folder.rglob("*.*")) / 2**20
            rows.append(
                {"iteration": part * (iterations // 10), **resident, "iteration_ms": iteration_ms, "disk": folder_mib}
            )
            print({name: round(value, 2) for name, value in rows[-1].items()}, flush=True)
        began = time.perf_counter()
        spans = len(lab.spans())
        return pd.DataFrame(rows).set_index("iteration"), spans, time.perf_counter() - began


def main() -> int:
    """Print the table; 1 where something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("inline", "ray"), default="inline")
    parser.add_argument("--iterations", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table, spans, spans_s = measured(arguments.backend, arguments.iterations, Path(folder))
    print(table.round(2).to_string())
    resident = table.filter(like="resident")
    grown = (resident.iloc[-1] - resident.iloc[0]).to_dict()
    print(f"grown after the first tenth: {', '.join(f'{name} {mib:.1f}' for name, mib in grown.items())}")
    print(f"{spans} spans in {spans_s:.2f} s")
    return int(max(grown.values()) > GROWTH_MIB or spans_s > SPANS_S)


if __name__ == "__main__":
    raise SystemExit(main())
