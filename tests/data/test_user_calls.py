"""Functions in a process of their own: what hangs, crashes or eats memory costs its row, and is named."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.data.reward_function import FunctionCaller, Score, check_function, first_failure, score_rows
from workbench.errors import BadInput, RewardError
from workbench.support.calls.session import CallProcess
from workbench.support.calls.sessions import UserCalls


@pytest.fixture
def calls() -> Iterator[UserCalls]:
    calls = UserCalls()
    yield calls
    calls.close()


def run(
    calls: UserCalls, function: Callable[..., Any], n: int = 3, concurrency: int | None = 2,
    timeout_s: float = 20.0,
) -> list[Score | None]:  # fmt: skip
    scores, failures = score_rows(
        function,
        [{"prompt": f"p{i}", "response": "r" * i} for i in range(n)],
        [i + 1 for i in range(n)],
        caller=FunctionCaller(calls=calls, concurrency=concurrency, timeout_s=timeout_s, most=0),
        where="rank 1 of pool shared",
        row_numbers=[10 + i for i in range(n)],
    )
    if failures:
        raise first_failure(failures)
    return scores


def failed_rows(
    calls: UserCalls, function: Callable[..., Any], n: int = 3, concurrency: int = 3, timeout_s: float = 20.0
) -> dict[int, str]:
    """What is said of the rows that failed, by prompt; all others have their score, 1."""
    rows = [{"prompt": f"p{i}", "response": "r"} for i in range(n)]
    caller = FunctionCaller(calls=calls, concurrency=concurrency, timeout_s=timeout_s)
    scores, failures = score_rows(function, rows, [1] * n, caller=caller, where="rank 0", row_numbers=range(n))
    assert all(scores[i] == 1.0 for i in range(n) if i not in failures)
    return {i: error.what for i, error in failures.items()}


def process_of(calls: UserCalls) -> psutil.Process:
    assert calls._process is not None
    return psutil.Process(calls._process._popen.pid)


def assert_goes_on(calls: UserCalls) -> None:
    assert run(calls, lambda prompt, response: 1.0) == [1.0] * 3


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("waits", [False, True], ids=["thread", "coroutine"])
def test_a_call_that_lets_no_other_go_on_is_ended_and_alone_fails(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr("workbench.support.calls.session.ANSWER_S", 0.2)

    def holds_pythons_lock(prompt: str, response: str) -> float:
        if prompt == "p1":
            re.match(r"(a+)+$", "a" * 60 + "b")
        time.sleep(0.05)
        return 1.0

    async def holds_the_event_loop(prompt: str, response: str) -> float:
        if prompt == "p1":
            time.sleep(60)
        return 1.0

    assert_goes_on(calls)
    process, threads, begun_s = process_of(calls), threading.active_count(), time.monotonic()
    found = failed_rows(calls, holds_the_event_loop if waits else holds_pythons_lock, timeout_s=0.5)
    assert found == {1: "took more than 0.5 s"}
    assert time.monotonic() - begun_s < 30
    assert gone(process.pid) and threading.active_count() == threads
    assert_goes_on(calls)


def test_calls_wait_for_those_under_way_where_there_is_no_memory_for_threads(calls: UserCalls) -> None:
    @wb.limits(memory_bytes=2**28)
    def waits(prompt: str, response: str) -> float:
        held = bytes(2**21)  # which stacks of threads leave room for
        time.sleep(0.2)
        return min(1.0, len(held))

    began_s = time.monotonic()
    assert failed_rows(calls, waits, n=200, concurrency=200) == {}
    assert time.monotonic() - began_s < 20  # 40 s one after the other


def test_a_task_that_exits_ends_its_own_call_alone(calls: UserCalls) -> None:
    async def exits(prompt: str) -> float:
        await asyncio.sleep(0.2)
        if prompt == "p1":
            sys.exit(3)
        return 1.0

    async def scores(prompt: str, response: str) -> float:
        return await asyncio.create_task(exits(prompt))

    assert failed_rows(calls, scores, n=6, concurrency=6) == {1: "raised SystemExit: 3"}


def test_calls_that_only_wait_too_long_fail_together(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("workbench.support.calls.session.ANSWER_S", 60.0)
    asked = tmp_path / "asked"

    def waits(prompt: str, response: str) -> float:
        with asked.open("a") as file:
            file.write(prompt)
        time.sleep(60 if prompt in ("p1", "p2", "p3") else 0)
        return 1.0

    assert failed_rows(calls, waits, n=6, concurrency=4, timeout_s=2.0) == dict.fromkeys(
        (1, 2, 3), "took more than 2 s"
    )
    assert len(asked.read_text()) == 12  # none was asked again alone


def test_a_process_that_ends_or_crashes_costs_its_row_and_names_it(calls: UserCalls) -> None:
    def ends(prompt: str, response: str) -> float:
        if prompt == "p1":
            ctypes.string_at(0)
        if prompt == "p2":
            os._exit(3)
        if prompt == "p3":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "p4":
            sys.exit(1)
        time.sleep(0.05)  # so that others are under way
        return 1.0

    assert failed_rows(calls, ends, n=7) == {
        1: "crashed its process with SIGSEGV",
        2: "ended its process with exit code 3",
        3: "crashed its process with SIGKILL (the system kills a process when memory runs out)",
        4: "raised SystemExit: 1",
    }
    with expect_error(RewardError, value="ended its process with exit code 3 for row 10 on rank 1 .*'p0'"):
        run(calls, lambda prompt, response: os._exit(3), concurrency=1)


def test_memory_is_limited(calls: UserCalls) -> None:
    @wb.limits(memory_bytes=2**29)
    def eats(prompt: str, response: str) -> float:
        if prompt == "p1":
            return float(len(bytearray(2**30)))
        time.sleep(0.05)
        return 1.0

    with expect_error(
        RewardError, value=r"eats raised MemoryError.* for row 11", rule=r"536,870,912 bytes \(wb.limits"
    ):
        run(calls, eats)
    assert list(failed_rows(calls, eats, n=4)) == [1]


def test_nothing_is_left_behind(calls: UserCalls, tmp_path: Path) -> None:
    def spawns(prompt: str, response: str) -> float:
        child = subprocess.Popen(["sleep", "600"], start_new_session=prompt == "p1")
        (tmp_path / str(child.pid)).touch()
        if prompt == "p2":  # whose parent ends: it would be a child of the first process of the machine
            line = "sleep 600 > /dev/null & echo $!"
            (tmp_path / subprocess.check_output(["setsid", "sh", "-c", line], text=True).strip()).touch()
        return 0.0

    run(calls, spawns)
    pids = [process_of(calls).pid, *(int(path.name) for path in tmp_path.iterdir())]
    assert len(pids) == 5 and not any(map(gone, pids))
    calls.close()
    wait_until(lambda: all(map(gone, pids)))


KILLED_HOST = """
import os, re, sys, threading, time
from tests.data.test_user_calls import run
from workbench.support.calls.sessions import UserCalls

