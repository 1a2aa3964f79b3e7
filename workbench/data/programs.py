"""`wb.verifiers.code`: runs programs that a model wrote against the tests of their row."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from workbench.data.sandbox import MOST_SHOWN_BYTES, REMEDY, Ran, check_sandbox, run_python, run_without_sandbox
from workbench.data.user_functions import Noted, short
from workbench.errors import BadInput, RewardError
from workbench.errors.plain_text import plain_text, shown
from workbench.support.calls.needs import at_once, needs, with_notes
from workbench.support.validation import at_least, checked

Share = Literal["all", "share"]
Run = Callable[..., Ran]
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>\w*)[^\n]*\n(?P<text>.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("", "python", "python3", "py")
CALL = """

import json as _json
_object = Solution() if "Solution" in globals() else None
_value = (getattr(_object, {name!r}, None) or globals()[{name!r}])(*_json.loads({given!r}))
print()
print({mark!r} + _json.dumps(_value))
"""
REMEDY_OF_TESTS = (
    "give asserts as text or as a list, or {'inputs': [...], 'outputs': [...]} with 'fn_name' for calls, or a list of "
    "{'input': ..., 'output': ...}; also as JSON"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test. function: the function to call with `given`; "": `given` is the program's input and `expected` its
    output, or `asserts` are run after the program."""

    given: Any = ""
    expected: Any = ""
    function: str = ""
    asserts: str = ""


def _check_sandbox() -> None:
    check_sandbox(f"{REMEDY}; wb.verifiers.code_without_sandbox runs them with your rights")


@needs(_check_sandbox)
@at_once(8)
@with_notes
def code(
    prompt: str, response: str, tests: Any, *, score: Share = "all", timeout_s: float = 6.0, total_s: float = 20.0,
    memory_bytes: int = 2**29, **_: Any,
) -> float:  # fmt: skip
    """Return 1.0 if the Python program of the response passes all tests of its row, else 0.0. Runs it in a sandbox.

    The program is the last ```python block of the response, or the last unlabelled ``` block if none is labelled as
    Python; a response without such a block earns 0. A program that hangs, crashes, starts too many processes, takes too
    much memory or writes to a forbidden place fails the test, and `.note` of the score says so (column
    `rewards_notes`). If the machine fails, such as without space for files, the row has failed.
    tests: asserts, as text (one test) or a list of texts (one test each); {"inputs": [...], "outputs": [...]}: texts
        that the program reads and must print, or with "fn_name" arguments and results of a function (or of a method of
        `Solution`); a list of {"input": ..., "output": ...}, with "fn_name" or metadata for calls; each also as JSON.
        Lines are compared without white space at their ends. Expected outputs and results stay outside the sandbox, but
        asserts run in the program's own interpreter, so a program that looks for them can cheat.
    score: "share": the share of passed tests, all of which are run; "all": stop at the first failed test.
    timeout_s, total_s: wall-clock limits of one test and of all tests; keep total_s below `call_timeout_s` of
        `compute_reward`. memory_bytes: see `wb.sandbox.run_python`. Set these with `functools.partial`.
    Raises `BadInput` for tests of another form, `MissingDependency` without a sandbox.
    """
    _check_sandbox()
    return _scored(run_python, response, tests, score, timeout_s, total_s, memory_bytes)


@at_once(8)
@with_notes
def code_without_sandbox(
    prompt: str, response: str, tests: Any, *, score: Share = "all", timeout_s: float = 6.0, total_s: float = 20.0,
    memory_bytes: int = 2**29, **_: Any,
) -> float:  # fmt: skip
    """Like `code`, but only with limits of time, memory and threads: the program has all your rights to read, write,
    send and start programs. Use it only on machines without a sandbox and without anything to lose."""
    run = partial(run_without_sandbox, threads=32)
    return _scored(run, response, tests, score, timeout_s, total_s, memory_bytes)


def program_of(response: str) -> str | None:
    """Return the last block of a response that is labelled as Python, else the last block without a label; None if
    there is neither. The last block may lack its end."""
    blocks = [block for block in _BLOCK.finditer(response) if block["language"].lower() in _PYTHON]
    blocks = [block for block in blocks if block["language"]] or blocks
    return blocks[-1]["text"] if blocks else None


def cases_of(value: Any) -> list[Case]:
    """Return the tests in a row's column. Raises `BadInput` if there are none, or their form is unknown."""
    found = _cases(value)
    if not found:
        raise BadInput(f"tests={shown(value)}", "a program needs at least one test", REMEDY_OF_TESTS)
    return found


def _cases(value: Any) -> list[Case]:
    try:
        if isinstance(value, str):
            try:
                return _cases(json.loads(value)) if value.lstrip()[:1] in ("[", "{") else _asserts(value)
            except json.JSONDecodeError:
                return _asserts(value)
        if isinstance(value, Mapping):
            return _of_mapping(value)
        if isinstance(value, Sequence):
            return [test for one in value for test in (_asserts(one) if isinstance(one, str) else _of_mapping(one))]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    raise BadInput(f"tests={shown(value)}", "tests must have one of the known forms", REMEDY_OF_TESTS)


def _asserts(text: str) -> list[Case]:
    return [Case(asserts=text)] if text.strip() else []


