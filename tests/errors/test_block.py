"""What a cell shows of an error, in a real kernel, and the debugger there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

from workbench.errors import BadInput

OPEN = """from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
lab = tiny_lab("block", Path("runs"), backend="inline")
batch = lab.prompts.next(4)
batch = lab.actor.generate_sequences(batch, max_new_tokens=3)"""
BROKEN = """def broken(prompt, response, **row):
    share = len(response) / 0
    return share"""
SEEN = r"'seen (What is|Compute|How muc|Work ou|\d+ )"  # how prompts of the data set begin


class Kernel:
    """Runs cells, answers what they ask for, and gives what they print and what they show of an error."""

    def __init__(self, folder: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        self._manager, self._client = start_new_kernel(cwd=str(folder))
        self.run(f"import sys; sys.path.insert(0, {str(root)!r})")

    def run(self, text: str, typed: Sequence[str] = ()) -> tuple[str, str]:
        out: list[str] = []
        error: list[str] = []
        lines = iter(typed)

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                out.append(content["text"])
            elif message["msg_type"] == "execute_result":
                out.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                error.append("\n".join(content["traceback"]))

        self._client.execute_interactive(
            text, allow_stdin=True, output_hook=hear, timeout=120,
            stdin_hook=lambda message: self._client.input(next(lines)),
        )  # fmt: skip
        return "".join(out), re.sub(r"\x1b\[[0-9;]*m", "", "".join(error))

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    assert kernel.run(OPEN)[1] == ""
    assert kernel.run(BROKEN)[1] == ""
    yield kernel
    kernel.run("lab.close()")
    kernel.close()


@pytest.mark.slow
def test_a_failed_stage_is_one_block(kernel: Kernel) -> None:
    _, shown = kernel.run("scored = lab.reward.compute_reward(batch, function=broken)")
    assert re.search(r"-+> 1 scored = lab.reward.compute_reward\(batch, function=broken\)", shown)
    assert "RewardError: reward.compute_reward failed on rank 0: reward function broken raised ZeroDiv" in shown
    assert re.search(r"on rank 0:\n  Cell In\[\d+\], line 2, in broken\n    share = len\(response\) / 0", shown)
    assert "lab.debug()" in shown
    for noise in (
        "runner.py",
        "run.py",
        "host.py",
        "scheduler.py",
        "user_calls.py",
        "user_functions.py",
        "server.py",
        "direct cause",
    ):
        assert noise not in shown
    assert shown.count("Traceback") == 1
    _, shown = kernel.run("lab.reward.compute_reward(batch, concurrency=0)")
    assert "BadInput: concurrency=0" in shown and "group.py" not in shown and "lab.debug()" not in shown
    kernel.run("%xmode Verbose")
    _, shown = kernel.run("lab.reward.compute_reward(batch, function=broken)")
    assert "runner.py" in shown
    kernel.run("%xmode Context")


@pytest.mark.slow
def test_the_debugger_stops_in_the_users_function(kernel: Kernel) -> None:
    kernel.run("lab.reward.compute_reward(batch, function=broken)")
    printed, shown = kernel.run("lab.debug()")
    assert "here, as rank" in printed
    assert "ZeroDivisionError" in shown and "share = len(response) / 0" in shown
    printed, _ = kernel.run("%debug", typed=["p 'seen ' + prompt[:7]", "q"])
    assert re.search(SEEN, printed)  # of the row that failed first
    stops = "def stops(prompt, response, **row):\n    breakpoint()\n    raise ValueError(prompt)"
    kernel.run(stops.replace("    breakpoint()\n", ""))
    kernel.run("lab.reward.compute_reward(batch, function=stops)")
    printed, shown = kernel.run("print(lab.last_error()); lab.last_error().batch.rows")
    assert "<reward.compute_reward failed on rank 0: RewardError, " in printed and "4" in printed


@pytest.mark.slow
def test_the_frames_of_a_block_can_be_entered(kernel: Kernel) -> None:
    kernel.run("lab.reward.compute_reward(batch, function=wb.limits(own_process=False)(broken))")
    printed, _ = kernel.run("%debug", typed=["exceptions 0", "p 'seen ' + prompt[:7]", "q"])
    assert re.search(SEEN, printed)  # of the row that failed first


def test_outside_of_a_notebook_it_is_text() -> None:
    assert BadInput("a", "b", "c")._render_traceback_() == ["BadInput: a. b. c."]
