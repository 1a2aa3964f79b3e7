"""Scores of steps: from functions and from a reward model, and what GAE and process supervision make of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import workbench as wb
from tests.cases import TINY, stored, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged, Table
from workbench.errors import BadInput, RewardError
from workbench.messages.shards import Shard
from workbench.models import load_tokenizer
from workbench.workers.score_columns import steps_of, text_of_tokens

TEXTS = ["two\n\nsteps here", "\n\none", "a\n\n\n\nb\n\nc", "x\n\ny"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY, "reward": TINY}
    runs = tmp_path_factory.mktemp("runs")
    with tiny_lab("steps", runs, backend="inline", models=models, training={"minibatches": 1}) as lab:
        yield lab


def table(texts: list[str] = TEXTS) -> Table:
    tokenizer = load_tokenizer(TINY)
    ids = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    responses = Ragged.of(ids, torch.int64)
    return {
        "prompt_ids": stored(len(texts))["prompt_ids"],
        "prompt": ["?"] * len(texts),
        "response_ids": responses,
        "response_mask": responses.like(torch.ones(len(responses.values)).bool()),
        "values": responses.like(torch.linspace(0, 1, len(responses.values))),
        "prompt_uid": torch.arange(len(texts)) // 2,
    }


def lengths(prompt: str, response: str, steps: list[str]) -> list[float]:
    return [float(len(step.strip())) for step in steps]


def rows(batch: wb.Batch, name: str) -> list[list[float]]:
    column = batch.fetch([name])[name]
    assert isinstance(column, Ragged)
    return [row.tolist() for row in column.rows()]


def at_ends(batch: wb.Batch) -> list[list[float]]:
    pairs = zip(rows(batch, "rewards"), rows(batch, "step_ends"), strict=True)
    return [[reward for reward, end in zip(*row, strict=True) if end] for row in pairs]


def test_a_number_for_each_step_of_a_text(lab: wb.Workbench) -> None:
    batch = lab.reward.compute_reward(lab.put(table()), function=lengths, steps="\n\n")
    assert at_ends(batch) == [[3.0, 10.0], [3.0], [1.0, 1.0, 1.0], [1.0, 1.0]]
    off = zip(rows(batch, "rewards"), rows(batch, "step_ends"), strict=True)
    assert not any(reward for row in off for reward, end in zip(*row, strict=True) if not end)
    assert all(row[-1] for row in rows(batch, "step_ends"))


def test_gae_takes_the_scores_of_steps_as_rewards_of_tokens(lab: wb.Workbench) -> None:
    batch = lab.reward.compute_reward(lab.put(table()), function=lengths, steps="\n\n")
    batch = lab.compute_advantages(batch, estimator="gae", lam=1.0, whiten_advantages=False)
    for rewards, values, found in zip(*(rows(batch, n) for n in ("rewards", "values", "advantages")), strict=True):
        assert found == pytest.approx([sum(rewards[t:]) - value for t, value in enumerate(values)], abs=1e-5)


def test_process_supervision_normalises_over_all_steps_of_a_prompt(lab: wb.Workbench) -> None:
    batch = lab.reward.compute_reward(lab.put(table()), function=lengths, steps="\n\n")
    batch = lab.compute_advantages(batch, estimator="grpo_process")
    steps = torch.tensor([3.0, 10.0, 3.0])
    normal = ((steps - steps.mean()) / steps.std()).tolist()
    ends, found = rows(batch, "step_ends"), rows(batch, "advantages")
    first = ends[0].index(1)
    assert found[0][: first + 1] == pytest.approx([normal[0] + normal[1]] * (first + 1), abs=1e-5)
    assert found[0][first + 1 :] == pytest.approx([normal[1]] * (len(found[0]) - first - 1), abs=1e-5)
    assert found[1] == pytest.approx([normal[2]] * len(found[1]), abs=1e-5)
    assert found[2] == [0.0] * len(found[2])  # all steps of that prompt are alike
    assert lab.last_metrics["compute_advantages"]["steps/mean"] == 2.0


def test_one_step_a_response_is_grpo(lab: wb.Workbench) -> None:
    given = lab.put({**table(), "rewards": torch.tensor([1.0, 0.0, 0.25, 0.5])})
    found, right = (rows(lab.compute_advantages(given, estimator=e), "advantages") for e in ("grpo_process", "grpo"))
    assert found == [pytest.approx(row, abs=1e-6) for row in right]


def test_ends_of_steps_are_those_of_the_newest_rewards(lab: wb.Workbench) -> None:
    def of_tokens(prompt: str, response: str, response_ids: list[int]) -> list[float]:
        return [float(i * i % 7) for i in range(len(response_ids))]

    batch = lab.put(table())
    expected, again = (
        rows(lab.compute_advantages(scored, estimator="grpo_process"), "advantages")
        for scored in (
            lab.reward.compute_reward(batch, function=of_tokens),
            lab.reward.compute_reward(
                lab.reward.compute_reward(batch, function=lengths, steps="\n\n"), function=of_tokens
            ),
        )
    )
    assert again == expected


def test_functions_that_say_where_steps_end(lab: wb.Workbench) -> None:
    def pairs(prompt: str, response: str, response_ids: list[int]) -> list[tuple[int, float]]:
        return [(0, 0.0), (len(response_ids) - 1, 2.0)]

    batch = lab.reward.compute_reward(lab.put(table()), function=pairs, steps=True)
    assert at_ends(batch) == [[0.0, 2.0]] * 4  # a step of reward 0 is a step


@pytest.mark.parametrize(
    ("value", "steps", "said"),
    [
        ([(0, 1.0), (99, 1.0)], True, "returned a step that ends at token 99 of a response of"),
        ([(1, 1.0), (0, 1.0)], True, "steps that end at tokens .1, 0., not in increasing order"),
        ([1.0, 2.0], True, "returned .1.0, 2.0."),
        ([1.0] * 7, "\n\n", r"returned 7 numbers for a response of \d steps"),
    ],
)
def test_what_is_no_score_of_steps(lab: wb.Workbench, value: Any, steps: Any, said: str) -> None:
    with pytest.raises(RewardError, match=rf"{said}.*with steps= it must return"):
        lab.reward.compute_reward(lab.put(table()), function=lambda prompt, response: value, steps=steps)


def test_an_outcome_beside_steps_is_a_step_that_ends_with_the_response(lab: wb.Workbench) -> None:
    def first(prompt: str, response: str) -> list[tuple[int, float]]:
        return [(0, 0.25)]

    def outcome(prompt: str, response: str) -> float:
        return float(response.startswith("two"))

    parts = {"steps": first, "outcome": (outcome, 2.0)}
    batch = lab.reward.compute_reward(lab.put(table()), function=parts, steps=True)
    assert at_ends(batch) == [[0.25, 2.0], [0.25, 0.0], [0.25, 0.0], [0.25, 0.0]]


def test_rows_that_are_not_asked_keep_their_steps(lab: wb.Workbench) -> None:
    batch = lab.reward.compute_reward(lab.put(table()), function=lengths, steps="\n\n")
    again = lab.reward.compute_reward(batch, function=lambda prompt, response: [(0, 7.0)], steps=True, only=[0])
    assert at_ends(again) == [[7.0], *at_ends(batch)[1:]]


def test_a_reward_model_scores_each_step_as_it_scores_a_response_that_ends_there(lab: wb.Workbench) -> None:
    batch = lab.reward.compute_reward(lab.put(table()), steps="\n\n")
    ends = rows(batch, "step_ends")
    whole = table()
    responses, prompts = whole["response_ids"], whole["prompt_ids"]
    assert isinstance(responses, Ragged) and isinstance(prompts, Ragged)
    cut = [(row, t + 1) for row, of_row in enumerate(ends) for t, end in enumerate(of_row) if end]
    alone = lab.reward.compute_reward(
        lab.put(
            {
                "prompt_ids": prompts.take([row for row, _ in cut]),
                "response_ids": Ragged.of([responses.rows()[row][:n] for row, n in cut], torch.int64),
            }
        )
    )
    found = [score for row in at_ends(batch) for score in row]
    assert len(set(found)) == len(found) == 8
    assert found == pytest.approx(alone.fetch(["rewards"])["rewards"].tolist(), abs=1e-5)


def test_wrong_steps_are_refused(lab: wb.Workbench) -> None:
    with expect_error(BadInput, value="steps=''", rule="ends with a text"):
        lab.reward.compute_reward(lab.put(table()), function=lengths, steps="")
    with expect_error(BadInput, rule="a model does not say where steps end"):
        lab.reward.compute_reward(lab.put(table()), steps=True)


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer of words in which a space is the next word's, as Llama-2's: decoded alone, a word has none."""
    words = ["<unk>", "▁First", "▁we", "▁add.", "▁Step", "▁2:", "▁done"]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=model)


