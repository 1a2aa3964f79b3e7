"""`wb.verifiers.format`: the form of DeepSeek-R1 and forms of one's own."""

from __future__ import annotations

from functools import partial

import workbench as wb
from tests.expected import expect_error
from workbench.errors import BadInput

RESPONSES: list[tuple[str, float]] = [
    ("<think>1 + 1</think><answer>2</answer>", 1.0),
    ("<think>\n1 +\n1\n</think>\n\n<answer>\n2\n</answer>\n", 1.0),
    ("<think></think> <answer></answer>", 1.0),
    ("<think>a < b > c</think><answer>x<y</answer>", 1.0),
    ("2", 0.0),
    ("", 0.0),
    ("<think>1 + 1</think> 2", 0.0),
    ("<answer>2</answer><think>1 + 1</think>", 0.0),
    ("so: <think>1</think><answer>2</answer>", 0.0),
    ("<think>1</think><answer>2</answer> done", 0.0),
    ("<think>1</think>so<answer>2</answer>", 0.0),
    ("<think>1</think><think>1</think><answer>2</answer>", 0.0),
    ("<think>1<answer>3</answer></think><answer>2</answer>", 0.0),
    ("<think>1</think><answer>2", 0.0),
]


def test_thinking_then_the_answer() -> None:
    for response, score in RESPONSES:
        assert wb.verifiers.format("", response) == score


def test_a_pattern_of_ones_own() -> None:
    boxed = partial(wb.verifiers.format, pattern=r".*\\boxed\{[^{}]+\}.*")
    assert boxed("", "so\n\\boxed{2}\n") == 1.0
    assert boxed("", "so\n\\boxed{}\n") == 0.0
    for wrong in ("(", "a{99999999999}", 5):
        with expect_error(BadInput, value="pattern="):
            wb.verifiers.format("", "x", pattern=wrong)  # type: ignore[arg-type]


def test_long_texts_take_no_time() -> None:
    assert wb.verifiers.format("", "<think>" * 20_000) == 0.0
    assert wb.verifiers.format("", "<think>" + "a<" * 100_000 + "</think><answer></answer>") == 1.0
