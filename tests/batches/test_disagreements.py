"""Where two verifiers disagree: against counts and kappa by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import workbench as wb
from tests.cases import stored, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput, UnknownColumn

MATH = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
JUDGE = [1.0, 0.25, 0.0, 0.75, 0.625, 1.0]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("apart", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def table(judge: list[float] = JUDGE) -> Table:
    return {**stored(6), "prompt": list("abcdef"), "rewards/math": torch.tensor(MATH),
            "rewards/judge": torch.tensor(judge)}  # fmt: skip


def test_rows_by_gap_and_kappa(lab: wb.Workbench) -> None:
    found = lab.put(table()).disagreements("math", "judge")
    assert found.df["row"].tolist() == [5, 1, 3, 4, 0, 2]  # rows of one gap in their order
    assert found.df["gap"].tolist() == [1.0, 0.75, 0.75, 0.375, 0.0, 0.0]
    assert found.df["agree"].tolist() == [False, False, False, True, True, True]
    assert found.df["prompt"].tolist() == list("fbdeac") and "response" in found.df
    assert found.counts == {(True, True): 2, (True, False): 1, (False, True): 2, (False, False): 1}
    assert found.agreement == 0.5
    # both say yes by chance on 3/6 x 4/6, no on 3/6 x 2/6 of the rows: 0.5
    assert found.kappa == pytest.approx(0.0)
    assert lab.put(table(MATH)).disagreements("math", "judge").kappa == 1.0
    assert math.isnan(lab.put({**table([1.0] * 6), "rewards/math": torch.ones(6)}).disagreements("math", "judge").kappa)


def test_kappa_by_hand(lab: wb.Workbench) -> None:
    one, two = [1.0] * 25 + [0.0] * 25, [1.0] * 20 + [0.0] * 5 + [1.0] * 10 + [0.0] * 15
    found = lab.put({"one": torch.tensor(one), "two": torch.tensor(two)}).disagreements("one", "two")
    assert found.agreement == 0.7 and found.kappa == pytest.approx(0.4)


def test_other_scales_and_thresholds(lab: wb.Workbench) -> None:
    tens = table([10 * score for score in JUDGE])
    found = lab.put(tens).disagreements("math", "judge")
    assert found.thresholds == (0.5, 5.0) and found.df["gap"].tolist() == [1.0, 0.75, 0.75, 0.375, 0.0, 0.0]
    strict = lab.put(tens).disagreements("math", "judge", threshold=(0.5, 7.0))
    assert strict.counts == {(True, True): 1, (True, False): 2, (False, True): 2, (False, False): 1}


def test_failed_rows_are_left_out_and_tokens_are_summed(lab: wb.Workbench) -> None:
    whole = table()
    mask = whole["response_mask"]
    assert isinstance(mask, Ragged)
    steps = [[0.0] * (n - 1) + [score] for n, score in zip(mask.lengths.tolist(), JUDGE, strict=True)]
    whole["rewards/judge"] = Ragged.of(steps, torch.float32)
    found = lab.put({**whole, "valid": torch.tensor([1, 1, 1, 1, 1, 0])}).disagreements("math", "judge")
    assert found.left_out == 1 and found.df["row"].tolist() == [1, 3, 4, 0, 2]
    assert found.df["rewards/judge"].tolist() == [0.25, 0.75, 0.625, 1.0, 0.0]


def test_how_it_is_shown(lab: wb.Workbench) -> None:
    found = lab.put({**table(), "prompt": ["<b>" + "x" * 500] * 6}).disagreements("math", "judge")
    assert repr(found) == "<rewards/math and rewards/judge disagree on 3 of 6 rows; kappa 0.00>"
    html = found._repr_html_()
    assert "3 of 6 rows" in html and "kappa 0.00" in html and "largest gaps first" in html
    assert "<b>" not in html and "x" * 200 not in html
    many = lab.put({"one": torch.ones(30), "two": torch.zeros(30)}).disagreements("one", "two")
    assert "the first 12 of 30" in many._repr_html_()


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ([1.0] * 4, [0.0, 1.0, 0.0, 1.0], "disagree on 2 of 4 rows; kappa says nothing: one is 1 on every row"),
        ([1.0] * 4, [0.0] * 4, "4 of 4 rows; kappa says nothing: one is 1 on every row, two is 0 on every row"),
        ([7.0] * 4, [0.0, 0.25, 0.25, 0.0], "one is 7 on every row, two is not above 0.5 on every row"),
        ([0.75, 1.0], [0.0, 1.0], "one is above 0.5 on every row"),
    ],
)
def test_a_score_that_is_the_same_on_all_rows_is_named(
    lab: wb.Workbench, one: list[float], two: list[float], said: str
) -> None:
    found = lab.put({"one": torch.tensor(one), "two": torch.tensor(two)}).disagreements("one", "two")
    assert said in repr(found) and f"says nothing: {found.one_sided}" in found._repr_html_()
    assert found.kappa == 0 or math.isnan(found.kappa)


def test_no_row_with_both_scores(lab: wb.Workbench) -> None:
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([math.nan, math.nan])
    found = lab.put({"one": one, "two": two}).disagreements("one", "two")
    assert repr(found) == "<one and two disagree on 0 of 0 rows; kappa says nothing: no row has both scores>"
    failed = lab.put({**table(), "valid": torch.zeros(6)}).disagreements("math", "judge")
    assert failed.df.empty and failed.left_out == 6
    assert "2 failed rows are left out" in found._repr_html_()


def test_of_rewards_of_two_functions(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4)
    batch = lab.reward.compute_reward(batch, function={"vowels": vowels, "numbers": wb.verifiers.arithmetic})
    found = batch.disagreements("vowels", "numbers")
    assert len(found.df) == 4 and {"prompt", "response", "rewards/vowels", "rewards/numbers"} <= set(found.df)


def test_wrong_columns_are_refused(lab: wb.Workbench) -> None:
    batch = lab.put(table())
    with expect_error(UnknownColumn, value="disagreements reads column 'coder'"):
        batch.disagreements("math", "coder")
    with expect_error(BadInput, rule="it holds text"):
        batch.disagreements("math", "prompt")