def holds(prompt, response):
    if child := os.fork():
        print(os.getpid(), child, flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")

run(UserCalls(), holds, n=1, timeout_s=600)
"""


def test_a_host_that_is_killed_takes_the_process_along_though_pythons_lock_is_held() -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}\n{KILLED_HOST}"
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    pids = list(map(int, host.stdout.readline().split()))
    time.sleep(0.5)
    assert len(pids) == 2 and not any(map(gone, pids))
    host.kill()
    host.wait()
    host.stdout.close()
    wait_until(lambda: all(map(gone, pids)))


def test_what_a_function_raises_is_cut_and_obeyed_by_no_terminal(calls: UserCalls) -> None:
    def long(prompt: str, response: str) -> float:
        raise ValueError("\x1b[2J\x1b]0;owned\x07\x9b31mred" + "x" * 100_000 + "\r\u202eend")

    said = r"raised ValueError: redxxx.* \.\.\. .*xxx\\r\\u202eend for row 10"
    for function in (long, wb.limits(own_process=False)(functools.partial(long))):
        with pytest.raises(RewardError, match=said) as caught:
            run(calls, function, n=1)
        assert len(str(caught.value)) < 3000
        assert not set(str(caught.value)) & set("\x1b\x9b\x07\r\u202e")

    def unspeakable(prompt: str, response: str) -> float:
        class Mean(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no")

        raise Mean

    class Odd:
        def __float__(self) -> float:
            raise OSError("odd")

    with expect_error(RewardError, value="raised OSError: odd for row"):
        run(calls, lambda prompt, response: Odd())
    with expect_error(RewardError, value=r"raised Mean: \(its message cannot be read: RuntimeError\)"):
        run(calls, unspeakable)


def test_frames_of_the_function_come_along(calls: UserCalls) -> None:
    def inner(text: str) -> float:
        raise LookupError(text)

    with expect_error(RewardError, value="raised LookupError: p0 for row 10") as caught:
        run(calls, lambda prompt, response: inner(prompt), n=1)
    assert "in inner" in str(caught.value.__cause__) and "raise LookupError(text)" in str(caught.value.__cause__)


@functools.cache
def big() -> float:
    return 3.0


def test_cached_functions_are_sent_and_keep_their_cache_there(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.lru_cache(maxsize=2)
    def made(number: int) -> float:
        return float(os.getpid())

    def again(prompt: str, response: str) -> float:
        return float(made(1) == made(1) == os.getpid() and made.cache_info().hits > 0) + big()

    monkeypatch.setattr(sys.modules["__main__"], "big", big, raising=False)  # a cell's
    monkeypatch.setattr(big, "__module__", "__main__")
    for function in (again, functools.cache(again)):
        assert run(calls, function) == [4.0] * 3


def test_what_cannot_be_sent_is_refused_with_the_remedy(calls: UserCalls) -> None:
    lock = threading.Lock()

    def locked(prompt: str, response: str) -> float:
        with lock:
            return 1.0

    remedy = r"locked cannot be sent to a process of its own: lock is .*cannot pickle.*@wb.limits\(own_process=False\)"
    for call in (lambda: check_function(locked), lambda: run(calls, locked)):
        with pytest.raises(BadInput, match=remedy):
            call()
    assert run(calls, wb.limits(own_process=False)(locked)) == [1.0] * 3
    assert calls._process is None
    with expect_error(BadInput, value="memory_bytes=0"):
        wb.limits(memory_bytes=0)
    with expect_error(BadInput, value="memory_bytes=1000"):
        wb.limits(memory_bytes=1000)
    with expect_error(BadInput, rule="memory_bytes"):
        wb.limits(memory=2**30)  # type: ignore[call-arg]
    with expect_error(BadInput, value="wb.limits"):
        wb.limits(locked)  # type: ignore[arg-type, call-arg]


def test_a_function_that_cannot_be_loaded_there(calls: UserCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def __reduce__(self) -> Any:
            return exec, ("raise ImportError('only in the host')",)

        def __call__(self, prompt: str, response: str) -> float:
            return 0.0

    with expect_error(RewardError, value="Here cannot be loaded in its process: ImportError: only in the host"):
        run(calls, Here())
    calls.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])  # it cannot import the package
        with expect_error(RewardError, value="cannot be loaded: its process ended its process with exit code 1"):
            run(calls, len_of_response)
    assert_goes_on(calls)


def len_of_response(prompt: str, response: str) -> float:
    return float(len(response))


def test_what_it_prints_is_printed_here(calls: UserCalls, capsys: pytest.CaptureFixture[str]) -> None:
    def tells(prompt: str, response: str) -> float:
        print("said", prompt)
        print("warned", file=sys.stderr)
        return 0.0

    run(calls, tells, n=2, concurrency=1)
    assert capsys.readouterr() == ("said p0\nsaid p1\n", "warned\n" * 2)


def test_the_process_is_there_beside_other_work_and_loads_no_engine(
    calls: UserCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engines(prompt: str, response: str) -> float:
        return float(sum(name in sys.modules for name in ("torch", "transformers", "vllm", "ray", "pydantic")))

    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # no text: Python leaves it out
    calls.prepare(engines)
    before = process_of(calls).pid
    assert run(calls, engines) == [0.0] * 3
    assert process_of(calls).pid == before


def test_an_interrupt_leaves_no_half_message_for_the_next_session(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(process: CallProcess, timeout_s: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CallProcess, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(calls, len_of_response)
    assert_goes_on(calls)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_a_test.py").write_text("WEIGHT = 1.0\n")
    text = "import helper_of_a_test as helper\nSCALE = 1.0\ndef score(prompt, response): return SCALE * helper.WEIGHT\n"
    (tmp_path / "rewards_of_a_test.py").write_text(text)
    yield importlib.import_module("rewards_of_a_test")
    for name in ("rewards_of_a_test", "helper_of_a_test"):
        sys.modules.pop(name)


def test_each_function_has_its_classes_as_they_were_sent_with_it(calls: UserCalls) -> None:
    class Scale:
        by = 1.0

    def scaled(prompt: str, response: str) -> float:
        return Scale().by

    found = []
    for by in (1.0, 5.0, 1.0):
        Scale.by = by
        found += run(calls, scaled, n=1)
    assert found == [1.0, 5.0, 1.0]


def test_what_is_changed_in_a_module_of_the_user_takes_effect(calls: UserCalls, module: Any, tmp_path: Path) -> None:
    def indirect(prompt: str, response: str) -> float:
        return float(module.score(prompt, response))

    assert run(calls, module.score) == run(calls, indirect) == [1.0] * 3
    module.SCALE = 5.0
    assert run(calls, module.score) == run(calls, indirect) == [5.0] * 3
    module.helper.WEIGHT = 2.0
    assert run(calls, module.score) == run(calls, indirect) == [10.0] * 3
    before = process_of(calls).pid
    (tmp_path / "rewards_of_a_test.py").write_text("def score(prompt, response):\n    return 7.0 + 0 * len(prompt)\n")
    importlib.reload(module)
    assert run(calls, module.score) == run(calls, indirect) == [7.0] * 3
    assert process_of(calls).pid == before


def test_a_module_that_holds_what_cannot_be_sent_is_imported_by_its_process(calls: UserCalls, module: Any) -> None:
    module.score.__dict__["lock"] = threading.Lock()
    assert run(calls, module.score) == [1.0] * 3


def test_rows_hold_objects_of_the_notebook_and_what_cannot_be_read_there_is_named(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(
        "class Task:\n    goal = 2.0\ndef score(prompt, response, task): return task.goal * isinstance(task, Task)",
        names,
    )
    monkeypatch.setattr(sys.modules["__main__"], "Task", names["Task"], raising=False)

    def give(task: object) -> list[Score | None]:
        scores, failures = score_rows(
            names["score"], [{"prompt": "p", "response": "r", "task": task}], [1],
            caller=FunctionCaller(calls=calls, concurrency=1, timeout_s=20.0), where="rank 0", row_numbers=[10],
        )  # fmt: skip
        if failures:
            raise failures[0]
        return scores

    assert give(names["Task"]()) == [2.0]

    class Here:
        def __reduce__(self) -> Any:
            return exec, ("raise ImportError('only in the host')",)

    with expect_error(RewardError, value="could not get its row: ImportError: only in the host for row 10"):
        give(Here())
    with expect_error(BadInput, value="a row for score cannot be sent to its process: cannot pickle"):
        give(threading.Lock())
    assert_goes_on(calls)


def test_calls_that_fill_the_wire_wait_for_a_slow_import(calls: UserCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.support.calls.session.SEND_TIMEOUT_S", 2.0)

    class Slow:
        def __reduce__(self) -> Any:
            return exec, ("import time; time.sleep(2.5)",)

    slow = Slow()

    def score(prompt: str, response: str) -> float:
        return float(slow is None)

    rows = [{"prompt": "p" * 2**23, "response": "r"}]
    assert score_rows(
        score, rows, [1], caller=FunctionCaller(calls=calls, concurrency=1, timeout_s=20), where="here", row_numbers=[0]
    ) == ([1.0], {})  # fmt: skip


def alarmed(prompt: str, response: str) -> float:
    """Limits its time by a signal, as math-verify does, and leaves the alarm of row p0 behind."""

    def late(*signal_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.1 if prompt == "p0" else 0)
    return 1.0


def wrapped(prompt: str, response: str) -> float:
    """The same, as verifiers are often written."""
    try:
        return alarmed(prompt, response)
    except Exception:
        return 0.0


def test_calls_one_at_a_time_have_the_main_thread_where_signals_work(calls: UserCalls) -> None:
    def after_a_while(prompt: str, response: str) -> float:
        time.sleep(0.3 * (prompt == "p1"))
        return alarmed(prompt, response)

    async def waits(prompt: str, response: str) -> float:
        return float(threading.current_thread() is not threading.main_thread())

    def by_math_verify(prompt: str, response: str) -> float:
        from math_verify import parse, verify

        try:
            return float(verify(parse("$\\frac{1}{2}$"), parse("$0.5$")))
        except Exception:
            return 0.0

    for concurrency in (None, 1):
        for function in (alarmed, wrapped, after_a_while, waits, by_math_verify):
            assert run(calls, function, concurrency=concurrency) == [1.0] * 3

    def prints(prompt: str, response: str) -> float:
        """Its handler prints, and raises, while it prints: messages stay whole."""

        def late(*signal_: Any) -> None:
            print("late")
            raise TimeoutError

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            while True:
                print("x" * 1000)
        except TimeoutError:
            return 1.0

    assert run(calls, prints, concurrency=None) == [1.0] * 3

    async def alarmed_later(prompt: str, response: str) -> float:
        return wrapped(prompt, response)

    run(calls, waits)
    process = process_of(calls)
    with pytest.raises(RewardError):
        run(calls, alarmed_later, concurrency=None)
    assert process_of(calls) == process  # calls that were cancelled before they began have ended

    for function in (alarmed, wrapped, alarmed_later):  # no row scores 0 in silence for want of a thread
        for kind in (function, wb.limits(own_process=False)(functools.partial(function))):
            with expect_error(RewardError, value="sets a handler for signal.alarm", remedy="concurrency=1.*async"):
                run(calls, kind, concurrency=2)
    assert signal.signal.__name__ == "signal"  # of this process


def test_a_function_sees_the_variables_folder_and_path_of_now(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def seen(prompt: str, response: str) -> float:
        folder, path = os.getcwd() == os.environ.get("FOLDER"), os.environ.get("FOLDER") in sys.path
        if prompt == "p0" and os.environ.get("CRASH"):
            os._exit(3)
        return float(os.environ.get("KEY", "-1")) + 10 * folder + 100 * path

    monkeypatch.delenv("KEY", raising=False)
    assert run(calls, seen) == [-1.0] * 3
    monkeypatch.setenv("KEY", "7")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    assert run(calls, seen) == [7.0] * 3
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert run(calls, seen) == [117.0] * 3
    monkeypatch.setenv("CRASH", "1")
    with expect_error(RewardError, value="exit code 3"):
        run(calls, seen)
    monkeypatch.delenv("CRASH")
    assert run(calls, seen) == [117.0] * 3  # in a new process
    monkeypatch.delenv("KEY")
    assert run(calls, seen) == [109.0] * 3
    assert [run(calls, counts, n=1)[0] for _ in range(3)] == [1.0, 2.0, 3.0]
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "module_of_later.py").write_text("VALUE = 4.0")
    monkeypatch.syspath_prepend(str(tmp_path / "later"))

    def imports(prompt: str, response: str) -> float:
        return float(importlib.import_module("module_of_later").VALUE)

    assert run(calls, imports) == [4.0] * 3


def counts(prompt: str, response: str) -> float:
    """Counts in a variable of its process, which stages between do not take away."""
    os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", 0)) + 1)
    return float(os.environ["COUNTED"])


def test_each_call_in_the_host_has_the_row_as_it_is(calls: UserCalls) -> None:
    @wb.limits(own_process=False)
    def changes(prompt: list[int], response: str) -> float:
        prompt.append(1)
        if len(prompt) == 2 and not response:
            raise ValueError("the first time")
        return float(len(prompt))

    class Unreadable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("of its own text")

    @wb.limits(own_process=False)
    def fails(prompt: list[int], response: str) -> float:
        raise Unreadable

    rows = [{"prompt": [0], "response": "r" * i} for i in range(2)]
    for retries in (0, 1):
        caller = FunctionCaller(calls=calls, concurrency=1, timeout_s=20, retries=retries)
        scores, failures = score_rows(changes, rows, [1, 1], caller=caller, where="rank 0", row_numbers=[0, 1])
        assert scores == [None, 2.0] and list(failures) == [0] and rows[0]["prompt"] == [0]
    _, failures = score_rows(fails, rows, [1, 1], caller=caller, where="rank 0", row_numbers=[0, 1])
    assert list(failures) == [0, 1] and "its message cannot be read" in failures[0].what
