"""`wb.verifiers.code`: what passes, what does not and why, and whose fault it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab
from tests.expected import expect_error
from workbench.data import programs, sandbox
from workbench.data.programs import cases_of, code, code_without_sandbox, program_of
from workbench.data.reward_function import check_function
from workbench.data.sandbox import problem_here, run_python
from workbench.data.user_functions import Noted
from workbench.errors import BadInput, MissingDependency, RewardError

here = pytest.mark.skipif(bool(problem_here()), reason=f"no sandbox: {problem_here()}; `apt install bubblewrap`")
ECHO = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADDS = "a, b = map(int, input().split())\nprint(a + b)"


def block(program: str) -> str:
    return f"First I think.\n```python\n{program}\n```\nThat is it."


BLOCKS: list[tuple[str, str | None]] = [
    ("```python\nx = 1\n```", "x = 1\n"),
    ("```\nx = 1\n```", "x = 1\n"),
    ("```py\nx = 1\n```\nand better\n```python\nx = 2\n```", "x = 2\n"),
    ("```python\nx = 1\n```\nrun it:\n```bash\nls\n```", "x = 1\n"),
    ("```python\nx = 1", "x = 1"),  # cut
    ("```python\nx = 1\n```\nIt prints:\n```\n6 is the output\n```", "x = 1\n"),
    ("x = 1", None),
    ("```bash\nls\n```", None),
]


def test_the_program_is_the_last_block() -> None:
    for response, program in BLOCKS:
        assert program_of(response) == program


SOLVES = "class Solution:\n    def add(self, a, b):\n        return a + b"


FORMS: list[tuple[str, Any]] = [
    (ADDS, ECHO),
    (ADDS, json.dumps(ECHO)),
    (ADDS, {"inputs": [["1 2"]], "outputs": [["3"]]}),
    (ADDS, [{"input": "1 2", "output": "3", "testtype": "stdin"}]),
    (ADDS, {"test_cases": [{"type": "stdin_stdout", "input": "1 2", "output": "3  \n\n"}]}),
    ("def add(a, b):\n    return a + b", {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}),
    ("def add(a, b):\n    return a + b", {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}),
    (SOLVES, [{"input": "[1]\n[2]", "output": "[1, 2]", "metadata": {"func_name": "add"}}]),
    ("def add(a, b):\n    return a + b", "assert add(1, 2) == 3\nassert add(-1, 1) == 0"),
    ("def add(a, b):\n    return a + b", ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]),
    ("def add(a, b):\n    return a + b", {"test_list": ["assert f == 3"], "test_setup_code": "f = add(1, 2)"}),
    ("if __name__ == '__main__':\n    print(input())", {"inputs": ["x"], "outputs": ["x"]}),
]


@here
def test_forms_of_tests(subtests: pytest.Subtests) -> None:
    for program, tests in FORMS:
        with subtests.test(program=program, tests=tests):
            scored = code("?", block(program), tests=tests)
            assert isinstance(scored, Noted) and (scored, scored.note[:6]) == (1.0, "passed")
    program, tests = FORMS[0]
    assert code("?", block(f"{program}\nraise SystemExit(3)"), tests=tests) == 0.0


@here
def test_all_or_the_share() -> None:
    wrong = {"inputs": ["1 2", "3 4", "5 6", "0 0"], "outputs": ["3", "8", "11", "1"]}
    assert code("?", block(ADDS), tests=wrong) == 0.0
    scored = code("?", block(ADDS), tests=wrong, score="share")
    assert isinstance(scored, Noted) and scored == 0.5
    assert scored.note == "test 2 of 4: printed '7' instead of '8'"


FAULTS: list[tuple[str, str]] = [
    ("while True: pass", r"took more than 0\.[5-9] s"),
    ("raise ValueError('no')", "ValueError: no"),
    ("import os, time\nfor _ in range(7): os.fork()\ntime.sleep(30)", "started too many processes or threads"),
    ("x = bytearray(2**30)", "MemoryError"),
    ("print(3", "SyntaxError"),
    ("print('bwrap: no'); import sys; sys.stderr.write('bwrap: no'); sys.exit(1)", "bwrap: no"),
    ("print(4)", "printed '4' instead of '3'"),
]


@here
def test_the_fault_of_a_program_is_a_score_of_0_with_its_reason(subtests: pytest.Subtests) -> None:
    for program, note in FAULTS:
        with subtests.test(program=program, note=note):
            limit_s = 0.5 if "took more" in note else 20.0  # a machine that is busy starts an interpreter slowly
            scored = code("?", block(program), tests={"inputs": ["1 2"], "outputs": ["3"]}, timeout_s=limit_s)
            assert isinstance(scored, Noted) and scored == 0.0
            assert scored.note.startswith("test 1 of 1: ")
            assert re.search(note, scored.note), scored.note


RETURNED: list[tuple[str, Any, float]] = [
    ("10**5000", 2, 0.0),  # more digits than Python reads
    ("True", 1, 0.0),
    ("1", True, 0.0),
    ("[1, True]", [1, 1], 0.0),
    ("[1, {'a': True}]", [1, {"a": True}], 1.0),
    ("True", [True], 1.0),
    ("2.0", 2, 1.0),
    ("(1, 2)", [1, 2], 1.0),
]


def test_what_a_function_returns_is_what_is_expected_or_a_score_of_0() -> None:
    for value, expected, score in RETURNED:
        program = f"import sys\nsys.set_int_max_str_digits(0)\ndef f(x): return {value}"
        tests = {"inputs": [[1]], "outputs": [expected], "fn_name": "f"}
        assert code_without_sandbox("?", block(program), tests) == score


def test_values_that_are_too_deep_and_output_that_is_too_long_score_0() -> None:
    deep = "f = lambda x: 2\ndef print(text='', say=print):\n    say(text[:32] + '[' * 60000 if text else '')"
    found = code_without_sandbox("?", block(deep), {"inputs": [[1]], "outputs": [2], "fn_name": "f"})
    assert found == 0.0 and "returned [[[" in getattr(found, "note", "")
    found = code_without_sandbox(
        "?", block("print(42)\nprint('\\n' * 70000)\nprint(43)"), {"inputs": [""], "outputs": ["42"]}
    )
    assert found == 0.0 and "65536 bytes or more" in getattr(found, "note", "")


@here
def test_a_program_that_looks_does_not_find_what_it_is_to_print() -> None:
    looks = "print(open('/tmp/program.py').read())\nimport sys\nprint(sys.argv, dict(__import__('os').environ))"
    ran = []

    def kept(*args: Any, **kwargs: Any) -> sandbox.Ran:
        ran.append(run_python(*args, **kwargs))
        return ran[-1]

    secret = {"inputs": [[1]], "outputs": ["the-secret"], "fn_name": "f"}
    programs._scored(kept, block(f"def f(x): return 1\n{looks}"), secret, "all", 5.0, 5.0, 2**29)
    assert "def f" in ran[0].stdout and "the-secret" not in ran[0].stdout


@here
def test_the_time_of_all_tests_is_limited() -> None:
    tests = {"inputs": ["0"] + ["60"] * 49, "outputs": ["1"] * 50}
    program = block("import time; time.sleep(int(input())); print(1)")
    scored = code("?", program, tests=tests, score="share", total_s=2.0)
    assert isinstance(scored, Noted) and scored == 1 / 50
    assert scored.note.startswith("test 2 of 50: took more than")


WRONG_TESTS: list[Any] = [
    "", "  ", [], {}, {"inputs": ["1"], "outputs": []}, {"inputs": "1"}, 3, None, [3], {"test_list": [5]},
    {"test_list": [""]}, {"inputs": [[1]], "outputs": [1], "fn_name": 5},
]  # fmt: skip


def test_wrong_tests_are_refused(subtests: pytest.Subtests) -> None:
    for tests in WRONG_TESTS:
        with subtests.test(tests=tests), expect_error(BadInput, value="tests=", remedy="give asserts as text"):
            cases_of(tests)


def test_without_a_sandbox_it_is_refused_before_the_first_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem_here.cache_clear()
    try:
        with expect_error(
            MissingDependency, value="no sandbox works here", remedy="install bubblewrap.*code_without_sandbox"
        ):
            check_function(partial(code, score="share"))
        check_function(code_without_sandbox)
        assert code_without_sandbox("?", block(ADDS), tests=ECHO) == 1.0
        hangs = code_without_sandbox("?", block("while True: pass"), tests=ECHO, timeout_s=0.3)
        assert isinstance(hangs, Noted) and hangs == 0.0 and "took more than" in hangs.note
        assert code_without_sandbox("?", block("x = bytearray(2**30)"), tests=ECHO) == 0.0
    finally:
        problem_here.cache_clear()


def test_the_fault_of_the_machine_is_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = sandbox.Ran(ended="exit", exit_code=1, stdout="", stderr="bwrap: no room", duration_s=0.1, began=False)
    with expect_error(RewardError, value="the sandbox did not start: bwrap: no room"):
        programs._scored(lambda *a, **k: failed, block(ADDS), ECHO, "all", 1.0, 1.0, 2**29)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    rows = [{"prompt": f"add {i}", "tests": json.dumps(ECHO)} for i in range(4)]
    runs = tmp_path_factory.mktemp("runs")
    models = {"actor": TINY, "reward": partial(code, score="share")}
    with tiny_lab("programs", runs, backend="inline", models=models, prompts=rows) as lab:
        yield lab


@here
def test_a_column_says_why(lab: wb.Workbench) -> None:
    def long(prompt: str, response: str) -> float:
        return float(len(response) > 3)

    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    scored = lab.reward.compute_reward(batch)
    assert scored.df(["rewards_notes"])["rewards_notes"].tolist() == ["no code block"] * 2
    both = lab.reward.compute_reward(batch, function={"code": wb.verifiers.code, "long": (long, 0.1)})
    assert both.df(["rewards_notes"])["rewards_notes"].tolist() == ["code: no code block"] * 2
    again = lab.reward.compute_reward(both, function={"code": wb.verifiers.code, "long": long}, only=[1])
    assert again.df(["rewards_notes"])["rewards_notes"].tolist() == ["code: no code block"] * 2