@pytest.mark.parametrize(
    ("tokenizer", "text", "end", "steps"),
    [
        (load_tokenizer(TINY), "第一步。第二步。", "。", ["第一步。", "第二步。"]),
        (load_tokenizer(TINY), "甲。乙 café 🙂", "。", ["甲。", "乙 café 🙂"]),
        (load_tokenizer(TINY), "naïve\n\n🙂🙂", "\n\n", ["naïve\n\n", "🙂🙂"]),
        (metaspace(), "First we add. Step 2: done", " Step", ["First we add. Step", " 2: done"]),
        (metaspace(), "First we add. Step 2: done", ".", ["First we add.", " Step 2: done"]),
    ],
)
def test_the_text_of_a_step_is_that_of_its_tokens_together(
    tokenizer: Any, text: str, end: str, steps: list[str]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    columns: Table = {"response_ids": Ragged.of([torch.tensor(ids)], torch.int64)}
    shard = Shard(columns=columns, rows=np.arange(1), minibatch_sizes=(1,), meta={})
    ((ends, found),) = steps_of(shard, tokenizer, end)
    assert found == steps
    for last, whole in zip(ends, accumulate(steps), strict=True):
        assert tokenizer.decode(ids[: last + 1]) == whole != tokenizer.decode(ids[:last])


def test_a_special_token_ends_steps_and_others_are_in_no_text() -> None:
    tokenizer = load_tokenizer(TINY)
    ids = tokenizer.encode("a<|tool|>b<|user|>c<|tool|>d<|eos|>", add_special_tokens=False)
    columns: Table = {"response_ids": Ragged.of([torch.tensor(ids)], torch.int64)}
    shard = Shard(columns=columns, rows=np.arange(1), minibatch_sizes=(1,), meta={})
    ((ends, found),) = steps_of(shard, tokenizer, "<|tool|>")
    assert (ends, found) == ([1, 5, 7], ["a<|tool|>", "bc<|tool|>", "d"])


def test_tokens_that_are_no_text_cost_no_more_than_their_number() -> None:
    tokenizer = load_tokenizer(TINY)
    half = tokenizer.encode("。", add_special_tokens=False)[:1]
    ids = half * 500 + [tokenizer.eos_token_id] * 500
    told: dict[Any, Any] = {}
    pieces = text_of_tokens(tokenizer, ids, told)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True) and len(told) < 40


