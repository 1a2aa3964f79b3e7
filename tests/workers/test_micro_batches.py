from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.training_ranks import ENGINES, make_engine, run_ranks, weights
from workbench.batches.columns import Ragged
from workbench.engines.communicator import Communicator
from workbench.engines.training import Pass
from workbench.messages.shards import Shard
from workbench.objectives.aggregation import aggregate, denominator
from workbench.telemetry import Recorder
from workbench.workers.micro_batches import MicroBatch, Scatter, cut, each_minibatch, split

ALONE = Communicator(0, 1, Recorder())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 120), st.integers(0, 10), st.booleans())
def test_every_row_once_within_the_budget(lengths: list[int], budget: int, least: int, padded: bool) -> None:
    def at(group: list[int]) -> list[int]:
        return [lengths[i] for i in group]

    groups = split(cut(lengths, budget, padded=padded), least)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(g) == 1 or (len(g) * max(n) if padded else sum(n)) <= budget for g in groups if (n := at(g)))
    assert len(groups) >= min(least, len(lengths))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 120))
def test_each_row_goes_into_the_first_micro_batch_with_room(lengths: list[int], budget: int) -> None:
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for group in groups:
            if sum(lengths[row] for row in group) + lengths[i] <= budget:
                group.append(i)
                break
        else:
            groups.append([i])
    assert cut(lengths, budget) == groups


def test_the_largest_micro_batch_is_halved_in_its_place() -> None:
    assert cut([5, 1, 1, 1, 1], 5) == [[0], [1, 2, 3, 4]]
    assert split([[0], [1, 2, 3, 4]], 3) == [[0], [1, 2], [3, 4]]
    assert split([[0], [1, 2, 3, 4]], 4) == [[0], [1], [2], [3, 4]]
    assert split([[0, 1]], 3) == [[0], [1]]


def test_many_rows_are_cut_and_taken_in_time_for_their_number() -> None:
    """Beside a tenth of the rows it may take a little more than ten times as long, not a hundred times."""

    def seconds(rows: int) -> float:
        lengths = torch.full((rows,), 100)
        column = Ragged(torch.zeros(100 * rows), lengths)
        begun_s = time.process_time()
        for index in cut([1500] * (rows - 1) + [50], 2048):
            column.take(index)
        return time.process_time() - begun_s

    seconds(300)
    assert seconds(3000) < 40 * min(seconds(300) for _ in range(3))


def shard(prompts: list[list[int]], responses: list[list[int]], sizes: tuple[int, ...]) -> Shard:
    columns = {"prompt_ids": Ragged.of(prompts, torch.int64), "response_ids": Ragged.of(responses, torch.int64)}
    return Shard(columns=dict(columns), rows=np.arange(len(prompts)), minibatch_sizes=sizes, meta={})


def test_rows_of_one_prompt_share_it() -> None:
    rows = shard([[5, 6], [7], [5, 6], [5, 6]], [[8], [9, 10], [11, 12], []], (4,))
    (micros,) = each_minibatch(rows, 100, ALONE, torch.device("cpu"))
    (micro,) = micros
    assert micro.index == [2, 0, 3, 1]
    assert micro.inputs["input_ids"].tolist() == [5, 6, 11, 12, 8, 7, 9, 10]
    assert (micro.inputs["lengths"], micro.inputs["after"]) == ((2, 2, 1, 3), (-1, 0, 0, -1))
    # the prompt's last state predicts the first token of each of its responses
    assert micro.inputs["positions"].tolist() == [1, 2, 1, 5, 6]
    assert micro.targets.tolist() == [11, 12, 8, 9, 10]
    assert micro.last.tolist() == [3, 4, 1, 7]
    assert micro.tokens == 4 + 3 + 2 + 3
    (padded,) = each_minibatch(rows, 100, ALONE, torch.device("cpu"), padded=True)
    assert padded[0].inputs["after"] == () and len(padded[0].inputs["input_ids"]) == padded[0].tokens


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=30), st.integers(12, 60))
def test_shared_prompts_stay_within_the_budget(rows: list[tuple[int, int]], budget: int) -> None:
    prompts, responses = [[n] * (n + 1) for n, _ in rows], [[1] * length for _, length in rows]
    given_shard = shard(prompts, responses, (len(rows),))
    (micros,) = each_minibatch(given_shard, budget, ALONE, torch.device("cpu"))
    assert sorted(i for micro in micros for i in micro.index) == list(range(len(rows)))
    for micro in micros:
        assert len(micro.inputs["input_ids"]) <= budget or len(micro.index) == 1
        assert len(micro.inputs["input_ids"]) == sum(micro.inputs["lengths"])


