"""The schema of columns: what passes, and what is refused by name, row, value and rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import stored
from tests.expected import expect_error
from workbench.batches.columns import ColumnValues, Ragged, Table
from workbench.batches.schema import SCHEMA
from workbench.batches.schema_check import check_columns
from workbench.errors import BadInput
from workbench.models.loading import Limits, longest_sequence

NAN, INF = float("nan"), float("inf")
LIMITS = Limits(vocabulary=264, context=64)


def right(name: str) -> ColumnValues:
    """A column that is as its schema says, of 3 rows."""
    schema = SCHEMA[name]
    ones = [[1], [1, 1, 1], [1, 1]]
    whole = schema.holds in ("token ids", "whole numbers")
    dtype = torch.int64 if whole else torch.bool if schema.holds == "zeros and ones" else torch.float32
    return torch.ones(3, dtype=dtype) if schema.row == "one" else Ragged.of(ones, dtype)


def with_number(column: ColumnValues, value: float) -> ColumnValues:
    """The column with another number in row 2, of a dtype that has it."""
    values = column.values if isinstance(column, Ragged) else column
    assert isinstance(values, torch.Tensor)
    changed = values.clone() if isinstance(value, int) and values.dtype == torch.int64 else values.float()
    changed[-1] = value
    return column.like(changed) if isinstance(column, Ragged) else changed


def names(*holds: str) -> list[str]:
    """The columns that hold such values."""
    return [name for name, schema in SCHEMA.items() if schema.holds in holds]


def test_what_is_right_passes() -> None:
    for name in set(SCHEMA) - set(names("text")):
        check_columns({name: right(name)}, range(3), LIMITS)
        check_columns({name: right(name), "prompt_ids": Ragged.of([[1]] * 3, torch.int64)}, range(3), LIMITS)


@pytest.mark.parametrize(
    ("value", "dtype"), [(NAN, torch.float32), (INF, torch.float64), (-INF, torch.bfloat16)], ids=str
)
def test_numbers_are_finite(value: float, dtype: torch.dtype) -> None:
    for name in names("numbers"):
        column: Any = with_number(right(name), value)
        column = column.like(column.values.to(dtype)) if isinstance(column, Ragged) else column.to(dtype)
        with expect_error(BadInput, value=f"column '{name}' holds {value} in row 12", rule="numbers must be finite"):
            check_columns({name: column}, [10, 11, 12], LIMITS)


def test_masks_are_zeros_and_ones() -> None:
    for name in ("response_mask", "finished"):
        for value in (7, -1, 0.5, NAN):
            with pytest.raises(BadInput, match=f"column '{name}' holds {float(value)} in row 2.*must be 0 or 1"):
                check_columns({name: with_number(right(name), value)}, range(3), LIMITS)


def test_token_ids_are_the_models() -> None:
    for name in names("token ids"):
        for token_id in (-1, 264, 2**40):
            with pytest.raises(BadInput, match=f"column '{name}' has token id {token_id} in row 2.*ids 0 to 263"):
                check_columns({name: with_number(right(name), token_id)}, range(3), LIMITS)
        with pytest.raises(BadInput, match=f"column '{name}' is float32.*token ids, of int64"):
            check_columns({name: with_number(right(name), 5.5)}, range(3), LIMITS)


WRONG_COLUMNS: list[tuple[str, ColumnValues, str]] = [
    ("rewards", torch.ones(3, 1), r"'rewards' is a Tensor \[rows, 1\].*x\[:, 0\]"),
    ("rewards", torch.ones(3, 4), r"'rewards' is a Tensor \[rows, 4\]"),
    ("rewards", ["good"] * 3, "'rewards' is a list of str"),
    ("rewards", torch.ones(3, dtype=torch.complex64), "'rewards' is complex64"),
    ("values", torch.ones(3), r"'values' is a Tensor \[rows\].*repeat_interleave"),
    ("values", Ragged(torch.ones(3, 2), torch.ones(3, dtype=torch.int64)), "'values' is a Ragged"),
    ("final_values", Ragged.of([[1.0]] * 3, torch.float32), "'final_values' is a Ragged"),
    ("prompt_ids", torch.ones(3, 4, dtype=torch.int64), r"'prompt_ids' is a Tensor \[rows, 4\].*a list of token ids"),
    ("prompt_ids", Ragged.of([[1]] * 3, torch.int32), "'prompt_ids' is int32.*int64"),
    ("prompt_ids", Ragged.of([[1], [], [1]], torch.int64), "'prompt_ids' has no token in row 1"),
    ("chosen_ids", Ragged.of([[1], [], [1]], torch.int64), "'chosen_ids' has no token in row 1"),
    ("prompt_uid", torch.ones(3), "'prompt_uid' is float32.*integer"),
]  # fmt: skip


def test_dtype_and_shape(subtests: pytest.Subtests) -> None:
    for name, column, message in WRONG_COLUMNS:
        with subtests.test(name=name, column=column), pytest.raises(BadInput, match=message):
            check_columns({name: column}, range(3), LIMITS)


def test_columns_of_a_response_are_equally_long() -> None:
    table = stored()
    check_columns(table, range(4), LIMITS)
    for name, schema in SCHEMA.items():
        if schema.along == "response" and name != "response_ids" and schema.row != "one":
            dtype = torch.int64 if schema.holds in ("token ids", "whole numbers") else torch.float32
            with pytest.raises(BadInput, match=f"'{name}' has 1 numbers in row 0, where 'response_ids' has 5"):
                check_columns({**table, name: Ragged.of([[1]] * 4, dtype)}, range(4), LIMITS)
    mask, advantages = table["response_mask"], Ragged.of([[1.0]] * 4, torch.float32)
    with expect_error(BadInput, value="'advantages' has 1 numbers in row 7, where 'response_mask' has 5"):
        check_columns({"response_mask": mask, "advantages": advantages}, [7, 6, 5, 4], LIMITS)
    ends, given = Ragged.of([[2, 5]] * 4, torch.int64), Ragged.of([[1.0, 2.0]] * 3 + [[1.0]], torch.float32)
    with expect_error(BadInput, value="'turn_rewards' has 1 numbers in row 3, where 'turn_ends' has 2"):
        check_columns({**table, "turn_ends": ends, "turn_rewards": given}, range(4), LIMITS)


def test_rows_fit_the_models_context() -> None:
    table: Table = {
        "prompt_ids": Ragged.of([[1] * 4, [1] * 60], torch.int64),
        "response_ids": Ragged.of([[1] * 4] * 2, torch.int64),
        "chosen_ids": Ragged.of([[1] * 60, [1] * 4], torch.int64),
    }
    check_columns(table, range(2), LIMITS)
    for name, longer, row in (("response_ids", [[1] * 4, [1] * 5], 1), ("chosen_ids", [[1] * 61, [1]], 0)):
        with pytest.raises(BadInput, match=f"row {row} has 65 tokens in 'prompt_ids' and '{name}'.*at most 64"):
            check_columns({**table, name: Ragged.of(longer, torch.int64)}, range(2), LIMITS)
    told = {"teacher_prompt_ids": table["prompt_ids"], "response_ids": Ragged.of([[1] * 5] * 2, torch.int64)}
    with expect_error(BadInput, value="row 1 has 65 tokens in 'teacher_prompt_ids' and 'response_ids'"):
        check_columns(told, range(2), LIMITS)
    with expect_error(BadInput, value="row 1 has 65 tokens in 'pretrain_ids'"):
        check_columns({"pretrain_ids": Ragged.of([[1], [1] * 65], torch.int64)}, range(2), LIMITS)
    check_columns({"pretrain_ids": Ragged.of([[1] * 65], torch.int64)}, range(1), Limits())


def test_columns_of_users_hold_anything() -> None:
    own: Any = {"weight": torch.tensor([NAN, INF]), "old": torch.ones(2, 3), "text": ["a", None]}
    check_columns(own, range(2), LIMITS)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), place=st.integers(0, 10**6),
    value=st.sampled_from([NAN, INF, -INF, 3.4e38]),
)  # fmt: skip
def test_the_first_wrong_number_is_found_wherever_it_is(lengths: list[int], place: int, value: float) -> None:
    rows = [[0.5] * n for n in lengths]
    flat = [(row, token) for row, n in enumerate(lengths) for token in range(n)]
    if flat:
        row, token = flat[place % len(flat)]
        rows[row][token] = value
    column = Ragged.of(rows, torch.float32)
    if not flat or value == 3.4e38:
        check_columns({"values": column}, range(len(rows)), LIMITS)
        return
    with pytest.raises(BadInput, match=f"holds {value} in row {row}, token {token}"):
        check_columns({"values": column}, range(len(rows)), LIMITS)


@pytest.mark.parametrize(
    ("text", "longest"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({}, None),
        ({"max_position_embeddings": 8, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 32),
        ({"max_position_embeddings": 160, "rope_scaling": {"rope_type": "yarn", "factor": 40.0,
          "original_max_position_embeddings": 4}}, 160),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, 64),
    ],
)  # fmt: skip
def test_the_longest_sequence_of_a_configuration(text: dict[str, Any], longest: int | None) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**text))
    assert longest_sequence(config) == longest


def test_text_is_a_list_of_strings() -> None:
    check_columns({"failure": ["", "broken", ""]}, range(3), LIMITS)
    for wrong in (torch.zeros(3), ["", None, ""]):
        with expect_error(BadInput, value="column 'failure' is ", rule=" a list with one text a row"):
            check_columns({"failure": wrong}, range(3), LIMITS)
