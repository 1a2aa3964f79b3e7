from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.data.verifiers import arithmetic, gsm8k
from workbench.errors import BadInput

ROOT = Path(__file__).parents[2]


LAST_NUMBERS: list[tuple[str, str | float]] = [
    ("42", "42"),
    ("The answer is 42.", "42"),
    (r"$\boxed{42}$", "42"),
    ("42.0", "42"),
    ("042", "42"),
    ("first 41, no: 42\n\n", "42"),
    ("so...42", "42"),
    ("答案是42。", "42"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("it is 1,234.50.", "1234.5"),
    ("half: .5", "0.5"),
    ("-8", "-8"),
    ("\u22128", "-8"),
    ("(-8)", "-8"),
    ("-$8", "-8"),
    ("$-8", "-8"),
    ("2--8", "-8"),
    ("50-8", "8"),
    ("17 - 8", "8"),
    ("17 -8", "-8"),
    ("10%-20%", "20"),
    ("$5-$10", "10"),
    ("- 8 (a list)", "8"),
    ("GPT-4 is not -4", "-4"),
    ("12,3456", "3456"),
    ("1.2.3", "3"),
    ("3/4", "4"),
    ("1e3", "1"),
    ("12 cm2", "12"),
    ("42", 42),
    ("0.5", 0.5),
]


def test_arithmetic_rewards_the_last_number() -> None:
    for response, answer in LAST_NUMBERS:
        assert arithmetic("What?", response, answer=answer) == 1.0


OTHER_NUMBERS: list[tuple[str, str]] = [
    ("", "42"),
    ("H2O", "2"),
    ("42 or 43", "42"),
    ("421", "42"),
    ("4 2", "42"),
    ("-42", "42"),
    ("42", "-42"),
    ("42.5", "42"),
    ("1,234", "234"),
    ("1" * 40 + "2", "1" * 40 + "3"),
    ("-" + "1" * 40 + "2", "-" + "1" * 40 + "3"),
]


def test_arithmetic_gives_nothing_for_another_number_or_none() -> None:
    for response, answer in OTHER_NUMBERS:
        assert arithmetic("What?", response, answer=answer) == 0.0


GSM8K: list[tuple[str, str, float]] = [
    ("She has 72 clips.", "48/2 = <<48/2=24>>24\n#### 72", 1.0),
    ("24", "48/2 = <<48/2=24>>24\n#### 72", 0.0),
    ("It costs $1,450.00.", "#### 1,450", 1.0),
    ("1450 dollars", "#### $1,450", 1.0),
    ("a rise of 25%", "#### 25%", 1.0),
    ("5.5", "#### 5", 0.0),
    ("He owes 8, so -8", "#### -8", 1.0),
    # a box is the answer, whatever comes behind it
    (r"\boxed{18} dollars in 2 days", "#### 18", 1.0),
    (r"\boxed{18} dollars in 2 days", "#### 2", 0.0),
    (r"\boxed{5}, no: $\boxed{18}$.", "#### 18", 1.0),
    (r"\boxed{2 + 16 = 18}", "#### 18", 1.0),
    (r"\boxed{\$18}", "#### 18", 1.0),
    (r"\boxed{-18}", "#### -18", 1.0),
    (r"\boxed{18\text{ dollars in 2 days}}", "#### 18", 1.0),
    (r"\boxed{\text{18}} of 20", "#### 18", 1.0),
    (r"\boxed{\frac{36}{2}} or so, 7 times", "#### 18", 1.0),
    (r"18, so \boxed{x}", "#### 18", 0.0),
    (r"\boxed{}18", "#### 18", 0.0),
    (r"and so \boxed{18", "#### 18", 1.0),
    # LaTeX's fractions
    (r"\frac12", "#### 0.5", 1.0),
    (r"\dfrac{1}2", "#### 0.50", 1.0),
    (r"\tfrac1{2}", "#### 0.5", 1.0),
    (r"-\frac12", "#### -0.5", 1.0),
    (r"\frac{-1}{2}", "#### -0.5", 1.0),
    (r"3\frac12", "#### 3.5", 1.0),
    (r"-3\frac{1}{2}", "#### -3.5", 1.0),
    (r"\frac12", "#### 12", 0.0),
    (r"\frac12", "#### 2", 0.0),
    (r"\frac{1}{3}", "#### 0.3333333333333333", 0.0),
    (r"\frac{1}{0}", "#### 0", 0.0),
    (r"\frac{x}{2}", "#### 2", 1.0),
    # LaTeX's commas
    ("1{,}000", "#### 1000", 1.0),
    ("$1{,}234{,}567.5$", "#### 1,234,567.5", 1.0),
    (r"10,\!080", "#### 10080", 1.0),
    (r"\boxed{1{,}000}", "#### 1,000", 1.0),
    ("1{,}00", "#### 0", 1.0),
    ("{1,000}", "#### 1000", 1.0),
]


def test_gsm8k_compares_with_the_number_behind_the_mark() -> None:
    for response, answer, reward in GSM8K:
        assert gsm8k("What?", response, answer=answer, other_column=1) == reward


def test_long_texts_take_no_time() -> None:
    began_s = time.monotonic()
    for part in (r"\boxed{", "1{,}", r"\frac{", "{", r"3 \frac", r"\text{", "-", "12345 "):
        gsm8k("What?", part * 50_000, answer="#### 7")
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("answer", ["many", "", "1 or 2"])
def test_an_answer_that_is_not_one_number_is_an_error_not_a_reward(answer: str) -> None:
    with expect_error(BadInput, value="holds [02] numbers"):
        arithmetic("What?", "42", answer=answer)
    with expect_error(BadInput, value="holds [02] numbers"):
        gsm8k("What?", "42", answer=f"so\n#### {answer}")


def test_gsm8k_without_the_mark_names_the_other_function() -> None:
    with expect_error(BadInput, remedy="reward function `arithmetic`"):
        gsm8k("What?", "42", answer="42")


def test_gsm8k_on_the_real_data() -> None:
    """Every worked solution is a right response to its own question, and (almost) never to the next one's."""
    shared = Path(os.environ.get("WORKBENCH_SHARED_DATA", ROOT.parent / "shared" / "data"))
    files = sorted(shared.glob("gsm8k_*.jsonl"))
    if not files:
        pytest.skip(f"no gsm8k_*.jsonl in {shared}: set WORKBENCH_SHARED_DATA to a folder with GSM8K rows")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    finals = [row["answer"].rpartition("#### ")[2] for row in rows]
    for row, final in zip(rows, finals, strict=True):
        assert gsm8k(row["question"], row["answer"], answer=row["answer"]) == 1.0
        assert gsm8k(row["question"], f"So the answer is ${final}.", answer=row["answer"]) == 1.0
        assert gsm8k(row["question"], f"So it is {float(final.replace(',', '')) + 1:,.2f}", answer=row["answer"]) == 0.0
    shifted = zip(rows, rows[1:], finals, finals[1:], strict=False)
    wrong = [gsm8k("", a["answer"], answer=b["answer"]) == (x == y) for a, b, x, y in shifted]
    assert all(wrong)


# --- `format`: the form of DeepSeek-R1, and forms of one's own ---

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


def test_a_form_is_looked_for_in_no_time() -> None:
    assert wb.verifiers.format("", "<think>" * 20_000) == 0.0
    assert wb.verifiers.format("", "<think>" + "a<" * 100_000 + "</think><answer></answer>") == 1.0
