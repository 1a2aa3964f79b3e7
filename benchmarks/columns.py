"""What it costs to check a batch against the schema of its columns, where it enters a stage.

    python benchmarks/columns.py [--rows 4096] [--tokens 1024] [--iterations 20]

Two tables:

alone      the columns that each stage of PPO reads, of so many rows of so many tokens, on one core: milliseconds.
in stages  PPO on a tiny model, inline, 8 prompts and 12 new tokens: milliseconds of the check and of the whole stage on
           its rank, and the share of the one in the other. No model is faster, so that no share is larger. Fails where
           it is 1 % of all stages or more.

Each figure is the median of several calls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
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
from workbench.models.limits import Limits  # noqa: E402
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


def in_stages(iterations: int) -> float:
    """The share of the checks in all stages."""
    module: Any = host
    took_s, checked = list[float](), module.check_columns

    def timed(*args: Any) -> None:
        began_s = time.perf_counter()
        checked(*args)
        took_s.append(time.perf_counter() - began_s)

    checks, stages = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as runs, tiny_lab("columns", Path(runs), backend="inline") as lab:
        ppo = wb.PPO(lab, prompts=8, sampling=wb.Sampling(max_new_tokens=12))
        ppo.iterate()  # not timed: what is compiled, read and kept at first
        module.check_columns = timed
        try:
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
        finally:
            module.check_columns = checked
    print(f"\n{'stage':>20} {'check ms':>9} {'stage ms':>9} {'share':>7}")
    totals = [0.0, 0.0]
    for stage, parts in checks.items():
        check_s, stage_s = statistics.median(parts), statistics.median(stages[stage])
        totals = [totals[0] + check_s, totals[1] + stage_s]
        print(f"{stage:>20} {1e3 * check_s:9.3f} {1e3 * stage_s:9.2f} {check_s / stage_s:7.2%}")
    print(f"{'all':>20} {1e3 * totals[0]:9.3f} {1e3 * totals[1]:9.2f} {totals[0] / totals[1]:7.2%}")
    return totals[0] / totals[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    alone(given.rows, given.tokens)
    share = in_stages(given.iterations)
    if share >= LIMIT:
        sys.exit(f"the check takes {share:.2%} of the stages; the limit is {LIMIT:.0%}")
