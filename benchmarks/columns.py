"""What it costs to check a batch against the schema of its columns, where it enters a stage.

    python benchmarks/columns.py [--rows 4096] [--tokens 1024] [--iterations 20]

Three tables:

alone      the columns that each stage of PPO reads, of so many rows of so many tokens, on one core: milliseconds.
in stages  PPO on a tiny model, inline, 8 prompts and 12 new tokens: milliseconds of the check and of the whole stage on
           its rank, and the share of the one in the other. No model is faster, so that no share is larger. Fails where
           it is 1 % of all stages or more.
by size    `compute_advantages`, which runs no model and is the quickest stage by far, on batches of several sizes: the
           same share. Fails where it is 1 % or more from 512 rows of 256 tokens on.

Each figure is the median of several calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from tests.cases import tiny_lab  # noqa: E402
from workbench.batches.columns import Ragged, Table  # noqa: E402
from workbench.batches.schema import SCHEMA  # noqa: E402
from workbench.batches.schema_check import check_columns  # noqa: E402
from workbench.models.loading import Limits  # noqa: E402
from workbench.workers import host  # noqa: E402

READS = {
    "compute_log_prob": ("prompt_ids", "response_ids", "rollout_log_prob", "response_mask"),
    "compute_values": ("prompt_ids", "response_ids", "response_mask"),
    "compute_advantages": ("response_mask", "rewards", "values", "old_log_prob", "ref_log_prob"),
    "update_critic": ("prompt_ids", "response_ids", "response_mask", "values", "returns"),
    "update_actor": ("prompt_ids", "response_ids", "response_mask", "old_log_prob", "advantages", "rollout_log_prob"),
}
LIMIT = 0.01


def table_of(rows: int, tokens: int) -> Table:
    """All columns that the stages read, with so many response tokens a row."""
    lengths, made = torch.full((rows,), tokens), dict[str, Any]()
    for name in dict.fromkeys(name for names in READS.values() for name in names):
        schema = SCHEMA[name]
        if schema.row != "tokens":
            made[name] = torch.randn(rows)
        elif schema.holds == "token ids":
            made[name] = Ragged(torch.randint(0, 50_000, (rows * tokens,)), lengths.clone())
        elif schema.holds == "zeros and ones":
            made[name] = Ragged(torch.ones(rows * tokens, dtype=torch.bool), lengths.clone())
        else:
            made[name] = Ragged(torch.randn(rows * tokens), lengths.clone())
    return made


def alone(rows: int, tokens: int) -> None:
    table, limits = table_of(rows, tokens), Limits(vocabulary=50_000, context=4 * tokens)
    print(f"{rows} rows of {tokens} response tokens, one core\n{'stage':>20} {'ms':>8} {'MB read':>8}")
    for stage, names in READS.items():
        columns, took_s = {name: table[name] for name in names}, []
        for _ in range(7):
            began_s = time.perf_counter()
            check_columns(columns, range(rows), limits)
            took_s.append(time.perf_counter() - began_s)
        values = (c.values if isinstance(c, Ragged) else c for c in columns.values())
        read = sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.dtype != torch.bool)
        print(f"{stage:>20} {1e3 * statistics.median(took_s):8.2f} {read / 1e6:8.0f}")


@contextmanager
def timed_checks() -> Iterator[list[float]]:
    """The seconds of each check within, one after the other."""
    module: Any = host
    took_s, checked = list[float](), module.check_columns

    def timed(*args: Any, **kwargs: Any) -> None:
        began_s = time.perf_counter()
        checked(*args, **kwargs)
        took_s.append(time.perf_counter() - began_s)

    module.check_columns = timed
    try:
        yield took_s
    finally:
        module.check_columns = checked


def in_stages(iterations: int) -> float:
    """The share of the checks in all stages."""
    checks, stages = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as runs, tiny_lab("columns", Path(runs), backend="inline") as lab:
        ppo = wb.PPO(lab, prompts=8, sampling=wb.Sampling(max_new_tokens=12))
        ppo.iterate()  # not timed: what is compiled, read and kept at first
        with timed_checks() as took_s:
            for _ in range(iterations):
                took_s.clear()
                ppo.iterate()
                last = lab.spans()
                last = last[(last["parent"] == "") & last["kind"].isin(["transfer", "compute"])]
                last = last[last["run"] > last["run"].max() - len(took_s)]
                seconds = (last["end_s"] - last["start_s"]).groupby(last["run"]).sum()
                names = last.groupby("run")["stage"].first()
                for check_s, stage_s, stage in zip(took_s, seconds, names, strict=True):
                    checks[stage].append(check_s)
                    stages[stage].append(stage_s)
    print(f"\n{'stage':>20} {'check ms':>9} {'stage ms':>9} {'share':>7}")
    totals = [0.0, 0.0]
    for stage, parts in checks.items():
        check_s, stage_s = statistics.median(parts), statistics.median(stages[stage])
        totals = [totals[0] + check_s, totals[1] + stage_s]
        print(f"{stage:>20} {1e3 * check_s:9.3f} {1e3 * stage_s:9.2f} {check_s / stage_s:7.2%}")
    print(f"{'all':>20} {1e3 * totals[0]:9.3f} {1e3 * totals[1]:9.2f} {totals[0] / totals[1]:7.2%}")
    return totals[0] / totals[1]


def by_size(times: int = 7) -> float:
    """The largest share of the check in `compute_advantages`, of the batches that are no toys."""
    print(f"\n{'compute_advantages of':>24} {'check ms':>9} {'stage ms':>9} {'share':>7}")
    largest = 0.0
    for rows, tokens in ((8, 12), (64, 128), (512, 256), (512, 1024), (4096, 1024)):
        table = table_of(rows, tokens)
        with tempfile.TemporaryDirectory() as runs, tiny_lab("columns", Path(runs), backend="inline") as lab:
            batch = lab.put({name: table[name] for name in READS["compute_advantages"]})
            with timed_checks() as took_s:
                for _ in range(times):
                    lab.compute_advantages(batch)
            spans = lab.spans()
            spans = spans[(spans["parent"] == "") & spans["kind"].isin(["transfer", "compute"])]
            spans = spans[spans["stage"] == "compute_advantages"]
            stage_s = statistics.median((spans["end_s"] - spans["start_s"]).groupby(spans["run"]).sum())
        check_s = statistics.median(took_s)
        share = check_s / stage_s
        print(f"{f'{rows} rows of {tokens}':>24} {1e3 * check_s:9.3f} {1e3 * stage_s:9.2f} {share:7.2%}")
        largest = max(largest, share if rows >= 512 else 0.0)
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    alone(given.rows, given.tokens)
    share = max(in_stages(given.iterations), by_size())
    if share >= LIMIT:
        sys.exit(f"the check takes {share:.2%}; the limit is {LIMIT:.0%}")
