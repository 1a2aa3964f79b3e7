"""An environment that is told earlier turns again has to answer as it did."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.data.conversation_turns import ReplayedTurn, Resumed, digest


class Echo:
    def __init__(self, first: str = "begin", word: Any = "said") -> None:
        self.first, self.word = first, word

    def reset(self, sample_seed: int) -> str:
        return self.first

    def step(self, response: str) -> tuple[Any, float, bool]:
        return self.word, 0.5, False


def reset(made: Echo, observed: str, began: str) -> Any:
    said = [ReplayedTurn(text="hello", more={}, reward=0.5, observed=observed)]
    return Resumed(make=lambda: made, sample_seed=1, turns=said, began=began)().reset()


def test_the_same_answers_are_taken() -> None:
    assert reset(Echo(), digest("said"), digest("begin")) is None
    messages = [{"role": "user", "content": "said"}]
    assert reset(Echo(word=messages), digest([dict(messages[0])]), "") is None
    assert reset(Echo(word="other"), "", "") is None  # what was answered is not known


def test_another_observation_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="turn 0 was repeated, the environment answered 'other'"):
        reset(Echo(word="other"), digest("said"), digest("begin"))
    with pytest.raises(RuntimeError, match="reset gave 'another'"):
        reset(Echo(first="another"), digest("said"), digest("begin"))
    assert digest(None) == digest("") != digest("x")
