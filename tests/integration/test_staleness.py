"""Rollout workers in a pool of their own: generation for the next iteration runs beside training, with the numbers of
one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from math import isnan
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.backends import registry
from workbench.errors import HostDied

pytestmark = pytest.mark.slow
MODELS = {"actor": TINY, "reward": vowels}
PAUSING: dict[str, Any] = {"staleness": 2, "pause_after": 5}
POOLS = wb.Placement.of({"train": (1, ["actor", "reward"]), "rollout": (1, ["rollout"])})


def vowels_behind(gate: Path) -> Callable[..., float]:
    """The reward, which waits for a file."""

    def gated(prompt: str, response: str, **row: Any) -> float:
        last = time.monotonic() + 300
        while not gate.exists():
            if time.monotonic() > last:
                raise TimeoutError("generation did not run beside training")
            time.sleep(0.02)
        return vowels(prompt, response)

    return gated


def grpo(lab: wb.Workbench, reward: Any = None) -> wb.GRPO:
    sampling = wb.Sampling(max_new_tokens=12, ignore_eos=True)
    return wb.GRPO(lab, prompts=4, samples=2, sampling=sampling, epochs=2, correction=wb.Correction(), reward=reward)


def generated(lab: wb.Workbench) -> int:
    """How many generations have ended."""
    runs = lab.runs()
    return int(((runs["operation"] == "generate_sequences") & (runs["state"] == "done")).sum())


def test_both_pools_work_at_once_with_the_numbers_of_one_process(tmp_path: Path) -> None:
    with tiny_lab("inline-stale", tmp_path, backend="inline", models=MODELS) as lab:
        algorithm = grpo(lab)
        expected = [algorithm.run(1, staleness=k).to_dict("index") for k in (1, 1, 0)]
        expected.append(algorithm.run(3, **PAUSING).to_dict("index"))
    gate = tmp_path / "gate"
    gate.touch()
    with tiny_lab("stale-pools", tmp_path, models=MODELS, placement=POOLS, devices=2) as lab:
        algorithm = grpo(lab, vowels_behind(gate))
        algorithm.replace("compute_reward", call_timeout_s=600)
        assert differing(algorithm.run(1, staleness=1), expected[0]) == []
        gate.unlink()  # the second iteration cannot be trained before the third one's rollouts are there
        before = generated(lab)

        def open_gate() -> None:
            while generated(lab) == before and not closing.wait(0.02):
                pass
            gate.touch()

        closing = threading.Event()
        opener = threading.Thread(target=open_gate)
        opener.start()
        try:
            found = algorithm.run(1, staleness=1)
        finally:
            closing.set()
            opener.join()
        assert differing(found, expected[1]) == []
        syncs = lab.syncs()
        assert syncs[syncs["event"] == "generation"]["version"].tolist() == [0, 0, 4]
        assert (syncs["verdict"] == "ok").all()
        del registry.opened["stale-pools"]  # as in another kernel, which has what waits
        with wb.attach("stale-pools") as again:
            assert again is not lab and len(again.buffer) == 4
            algorithm = grpo(again)
            # as a move without the rollout workers that was interrupted: what they drew stays with the trainer
            again.hosts.backend.work("train-0", "abandon_move", ["rollout-0"]).result()
            os.kill(again.hosts.backend.processes["rollout-0"].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            assert differing(algorithm.run(1), expected[2]) == []  # rollouts wait where they are trained on
            with pytest.raises(HostDied, match="rollout"):
                algorithm.run(3, **PAUSING)
            # which of them were begun depends on when the death was noticed
            assert set(again.runs()["state"]) - {"not run"} == {"done", "failed"}
            assert again.recover() is None
            assert differing(algorithm.run(3, **PAUSING), expected[3]) == []  # nothing went back


def differing(found: Any, expected: Any) -> list[tuple[int, str]]:
    """Where a frame is not equal to the last bit; NaN is equal to NaN. What only pools have, bytes, is left out."""
    rows = found.drop(columns="generate_sequences/sync/received_bytes", errors="ignore").to_dict("index")
    assert list(rows) == list(expected)
    return [
        (row, name)
        for row in expected
        for name in {**rows[row], **expected[row]}
        if not same(rows[row].get(name), expected[row].get(name))
    ]


def same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and isnan(one) and isnan(other))
