"""The samples of a real workbench: which batch, which rows, what is brought here, and what the picture says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import workbench as wb
from tests.cases import tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput
from workbench_widgets.driver import Driver
from workbench_widgets.sample_rows import SampleRows, chosen
from workbench_widgets.samples import PAGE_ROWS, Samples


def spread(prompt: str, response: str, **row: Any) -> float:
    """A reward that differs from response to response."""
    return sum(map(ord, response)) % 7 / 7


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("samples", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


@pytest.fixture(scope="module")
def first(lab: wb.Workbench) -> wb.Batch:
    """What one iteration of PPO made, before its updates."""
    ppo = wb.PPO(lab, prompts=3, samples=2, reward=spread, sampling=wb.Sampling(max_new_tokens=12))
    ppo.iterate()
    made: wb.Batch = ppo.made["compute_advantages"]
    return made


@pytest.fixture(scope="module")
def after(lab: wb.Workbench, first: wb.Batch) -> wb.Batch:
    """The same rows, with the log-probabilities after them."""
    return lab.actor.compute_log_prob(first)


@pytest.fixture
def view(lab: wb.Workbench) -> Samples:
    return Samples(lab, Driver(lab))


def wide(lab: wb.Workbench, rows: int = 90, tokens: int = 30) -> wb.Batch:
    """A batch of many rows, whose tokens say which row they are of."""
    ids = [[8 + row % 200] * (1 + row % tokens) for row in range(rows)]
    likely = Ragged.of([[-float(row)] * len(row_ids) for row, row_ids in enumerate(ids)], torch.float32)
    return lab.put(
        {
            "prompt_ids": Ragged.of([[9, 10]] * rows, torch.int64), "response_ids": Ragged.of(ids, torch.int64),
            "old_log_prob": likely, "rewards": torch.arange(rows) / rows, "prompt_uid": torch.arange(rows) // 4,
        }
    )  # fmt: skip


def test_the_newest_batch_that_has_responses_and_is_whole_is_shown(
    view: Samples, lab: wb.Workbench, after: wb.Batch
) -> None:
    assert view.shown_batch() == after.id
    assert not any(name.endswith(" v0") for name in view.batches())  # prompts have no responses
    lab.prompts.next(2)
    assert view.shown_batch() == after.id
    view.receive(iteration=1)
    assert lab.store.iteration(view.shown_batch()) == 1
    view.receive(iteration=77)
    assert "Iteration 77 has no batch" in view.picture() and "limit_bytes" in view.picture()
    assert view.shown_batch() == after.id


def test_a_released_batch_is_said_to_be_gone(view: Samples, lab: wb.Workbench) -> None:
    batch = wide(lab, rows=3)
    view.receive(batch=batch.id)
    assert batch.id in view.picture()
    lab.release(batch.id)
    assert f"{batch.id} is no longer in the store" in view.picture()
    assert "choose another batch" in view.text()


def test_only_the_tokens_of_the_rows_shown_are_brought(
    view: Samples, lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, asked = wide(lab), []
    pull = lab.runner.batches.pull

    def counted(columns: Mapping[str, Any], rows: np.ndarray) -> Any:
        asked.append((tuple(columns), len(rows)))
        return pull(columns, rows)

    monkeypatch.setattr(lab.runner.batches, "pull", counted)
    view.receive(batch=batch.id)
    view.payload()
    view.controls()
    tokens = [rows for names, rows in asked if "response_ids" in names]
    assert tokens == [PAGE_ROWS]
    assert {name for names, rows in asked for name in names if rows == batch.rows} == {"rewards", "prompt_uid"}
    asked.clear()
    view.picture()
    assert asked == []  # what is here is not brought again
    lab.release(batch)


def test_rows_are_sorted_filtered_and_paged(view: Samples, lab: wb.Workbench) -> None:
    batch = wide(lab)
    view.receive(batch=batch.id)
    view.on_sort("rewards")
    assert list(view.look().found[:3]) == [89, 88, 87]
    view.on_sort("rewards")
    assert list(view.look().found[:3]) == [0, 1, 2]
    view.on_page(1)
    assert view.look().page[0].row == PAGE_ROWS
    view.on_page(9)
    assert view.look().page[-1].row == 89
    view.on_where("rewards > 0.5 and response_tokens <= 3")
    looked = view.look()
    assert list(looked.found) == [row for row in range(90) if row / 90 > 0.5 and row % 30 < 3]
    assert looked.page[0].mean("old_log_prob") == -float(looked.page[0].row)
    view.on_where("")
    view.on_search(lab.decode([8 + 17]))
    assert 17 in view.look().found and 18 not in view.look().found
    view.on_where("rewards > 2")
    assert "No row matches" in view.picture()
    with expect_error(BadInput, value="rewardz"):
        view.on_where("rewardz > 2")
    assert view.where == "rewards > 2"
    lab.release(batch)


NO_EXPRESSIONS = [
    "__import__('os')", "rewards.mean() > 0", "@rewards", "rewards", "3", "rewards > 'a'", "[r for r in rewards]",
    "lambda: 1", "rewards = 1", "rewards >", "(" * 300, "pd.io", "rewards if rewards else rewards", "costs > 1",
]  # fmt: skip


def test_what_is_no_truth_value_of_a_row_is_refused(subtests: pytest.Subtests) -> None:
    for where in NO_EXPRESSIONS:
        with subtests.test(where=where):
            frame = pd.DataFrame({"rewards": [0.0, 1.0], "truncated": [True, False]})
            with expect_error(BadInput, value="rows where"):
                chosen(frame, where)


def test_expressions_choose_rows() -> None:
    frame = pd.DataFrame({"rewards": [0.0, 1.0, math.nan], "truncated": [True, False, True]})
    assert chosen(frame, "").tolist() == [True] * 3
    assert chosen(frame, "0.5 < rewards <= 1").tolist() == [False, True, False]
    assert chosen(frame, "truncated").tolist() == [True, False, True]
    assert chosen(frame, "not truncated or rewards == 0").tolist() == [True, True, False]
    assert chosen(frame, "(rewards * 2 - 1 > 0) & ~truncated").tolist() == [False, True, False]


def test_tokens_carry_the_batchs_own_numbers(view: Samples, lab: wb.Workbench, first: wb.Batch) -> None:
    view.receive(batch=first.id)
    view.on_row(2)
    view.act("colour", {"value": "advantages"})
    frame = first.df(rows=[2])
    picture = view.picture()
    for n, value in enumerate(frame["advantages"][0]):
        shown = f"{value:.6g}".replace("-", "−")
        assert f"token {n + 1} of {len(frame['advantages'][0])}" in picture
        assert f"advantages {shown}" in picture
    view.act("colour", {"value": "kl"})
    looked = view.look()
    pairs = zip(frame["old_log_prob"][0], frame["ref_log_prob"][0], strict=True)
    assert looked.columns["kl"].tolist() == pytest.approx([a - b for a, b in pairs], abs=1e-6)
    assert "k1: old_log_prob - ref_log_prob" in view.picture()


def test_the_group_of_a_prompt_is_sorted_by_reward_with_mean_and_spread(
    view: Samples, lab: wb.Workbench, first: wb.Batch
) -> None:
    view.receive(batch=first.id)
    view.on_row(3)
    rewards = torch.tensor(first.df(["rewards"], [2, 3])["rewards"].tolist(), dtype=torch.float64)
    picture = view.picture()
    assert "group: 2 samples of one prompt" in picture
    assert f"rewards mean {rewards.mean():.6g}, standard deviation {rewards.std():.6g}" in picture
    assert "Show these rows" not in picture
    assert "Show these rows" in view.payload()[0]["html"]
    view.on_where("prompt_uid == 1")
    assert sorted(view.look().found) == [2, 3]


def test_a_later_version_beside_gives_the_new_ratio(
    view: Samples, lab: wb.Workbench, first: wb.Batch, after: wb.Batch
) -> None:
    view.receive(batch=first.id)
    view.on_row(1)
    view.on_beside(after.id)
    view.act("colour", {"value": "new_ratio"})
    looked = view.look()
    old = first.df(rows=[1])["old_log_prob"][0]
    new = after.df(rows=[1])["old_log_prob"][0]
    assert new != old  # the actor has learned in between
    assert view.clip == (0.2, 0.2)
    expected = [math.exp(b - a) for a, b in zip(old, new, strict=True)]
    assert looked.columns["new_ratio"].tolist() == pytest.approx(expected, rel=1e-5)
    view.act("colour", {"value": "old_log_prob"})
    picture = view.picture()
    assert "the same response" in picture
    gap = f"{new[0] - old[0]:.6g}".replace("-", "−")
    assert f"difference {gap[:6]}" in picture
    assert '<option value="new_ratio"' in view.controls()
    view.act("token", {"at": 1, "side": 1})
    assert view.at == 1 and "token 2</th>" in view.picture()


def test_only_what_the_loss_clips_is_marked_where_that_is_known(view: Samples, lab: wb.Workbench) -> None:
    def put(old: list[float], **more: Ragged) -> wb.Batch:
        ids = Ragged.of([[20, 21, 22]], torch.int64)
        common = {"prompt_ids": Ragged.of([[9]], torch.int64), "response_ids": ids}
        return lab.put({**common, "old_log_prob": ids.like(torch.tensor(old)), **more})

    up, down = math.log(1.5), math.log(0.5)
    batch = put([0.0] * 3, advantages=Ragged.of([[1.0, -1.0, 1.0]], torch.float32))
    after = put([up, up, down], rollout_log_prob=Ragged.of([[0.0, 0.0, 0.0]], torch.float32))
    view.receive(batch=batch.id)
    view.on_beside(after.id)
    tokens = [part.split("</span>")[0] for part in view.picture().split("<span title=")[1:4]]
    assert ["▲" in token for token in tokens] == [True, False, False] and not any("▼" in token for token in tokens)
    words = ["new_ratio above the clip range, clipped", "new_ratio above the clip range, not clipped"]
    for said, token in zip([*words, "new_ratio below the clip range, not clipped"], tokens, strict=True):
        assert f', {said}"' in token
    view.receive(batch=after.id)
    view.on_beside("")
    assert "ratio above the clip range" in view.picture() and "clipped" not in view.picture()
    assert [view.picture().count(sign) for sign in "▲▼"] == [2, 1]
    for each in (batch, after):
        lab.release(each)


def test_rows_that_were_moved_are_found_beside_by_prompt_and_response(lab: wb.Workbench, first: wb.Batch) -> None:
    turned = first.take(list(range(5, -1, -1)))
    mine, theirs = SampleRows(lab, first.id), SampleRows(lab, turned.id)
    for sample in mine.samples(range(6)):
        other = theirs.counterpart(sample, mine)
        assert other is not None
        assert (other.row, other.token_ids) == (5 - sample.row, sample.token_ids)


def test_the_still_picture_stands_alone_and_is_small(view: Samples, lab: wb.Workbench) -> None:
    long = lab.put(
        {
            "prompt_ids": Ragged.of([[9] * 50] * 40, torch.int64),
            "response_ids": Ragged.of([[20 + n % 200 for n in range(2000)]] * 40, torch.int64),
            "response_mask": Ragged.of([[n % 3 > 0 for n in range(2000)]] * 40, torch.bool),
            **{
                name: Ragged.of([torch.linspace(-3, 0, 2000)] * 40, torch.float32)
                for name in ("old_log_prob", "rollout_log_prob", "ref_log_prob", "advantages", "returns", "values")
            },
            "rewards": torch.rand(40), "prompt_uid": torch.zeros(40, dtype=torch.int64),
        },
        meta={"iteration": 9},
    )  # fmt: skip
    view.receive(iteration=9)
    still = view.picture()
    assert len(still.encode()) < 150_000
    assert "<button" not in still and "data-act" not in still and "<script" not in still
    assert "line-through" in still and "tokens 1 to 400 of 2000" in still
    view.on_beside(long.id)
    view.on_window(400)
    assert "token 401 of 2000" in view.payload()[0]["html"]
    lab.release(long)


@pytest.mark.parametrize("scores", [[[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]])
def test_a_ragged_column_of_another_length_is_none_by_token(
    view: Samples, lab: wb.Workbench, scores: list[list[float]]
) -> None:
    """Though some row of it is as long as its response: the first, or another."""
    ids = Ragged.of([[20, 21], [22, 23]], torch.int64)
    turns = Ragged.of(scores, torch.float32)
    batch = lab.put(
        {"prompt_ids": ids, "response_ids": ids, "turn_scores": turns, "old_log_prob": ids.like(torch.zeros(4)),
         "prompt_uid": torch.zeros(2)}
    )  # fmt: skip
    view.receive(batch=batch.id)
    for row in range(2):
        view.on_row(row)
        for html in (view.picture(), view.payload()[0]["html"], view.controls()):
            assert "old_log_prob" in html and "turn_scores" not in html
    lab.release(batch)


def test_text_of_a_batch_is_escaped(view: Samples, lab: wb.Workbench) -> None:
    batch = lab.put(
        {
            "prompt_ids": Ragged.of([[9]], torch.int64), "response_ids": Ragged.of([[9, 10]], torch.int64),
            "prompt": ["<img src=x onerror=alert(1)>"], "rewards": torch.zeros(1), "note": ["<i>"],
        }
    )  # fmt: skip
    view.receive(batch=batch.id)
    for html in (view.picture(), view.payload()[0]["html"], view.controls()):
        assert "<img" not in html and "<i>" not in html
    lab.release(batch)
