"""`wb.verifiers.group_diversity` and `group_length`: by hand, and as components of a reward on a live workbench."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.models import load_tokenizer

diversity, length = wb.verifiers.group_diversity, wb.verifiers.group_length


def of(*texts: str, **options: Any) -> list[float]:
    return diversity(prompt=["p"] * len(texts), response=texts, **options)


def test_diversity_by_hand() -> None:
    assert of("a b c", "a b c") == [0.0, 0.0]
    assert of("a b", "c d") == [1.0, 1.0]
    assert of("alone") == [0.0]
    # bigrams {ab, bc}, {ab, bd}, {xy}: 1 in 3 is shared by the first two
    assert of("a b c", "a b d", "x y") == pytest.approx([(2 / 3 + 1) / 2, (2 / 3 + 1) / 2, 1.0])
    assert of("a b", "b a", n=1) == [0.0, 0.0]
    assert of("ab", "abc", unit="characters") == [0.5, 0.5]
    assert of("a", "", "a") == [0.5, 1.0, 0.5]  # shorter than n: one n-gram


def test_length_by_hand() -> None:
    given: dict[str, Any] = {"prompt": ["p"] * 3, "response_ids": [[1] * 2, [1] * 3, [1] * 6]}
    texts = ["4", "5", "4"]
    assert length(response=texts, **given) == [0.5, 0.25, -0.5]
    right = wb.verifiers.arithmetic
    assert length(response=texts, answer=["4"] * 3, right=right, **given) == [0.5, 0.0, -0.5]
    assert length(response=texts, **{**given, "response_ids": [[1], [2], [3]]}) == [0.0, 0.0, 0.0]
    of_ids = length(response=texts, right=lambda prompt, response, response_ids: len(response_ids) > 2, **given)
    assert of_ids == [0.0, 0.25, -0.5]


def test_wrong_answers_have_no_diversity_and_still_count() -> None:
    scores = of("a b", "c d", "a b", right=lambda prompt, response: float(response == "a b"))
    assert scores == [0.5, 0.0, 0.5]
    # a tool has said the answer, and the policy has not
    options: dict[str, Any] = {"answer": ["4"] * 2, "right": wb.verifiers.arithmetic}
    assert of("= 4 a", "= 4", last_turn=["a", "4"], n=1, **options) == [0.0, pytest.approx(1 / 3)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"right": diversity}, "must be a function of one response"),
    ({"right": lambda prompt, response: None}, "returned None.*must return one finite number"),
    ({"n": 0}, "n=0"),
    ({"unit": "tokens"}, "unit='tokens'"),
]


def test_what_is_refused(subtests: pytest.Subtests) -> None:
    for options, says in REFUSED:
        with subtests.test(options=options, says=says), pytest.raises(BadInput, match=says):
            of("a", "b", **options)


async def later(prompt: str, response: str) -> float:
    return 1.0


def test_a_verifier_that_has_to_be_awaited_is_refused() -> None:
    with expect_error(BadInput, rule="must be a function of one response"):
        of("a", "b", right=later)


def most(prompt: str, response: str) -> float:
    return float(len(response) % 3 > 0)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[wb.Workbench]:
    models = {"actor": TINY, "reward": vowels}
    prompts = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    with tiny_lab("group-rewards", tmp_path, backend="inline", models=models, prompts=prompts) as lab:
        yield lab


def test_they_are_components_of_a_reward(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(
        lab.prompts.next(4), samples=4, max_new_tokens=6, seed=3, stop_token_ids=range(8, 50)
    )
    parts = {"short": (partial(length, right=most), 0.5), "other": partial(diversity, unit="characters", n=1)}
    scored = lab.reward.compute_reward(batch, function=parts)
    short, other, both = (torch.tensor(scored.df()[f"rewards{name}"].tolist()) for name in ("/short", "/other", ""))
    frame, tokenizer = batch.df(["prompt_uid", "response_ids"]), load_tokenizer(TINY)
    for _, rows in frame.groupby("prompt_uid"):
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows["response_ids"]]
        lengths = torch.tensor([len(ids) for ids in rows["response_ids"]], dtype=torch.float32)
        span = lengths.max() - lengths.min()
        want = 0.5 - (lengths - lengths.min()) / span if span else torch.zeros(4)
        good = torch.tensor([most("", text) > 0 for text in texts])
        assert short[rows.index].tolist() == pytest.approx(torch.where(good, want, want.clamp(max=0)).tolist())
        assert other[rows.index].tolist() == pytest.approx(of(*texts, unit="characters", n=1))
    assert len(set(short.tolist())) > 2 and len(set(other.tolist())) > 2
    assert both.tolist() == pytest.approx((0.5 * short + other).tolist())
