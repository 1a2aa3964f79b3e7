from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.dataflow.columns import Ragged
from workbench.telemetry import Recorder
from workbench.workers.calls import Shard
from workbench.workers.communicator import Communicator
from workbench.workers.micro_batches import MicroBatch, Scatter, cut, each_minibatch

ALONE = Communicator(0, 1, Recorder())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 120), st.integers(0, 10))
def test_every_row_once_within_the_budget(lengths: list[int], budget: int, least: int) -> None:
    groups = cut(lengths, budget, least)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= budget for g in groups)
    assert len(groups) >= min(least, len(lengths))


def shard(prompts: list[list[int]], responses: list[list[int]], sizes: tuple[int, ...]) -> Shard:
    columns = {"prompt_ids": Ragged.of(prompts, torch.int64), "response_ids": Ragged.of(responses, torch.int64)}
    return Shard(columns=dict(columns), rows=np.arange(len(prompts)), minibatch_sizes=sizes, meta={})


def test_what_a_forward_pass_is_given() -> None:
    (micros,) = each_minibatch(shard([[5, 6], [7]], [[8], [9, 10]], (2,)), 100, ALONE, torch.device("cpu"))
    (micro,) = micros
    assert micro.inputs["input_ids"].tolist() == [[5, 6, 8], [7, 9, 10]]
    # the state before a token predicts it: position 1 of row 0 predicts 8, positions 0 and 1 of row 1 predict 9, 10
    assert list(zip(micro.inputs["rows"].tolist(), micro.inputs["times"].tolist(), strict=True)) == [
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert micro.targets.tolist() == [8, 9, 10]
    assert micro.to_BR(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0], [2, 3]]


def test_minibatches_are_cut_apart_and_results_find_their_rows() -> None:
    given_shard = shard([[1], [2, 2], [3], [4]], [[10], [11, 12, 13], [14, 15], [16]], (2, 2))
    minibatches = each_minibatch(given_shard, 4, ALONE, torch.device("cpu"))
    assert [sorted(i for micro in m for i in micro.index) for m in minibatches] == [[0, 1], [2, 3]]
    scatter = Scatter(given_shard.ragged("response_ids"), torch.int64)
    for micro in (micro for minibatch in minibatches for micro in minibatch):
        scatter.put(micro, micro.targets * 2)
    assert [row.tolist() for row in scatter.column().rows()] == [[20], [22, 24, 26], [28, 30], [32]]


class OfTwo(Communicator):
    """The other rank has three micro-batches."""

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.maximum(tensor, torch.tensor([3]))


def test_ranks_take_equally_many_steps_and_filler_counts_for_nothing() -> None:
    (micros,) = each_minibatch(shard([[1]], [[2, 3]], (1,)), 100, OfTwo(0, 2, Recorder()), torch.device("cpu"))
    assert [micro.weight for micro in micros] == [1.0, 0.0, 0.0]
    mask = Ragged.of([[True, True]], torch.bool)
    assert [float(micro.mask_BR(mask).sum()) for micro in micros] == [2.0, 0.0, 0.0]
    scatter = Scatter(Ragged.of([[0, 0]], torch.int64))
    for number, micro in enumerate(micros):
        scatter.put(micro, torch.full((2,), float(number + 1)))
    assert scatter.column().values.tolist() == [1.0, 1.0]
    assert isinstance(micros[0], MicroBatch)
