"""Contexts of one conversation: what each begins with, and that a token is trained once, where it was sampled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput
from workbench.models.tokenizers import render_reply

ASKED = "Sum up."
CONTEXT: dict[str, Any] = {"max_tokens": 140, "turn_tokens": 24, "keep_turns": 1}
TURNS = 14
# every second token ends a turn, and none is banned: log-probabilities are those of the trainer
DRAWN: dict[str, Any] = {"max_turns": TURNS, "max_new_tokens": 600, "stop_token_ids": tuple(range(3, 250, 2))}


class Counting:
    """Answers with a message; the reward of a turn is its number of tokens."""

    def step(self, response: str, response_ids: list[int]) -> tuple[Any, float, bool]:
        return [{"role": "user", "content": f"{len(response_ids)}, go on"}], float(len(response_ids)), False


class Texts(Counting):
    """The same in texts, from a first one on."""

    def reset(self, prompt: str) -> str:
        return "words: "

    def step(self, response: str, response_ids: list[int]) -> tuple[Any, float, bool]:
        return f" ({len(response_ids)} tokens, go on) ", float(len(response_ids)), False


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "critic": TINY}
    with tiny_lab("contexts", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


def rolled(lab: wb.Workbench, environment: Any, **context: Any) -> wb.Batch:
    context = {**CONTEXT, **context}
    options = {"environment": environment, "context": wb.Context(**context), **DRAWN}
    return lab.actor.generate_sequences(lab.prompts.next(2), samples=3, seed=7, **options)


def rows(batch: wb.Batch, *names: str) -> Iterator[dict[str, Any]]:
    table = batch.fetch(["prompt_ids", "response_ids", "response_mask", "context_starts", *names])
    columns = [c.rows() if isinstance(c, Ragged) else c for c in table.values()]
    for row in zip(*columns, strict=True):
        lists = (one.tolist() if hasattr(one, "tolist") else one for one in row)
        yield dict(zip(table, lists, strict=True))


def contexts(row: dict[str, Any]) -> list[list[int]]:
    """The sequences that a row is trained in."""
    ids, starts = row["response_ids"], [i for i, first in enumerate(row["context_starts"]) if first]
    parts = [ids[start:end] for start, end in pairwise([0, *starts, len(ids)])]
    return [[*row["prompt_ids"], *parts[0]], *parts[1:]]


@pytest.mark.parametrize("environment", [Counting, Texts])
@pytest.mark.parametrize("summary", [ASKED, pytest.param(None, marks=pytest.mark.thorough)])
def test_no_token_is_trained_twice_nor_under_another_context(
    lab: wb.Workbench, environment: Any, summary: str | None
) -> None:
    batch = rolled(lab, environment, summary=summary)
    for row in rows(batch, "environment_rewards", "turn_starts", "turn_ends", "turn_rewards", "turns", "ending"):
        assert sum(row["context_starts"]) >= 1 and row["ending"] == "max_turns"
        turns = [*zip(row["turn_starts"], row["turn_ends"], strict=True)]
        assert row["turns"] == len(turns) == TURNS + (sum(row["context_starts"]) if summary else 0)
        mine = [row["response_mask"][start:end] for start, end in turns]
        assert all(all(turn) for turn in mine) and sum(map(len, mine)) == sum(row["response_mask"])
        told = [(end - start, given) for (start, end), given in zip(turns, row["turn_rewards"], strict=True) if given]
        assert len(told) == TURNS and all(
            tokens == given for tokens, given in told
        )  # each as its environment saw it, once
        for context in contexts(row):
            assert context[: len(row["prompt_ids"])] == row["prompt_ids"]
            assert len(context) <= CONTEXT["max_tokens"] + (CONTEXT["turn_tokens"] + 60 if summary else 0)
    batch = lab.actor.compute_log_prob(batch)
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-4  # each under the context it was sampled in
    lab.actor.compute_log_prob(batch.drop("context_starts", "old_log_prob"))
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] > 1e-2
    batch = lab.critic.compute_values(batch.rename(environment_rewards="rewards"), final=True)
    batch = lab.compute_advantages(batch, estimator="gae_turn")
    assert lab.actor.update_actor(batch)["grad_norm"] > 0


@pytest.mark.parametrize("keep", [1, 3])
def test_a_context_begins_with_the_prompt_and_the_newest_turns(lab: wb.Workbench, keep: int) -> None:
    numbers = set[int]()
    for row in rows(rolled(lab, Counting, keep_turns=keep), "turn_starts", "turn_ends"):
        ids, turns = row["response_ids"], [*zip(row["turn_starts"], row["turn_ends"], strict=True)]
        exchanges = [ids[start:end] + answered(lab, ids[start:end]) for start, end in turns]
        for begin in (i for i, first in enumerate(row["context_starts"]) if first):
            next_turn = next(k for k, (start, _) in enumerate(turns) if start > begin)
            begins_with = ids[begin : turns[next_turn][0]]
            newest = [[*row["prompt_ids"], *chain(*exchanges[next_turn - n : next_turn])] for n in range(1, keep + 1)]
            fit = [one for one in newest[:next_turn] if len(one) <= CONTEXT["max_tokens"] - CONTEXT["turn_tokens"]]
            assert begins_with == fit[-1]  # as many of the newest turns as fit, each whole, with its answer
            numbers.add(len(fit))
    assert max(numbers) == keep
    assert lab.last_metrics["generate_sequences"]["contexts/mean"] > 1


def answered(lab: wb.Workbench, turn_ids: list[int]) -> list[int]:
    """The tokens of what `Counting` answers to a turn."""
    messages = [{"role": "user", "content": f"{len(turn_ids)}, go on"}]
    return render_reply(lab.runner.batches.tokenizer, messages, after=turn_ids[-1])


def test_a_summary_stands_in_place_of_what_is_left_out(lab: wb.Workbench) -> None:
    tokenizer = lab.runner.batches.tokenizer
    for row in rows(rolled(lab, Counting, summary=ASKED), "turn_starts", "turn_ends"):
        first, second, *_ = contexts(row)
        start = row["context_starts"].index(True) + len(row["prompt_ids"])
        end = max(end for end in row["turn_ends"] if end <= start - len(row["prompt_ids"]))
        begun = row["turn_starts"][row["turn_ends"].index(end)]
        summary = row["response_ids"][begun:end]
        assert second[len(row["prompt_ids"]) :][: len(summary)] == summary
        question = render_reply(tokenizer, [{"role": "user", "content": ASKED}], after=row["response_ids"][begun - 1])
        assert ASKED in lab.decode(first) and row["response_ids"][begun - len(question) : begun][-3:] == question[-3:]
        assert ASKED not in lab.decode(second[: len(row["prompt_ids"]) + len(summary) + 5])


def test_without_room_for_the_newest_turn_the_conversation_ends(lab: wb.Workbench) -> None:
    batch = rolled(lab, Counting, max_tokens=30, turn_tokens=29)
    assert set(batch.df()["ending"]) == {"max_tokens"} and set(batch.df()["turns"]) == {1}


def test_a_context_that_is_not_full_changes_nothing(lab: wb.Workbench) -> None:
    prompts, options = lab.prompts.next(2), {**DRAWN, "environment": Counting, "max_new_tokens": 96}
    plain = lab.actor.generate_sequences(prompts, seed=3, **options)
    roomy = lab.actor.generate_sequences(prompts, seed=3, context=wb.Context(max_tokens=190, turn_tokens=8), **options)
    assert [*plain.df()["response_text"]] == [*roomy.df()["response_text"]]


def test_wrong_contexts(lab: wb.Workbench) -> None:
    with expect_error(BadInput, rule="a context must have room for the prompt and a turn"):
        wb.Context(max_tokens=64)
    with expect_error(BadInput, value=r"Context\.keep_turns=0"):
        wb.Context(max_tokens=640, keep_turns=0)
    with expect_error(BadInput, value="context= without environment="):
        wb.Sampling(context=wb.Context(max_tokens=640))
    with expect_error(BadInput, rule="the model reads at most Generation"):
        rolled(lab, Counting, max_tokens=100_000)
    with expect_error(BadInput, value="context=3"):
        lab.actor.generate_sequences(lab.prompts.next(1), environment=Counting, context=3)
