"""Run folders written as a workbench writes them, without one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.telemetry.store import TelemetryStore


def write_run(
    runs: Path, name: str, date: str, rewards: Sequence[float], *, settings: Mapping[str, Any], rows: int = 4,
    algorithm: str = "PPO", **fields: Any,
) -> Path:  # fmt: skip
    """A run whose iterations have these rewards, and responses of ten tokens."""
    folder = runs / name / date
    store = TelemetryStore(folder)
    store.append_settings(algorithm, 1, {"clip": 0.2, **fields})
    for number, reward in enumerate(rewards, 1):
        store.append_event("iteration", iteration=number)
        store.append_metrics("generate_sequences", 1, number, {"response_tokens/mean": 10.0}, rows=rows)
        store.append_metrics("compute_reward", 2, number, {"rewards/mean": reward}, rows=rows)
    code = {"commit": "c" * 40, "versions": {"torch": "2"}, "files": {"a.py": "1"}, "functions": {}}
    record = {
        "format": 1, "name": name, "opened_s": time.time(), "settings": dict(settings), "code": code,
        "data": {"prompts": "x"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    return folder
