"""Limits of a conversation: each ends it, and is named in its ending."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import workbench as wb
from tests.calculator import EQUALS, segments
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput

DIGITS = {**dict.fromkeys(range(23, 33), 14.0), EQUALS: 15.0}
SAMPLING: dict[str, Any] = {"stop": ("=",), "logit_bias": DIGITS, "max_new_tokens": 100}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("limits", tmp_path_factory.mktemp("runs"), backend="inline", models={"actor": TINY}) as lab:
        yield lab


class Caller:
    """Takes a turn that begins with a digit as a call."""

    tool_format: ClassVar[Any] = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"(?P<name>\d)", "close": "=", "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": {}}},
            },
            "content": {},
        },
    }  # fmt: skip

    def step(self, response: str) -> tuple[str, float, bool]:
        return ";", 1.0, False


def said(parts: list[tuple[bool, list[Any]]]) -> list[list[Any]]:
    return [part for mine, part in parts if mine]


@pytest.mark.parametrize("most", [0, 2])
def test_a_turn_with_more_calls_than_are_left_is_not_answered(lab: wb.Workbench, most: int) -> None:
    batch = lab.actor.generate_sequences(
        lab.prompts.next(4), samples=2, seed=1, environment=Caller, max_turns=5, max_calls=most, **SAMPLING
    )
    endings, seen = batch.df()["ending"], set()
    for row, parts in enumerate(segments(batch)):
        turns = [lab.decode(ids) for ids in said(parts)]
        calls = [turn != "=" for turn in turns]
        over = sum(calls) > most
        assert endings[row] == ("max_calls" if over else "max_turns")
        assert sum(calls[:-1]) <= most and calls[-1] >= over  # the last turn is the one that is over the limit
        rewards = [given[-1] for given in said(segments(batch, "environment_rewards")[row])]
        assert rewards == [1.0] * (len(turns) - over) + [0.0] * over
        seen.add(endings[row])
    assert "max_calls" in seen
    assert not batch.df()["finished"].any()
    metrics = lab.last_metrics["generate_sequences"]
    assert metrics["ending_max_calls/fraction"] == (endings == "max_calls").mean()


def test_time_ends_a_conversation_between_turns_and_while_its_environment_answers(lab: wb.Workbench) -> None:
    class Silent:
        async def step(self, response: str) -> Any:
            await asyncio.Event().wait()  # for ever

    prompts = lab.prompts.next(2)
    batch = lab.actor.generate_sequences(prompts, environment=Silent, max_seconds=0.5, **SAMPLING)
    assert batch.df()["ending"].tolist() == ["max_seconds"] * 2
    assert batch.df()["turns"].tolist() == [1, 1] and not len(batch.failed())
    batch = lab.actor.generate_sequences(prompts, environment=Caller, max_seconds=1e-9, **SAMPLING)
    assert batch.df()["ending"].tolist() == ["max_seconds"] * 2
    assert batch.df()["turns"].tolist() == [1, 1]


def test_limits_of_environments_are_refused_for_an_agent() -> None:
    with expect_error(BadInput, value="max_calls and max_seconds with agent="):
        wb.Sampling(agent=lambda base_url, api_key: 0.0, max_calls=1, max_seconds=1.0)


def test_each_other_limit_is_named(lab: wb.Workbench) -> None:
    class Over(Caller):
        def step(self, response: str) -> tuple[str, float, bool]:
            return ";", 1.0, True

    prompts = lab.prompts.next(2)
    for options, ending in (
        ({"environment": Over, "max_turns": 1, "max_calls": 9, "max_seconds": 1e6}, "done"),  # it was done all the same
        ({"environment": Caller, "max_turns": 2}, "max_turns"),
        ({"environment": Caller, "max_turns": 99, "max_new_tokens": 20}, "max_tokens"),
    ):
        batch = lab.actor.generate_sequences(prompts, **{**SAMPLING, **options})
        assert batch.df()["ending"].tolist() == [ending] * 2
        assert batch.df()["finished"].all() == (ending == "done")


def test_where_no_turn_is_answered_the_call_says_so(lab: wb.Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = lab.prompts.next(2)
    lab.actor.generate_sequences(prompts, environment=Caller, max_new_tokens=3, logit_bias={EQUALS: float("-inf")})
    said = "no reply of environment {} was read on rank 0: all 2 conversations were cut in their first turn, or had no"
    assert said.format("Caller") in capsys.readouterr().err

    class Long(Caller):
        def step(self, response: str) -> tuple[str, float, bool]:
            return ";" * 200, 1.0, False

    lab.actor.generate_sequences(prompts, environment=Long, **SAMPLING)
    assert said.format("Long") in capsys.readouterr().err
    short = wb.Context(max_tokens=2, turn_tokens=1)
    lab.actor.generate_sequences(prompts, environment=Caller, context=short, **SAMPLING)
    assert "max_new_tokens=100, Context.max_tokens=2 or Generation.max_model_tokens" in capsys.readouterr().err
    lab.actor.generate_sequences(prompts, environment=Caller, **SAMPLING)
    assert "no reply of" not in capsys.readouterr().err


def test_another_response_has_no_columns_of_the_turns_before_it(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), samples=2, environment=Caller, **SAMPLING)
    table = batch.fetch()
    mask = table["response_mask"]
    assert isinstance(mask, Ragged)
    kept = lab.put({**table, "mine": table["prompt_uid"], "context_starts": mask.like(torch.zeros(len(mask.values)))})
    assert {"turns", "turn_ends", "context_starts"} <= {*kept.names}
    again = lab.actor.generate_sequences(kept, max_new_tokens=4)
    assert {"mine", "prompt", "valid"} <= {*again.names}
    assert not {"turns", "turn_ends", "turn_rewards", "environment_rewards", "context_starts"} & {*again.names}
    lab.actor.compute_log_prob(again)


def test_an_instance_in_place_of_a_class_is_refused_with_its_remedy(lab: wb.Workbench) -> None:
    with expect_error(BadInput, remedy="give the class, not an instance"):
        lab.actor.generate_sequences(lab.prompts.next(1), environment=Caller())
