"""Any words for `wb`, and any options for a script: usage or one line of an error of ours, and an exit code; never a
traceback."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.fuzz.damage import harmless, profile
from workbench import cli
from workbench.launch.script import DONE, FAILED, WRONG_USAGE

VALUES = (
    "", "-1", "0", "3", "x", "1.5", "nan", "1e9", "actor=llama-7b", "actor=", "=", ",", "1-1-1", "1-1", "0-0-0",
    "hybridflow", "a\0b", "\x1b[31m", "\ud800", "x" * 300, "/dev/null", "..", "tiny-llama", "ppo", "--", "-", "é",
)  # fmt: skip
COMMANDS = ("ls", "stop", "trace", "reshard", "map", "export")  # not doctor, which takes seconds


def options(command: str) -> list[str]:
    """The options of a command of `wb`."""
    sub = next(action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction))
    return [option for action in sub.choices[command]._actions for option in action.option_strings]


KNOWN = {command: options(command) for command in COMMANDS}
WORDS = st.sampled_from(COMMANDS).flatmap(
    lambda command: st.tuples(
        st.just(command), st.lists(st.sampled_from([*KNOWN[command], *VALUES]) | st.text(max_size=5), max_size=6)
    )
)


def said(act: Callable[[], object]) -> tuple[object, str]:
    """The exit code, and what is printed on stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = act()
        except SystemExit as error:
            code = error.code
    return code, errors.getvalue()


def test_words_of_wb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    @profile(300, 5000)
    @given(WORDS)
    def tried(words: tuple[str, list[str]]) -> None:
        code, errors = said(lambda: cli.main([words[0], *words[1]]))
        assert code in (0, FAILED, WRONG_USAGE)
        assert code == 0 or words[0] in ("export", "ls") or errors
        assert "Traceback" not in errors
        assert harmless(errors)

    tried()


def main(iterations: int = 1, rate: float = 0.5, names: tuple[str, ...] = (), flag: bool = False) -> None:
    """A script."""


OPTIONS = ("--iterations", "--rate", "--names", "--flag", "--no-flag", "--seed", "--backend", "--track", "--save-every",
           "--resume", "--name", "--output", "--devices", "--iteratins", "--quiet")  # fmt: skip


def test_options_of_a_script() -> None:
    @profile(200, 5000)
    @given(st.lists(st.sampled_from([*OPTIONS, *VALUES]), max_size=5))
    def tried(words: list[str]) -> None:
        code, errors = said(lambda: wb.script.run(main, words))
        assert code in (DONE, FAILED, WRONG_USAGE)
        assert code == DONE or errors
        assert "Traceback" not in errors
        assert harmless(errors)

    tried()


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["exprt"], "export"), (["export", "n.ipynb", "--chek"], "--check"), (["ls", "--jsn"], "--json"),
        (["map", "--models", "actor=llama-7b", "--gpus", "4", "--placement", "splitt"], "split"),
    ],
)  # fmt: skip
def test_the_nearest_name(words: list[str], nearest: str) -> None:
    code, errors = said(lambda: cli.main(words))
    assert code == WRONG_USAGE
    assert f"write {nearest} (the nearest)" in errors


def test_the_nearest_option_of_a_script() -> None:
    code, errors = said(lambda: wb.script.run(main, ["--iteratins", "3"]))
    assert code == WRONG_USAGE
    assert "write --iterations (the nearest)" in errors
