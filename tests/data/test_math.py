"""`wb.verifiers.math`: what equals what, and what becomes of a comparison that does not end."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.expected import expect_error
from workbench.config.requirements import check_function
from workbench.data.reward_function import FunctionCaller, score_rows
from workbench.data.verifiers import math
from workbench.errors import BadInput, MissingDependency
from workbench.support.calls.needs import needs
from workbench.support.calls.sessions import UserCalls

# answer | response
RIGHT = r"""
\frac{1}{2}|The answer is $\frac{1}{2}$.
\frac{1}{2}|0.5
\frac{3}{4}|$\dfrac{3}{4}$
3\frac{1}{2}|$3.5$
-\frac{2}{3}|$\boxed{-\tfrac{2}{3}}$
12|\boxed{12\text{ cm}}
90|\boxed{90^{\circ}}
\frac{\sqrt{2}}{2}|\boxed{\frac{1}{\sqrt{2}}}
x^2+2x+1|\boxed{(x+1)^2}
\{1,2,3\}|\boxed{\{3,2,1\}}
\{1,2\}|$x=1$ or $x=2$
[1,2)|\boxed{\left[1,2\right)}
[-2,7]|\boxed{x\in[-2,7]}
y=2x+1|\boxed{y=1+2x}
\begin{pmatrix}1\\2\end{pmatrix}|\boxed{\begin{pmatrix}1\\2\end{pmatrix}}
2^{10}|1024
\log_2 8|\boxed{3}
-8|\boxed{-8}
50\%|\boxed{50\%}
50%|\boxed{50}
50\%|\boxed{0.5}
\$18|\boxed{18}
18|\boxed{\$18} dollars in 2 days
18|\boxed{18} dollars in 2 days
1,234|\boxed{1{,}234}
1234|That makes 1,234.
1{,}234|\boxed{1234}
x=5|\boxed{5}
5|\boxed{x=5}
\text{(B)}|\boxed{B}
(B)|\boxed{\text{(B)}}
$7$|\boxed{7}
\(7\)|\boxed{7}
6:00|\boxed{6:00}
42|First \boxed{41}. No: \boxed{42}
42|I think it is 41, but the final answer is $42$. I hope it is correct.
42|\boxed{42
1\times10^{3}|\boxed{1000}
"""
WRONG = r"""
\frac{1}{2}|\boxed{\frac{1}{3}}
50\%|\boxed{5}
\{1,2,3\}|\boxed{\{1,2\}}
[1,2)|\boxed{(1,2]}
x=1|\boxed{y=1}
x>2|\boxed{x\ge 2}
\text{Monday}|\boxed{\text{Tuesday}}
1234|\boxed{1{,}235}
\frac{1}{2}|
\frac{1}{2}|I do not know.
\frac{1}{2}|\boxed{}
6:00|\boxed{7:00}
42|\boxed{41} and not 42
42|First \boxed{42}. No: \boxed{41}
18|\boxed{18} \boxed{x
"""


def cases(text: str) -> list[tuple[str, str]]:
    return [(answer, response) for answer, _, response in (line.partition("|") for line in text.strip().splitlines())]


def test_equal_formulas() -> None:
    for answer, response in cases(RIGHT):
        assert math("?", response, answer=answer) == 1.0


def test_other_formulas() -> None:
    for answer, response in cases(WRONG):
        assert math("?", response, answer=answer) == 0.0


@pytest.mark.parametrize(("answer", "response"), [(42, "42"), (0.5, r"\boxed{\frac12}"), (1e-07, "0.0000001")])
def test_numbers_as_answers(answer: float, response: str) -> None:
    assert math("?", response, answer=answer) == 1.0
    assert math("?", "41", answer=answer) == 0.0


def test_an_answer_that_is_no_formula_is_refused(subtests: pytest.Subtests) -> None:
    wrong: list[Any] = ["", "  ", None, True, [1], float("nan")]
    for answer in wrong:
        with (
            subtests.test(answer=answer),
            expect_error(BadInput, value="not a formula", remedy="correct the answer"),
        ):
            math("?", "42", answer=answer)


def test_without_math_verify_the_call_is_refused_before_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    check_function(math)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with expect_error(MissingDependency, value="math-verify is not installed", remedy=r".\[math\]"):
        check_function(math)


def test_it_works_in_threads() -> None:
    found: dict[int, float] = {}

    def ask(i: int) -> None:
        found[i] = math("?", rf"\boxed{{\frac{{{i}}}{{7}}}}", answer=rf"\frac{{{2 * i}}}{{14}}")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(1, 9), 1.0)


def test_what_a_function_imports_is_no_part_of_the_time_of_its_first_call(tmp_path: Path) -> None:
    """On a slow disk the import of sympy takes longer than many a time limit."""
    imported = tmp_path / "imported"

    def imports() -> None:
        if not imported.exists():
            time.sleep(1)
            imported.touch()

    @needs(imports)
    def one(prompt: str, response: str) -> float:
        imports()
        return 1.0

    calls = UserCalls()
    try:
        caller = FunctionCaller(calls=calls, concurrency=1, timeout_s=0.5)
        rows = [{"prompt": "?", "response": "!"}]
        scores, failures = score_rows(one, rows, [1], caller=caller, where="rank 0", row_numbers=[0])
    finally:
        calls.close()
    assert scores == [1.0] and not failures
