"""The strip, on a real workbench: its figures against the tables that they come from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import workbench as wb
from tests.cases import tiny_lab
from workbench.display.html import bytes_text


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("strip", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def test_its_line(lab: Any) -> None:
    shown = lab.strip()
    assert shown is lab.strip()
    assert "strip" not in lab.panel().views
    strip: Any = shown.views["strip"]
    assert strip.text() == "iteration 0: nothing runs | no warnings"
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
    ppo.run(2)
    ppo.step()
    ppo.step()
    time.sleep(0.5)  # the user thinks
    ppo.iterate()
    runs = lab.runs()[lambda frame: frame["iteration"] == 3]
    spans = lab.spans()[lambda frame: frame["run"].isin(runs["run"])]
    took_s = (runs["ended_s"] - runs["started_s"]).sum()  # one after the other
    assert took_s < runs["ended_s"].max() - runs["started_s"].min() - 0.5
    rate = spans["processed_tokens"].sum() / took_s
    reward = lab.metrics("compute_reward")["rewards/mean"].iloc[-1]
    reading = lab.read_memory()[0]
    held = f"{bytes_text(sum(reading.shares().values()))} of {bytes_text(reading.capacity_bytes)} on cpu:0"
    assert strip.text() == (
        f"iteration 3: nothing runs | tokens/s {rate:,.0f} | reward {reward:.4g} | memory {held} | no warnings"
    )
    assert strip.depends_on() == strip.depends_on()
    live, still = strip.picture(), strip.still()
    assert ("connected" in live, "connected" in still) == (True, False)
    assert "reward of the last 3 iterations" in still


def test_hosts_that_are_gone_hold_nothing(lab: Any) -> None:
    strip: Any = lab.strip().views["strip"]
    (now,) = lab.read_memory()
    before = strip.text()
    full = replace(now, host="before-the-move-0", device="cpu:7", resident_bytes=now.capacity_bytes)
    lab.telemetry.append_memory([full, replace(full, host="before-the-move-1", error="no answer in 1 s")])
    assert strip.text() == before


def test_what_is_wrong(lab: Any) -> None:
    strip: Any = lab.strip().views["strip"]

    def broken(prompt: str, response: str, **row: Any) -> float:
        raise ZeroDivisionError("on purpose")

    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=3)
    with pytest.raises(wb.errors.RewardError):
        lab.reward.compute_reward(batch, function=broken)
    assert strip.text().endswith("| compute_reward failed")
    lab.reward.compute_reward(batch)
    assert strip.text().endswith("| no warnings")
    lab.hosts.lost["shared"] = "a test"
    try:
        assert strip.text().endswith("| pool shared is lost")
    finally:
        del lab.hosts.lost["shared"]
