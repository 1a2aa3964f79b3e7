"""From any layout on any ranks to any other, against an independent count of elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from tests.resharding.counting import Held, count, shapes_of
from workbench.placement import Layout
from workbench.resharding import boxes
from workbench.resharding.plan import Distribution, Reshard
from workbench.resharding.weights import model_weights

CONFIG: Any = LlamaConfig(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    tie_word_embeddings=True,
    attention_bias=True,
)
WEIGHTS = model_weights(CONFIG, dtype="float32")
SIZES = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1), (1, 1, 3), (2, 1, 2)]


@st.composite
def distributions(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[int], str]:
    sizes = draw(st.sampled_from(SIZES))
    needed = sizes[0] * sizes[1] * sizes[2]
    ranks = draw(st.lists(st.integers(0, 9), min_size=needed, max_size=needed, unique=True))
    return sizes, ranks, draw(st.sampled_from(["replicas", "fsdp", "zero"]))


def check(before: tuple[Any, list[int], str], after: tuple[Any, list[int], str]) -> Reshard:
    source, destination = Held(CONFIG, *before), Held(CONFIG, *after)
    ranks = sorted({*before[1], *after[1]})

    def nearest(rank: int) -> list[list[int]]:
        each = before[0][0] * before[0][1]
        if before[2] != "replicas" or rank not in after[1]:
            return [before[1]]
        if rank in before[1]:
            k = before[1].index(rank) // each
        else:
            k = after[1].index(rank) // (after[0][0] * after[0][1]) % before[0][2]
        return [before[1][k * each : (k + 1) * each], before[1]]

    expected = count(CONFIG, source, destination, ranks, 4, everything=False, nearest=nearest)
    plan = Reshard(
        *(Distribution(WEIGHTS, Layout(*sizes), tuple(at), sharding) for sizes, at, sharding in (before, after))  # type: ignore[arg-type]
    )
    figures = plan.figures()
    assert plan.ranks == tuple(ranks)
    assert np.array_equal(figures.matrix, expected.matrix)
    kept = [
        sum(int((source.mask(n, s, r) & ~destination.mask(n, s, r)).sum()) * 4 for n, s in shapes_of(CONFIG).items())
        for r in ranks
    ]
    assert figures.kept_twice.tolist() == kept
    assert np.array_equal(figures.peak_parameter, expected.peak)
    return plan


@given(distributions(), distributions())
def test_any_distribution_to_any_other(before: Any, after: Any) -> None:
    check(before, after)


def test_to_other_ranks_everything_goes_and_to_the_same_place_nothing() -> None:
    plan = check(((1, 1, 2), [0, 1], "replicas"), ((1, 2, 1), [5, 6], "replicas"))
    received = dict(zip(plan.ranks, plan.figures().received.tolist(), strict=True))
    assert received[0] == received[1] == 0
    whole = sum(weight.nbytes for weight in WEIGHTS if weight.axis is None)
    assert received[5] + received[6] == WEIGHTS.nbytes + whole  # each norm twice, the rest once
    same = ((2, 2, 1), [3, 1, 0, 2], "fsdp")
    assert not check(same, same).figures().matrix.any()


def test_replicas_serve_new_ranks_in_turn() -> None:
    plan = check(((1, 1, 2), [0, 1], "replicas"), ((1, 1, 2), [2, 3], "replicas"))
    assert plan.figures().matrix.tolist() == [[0, 0, WEIGHTS.nbytes, 0], [0, 0, 0, WEIGHTS.nbytes]] + [[0] * 4] * 2


@given(st.sampled_from(["replicas", "fsdp", "zero"]), st.sampled_from(SIZES))
def test_boxes_in_order_are_the_local_tensor(sharding: Any, sizes: Any) -> None:
    ranks = tuple(range(sizes[0] * sizes[1] * sizes[2]))
    held, distribution = (
        Held(CONFIG, sizes, list(ranks), sharding),
        Distribution(WEIGHTS, Layout(*sizes), ranks, sharding),
    )
    for weight in WEIGHTS:
        ids = torch.arange(weight.numel).reshape(weight.matrix)
        for rank in ranks:
            expected, shard = held.of(weight.name, weight.shape, rank), distribution.shard(weight, rank)
            assert (expected is None) == (shard is None)
            if expected is None or shard is None:
                continue
            mine = [ids[r0:r1, c0:c1].flatten() for r0, r1, c0, c1 in shard.boxes]
            assert tuple(expected.shape) == shard.shape
            assert torch.equal(torch.cat(mine) if mine else ids.flatten()[:0], expected.flatten())


BOXES = st.tuples(*[st.integers(0, 5)] * 4).map(lambda n: (min(n[:2]), max(n[:2]), min(n[2:]), max(n[2:])))


def cells(found: boxes.Boxes) -> list[tuple[int, int]]:
    return [(row, column) for r0, r1, c0, c1 in found for row in range(r0, r1) for column in range(c0, c1)]


@given(BOXES, st.lists(BOXES, max_size=3))
def test_boxes_are_sets_of_cells(left: boxes.Box, others: list[boxes.Box]) -> None:
    a = boxes.of((left,))
    for b in ((), *(boxes.of((other,)) for other in others)):
        rest, both = boxes.subtract(a, b), boxes.intersect(a, b)
        assert sorted(cells(rest)) == sorted(set(cells(a)) - set(cells(b)))
        assert sorted(cells(both)) == sorted(set(cells(a)) & set(cells(b)))
        assert boxes.size(rest) + boxes.size(both) == boxes.size(a)
