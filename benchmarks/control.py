"""What the controller adds to a stage, against the number of ranks and the number of rows.

    python benchmarks/control.py [--ranks 1 2 4 8] [--rows 100 1000 10000 100000 1000000]

Three tables:

called     an operation that does nothing, on hosts that load no model: time from the call to its result, less the
           longest compute span of a rank. With the rows where they are needed, so that nothing moves.
moved      the same on two pools of one rank: each row (64 tokens, log-probabilities) goes from one to the other.
planned    the calls to 1, 64 and 1024 ranks for a batch whose columns five stages of other layouts made: no host is
           started. Bytes are those of all calls, pickled. Fails above 1 ms a rank and 1 us a row.

Each figure is the median of several calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from tests.light import describe  # noqa: E402
from workbench.backends.inline import InlineBackend  # noqa: E402
from workbench.batches.columns import Ragged  # noqa: E402
from workbench.batches.location import Column, Location, ShardId  # noqa: E402
from workbench.controller import Workbench  # noqa: E402
from workbench.messages.calls import Call, Output  # noqa: E402
from workbench.messages.shards import Shard  # noqa: E402
from workbench.placement import Layout  # noqa: E402
from workbench.workers.worker import Worker  # noqa: E402

TOKENS, PLANNED_RANKS = 64, (1, 64, 1024)
# A plan may cost so much a rank, and for the row numbers, which it has to write down, so much a row.
LIMIT_S, ROW_LIMIT_S = 1e-3, 1e-6


def worker_class() -> type[Worker]:
    """A class of a function travels to the hosts whole: they import no benchmark."""

    class Idle(Worker):
        @wb.register("3D_PROTO", reads=("uid",), writes=("tokens", "log_prob"))
        def make(self, batch: Shard, *, tokens: int) -> Output:
            rows = len(batch)
            lengths = torch.full((rows,), tokens)
            values = torch.zeros(rows * tokens, dtype=torch.int64)
            return Output(columns={"tokens": Ragged(values, lengths), "log_prob": Ragged(values.float(), lengths)})

        @wb.register("3D_PROTO", reads=("tokens", "log_prob"))
        def nothing(self, batch: Shard) -> Output:
            return Output()

        @wb.register("3D_ALL_MICRO_DP", reads=("prompt_uid", "c0", "c1", "c2", "c3", "c4"), samples=True)
        def plan(self, batch: Shard) -> Output:
            return Output()

    return Idle


def median_s(call: Callable[[], float], times: int) -> float:
    """The median of what the call says that it took, after one that is not counted."""
    call()
    return statistics.median(call() for _ in range(times))


def added_s(lab: Any, group: Any, batch: wb.Batch) -> float:
    """Wall time of a stage that does nothing, less its longest compute span."""
    began = time.perf_counter()
    run = group.nothing.submit(batch)
    run.result()
    wall = time.perf_counter() - began
    return wall - max(s.end_s - s.start_s for reply in run.replies for s in reply.spans if s.kind == "compute")


def stored(lab: Any, rows: int) -> wb.Batch:
    """A batch on the hosts of the actor."""
    return lab.actor.make(lab.put({"uid": torch.arange(rows)}), tokens=TOKENS)


def opened(ranks: int, runs: str, critic: int = 0) -> wb.Workbench:
    """A workbench of that many hosts."""
    model = wb.Model("tiny-llama-tied", worker=worker_class())
    pools = {"actor": (ranks, ["actor"])} | ({"critic": (critic, ["critic"])} if critic else {})
    return wb.open(
        "control-cost", models=dict.fromkeys(pools, model), placement=wb.Placement.of(pools),
        devices=ranks + critic, device="cpu", runs=runs, if_exists="replace",
    )  # fmt: skip


def by_ranks(all_ranks: list[int], runs: str) -> None:
    """Print the table `called`."""
    print(f"called    {'ranks':>8} {'rows':>9} {'added_ms':>10} {'ms_a_rank':>10}")
    for ranks in all_ranks:
        with opened(ranks, runs) as lab:
            batch = stored(lab, 64)
            added_ms = 1e3 * median_s(lambda lab=lab, batch=batch: added_s(lab, lab.actor, batch), 15)  # type: ignore[misc]
        print(f"          {ranks:8d} {64:9d} {added_ms:10.2f} {added_ms / ranks:10.2f}", flush=True)


def by_rows(all_rows: list[int], runs: str) -> None:
    """Print the table `moved`."""
    print(f"moved     {'ranks':>8} {'rows':>9} {'added_ms':>10} {'us_a_row':>10} {'MB':>8}")
    with opened(1, runs, critic=1) as lab:
        for rows in all_rows:
            batch = stored(lab, rows)
            added = median_s(lambda batch=batch: added_s(lab, lab.critic, batch), 3)  # type: ignore[misc]
            size = sum(batch.columns[name].nbytes for name in ("tokens", "log_prob")) / 1e6
            line = f"{1:8d} {rows:9d} {1e3 * added:10.2f} {1e6 * added / rows:10.3f} {size:8.1f}"
            print(f"          {line}", flush=True)


def handle(lab: Workbench, rows: int) -> wb.Batch:
    """A batch as five stages leave it, each on another layout, half of them after a shuffle of the rows."""
    order = np.random.default_rng(0).permutation(rows)
    columns = {}
    for number, ranks in enumerate((1, 4, 6, 16, 64)):
        parts = np.array_split(np.arange(rows), ranks)
        shards = [ShardId(f"other-{rank}", f"stage{number}") for rank in range(ranks)]
        location = Location.of_parts(list(zip(shards, parts, strict=True)))
        column = Column(
            dtype="int64",
            row_shape=(),
            nbytes=8 * rows,
            owner="",
            location=location.take(order) if number % 2 else location,
        )
        columns[f"c{number}"] = column
    columns["prompt_uid"] = columns["c0"]
    return wb.Batch("simulated", columns, source=lab.runner.batches, counts=lab.runner.batches.shard_counts)


def plan_s(ranks: int, rows: int, runs: Path) -> tuple[float, int]:
    """Processor seconds to plan one stage on that many ranks, and the bytes of its calls, pickled. Starts no host."""
    layout = Layout(1, 8, ranks // 8, 1, 2) if ranks > 8 else Layout(d=ranks)
    placement = wb.Placement.colocate(ranks, layouts={"actor": layout})
    lab = Workbench(describe({"actor": worker_class()}, placement), runs)
    lab.hosts.backend = InlineBackend()  # never started
    batch = handle(lab, rows)

    def calls() -> list[Call]:
        return lab.runner.prepare(lab.actor, "plan", (batch,)).plan()

    def once() -> float:
        began = time.process_time()  # planning is this one thread: other work of the machine does not count
        calls()
        return time.process_time() - began

    return median_s(once, 3), sum(len(cloudpickle.dumps(call)) for call in calls())


def planned(all_rows: list[int], runs: str) -> bool:
    """Print the table `planned`; whether each rank stayed below the limit."""
    print(f"planned   {'ranks':>8} {'rows':>9} {'plan_ms':>10} {'ms_a_rank':>10} {'us_a_row':>10} {'MB_calls':>9}")
    within = True
    for ranks in PLANNED_RANKS:
        # with few rows, what is left is what a rank costs
        for rows in (rows for rows in all_rows if rows >= ranks // 2):
            seconds, size = plan_s(ranks, rows, Path(runs))
            within &= seconds < LIMIT_S * ranks + ROW_LIMIT_S * rows
            print(
                f"          {ranks:8d} {rows:9d} {1e3 * seconds:10.2f} {1e3 * seconds / ranks:10.3f} "
                f"{1e6 * seconds / rows:10.3f} {size / 1e6:9.3f}",
                flush=True,
            )
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, nargs="*", default=[10**n for n in range(2, 7)])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        within = planned(options.rows, runs)
        by_ranks(options.ranks, runs)
        by_rows(options.rows, runs)
    if not within:
        print(f"planning took more than {1e3 * LIMIT_S:.0f} ms a rank and {1e6 * ROW_LIMIT_S:.0f} us a row")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