def test_functions_read_the_scores_of_a_reward_model_under_another_name(lab: wb.Workbench) -> None:
    batch = lab.reward.compute_reward(lab.put(table()), steps="\n\n").rename(rewards="of_steps").drop("step_ends")
    batch = lab.reward.compute_reward(batch).rename(rewards="learned")

    @wb.batched(over="group")
    def centred(prompt: list[str], response: list[str], learned: list[float]) -> list[float]:
        return [score - sum(learned) / len(learned) for score in learned]

    parts: dict[str, Any] = {"model": lambda prompt, response, learned: learned, "centred": centred, "steps": summed}
    frame = lab.reward.compute_reward(batch, function=parts).df()
    scores = torch.tensor(frame["learned"].tolist())
    assert frame["rewards/model"].tolist() == scores.tolist()
    means = scores.view(2, 2).mean(1).repeat_interleave(2)
    torch.testing.assert_close(torch.tensor(frame["rewards/centred"].tolist()), scores - means)
    assert frame["rewards/steps"].tolist() == pytest.approx([sum(row) for row in frame["of_steps"]])

    def others(prompt: str, response: str, **row: Any) -> float:  # with only=, scores of the batch are no input
        return float(len(row))

    first = lab.reward.compute_reward(batch, function={"others": others})
    again = lab.reward.compute_reward(first, function={"others": others}, only=[0])
    assert again.df()["rewards/others"].tolist() == first.df()["rewards/others"].tolist()


def summed(prompt: str, response: str, of_steps: list[float]) -> float:
    return sum(of_steps)
