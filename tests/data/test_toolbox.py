"""The tools that ship: a calculator, a search, and programs in the sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.data.sandbox import problem_here
from workbench.errors import BadInput

CORPUS = [
    {"title": "France", "text": "Paris is the capital of France. The Seine flows through it."},
    {"title": "Italy", "text": "Rome is the capital of Italy, on the Tiber."},
    {"title": "Cats", "text": "A cat sleeps for most of the day. Cats were tamed near the Nile."},
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def answer(tool: Any, **arguments: Any) -> str:
    """What a model is told that calls the tool."""
    tools = wb.Tools([tool])
    name = next(iter(tools.by_name))
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    said, *_ = asyncio.run(tools().step({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert said is not None
    return str(said[0]["content"])


FORMULAS: list[tuple[str, float]] = [
    ("12 * (3 + 4) / 2", 42), ("2 ^ 10", 1024), ("2 ** -1", 0.5), ("-3 + +5", 2), ("7 // 2 + 7 % 2", 4),
    ("sqrt(16) + abs(-2)", 6), ("max(1, 2.5)", 2.5), ("sin(pi / 2)", 1), ("10 / 4", 2.5), (" 1e3 ", 1000),
    ("2 ^ 4000 % 7", pow(2, 4000, 7)), ("2 ^ 4095", 2**4095), ("-(10 ^ 400)", -(10**400)),
    ("round(2.347, 2)", 2.35),
]  # fmt: skip


def test_the_calculator_calculates() -> None:
    for formula, value in FORMULAS:
        assert wb.toolbox.calculator(formula) == value
        assert answer(wb.toolbox.calculator, expression=formula) == json.dumps(value)


NO_FORMULAS: list[tuple[str, str]] = [
    ("__import__('os').system('true')", "has no value"), ("(1).real", "has no value"), ("[1][0]", "has no value"),
    ("open('/etc/passwd')", "there is no function 'open'"), ("1 +", "is not a formula"), ("", "is not a formula"),
    ("9 ^ 9 ^ 9", "too large"), ("2 ^ 4096", "too large"), ("3 ^ 4096", "too large"),
    ("round(5, -10 ^ 9)", "too many places"),
    ("10 ^ 400 * 1.5", "has no value"), ("2 ^ 4000 * 2 ^ 4000", "too large"), ("9.0 ^ 999", "has no value"),
    ("1 / 0", "divides by zero"), ("sqrt(-1)", "has no value"), ("(-8) ^ 0.5", "among the real numbers"),
    ("1e999", "among the real numbers"), ("True", "has no value"), ("'a' * 3", "has no value"),
    ("-" * 3000 + "1", "is not a formula|has no value"), ("(" * 3000 + "1" + ")" * 3000, "is not a formula"),
    ("max(1, key=abs)", "has no value"), ("lambda: 1", "has no value"), ("x", "has no value"),
]  # fmt: skip


def test_the_calculator_does_nothing_else(subtests: pytest.Subtests) -> None:
    for formula, why in NO_FORMULAS:
        with subtests.test(formula=formula, why=why):
            with pytest.raises(BadInput, match=why):
                wb.toolbox.calculator(formula)
            assert answer(wb.toolbox.calculator, expression=formula).startswith("Error: calculator raised BadInput")


def test_search_finds_the_best_match_first(tmp_path: Path) -> None:
    found = wb.toolbox.search(CORPUS, results=2).function
    assert [row["title"] for row in found("What is the capital of Italy?")] == ["Italy", "France"]
    assert [row["title"] for row in found("sleeping CAT")] == ["Cats"]  # other forms of a word, other letters
    assert found("zebra") == []
    assert found("Seine")[0]["text"].startswith("Paris is the capital")
    short = wb.toolbox.search(["one two three four five six seven eight nine ten"], words=3).function
    assert short("seven") == [{"text": " ... six seven eight ... "}]
    told = answer(wb.toolbox.search(CORPUS, results=1, name="look_up"), query="capital of France")
    assert json.loads(told) == [CORPUS[0]]


QUERIES: list[str] = ['" OR title:*', "NEAR(a b)", "text : *", "'; DROP TABLE texts; --", "^capital AND"]


def test_a_query_is_words_and_no_language() -> None:
    for query in QUERIES:
        found = wb.toolbox.search(CORPUS).function
        assert {row["title"] for row in found(query)} <= {"France", "Italy", "Cats"}
        assert found("capital")  # nothing is gone


def test_a_corpus_is_texts_rows_a_file_or_a_folder(tmp_path: Path, home: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps(row) for row in CORPUS))
    (folder := tmp_path / "texts").mkdir()
    for row in CORPUS:
        (folder / f"{row['title']}.md").write_text(row["text"])
    (folder / "picture.png").write_bytes(b"capital")
    for corpus in (CORPUS, tmp_path / "corpus.jsonl", str(folder)):
        tool = wb.toolbox.search(corpus)
        assert tool.function("capital Italy")[0] == CORPUS[1]
    assert len([*(home / "search").glob("*.sqlite")]) == 2  # files of a folder come in another order
    (folder / "Spain.txt").write_text("Madrid is the capital of Spain.")
    assert wb.toolbox.search(folder).function("Madrid")[0]["title"] == "Spain"


def test_a_wrong_corpus_is_refused(tmp_path: Path) -> None:
    for corpus, why in (
        ([], "without texts"), (tmp_path / "none", "there is no such file or folder"),
        (__file__, "is not a file of rows"), ([1], "must be a text or a dict"),
        ([{"title": "x"}], "entry 0"), ([{"text": "x", "title": 1}], "entry 0"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=why):
            wb.toolbox.search(corpus)  # type: ignore[arg-type]
    for file, texts in ("texts.jsonl", '"Paris"\n"Rome"'), ("texts.json", '["Paris", "Rome"]'):
        (tmp_path / file).write_text(texts)
        with expect_error(BadInput, remedy='{"text": ...}'):
            wb.toolbox.search(tmp_path / file)
    for name, value in (("results", 0), ("words", 65), ("words", 0), ("name", "a b")):
        with pytest.raises(BadInput, match=name):
            wb.toolbox.search(CORPUS, **{name: value})  # type: ignore[arg-type]
    with expect_error(BadInput, rule="has no words"):
        wb.toolbox.search(CORPUS).function("?!")


sandboxed = pytest.mark.skipif(bool(problem_here()), reason="no sandbox works here")


@sandboxed
def test_programs_print_and_fail_in_the_sandbox() -> None:
    assert answer(wb.toolbox.python, code="print(6 * 7)") == "42\n"
    failed = answer(wb.toolbox.python, code="print('so far')\n1 / 0")
    assert failed.startswith("so far\n") and failed.endswith("ZeroDivisionError: division by zero")
    gone = answer(wb.toolbox.python, code="import socket; socket.create_connection(('127.0.0.1', 80), 1)")
    assert "Error" in gone
    assert "FileNotFoundError" in answer(wb.toolbox.python, code=f"open({str(Path(__file__))!r})")
    assert "cut: these are 4000" in answer(wb.toolbox.python, code="print('x' * 9000)")


@sandboxed
def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.data import toolbox

    monkeypatch.setattr(toolbox, "PYTHON_S", 0.5)
    assert toolbox.python("print('begun', flush=True)\nwhile True: pass") == "begun\n\n(it took more than 0.5 s)"


def test_a_machine_without_a_sandbox_says_so_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.support.calls.needs import check_needs

    check_needs(wb.Tools([wb.toolbox.calculator]))
    monkeypatch.setattr("workbench.data.sandbox.problem_here", lambda: "there is no bwrap")
    with expect_error(wb.errors.MissingDependency, value="there is no bwrap"):
        check_needs(wb.Tools([wb.toolbox.calculator, wb.toolbox.python]))
