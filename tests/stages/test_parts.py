"""What a stage is given of a batch of which other columns are still being made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.stages.runs import run_of
from workbench.batches.batch import Batch
from workbench.batches.location import Column, Location, ShardCounts, ShardId
from workbench.stages.run import Run

COUNTS = ShardCounts()


def column(key: str) -> Column:
    location = Location.of_parts([(ShardId("a-0", key), np.arange(2))])
    return Column(dtype="float32", row_shape=(), nbytes=8, owner="actor", location=location)


def making(number: int, stage: str, **made: Any) -> Run:
    run = run_of(number, stage)
    run.made_columns, run.meta = {n: column(stage) for n in made}, {f"of_{n}": value for n, value in made.items()}
    return run


@pytest.mark.parametrize("ended", [(), (2,), (3,)])
def test_only_the_makers_of_what_is_asked_for_add_to_the_meta(ended: tuple[int, ...]) -> None:
    generate, score = making(1, "generate", response_ids=0.7), making(2, "score", old_log_prob=1.3)
    value = making(3, "value", values=0)
    source: Any = None
    batch = Batch("batch1", {"prompt_ids": column("put")}, source=source, counts=COUNTS, meta={"iteration": 4})
    for run in (generate, score, value):
        batch = batch.with_pending(run, run.made_columns)
    generate.settle(None)
    for run in (score, value):
        if run.number in ended:
            run.settle(None)
    columns, meta = batch.finished_columns(["prompt_ids", "response_ids"])
    assert list(columns) == ["prompt_ids", "response_ids"]
    assert meta == {"iteration": 4, "of_response_ids": 0.7}
    if 2 in ended:
        assert batch.finished_columns(["old_log_prob"])[1] == {"iteration": 4, "of_old_log_prob": 1.3}
