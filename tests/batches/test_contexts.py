"""Responses of several contexts: where they begin, how long they are, and what is refused."""

from __future__ import annotations

import torch

from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.batches.schema_check import check_columns
from workbench.batches.turns import answer_lengths, contexts_of, longest_contexts
from workbench.errors import BadInput
from workbench.models.loading import Limits

STARTS = Ragged.of([[0, 0, 0, 1, 0, 1], [0, 0]], torch.uint8)


def test_where_contexts_begin_and_the_longest_of_them() -> None:
    assert contexts_of({"context_starts": STARTS}) == {0: [3, 5]}
    assert contexts_of({}) == contexts_of({"context_starts": Ragged.of([[0, 0]], torch.bool)}) == {}
    prompts, responses = torch.tensor([2, 9]), STARTS.lengths
    assert longest_contexts(prompts, responses, {0: [3, 5]}).tolist() == [5, 11]
    assert longest_contexts(torch.tensor([0, 0]), responses, {0: [1, 2]}).tolist() == [4, 2]
    assert longest_contexts(None, responses, {}).tolist() == [6, 2]


def test_a_row_may_be_longer_than_the_model_reads_and_none_of_its_contexts() -> None:
    columns = {
        "prompt_ids": Ragged.of([[1] * 4, [1]], torch.int64),
        "response_ids": Ragged.of([[1] * 6, [1] * 2], torch.int64),
    }
    limits = Limits(vocabulary=8, context=7)
    check_columns({**columns, "context_starts": STARTS}, [0, 1], limits)
    with expect_error(BadInput, value="row 0 has 10 tokens in 'prompt_ids' and 'response_ids'"):
        check_columns(columns, [0, 1], limits)
    with expect_error(BadInput, value="row 0 has 7 tokens"):
        check_columns({**columns, "context_starts": STARTS}, [0, 1], Limits(vocabulary=8, context=6))
    with expect_error(BadInput, value="holds 2 in row 0, token 3"):
        check_columns({**columns, "context_starts": STARTS.like(STARTS.values * 2)}, [0, 1], limits)
    with expect_error(BadInput, value="'context_starts' has 2 numbers in row 0"):
        check_columns({**columns, "context_starts": Ragged.of([[0, 1], [0, 0]], torch.bool)}, [0, 1], limits)


def test_answers_are_counted_without_the_prompts_of_further_contexts() -> None:
    mask = Ragged.of([[1, 0, 1, 0, 0, 0, 1, 0, 1], [1, 1, 0, 0, 1, 0, 0]], torch.bool)
    assert answer_lengths(mask, {}).tolist() == [9, 7]
    assert answer_lengths(mask, {0: [3]}).tolist() == [3, 7]  # the answer to a prompt of 3: 1 0 1
    assert answer_lengths(mask, {0: [1, 2], 1: [1]}).tolist() == [7, 6]  # 1, 0 and 1 0 0 0 1 0 1; 1 and 1 0 0 1 0 0
    assert answer_lengths(mask, {1: [5]}).tolist() == [9, 5]  # nothing was sampled in the further one
