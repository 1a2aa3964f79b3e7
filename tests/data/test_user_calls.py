"""Attacks of functions on their host: what hangs, crashes, forks or eats memory gives an error in time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import workbench as wb
from tests.expected import expect_error
from workbench.data.reward_function import Asking, Score, check_function, first_failure, score_rows
from workbench.errors import BadInput, RewardError, StageError
from workbench.support.calls.process import CallProcess
from workbench.support.calls.sessions import UserCalls


@pytest.fixture
def calls() -> Iterator[UserCalls]:
    calls = UserCalls()
    yield calls
    calls.close()


def run(
    calls: UserCalls, function: Callable[..., Any], n: int = 3, concurrency: int = 2, timeout_s: float = 20.0
) -> list[Score | None]:
    scores, failures = score_rows(
        function,
        [{"prompt": f"p{i}", "response": "r" * i} for i in range(n)],
        [i + 1 for i in range(n)],
        asking=Asking(calls=calls, concurrency=concurrency, timeout_s=timeout_s, most=0),
        where="rank 1 of pool shared",
        row_numbers=[10 + i for i in range(n)],
    )
    if failures:
        raise first_failure(failures)
    return scores


def ok(prompt: str, response: str) -> float:
    return 1.0


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


def test_a_regular_expression_that_holds_pythons_lock_is_ended_and_the_right_row_named(calls: UserCalls) -> None:
    def catastrophic(prompt: str, response: str) -> float:
        if prompt == "p1":
            return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))
        time.sleep(0.05)
        return 0.0

    assert_goes_on(calls)
    process, threads, begun_s = process_of(calls), threading.active_count(), time.monotonic()
    with expect_error(
        RewardError, value="took more than 0.5 s for row 11 on rank 1 .*'p1'", remedy="process was killed"
    ):
        run(calls, catastrophic, concurrency=3, timeout_s=0.5)
    assert time.monotonic() - begun_s < 60
    assert gone(process.pid) and threading.active_count() == threads
    assert_goes_on(calls)


def test_a_process_that_ends_or_crashes_is_an_error_that_names_the_row(calls: UserCalls) -> None:
    def leaves(prompt: str, response: str) -> float:
        if prompt == "p2":
            os._exit(3)
        return 0.0

    with expect_error(RewardError, value="leaves ended its process with exit code 3 for row 12"):
        run(calls, leaves, concurrency=1)
    assert_goes_on(calls)

    def crashes(prompt: str, response: str) -> float:
        if prompt == "p1":
            ctypes.string_at(0)
        time.sleep(5)
        return 0.0

    with expect_error(RewardError, value="crashed its process with SIGSEGV for row 11") as caught:
        run(calls, crashes, concurrency=3)  # the others are under way
    (note,) = caught.value.__notes__
    assert "in crashes" in note
    assert_goes_on(calls)

    def killed(prompt: str, response: str) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    with expect_error(RewardError, value=r"crashed its process with SIGKILL \(the system kills"):
        run(calls, killed)
    with expect_error(RewardError, value="raised SystemExit: 1"):
        run(calls, lambda prompt, response: sys.exit(1))
    assert_goes_on(calls)


def test_memory_is_limited_of_one_process_and_of_all_together(calls: UserCalls) -> None:
    @wb.limits(memory_bytes=2**29)
    def eats(prompt: str, response: str) -> float:
        return float(len(bytearray(2**30)))

    with expect_error(
        RewardError, value=r"eats raised MemoryError.* for row 1\d", rule=r"536,870,912 bytes \(wb.limits"
    ):
        run(calls, eats)

    @wb.limits(memory_bytes=2**28)
    def eats_in_children(prompt: str, response: str) -> float:
        for _ in range(4):
            if os.fork() == 0:
                kept = bytearray(100 * 2**20)
                time.sleep(60)
                os._exit(len(kept) % 2)
        time.sleep(60)
        return 0.0

    with expect_error(RewardError, value=r"takes [\d,]+ bytes in \d processes", rule="268,435,456 bytes"):
        run(calls, eats_in_children, n=1)
    assert_goes_on(calls)


def test_a_fork_bomb_is_stopped_with_all_that_it_started(calls: UserCalls, tmp_path: Path) -> None:
    @wb.limits(tasks=40)
    def bomb(prompt: str, response: str) -> float:
        for _ in range(8):  # no bomb without end: at most 256 processes, should nobody stop them
            os.fork()
            (tmp_path / str(os.getpid())).touch()
        if os.getpid() % 5 == 0 and os.getpid() != os.getpgrp():
            os.setsid()  # out of the group
        time.sleep(20)
        os._exit(0)

    begun_s = time.monotonic()
    with expect_error(
        RewardError, value=r"is over a limit: its process has \d+ processes and threads", rule="may have 40"
    ):
        run(calls, bomb, n=1)
    assert time.monotonic() - begun_s < 60
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) > 20
    wait_until(lambda: all(map(gone, pids)))
    assert_goes_on(calls)


def test_threads_that_calls_leave_behind_are_limited_and_no_call_is_blamed_for_those_of_others(
    calls: UserCalls,
) -> None:
    @wb.limits(tasks=30)
    def leaks(prompt: str, response: str) -> float:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        time.sleep(0.01)
        return 0.0

    assert run(calls, leaks, n=60) == [0.0] * 60

    @wb.limits(tasks=30)
    def leaks_at_once(prompt: str, response: str) -> float:
        for _ in range(60):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        time.sleep(20)
        return 0.0

    with expect_error(RewardError, value="processes and threads", rule="may have 30"):
        run(calls, leaks_at_once, n=2)
    assert_goes_on(calls)


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

    with expect_error(RewardError, value=r"raised Mean: \(its message cannot be read: RuntimeError\)"):
        run(calls, unspeakable)


def test_frames_of_the_function_come_along(calls: UserCalls) -> None:
    def inner(text: str) -> float:
        raise LookupError(text)

    with expect_error(RewardError, value="raised LookupError: p0 for row 10") as caught:
        run(calls, lambda prompt, response: inner(prompt), n=1)
    assert "in inner" in str(caught.value.__cause__) and "raise LookupError(text)" in str(caught.value.__cause__)


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
    with expect_error(BadInput, rule="takes no attributes"):
        wb.limits(tasks=1)(len)


def test_a_function_that_cannot_be_loaded_there(calls: UserCalls) -> None:
    class Here:
        def __reduce__(self) -> Any:
            return exec, ("raise ImportError('only in the host')",)

        def __call__(self, prompt: str, response: str) -> float:
            return 0.0

    with expect_error(RewardError, value="Here cannot be loaded in its process: ImportError: only in the host"):
        run(calls, Here())
    assert_goes_on(calls)


def test_what_is_returned_is_limited_and_checked(calls: UserCalls) -> None:
    with expect_error(RewardError, value="returned <.*Lock"):
        run(calls, lambda prompt, response: asyncio_lock())

    class Odd:
        def __float__(self) -> float:
            raise OSError("odd")

    with expect_error(RewardError, value="raised OSError: odd for row"):
        run(calls, lambda prompt, response: Odd())
    assert_goes_on(calls)


def asyncio_lock() -> Any:
    import asyncio

    return asyncio.Lock()


def test_what_it_prints_is_printed_here(calls: UserCalls, capsys: pytest.CaptureFixture[str]) -> None:
    def tells(prompt: str, response: str) -> float:
        print("said", prompt)
        print("warned", file=sys.stderr)
        return 0.0

    run(calls, tells, n=2, concurrency=1)
    assert capsys.readouterr() == ("said p0\nsaid p1\n", "warned\n" * 2)


def test_it_draws_on_where_its_host_stands_and_its_host_where_it_has_drawn(calls: UserCalls) -> None:
    def draws(prompt: str, response: str) -> float:
        return random.random() + float(np.random.rand())  # noqa: NPY002

    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    here = [random.random() + float(np.random.rand()) for _ in range(6)]  # noqa: NPY002
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    assert run(calls, draws, concurrency=1) + run(calls, draws, concurrency=1) == here


@pytest.mark.thorough
def test_a_library_that_it_imports_itself_draws_on_too(calls: UserCalls) -> None:
    def draws(prompt: str, response: str) -> float:
        import numpy
        import torch

        return float(numpy.random.rand()) + float(torch.rand(()))  # noqa: NPY002

    def seed() -> None:
        np.random.seed(4)  # noqa: NPY002
        torch.manual_seed(5)

    seed()
    here = [float(np.random.rand()) + float(torch.rand(())) for _ in range(7)]  # noqa: NPY002
    seed()
    there = run(calls, draws, concurrency=1) + run(calls, draws, concurrency=1)
    assert [*there, float(np.random.rand()) + float(torch.rand(()))] == here  # noqa: NPY002


def test_the_process_is_there_beside_other_work_and_loads_no_engine(calls: UserCalls) -> None:
    def engines(prompt: str, response: str) -> float:
        return float(sum(name in sys.modules for name in ("torch", "transformers", "vllm", "ray", "pydantic")))

    calls.prepare(engines)
    before = process_of(calls).pid
    assert run(calls, engines) == [0.0] * 3
    assert process_of(calls).pid == before


def test_the_modules_are_those_that_the_host_runs_though_their_files_were_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.workers.reload.sources import loaded

    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_reward_of_a_test.py"
    file.write_text("def score(prompt, response):\n    return 1.0\n")
    import edited_reward_of_a_test as module  # type: ignore[import-not-found]

    loaded.note()
    file.write_text("def score(prompt, response):\n    return 2.0 + 0.0\n")
    calls = UserCalls(loaded.replaced_texts)
    try:
        assert run(calls, module.score) == [1.0] * 3
    finally:
        calls.close()
        del sys.modules[module.__name__]  # later tests of this process reload what was edited


def test_memory_that_could_be_shared_counts_too(calls: UserCalls) -> None:
    @wb.limits(memory_bytes=2**28)
    def maps(prompt: str, response: str) -> float:
        shared = mmap.mmap(-1, 2**29)  # the system's limit of data does not hold it
        for at in range(0, len(shared), 4096):
            shared[at] = 1
        time.sleep(10)
        return 1.0

    with expect_error(RewardError, value=r"is over a limit: its process takes [\d,]+ bytes in 1 processes"):
        run(calls, maps, n=1)
    assert_goes_on(calls)


def test_a_path_object_among_the_folders_of_modules_does_no_harm(
    calls: UserCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert_goes_on(calls)


def test_an_interrupt_at_the_end_of_a_session_leaves_no_answer_for_the_next(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_goes_on(calls)

    def interrupted(process: CallProcess, timeout_s: float) -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt), calls.session(ok):
        patch.setattr(CallProcess, "receive", interrupted)
    assert_goes_on(calls)


def test_a_process_that_takes_no_function_is_a_typed_error(calls: UserCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(2**23)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])  # it cannot import the package
        with expect_error(StageError, value="its process ended its process"):
            run(calls, lambda prompt, response: float(len(large)))
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
            asking=Asking(calls=calls, concurrency=1, timeout_s=20.0), where="rank 0", row_numbers=[10],
        )  # fmt: skip
        if failures:
            raise failures[0]
        return scores

    assert give(names["Task"]()) == [2.0]

    class Here:
        def __reduce__(self) -> Any:
            return exec, ("raise ImportError('only in the host')",)

    with expect_error(RewardError, value="could not be given column 'task': ImportError: only in the host for row 10"):
        give(Here())
    with expect_error(BadInput, value="column 'task' of a row for score cannot be sent to its process: cannot pickle"):
        give(threading.Lock())
    assert_goes_on(calls)


def test_calls_that_fill_the_wire_wait_for_a_slow_import(calls: UserCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.support.calls.process.SEND_TIMEOUT_S", 0.5)

    class Slow:
        def __reduce__(self) -> Any:
            return exec, ("import time; time.sleep(2)",)

    slow = Slow()

    def score(prompt: str, response: str) -> float:
        return float(slow is None)

    rows = [{"prompt": "p" * 2**23, "response": "r"}]
    assert score_rows(
        score, rows, [1], asking=Asking(calls=calls, concurrency=1, timeout_s=20.0), where="rank 0", row_numbers=[0]
    ) == ([1.0], {})  # fmt: skip


def test_where_the_system_cannot_look_at_a_process_without_reaping_it(
    calls: UserCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "waitid")
    assert_goes_on(calls)
    with expect_error(RewardError, value="ended its process with exit code 3"):
        run(calls, lambda prompt, response: os._exit(3))
    with expect_error(RewardError, value="crashed its process with SIGKILL"):
        run(calls, lambda prompt, response: os.kill(os.getpid(), signal.SIGKILL))
    assert_goes_on(calls)
