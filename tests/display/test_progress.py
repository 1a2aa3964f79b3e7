from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.display import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr("workbench.display.progress.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    terminal = _Terminal()
    monkeypatch.setattr("workbench.display.progress.sys", SimpleNamespace(stderr=terminal))
    return terminal


def test_a_quick_stage_prints_nothing(clock: _Clock, terminal: io.StringIO):
    with Progress("update_actor") as bar:
        for done in range(8):
            clock.now_s += 0.24
            bar.update(done, 8, 100)
    assert terminal.getvalue() == ""


def test_after_two_seconds_a_line_with_rate_and_time_left_and_nothing_in_the_end(clock: _Clock, terminal: io.StringIO):
    with Progress("update_actor") as bar:
        clock.now_s += 3.0
        bar.update(3, 8, 1236)
        assert terminal.getvalue() == "\rupdate_actor  3/8 micro-batches  412 tokens/s  ~5 s left\x1b[K"
    assert terminal.getvalue().endswith("\r\x1b[K")
    clock.now_s += 60.0
    bar.note("starting hosts")  # as a backend does later, in another cell
    assert terminal.getvalue().endswith("s left\x1b[K\r\x1b[K")


def test_the_line_goes_away_when_the_stage_fails(clock: _Clock, terminal: io.StringIO):
    def stage() -> None:
        with Progress("s") as bar:
            clock.now_s += 3.0
            bar.update(1, 2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stage()
    assert "1/2" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_work_that_calls_nothing_is_shown_by_a_thread_that_ends_with_it(terminal: io.StringIO):
    with Progress("opening", after_s=0.0, ticks=True):
        until_s = time.monotonic() + 30
        while not terminal.getvalue() and time.monotonic() < until_s:
            time.sleep(0.01)
    said = terminal.getvalue()
    assert said.startswith("\ropening  0 s so far") and said.endswith("\r\x1b[K")


def test_at_most_four_refreshes_a_second(clock: _Clock, terminal: io.StringIO):
    with Progress("s", after_s=0) as bar:
        for done in range(1000):
            bar.update(done, 1000)
            clock.now_s += 0.001
    assert 4 <= terminal.getvalue().count("micro-batches") <= 5


def test_no_line_where_nobody_could_see_it_change(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    pipe = io.StringIO()
    monkeypatch.setattr("workbench.display.progress.sys", SimpleNamespace(stderr=pipe))
    with Progress("s", after_s=0) as bar:
        clock.now_s += 5
        bar.update(1, 2, 3)
    assert pipe.getvalue() == ""


@pytest.mark.parametrize(
    ("done", "total", "tokens", "text"),
    [
        (0, 8, 0, "s  0/8 rows  12 s so far"),
        (0, 0, 600, "s  50 tokens/s  12 s so far"),
        (8, 8, 0, "s  8/8 rows  12 s so far"),
        (1, 100, 0, "s  1/100 rows  ~19 min 48 s left"),
    ],
)
def test_the_line_says_only_what_is_known(done: int, total: int, tokens: int, text: str):
    bar = Progress("s", unit="rows")
    assert bar.text(12.0, done, total, tokens) == text


NOTEBOOK_CELL = """
import time
from workbench.display import Progress
with Progress("update_actor", after_s=0.0) as bar:
    for done in range(1, 4):
        bar.update(done, 3, 10)
        time.sleep(0.3)
with Progress("quick") as bar:
    bar.update(1, 3, 10)
print("done")
"""


def test_in_a_kernel_the_line_is_updated_in_place_and_saved_empty(monkeypatch: pytest.MonkeyPatch):
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        messages: list[dict[str, Any]] = []
        client.execute_interactive(NOTEBOOK_CELL, output_hook=messages.append, timeout=60)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    errors = [message["content"] for message in messages if message["msg_type"] == "error"]
    assert errors == []
    shown = [message["content"] for message in messages if message["msg_type"] == "display_data"]
    updates = [message["content"] for message in messages if message["msg_type"] == "update_display_data"]
    assert len(shown) == 1, json.dumps(shown, default=str)
    assert "1/3 micro-batches" in shown[0]["data"]["text/plain"]
    assert {update["transient"]["display_id"] for update in updates} == {shown[0]["transient"]["display_id"]}
    assert ["3/3" in update["data"]["text/plain"] for update in updates] == [False, True, False]
    assert updates[-1]["data"] == {"text/plain": ""}


def test_display_and_telemetry_load_no_engine_and_no_widget():
    heavy = "ray vllm deepspeed plotly ipywidgets torch pandas IPython"
    script = (
        "import sys, workbench.display, workbench.telemetry;"
        f"print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
