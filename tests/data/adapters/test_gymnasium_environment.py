"""Environments of Gymnasium in a conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.calculator import EQUALS
from tests.cases import TINY
from tests.expected import expect_error
from workbench.data.user_functions import reset
from workbench.errors import BadInput

gymnasium = pytest.importorskip("gymnasium")

LAKE: dict[str, Any] = {"is_slippery": False, "render_mode": "ansi"}
WORDS = ["left", "down", "right", "up"]


def says(environment: Any, *turns: str) -> list[tuple[str, float, bool]]:
    answers = []
    for turn in turns:
        said, reward, over = environment.step({"role": "assistant", "content": turn})
        assert [message["role"] for message in said] == ["user"]
        answers.append((said[0]["content"], reward, over))
    return answers


def test_the_lake_is_crossed_with_words() -> None:
    environment = wb.adapters.Gymnasium("FrozenLake-v1", actions=WORDS, **LAKE)()
    (first,) = environment.reset("Reach G.", seed=3)
    assert (
        first["role"] == "user" and first["content"].startswith("Reach G.\n\n") and "FFFG" not in first["content"][:9]
    )
    reference = gymnasium.make("FrozenLake-v1", **LAKE)
    reference.reset(seed=3)
    way = ["down", "I go down", "left? No: RIGHT", "right", "down", "right"]
    for turn, action in zip(way, [1, 1, 2, 2, 1, 2], strict=True):
        ((text, reward, over),) = says(environment, turn)
        _, expected, done, _, _ = reference.step(action)
        assert (text, reward, over) == (reference.render(), expected, done)
    assert (reward, over) == (1.0, True)
    environment.close()


def test_a_turn_without_an_action_is_told_so() -> None:
    environment = wb.adapters.Gymnasium("FrozenLake-v1", actions=WORDS, wrong_reward=-0.5, **LAKE)()
    environment.reset("Reach G.", seed=0)
    assert says(environment, "upside downs") == [
        ("No action was named. Say one of: left, down, right, up.", -0.5, False)
    ]
    numbered = wb.adapters.Gymnasium("FrozenLake-v1", show=lambda place: f"At {place}.", is_slippery=False)()
    assert numbered.reset("Reach 15.", seed=0) == [{"role": "user", "content": "Reach 15.\n\nAt 0."}]
    assert says(numbered, "none", "7", "I say 1", "from 3 to 1") == [
        ("No action was named. Say a number from 0 to 3.", 0.0, False),
        ("No action was named. Say a number from 0 to 3.", 0.0, False),
        ("At 4.", 0.0, False),
        ("At 8.", 0.0, False),
    ]


class Echo(gymnasium.Env):  # type: ignore[name-defined]
    """Wants to hear what it said, and starts elsewhere for another seed."""

    action_space = gymnasium.spaces.Text(100)
    observation_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(10**6))
        return self.word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.word, float(action == self.word), action == self.word, False, {}


def test_texts_are_actions_and_the_rows_seed_is_the_environments(tmp_path: Path) -> None:
    echo = wb.adapters.Gymnasium(Echo)
    (one,), (two,), (three,) = (echo().reset("Say it:", seed=seed) for seed in (1, 1, 2))
    assert one == two != three
    environment = echo()
    word = environment.reset("", seed=1)[0]["content"].strip()
    assert says(environment, "x", word) == [(word, 0.0, False), (word, 1.0, True)]
    with pytest.raises(TypeError, match=r"reset.*'seed'; the row has prompt"):
        reset(echo, {}, 0, {"prompt": "Say it:"})


def test_wrong_settings_are_refused() -> None:
    with expect_error(BadInput, value="actions"):
        wb.adapters.Gymnasium("FrozenLake-v1", actions="left")
    environment = wb.adapters.Gymnasium("Pendulum-v1")()
    environment.reset("", seed=0)
    with pytest.raises(TypeError, match="must be Text or Discrete"):
        environment.step({"role": "assistant", "content": "1"})


@pytest.mark.slow
def test_a_model_walks_on_the_lake(tmp_path: Path) -> None:
    lake = wb.adapters.Gymnasium("FrozenLake-v1", **LAKE)
    rows = [{"prompt": "Reach G.", "seed": n} for n in range(3)]
    bias = {**dict.fromkeys(range(23, 27), 14.0), EQUALS: 15.0}  # digits from 0 to 3
    with wb.open(
        "lake", models={"actor": TINY}, prompts=rows, training=wb.Training(engine="torch"), backend="inline",
        generation=wb.Generation(engine="transformers", max_model_tokens=1024), runs=tmp_path,
    ) as lab:  # fmt: skip
        batch = lab.actor.generate_sequences(
            lab.prompts.next(3), samples=2, environment=lake, max_turns=6, max_new_tokens=500, stop=("=",),
            logit_bias=bias,
        )  # fmt: skip
        found = batch.df()
    assert all("Reach G.\n\n" in text and "FHFH" in text for text in found["prompt_text"])
    assert found["turns"].max() > 1 and set(found["ending"]) <= {"done", "max_turns", "max_tokens"}
    assert found["response_text"].str.contains("FHFH").any()
