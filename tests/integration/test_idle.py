"""A workbench that nobody uses closes itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.errors import HostDied, WorkbenchError


@pytest.mark.slow
@pytest.mark.thorough
def test_a_forgotten_workbench_closes_itself(tmp_path: Path) -> None:
    lab = tiny_lab("forgotten", tmp_path, models={"actor": TINY, "reward": vowels}, idle_hours=0.002)

    def living() -> bool:
        return any(row["name"] == "forgotten" for row in wb.ls())

    processes = list(lab.hosts.backend.processes.values())  # type: ignore[attr-defined]
    lab.prompts.next(2)
    assert all(process.alive for process in processes)
    deadline = time.monotonic() + 300
    while living() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not living()
    assert not any(process.alive for process in processes)
    assert "nobody has used this workbench for 0.002 h" in next((lab.run_folder / "logs").iterdir()).read_text()
    with pytest.raises(WorkbenchError) as said:
        lab.prompts.next(2)
    assert isinstance(said.value, HostDied), said.value