def test_minibatches_are_cut_apart_and_results_find_their_rows() -> None:
    given_shard = shard([[1], [2, 2], [3], [4]], [[10], [11, 12, 13], [14, 15], [16]], (2, 2))
    minibatches = each_minibatch(given_shard, 4, ALONE, torch.device("cpu"))
    assert [sorted(i for micro in m for i in micro.index) for m in minibatches] == [[0, 1], [2, 3]]
    scatter = Scatter(given_shard.ragged("response_ids"))
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


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(2, 60))
def test_answers_of_a_pair_stay_side_by_side(lengths: list[tuple[int, int]], budget: int) -> None:
    answers = [[1] * n for pair in lengths for n in pair]
    rows = shard([[1]] * len(answers), answers, (len(answers),))
    (micros,) = each_minibatch(rows, budget, ALONE, torch.device("cpu"), unit_rows=2)
    firsts = [micro.index[i : i + 2] for micro in micros for i in range(0, len(micro.index), 2)]
    assert sorted(firsts) == [[2 * i, 2 * i + 1] for i in range(len(lengths))]
    assert all(len(m.index) == 2 or m.inputs["input_ids"].numel() <= budget for m in micros)


def test_filler_of_pairs_is_a_whole_pair() -> None:
    rows = shard([[1], [1]], [[2, 3], [4]], (2,))
    (micros,) = each_minibatch(rows, 100, OfTwo(0, 2, Recorder()), torch.device("cpu"), unit_rows=2)
    assert [micro.index for micro in micros] == [[0, 1]] * 3
    assert [micro.weight for micro in micros] == [1.0, 0.0, 0.0]


PROMPTS, RESPONSES = [[1, 2, 3], [4, 5], [6, 7, 8]], [[10, 11, 12, 13], [14, 15], [16, 17, 18]]


def one_step_each() -> dict[str, Any]:
    """One optimizer step of every engine on this rank's share of three rows, a row a micro-batch."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = np.array_split(np.arange(3), size)[rank].tolist()
    mine = shard([PROMPTS[i] for i in rows], [RESPONSES[i] for i in rows], (len(rows),))
    communicator = Communicator(rank, size, Recorder())
    (micros,) = each_minibatch(mine, 1, communicator, torch.device("cpu"))
    mask = Ragged.of([[True] * len(RESPONSES[i]) for i in rows], torch.bool)
    divisor = communicator.all_reduce(
        torch.stack([denominator(micro.mask_BR(mask), "token-mean", None) for micro in micros]).sum()
    )
    done: dict[str, Any] = {"weights of micro-batches": [micro.weight for micro in micros]}
    for kind in ENGINES:
        engine = make_engine(kind)

        def loss(micro: MicroBatch, output: Any) -> torch.Tensor:
            return aggregate(-micro.to_BR(output[0]), micro.mask_BR(mask), "token-mean", divisor)

        report = engine.step([Pass(inputs=micro.scored(1.0), loss=partial(loss, micro)) for micro in micros])
        done[kind] = (report.grad_norm, weights(engine))
    return done


@pytest.mark.slow
def test_a_rank_with_fewer_micro_batches_gives_the_gradients_of_one_process() -> None:
    ((alone,), ranks) = (run_ranks(one_step_each, size) for size in (1, 2))
    assert [rank["weights of micro-batches"] for rank in (alone, *ranks)] == [[1, 1, 1], [1, 1], [1, 0]]
    for kind in ENGINES:
        norm, expected = alone[kind]
        for rank in ranks:
            assert rank[kind][0] == pytest.approx(norm, rel=1e-5)
            for name, weight in expected.items():
                torch.testing.assert_close(rank[kind][1][name], weight, rtol=0, atol=1e-5)
