"""A long run: is memory flat, do iterations stay as fast, and are the views still quick?

    python benchmarks/long_run.py                         # 1,000 iterations inline; --backend ray, --iterations

PPO on a tiny model. Printed at every tenth of the run: resident memory of the kernel and of each host, milliseconds an
iteration, and MiB of the run folder; at its end, how long `lab.spans()` takes. The exit code is 1 where memory grew by
more than `GROWTH_MIB` after the first tenth, or `lab.spans()` took longer than `SPANS_S`.

"malloc" and "Python" are what the kernel has in use, of the C library and of Python's own allocator. Under Ray the
resident memory of the kernel grows longer than these: each of the 27 threads that Ray and torch have there allocates
from a part of its own, and what is freed in the middle of it stays with the process. Of 1,120 iterations: in use 146.3
MiB all the time, resident 9.6 MiB more after 600 than after 120, and 1.1 MiB more at the end.
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

GROWTH_MIB = {"inline": 8.0, "ray": 12.0}  # of a process, from the first tenth of the run to its end
IN_USE_MIB = 5.0  # the same of what the kernel has in use; a table that is doubled once is in it
SPANS_S = 0.5


class _Mallinfo(ctypes.Structure):
    """What glibc says of its allocator."""

    _fields_ = (
        ("arena", ctypes.c_size_t), ("ordblks", ctypes.c_size_t), ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t), ("hblkhd", ctypes.c_size_t), ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t), ("uordblks", ctypes.c_size_t), ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )  # fmt: skip


def in_use() -> dict[str, float]:
    """MiB that this process has allocated and not freed; nothing where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return {}
    ask.restype = _Mallinfo
    said = ask()
    # blocks of up to 512 bytes, each counted with 100, more than their mean; larger ones are in malloc's figure
    python = sys.getallocatedblocks() * 100 / 2**20
    return {"malloc MiB in use": (said.uordblks + said.hblkhd) / 2**20, "Python MiB in use": python}


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
                {
                    "iteration": part * (iterations // 10),
                    **resident,
                    **in_use(),
                    "iteration_ms": iteration_ms,
                    "disk": folder_mib,
                }
            )
            print({name: round(value, 2) for name, value in rows[-1].items()}, flush=True)
        spans, took_s = 0, list[float]()
        for _ in range(3):  # the quickest is told: another process may have the core meanwhile
            began = time.perf_counter()
            spans = len(lab.spans())
            took_s.append(time.perf_counter() - began)
        return pd.DataFrame(rows).set_index("iteration"), spans, min(took_s)


def main() -> int:
    """Print the table; 1 where something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("inline", "ray"), default="inline")
    parser.add_argument("--iterations", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table, spans, spans_s = measured(arguments.backend, arguments.iterations, Path(folder))
    print(table.round(2).to_string())
    memory = table.filter(like="MiB")
    grown = (memory.iloc[-1] - memory.iloc[0]).to_dict()
    limits = {name: IN_USE_MIB if "in use" in str(name) else GROWTH_MIB[arguments.backend] for name in grown}
    print(f"grown after the first tenth: {', '.join(f'{name} {mib:.1f}' for name, mib in grown.items())}")
    print(f"{spans} spans in {spans_s:.2f} s")
    return int(any(grown[name] > limits[name] for name in grown) or spans_s > SPANS_S)


if __name__ == "__main__":
    raise SystemExit(main())
