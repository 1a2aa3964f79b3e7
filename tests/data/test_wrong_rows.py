"""Rows of data sets, and what functions return, that would give wrong results without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.schema import SCHEMA
from workbench.data.examples import Examples
from workbench.data.prompts import Prompts
from workbench.data.sources import read_rows
from workbench.errors import BadInput, RolloutError
from workbench.models import load_tokenizer

HALF = "a\ud800"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("rows", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def test_a_data_set_makes_no_column_of_stages(tokenizer: Any, subtests: pytest.Subtests) -> None:
    for name in SCHEMA:
        with subtests.test(name=name):
            rows: Any = [{"prompt": "2 + 3", "answer": "5"}, {"prompt": "1 + 1", "answer": "2", name: 1.0}]
            with pytest.raises(BadInput, match=rf"row 1 has a column '{name}'.*(rename|drop)"):
                Prompts(rows, tokenizer=tokenizer)


def test_a_column_that_another_hides_is_refused() -> None:
    with expect_error(BadInput, value=r"row 0 of a list has columns .*1, '1'\]", rule="unique texts"):
        read_rows([{"prompt": "2 + 3", 1: "a", "1": "b"}])


def test_truth_values_are_no_texts(tokenizer: Any, subtests: pytest.Subtests) -> None:
    makers: list[Any] = [Prompts, lambda rows, **options: Examples(rows, "pairs", **options)]
    rows = [{"prompt": "a", "chosen": "x", "rejected": "y"}]
    for option, value in [("shuffle", "no"), ("shuffle", 0), ("chat", "maybe"), ("chat", 1)]:
        for make in makers:
            said = f"{option}={value!r}.*True(, False)? or "
            with subtests.test(said), pytest.raises(BadInput, match=said):
                make(rows, tokenizer=tokenizer, **{option: value})


def test_margins_are_finite(tokenizer: Any, subtests: pytest.Subtests) -> None:
    for margin in [float("nan"), float("inf"), 10**400, 1e39, True, "1"]:
        with subtests.test(margin=margin):
            row = {"prompt": "a", "chosen": "x", "rejected": "y", "margin": margin}
            with expect_error(BadInput, value="row 0.*margin=", rule="a margin is a finite number"):
                Examples([row], "pairs", tokenizer=tokenizer)


HALVES: list[Any] = [
    HALF, {"prompt": HALF}, {"prompt": "a", "answer": HALF}, {"prompt": "a", "more": {"deep": ["b", HALF]}},
    {"messages": [{"role": "user", "content": HALF}]},
]  # fmt: skip


def test_halves_of_surrogate_pairs_are_no_text(subtests: pytest.Subtests) -> None:
    for row in HALVES:
        with subtests.test(row=row):
            good: Any = "a" if isinstance(row, str) else {"prompt": "a"}
            with expect_error(BadInput, value="row 1.* has half a character", remedy="drop the row"):
                read_rows([good, row])
            assert len(read_rows([good, "é 𝄞" if isinstance(row, str) else {"prompt": "é 𝄞", "n": 1}])) == 2


class Halves:
    """An environment that says half of a surrogate pair, first or in reply."""

    def __init__(self, first: Any, reply: Any) -> None:
        self.first, self.reply = first, reply

    def reset(self) -> Any:
        return self.first

    def step(self, response: str) -> tuple[Any, float, bool]:
        return self.reply, 0.0, False


@pytest.mark.parametrize(
    ("first", "reply", "method"),
    [(HALF, "b", "reset"), (None, HALF, "step"), (None, [{"role": "user", "content": HALF}], "step")],
)
def test_an_environment_speaks_in_characters(lab: wb.Workbench, first: Any, reply: Any, method: str) -> None:
    asked: Any = {"max_new_tokens": 40, "max_turns": 2, "logit_bias": {2: 6.0, 36: 6.0}, "stop": ("=",)}
    with pytest.raises(RolloutError, match=rf"{method} of environment .* returned .*ud800"):
        lab.actor.generate_sequences(lab.prompts.next(2), environment=lambda: Halves(first, reply), **asked)
    assert lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2).rows == 2


def test_a_reward_function_that_takes_nothing_is_refused_before_anything_opens(tmp_path: Path) -> None:
    with expect_error(BadInput, value="takes nothing", remedy=r"write def fn\(prompt, response"):
        tiny_lab("nothing", tmp_path, backend="inline", models={"actor": TINY, "reward": lambda: 1})
    assert list(tmp_path.iterdir()) == []
    with expect_error(BadInput, value="Model.function=5"):
        wb.Model(function=5)  # type: ignore[arg-type]
    assert wb.Model(function=vowels).function is vowels


def test_an_algorithm_has_no_other_fields(lab: wb.Workbench) -> None:
    ppo = wb.PPO(lab, prompts=4)
    names = {"clipp": "write clip=", "lr": "a field of wb.Training", "zzz": "write it in the class"}
    for name, nearest in names.items():
        with pytest.raises(BadInput, match=rf"PPO\.{name} = 0\.5.*its fields are lab, prompts.*{nearest}"):
            setattr(ppo, name, 0.5)
        assert not hasattr(ppo, name)
    for name, value in {"metrics": ["loss"], "iteration": 0, "under_way": False}.items():
        with expect_error(BadInput, value=rf"PPO\.{name} = ", rule="a part of the algorithm"):
            setattr(ppo, name, value)
    ppo.clip, ppo._note = 0.1, "of one's own"
    assert ppo.iterate() and ppo.clip == 0.1


def test_a_draw_whose_stage_was_refused_is_no_iteration(lab: wb.Workbench) -> None:
    before = lab.iteration
    for _ in range(2):
        with expect_error(BadInput, value="max_new_tokens"):
            lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=0)
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    assert lab.iteration == before + 1 == batch.meta["iteration"]
    with expect_error(BadInput, value="max_new_tokens"):
        lab.actor.generate_sequences(batch, max_new_tokens=0)
    lab.prompts.next(2)
    assert lab.iteration == before + 2  # a stage has run


def test_an_evaluation_that_is_none_is_refused_before_an_iteration(lab: wb.Workbench) -> None:
    ppo, before = wb.PPO(lab, prompts=4), lab.iteration
    with expect_error(BadInput, value="evaluate=5"):
        ppo.run(1, evaluate=5)  # type: ignore[arg-type]
    assert lab.iteration == before
