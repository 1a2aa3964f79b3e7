"""What an operation of one's own may return, and what it is told when it returns something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import hosts_of
from tests.expected import expect_error
from tests.light import together
from workbench.batches.columns import Ragged
from workbench.errors import BadInput, StageError
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.workers.worker import Worker

PAIR = wb.Placement.colocate(2)


class Giver(Worker):
    """Returns what it is told to: on rank 0 `first`, elsewhere `other` (the same if None)."""

    @wb.register("3D_PROTO", reads=("uid",), writes=("score",))
    def give(self, batch: Shard, *, first: Any, other: Any = None) -> Any:
        made = first if self.context.host.rank == 0 or other is None else other
        return made(len(batch))

    @wb.register("3D_PROTO", reads=("uid",), writes=("score",))
    def ask_more(self, batch: Shard) -> Output:
        return Output(columns={"score": batch.numbers("weight")})


def scores(rows: int) -> Output:
    return Output(columns={"score": torch.zeros(rows)})


def made(column: Callable[[int], Any], **more: Callable[[int], Any]) -> Callable[[int], Output]:
    """Gives columns of as many rows as it is told."""
    return lambda rows: Output(columns={name: make(rows) for name, make in {"score": column, **more}.items()})


# what rank 0 and rank 1 return (None: the same), and what of it the error names
WRONG: list[tuple[Any, Any, str]] = [
    (scores, made(lambda n: torch.zeros(n + 1)), r"failed on rank 1: column 'score' has 3 rows.*got 2 rows"),
    (made(lambda n: Ragged(torch.zeros(4), torch.tensor([2, 2, 0]))), scores, "rank 0: column 'score' has 3 rows"),
    (made(np.zeros), None, r"rank 0, 1: column 'score' is a ndarray.*torch\.from_numpy"),
    (made(lambda n: torch.tensor(1.0)), None, "rank 0, 1: column 'score' is a .*without axes"),
    (made(lambda n: Ragged(torch.zeros(5), torch.full((n,), 2))), None, "rank 0, 1: column 'score' has 5 values"),
    (scores, made(lambda n: torch.zeros(n, dtype=torch.int64)), r"'score' as int64 \[rows\] on rank 1, as float32"),
    (scores, made(lambda n: torch.zeros(n, 2)), r"column 'score' as float32 \[rows, 2\] on rank 1"),
    (scores, made(torch.zeros, more=torch.zeros), r"returned column 'more' on rank 1\. rank 0 did not"),
    (made(torch.zeros, more=torch.zeros), scores, r"returned no column 'more' on rank 1\. rank 0 did"),
    (lambda n: {"score": torch.zeros(n)}, None, "returned no column 'score' on rank 0"),
]


def test_what_does_not_fit_names_operation_rank_and_column(tmp_path: Path) -> None:
    for number, (first, other, message) in enumerate(WRONG):
        with together({"actor": Giver}, PAIR, tmp_path / str(number)) as lab:
            batch = lab.put({"uid": torch.arange(4)})
            with pytest.raises(StageError, match=r"actor\.give .*" + message):
                lab.actor.give(batch, first=first, other=other)
            # what the ranks kept of it is forgotten, and the next call is unharmed
            right = lab.actor.give(batch, first=scores)
            assert right.columns["score"].dtype == "float32"
            assert [host.describe()["shards"] for host in hosts_of(lab).values()] == [2, 1]


def test_an_operation_that_asks_for_an_undeclared_column_is_told_how_to_declare_it(tmp_path: Path) -> None:
    with together({"actor": Giver}, wb.Placement.colocate(1), tmp_path) as lab:
        batch = lab.put({"uid": torch.arange(4), "weight": torch.ones(4)})
        with expect_error(BadInput, value="column 'weight'", rule="given uid", remedy=r"reads=\('weight', "):
            lab.actor.ask_more(batch)


class Scaler(Worker):
    """Writes in the columns that it is given."""

    @wb.register("3D_PROTO", reads=("uid", "values"), writes=("score",))
    def scale(self, batch: Shard) -> Output:
        uid = batch.columns["uid"]
        assert isinstance(uid, torch.Tensor)
        uid *= 10
        batch.ragged("values").values.add_(uid.repeat_interleave(batch.ragged("values").lengths))
        batch.ragged("values").lengths.zero_()
        return Output(columns={"score": uid})


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 2, 3], [3, 1, 0]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_writes_in_place_leaves_the_batch_as_it_was(tmp_path: Path, order: list[int], ranks: int) -> None:
    with together({"actor": Scaler}, wb.Placement.colocate(ranks), tmp_path) as lab:
        values = Ragged.of([[1.0], [2.0, 3.0], [], [4.0]], torch.float32)
        batch = lab.put({"uid": torch.arange(4), "values": values}).take(order)
        before = batch.df()
        for _ in range(2):
            made = lab.actor.scale(batch)
            assert made.fetch(["score"])["score"].tolist() == [10 * i for i in order]
        assert batch.df().equals(before)


def test_ranks_that_are_not_collected_may_return_nothing_or_else(tmp_path: Path) -> None:
    """Of a replica of two tensor ranks, the first one's output counts: columns, metrics and meta."""
    placement = wb.Placement.colocate(2, layouts={"actor": (1, 2, 1)})
    with together({"actor": Giver}, placement, tmp_path) as lab:
        assert repr(lab.actor).endswith("2 rank(s) (p=1, t=2, d=1)>")
        batch = lab.put({"uid": torch.arange(3)})
        made = lab.actor.give(batch, first=scores, other=lambda n: Output())
        assert made.fetch(["score"])["score"].tolist() == [0, 0, 0]
        assert [host.describe()["shards"] for host in hosts_of(lab).values()] == [2, 0]
        worker = hosts_of(lab)["shared-1"].workers["actor"]
        assert worker.context.layout.coordinates(worker.context.host.rank) == (0, 0, 1)
