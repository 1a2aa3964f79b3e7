"""The log of stage calls: what it says each has taken."""

from __future__ import annotations

import time
from typing import Any

from tests.stages.runs import run_of
from workbench.stages.run import Run, RunLog


def made(log: RunLog, stage: str) -> Run:
    run = run_of(1, stage)
    log.add(run, stage, 1, None, aside=False)
    return run


def test_what_never_began_took_nothing_and_what_runs_counts_up_to_now() -> None:
    log = RunLog()
    assert list(log.frame()["duration_s"]) == []
    cancelled, running, ended, waiting = (made(log, name) for name in ("cancelled", "running", "ended", "waiting"))
    cancelled.cancel()
    began = time.time() - 5.0
    running.started_s = ended.started_s = began
    ended.cancel()
    ended_s = ended.ended_s
    rows: dict[str, Any] = {row["stage"]: row for row in log.frame().to_dict("records")}
    assert rows["cancelled"]["ended_s"] > 0  # and it has no start
    assert rows["cancelled"]["duration_s"] == rows["waiting"]["duration_s"] == 0.0
    assert rows["ended"]["duration_s"] == ended_s - began
    assert 5.0 <= rows["running"]["duration_s"] < 60.0
    assert not waiting.done
