"""What the test of failed rows runs inside ranks of its own: rewards by functions, and advantages, of eight rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import workbench as wb
from tests.cases import TINY
from tests.workers.update_ranks import context_here
from workbench.batches.columns import Ragged
from workbench.messages.metrics import as_metrics
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.settings.engines import Generation, Training
from workbench.workers.advantages import GROUPED
from workbench.workers.roles.numeric import NumericWorker
from workbench.workers.roles.reward import RewardWorker

ROWS = 8
VALID = [1, 0, 1, 1, 0, 0, 1, 0]  # of two prompts, whose rows lie on both ranks; the second has one valid row


def picky(prompt: str, response: str, number: str) -> float:
    if number in "16":
        raise ConnectionError("HTTP 503")
    return float(number)


def steps(prompt: str, response: str, response_ids: list[int], number: str) -> list[float]:
    if number == "3":
        raise ConnectionError("HTTP 503")
    return [float(number)] * len(response_ids)


@wb.batched(over="group")
def against_group(prompt: list[str], response: list[str], number: list[str]) -> list[float]:
    return [float(one) - sum(map(float, number)) / len(number) for one in number]


@wb.batched(over="batch")
def place(prompt: list[str], response: list[str], number: list[str]) -> list[float]:
    if "x" in number:
        raise ValueError("no number")
    return [number.index(one) / len(number) for one in number]


def shard(rank: int, size: int, **columns: Any) -> Shard:
    """This rank's rows of eight: every second of two ranks."""
    rows = torch.arange(rank, ROWS, size)
    draws = torch.Generator().manual_seed(1)
    every = Ragged.of([torch.randn(3 + row % 3, generator=draws) for row in range(ROWS)], torch.float32)
    ids = every.like(torch.randint(8, 200, (len(every.values),), generator=draws))
    table = {
        "prompt_ids": ids, "response_ids": ids, "response_mask": every.like(torch.ones(len(ids.values)).bool()),
        "old_log_prob": every.like(-every.values.abs()), "rollout_log_prob": every.like(-every.values.abs() - 0.1),
        "turn_ends": Ragged.of([[1, n] for n in every.lengths.tolist()], torch.int64),
        "values": every, "prompt_uid": torch.arange(ROWS) % 4 // 2, "rewards": torch.randn(ROWS, generator=draws),
        **columns,
    }  # fmt: skip
    mine = {
        name: column.take(rows.tolist()) if isinstance(column, Ragged) else column[rows]
        if isinstance(column, torch.Tensor) else [column[row] for row in rows.tolist()]
        for name, column in table.items()
    }  # fmt: skip
    return Shard(columns=mine, rows=rows.numpy(), minibatch_sizes=(len(rows),), meta={})


def outcomes() -> dict[str, Any]:
    """Columns of this rank's rows, by row number, and metrics with their counts, of each call."""
    context = context_here()
    rank, size = context.communicator.rank, context.communicator.world_size
    settings = {"dtype": "float32", "training": Training(engine="torch"), "generation": Generation()}
    model = Model(function=picky).filled("reward", **settings)  # type: ignore[arg-type]
    reward, numeric = RewardWorker(model, context), NumericWorker(Model(TINY), context)
    texts = {name: [str(row) for row in range(ROWS)] for name in ("prompt", "number")}
    given = shard(rank, size, **texts)
    given.columns.pop("rewards")
    done = {
        "one": reward.compute_reward(given, most_failed=1.0),
        "many": reward.compute_reward(
            given, most_failed=1.0, function={"a": picky, "b": (against_group, 0.5), "c": place}
        ),
        "mixed": reward.compute_reward(
            given, most_failed=1.0, function={"a": picky, "b": (against_group, 0.5), "steps": steps}
        ),
        "all failed": reward.compute_reward(
            shard(rank, size, **{**texts, "number": ["x"] * ROWS}), function=place, most_failed=1.0
        ),
    }
    again = replace(given, columns={**given.columns, **done["one"].columns})
    done["again"] = reward.compute_reward(again, function=place, only=[6])
    again = replace(given, columns={**given.columns, **done["mixed"].columns})
    functions: dict[str, Any] = {"a": place, "b": against_group, "steps": steps}
    done["mixed again"] = reward.compute_reward(again, function=functions, only=[6], most_failed=1.0)
    valid = shard(rank, size, valid=torch.tensor(VALID))
    for estimator in (*GROUPED, "gae"):
        correction = wb.Correction() if estimator == "off_policy_baseline" else None
        done[estimator] = numeric.compute_advantages(valid, estimator=estimator, correction=correction)  # type: ignore[arg-type]
    ends = valid.ragged("response_mask")
    flags = torch.tensor([t % 2 == 0 for n in ends.lengths.tolist() for t in range(n)])
    columns = {**valid.columns, "rewards": valid.columns["values"], "step_ends": ends.like(flags)}
    done["steps"] = numeric.compute_advantages(replace(valid, columns=columns), estimator="grpo_process")
    context.calls.close()
    return {
        "columns": {
            call: {
                name: dict(zip(given.rows.tolist(), map(_plain, _rows(column)), strict=True))
                for name, column in output.columns.items()
            }
            for call, output in done.items()
        },
        "metrics": {call: as_metrics(output.metrics) for call, output in done.items()},
    }


def _rows(column: Any) -> list[Any]:
    return column.rows() if isinstance(column, Ragged) else list(column)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
