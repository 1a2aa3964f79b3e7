"""Whatever a stage, a column, a metric, a prompt, a model or an error is called, no view takes it for html."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from tests.cases import tiny_lab
from workbench.batches.columns import Ragged, Table
from workbench.checks import CheckReport, Finding
from workbench.errors import RewardError
from workbench.telemetry.memory import MemoryReading
from workbench.telemetry.spans import Span, Transfer
from workbench_widgets import VIEWS

HOSTILE = """x"'><img src=x onerror=alert(1)>"""
# what a script puts into the page as html
HTML = ("html", "notes", "key", "below", "still", "times", "details")


class Elements(HTMLParser):
    """Fails at what no view of ours makes."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """No picture from elsewhere, no script, and no attribute that is one."""
        assert tag not in ("img", "script", "iframe"), attrs
        assert not any(name.startswith("on") for name, _ in attrs), attrs


def broken(prompt: str, response: str, **row: Any) -> float:
    raise ZeroDivisionError(HOSTILE)


def named(prompt: str, response: str, **row: Any) -> float:
    return 0.5


named.__name__ = named.__qualname__ = HOSTILE


class Answers:
    """An environment whose answers are so."""

    def step(self, response: str) -> tuple[str, float, bool]:
        return HOSTILE, 0.0, False


class Named(wb.PPO):
    """An algorithm whose name is set below."""


Named.__name__ = Named.__qualname__ = HOSTILE


def recorded(lab: wb.Workbench) -> None:
    """Records of a stage, a host and a column that are called so."""
    now_s, device = time.time(), next(device for _, device in lab.devices())
    common: dict[str, Any] = {"stage": HOSTILE, "run": 1, "start_s": now_s - 99, "end_s": now_s}
    span = Span(**common, role=HOSTILE, pool=HOSTILE, rank=0, device=HOSTILE, kind="compute", note=HOSTILE,
                tokens=3, bytes=4, peak_memory_bytes=9)  # fmt: skip
    lab.telemetry.append_spans([span])
    lab.telemetry.append_transfers([Transfer(**common, source=HOSTILE, destination="b", bytes=7, columns=HOSTILE)])
    held = {HOSTILE: {HOSTILE: 5}}
    reading: dict[str, Any] = {"time_s": now_s, "iteration": 1, "capacity_bytes": 99}
    lab.telemetry.append_memory(
        [
            MemoryReading(**reading, host="h", device=HOSTILE, machine=HOSTILE, held=held),
            MemoryReading(**reading, host=HOSTILE, device=device, error=HOSTILE),
        ]
    )


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    runs = tmp_path_factory.mktemp("runs")
    other = runs / HOSTILE.replace("/", "") / "1"
    other.mkdir(parents=True)
    models = {"actor": "tiny-llama-tied", "reference": "tiny-llama-tied", "critic": "tiny-llama-tied", "reward": named}
    with tiny_lab("hostile", runs, backend="inline", models=models) as lab:
        panel = lab.panel(algorithm=Named(lab, prompts=2, sampling=wb.Sampling(max_new_tokens=3)))
        batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=3)
        with pytest.raises(RewardError):
            lab.reward.compute_reward(batch, function=broken)
        lab.report(HOSTILE, {HOSTILE: 0.5})
        (other / "metrics.jsonl").write_text((Path(lab.run_folder) / "metrics.jsonl").read_text())
        recorded(lab)
        chat = lab.conversation(HOSTILE, environment=Answers, sampling=wb.Sampling(max_new_tokens=200, stop=("=",)))
        chat.step()
        ids = Ragged.of([[20, 21], [22]], torch.int64)
        numbers: Table = {HOSTILE: ids.like(torch.ones(3)), f"a {HOSTILE}": torch.ones(2), "prompt_uid": torch.zeros(2)}
        texts: Table = {"prompt": [HOSTILE] * 2, f"b {HOSTILE}": [HOSTILE] * 2}
        for _ in range(2):
            lab.put({"prompt_ids": ids, "response_ids": ids, **numbers, **texts})
        yield panel


def stepper(view: Any) -> None:
    view.act("choose", {"stage": "compute_reward"})


def traffic(view: Any) -> None:
    view.act("stage", {"value": HOSTILE})


def samples(view: Any) -> None:
    view.act("colour", {"value": HOSTILE})
    view.act("sort", {"column": f"a {HOSTILE}"})
    view.act("beside", {"value": list(view.batches())[1]})


def metrics(view: Any) -> None:
    view.act("show", {"stage": HOSTILE, "metric": HOSTILE, "value": True})
    view.act("beside", {"run": next(iter(view.runs())), "value": True})


def timeline(view: Any) -> None:
    view.act("show", {"value": "several"})
    view.act("choose", {"span": 0})  # the one that began first


def checks(view: Any) -> None:
    view.report = CheckReport((Finding(check=HOSTILE, verdict="failed", culprit=HOSTILE, about=HOSTILE),))


ACTS: dict[str, Callable[[Any], None]] = {
    act.__name__: act for act in (stepper, traffic, samples, metrics, timeline, checks)
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_names_are_not_html(panel: Any, name: str) -> None:
    view = panel.views[name]
    ACTS.get(name, lambda _: None)(view)
    drawn = {"controls": view.controls(), "picture": view.picture(), "svg": view.svg() or ""}
    if view.script:
        data, _ = view.payload()
        drawn |= {key: value for key, value in data.items() if key in HTML and value}
    assert any(escape("<img src=x") in html for html in drawn.values())  # it is there, as text
    for html in drawn.values():
        Elements().feed(html)