def _of_mapping(value: Mapping[str, Any]) -> list[Case]:
    if "test_cases" in value:
        return _cases(value["test_cases"])
    if "test_list" in value:
        before = value.get("test_setup_code") or ""
        lines = [value["test_list"]] if isinstance(value["test_list"], str) else list(value["test_list"])
        if not all(isinstance(line, str) and line.strip() for line in lines):
            raise ValueError
        return [Case(asserts=f"{before}\n{line}") for line in lines]
    function = value.get("fn_name") or (value.get("metadata") or {}).get("func_name") or ""
    several = "inputs" in value
    given, expected = (value["inputs"], value["outputs"]) if several else ([value["input"]], [value["output"]])
    if len(given) != len(expected) or isinstance(given, str):
        raise ValueError
    if function and not (isinstance(function, str) and function.isidentifier()):
        raise ValueError
    if function:
        return [Case(given=_arguments(one), expected=_json(two), function=function)
                for one, two in zip(given, expected, strict=True)]  # fmt: skip
    return [Case(given=_lines(one), expected=_lines(two)) for one, two in zip(given, expected, strict=True)]


def _arguments(given: Any) -> list[Any]:
    """Return the arguments of a call, from a list, or from a text with one JSON value per line."""
    return [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def _json(expected: Any) -> Any:
    try:
        return json.loads(expected) if isinstance(expected, str) else expected
    except json.JSONDecodeError:
        return expected


def _lines(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(checked("line", line, str) for line in text)


# --- running them -----------------------------------------------------------------------------------------------------


def _scored(
    run: Run, response: str, tests: Any, score: Share, timeout_s: float, total_s: float, memory_bytes: int
) -> Noted:
    every, program = cases_of(tests), program_of(checked("response", response, str))
    if not isinstance(score, str) or score not in ("all", "share"):
        raise BadInput(f"score={shown(score)}", "must be 'all' or 'share'")
    for name, value in (("timeout_s", timeout_s), ("total_s", total_s), ("memory_bytes", memory_bytes)):
        at_least(name, value, 0, strictly=True)
    if program is None:
        return Noted.of(0.0, "no code block")
    passed, notes, left_s = 0, [], total_s
    for number, test in enumerate(every, 1):
        if left_s <= 0:
            notes.append(f"test {number} of {len(every)}: not run, the tests before it took {total_s:g} s")
            break
        ran, note = _passes(partial(run, timeout_s=min(timeout_s, left_s), memory_bytes=memory_bytes), program, test)
        left_s -= ran.duration_s
        passed += not note
        if note:
            notes.append(f"test {number} of {len(every)}: {note}")
            if score == "all":
                break
    share = passed / len(every)
    return Noted.of(share if score == "share" else float(share == 1), notes[0] if notes else f"passed {passed}")


def _passes(run: Run, program: str, test: Case) -> tuple[Ran, str]:
    """Run a test. Return the run, and why the test has failed; "" if it has passed."""
    mark = secrets.token_hex(16)  # without it, a program that exits early without an error would pass
    if test.asserts:
        ran = run(f"{program}\n\n{test.asserts}\n\nprint({mark!r})\n", stdin="")
        return ran, _failure(ran) or ("" if ran.last.rstrip().endswith(mark) else "it ended before its tests had ended")
    if test.function:
        ran = run(program + CALL.format(name=test.function, given=json.dumps(test.given), mark=mark), stdin="")
        if note := _failure(ran):
            return ran, note
        printed, returned = ran.stdout.rpartition(mark)[1:]
        if printed and _is_expected(returned.strip(), test.expected):
            return ran, ""
        said = short(returned.strip()) if printed else f"nothing in its first {MOST_SHOWN_BYTES} characters"
        return ran, f"returned {said} instead of {short(json.dumps(test.expected))}"
    if len(test.expected.encode()) >= MOST_SHOWN_BYTES:
        raise BadInput(
            f"a test that expects {len(test.expected)} characters", f"must expect fewer than {MOST_SHOWN_BYTES} bytes"
        )
    ran = run(program, stdin=test.given)
    if note := _failure(ran):
        return ran, note
    if len(ran.stdout.encode()) >= MOST_SHOWN_BYTES:
        return ran, f"printed {MOST_SHOWN_BYTES} bytes or more"
    if _stripped(ran.stdout) == _stripped(test.expected):
        return ran, ""
    return ran, f"printed {short(ran.stdout.strip())!r} instead of {short(test.expected.strip())!r}"


def _is_expected(returned: str, expected: Any) -> bool:
    """Whether a program's JSON has the expected value; some data sets put the expected value into a list."""
    try:
        value = _json(returned)
        same = value == expected or [value] == expected
        return same and _flags(value) == _flags(expected if value == expected else expected[0])
    except (ValueError, RecursionError):  # more digits than Python reads, or too deep
        return False


def _flags(value: Any) -> Any:
    """Return the structure of a value with True in place of booleans, because True and False equal 1 and 0."""
    if isinstance(value, Mapping):
        return {key: _flags(one) for key, one in value.items()}
    return [_flags(one) for one in value] if isinstance(value, list | tuple) else isinstance(value, bool)


def _failure(ran: Ran) -> str:
    """Return why a program failed; "" if it did not. Raises `RewardError` if the sandbox did not start."""
    if not ran.began:
        raise RewardError(f"the sandbox did not start: {short(ran.stderr.strip(), 200)}", "", REMEDY)
    if ran.ended != "exit":
        limits = {"time": f"took more than {ran.duration_s:.1f} s", "memory": "took too much memory"}
        return limits.get(ran.ended, "started too many processes or threads")
    if ran.exit_code:
        lines = ran.stderr.strip().splitlines() or [f"ended with {ran.exit_code}"]
        return short(plain_text(lines[-1]), 200)
    return ""


def _stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
