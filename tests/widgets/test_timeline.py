"""The timeline view: what it sends is what was recorded, and what it says of a span is what was recorded."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.cases import tiny_lab
from tests.display.by_rows import device_times
from tests.expected import expect_error
from workbench.display.idle import CAUSES
from workbench.errors import BadInput
from workbench.session.history import History
from workbench.telemetry import Span, TelemetryStore
from workbench_widgets import Driver
from workbench_widgets.timeline import MOST_ITERATIONS, TimelineView


class Lab:
    """Of a workbench what the view looks at: real telemetry, no workers."""

    def __init__(self, folder: Path, lanes: list[tuple[str, str]]) -> None:
        self.telemetry, self.lanes = TelemetryStore(folder), lanes

    def devices(self) -> list[tuple[str, str]]:
        return self.lanes


def span(run: int, start_s: float, end_s: float, device: int = 0, **more: Any) -> Span:
    given = {"stage": "update_actor", "role": "actor", "pool": "train", "kind": "compute", **more}
    return Span(run=run, rank=device, device=f"cpu:{device}", start_s=start_s, end_s=end_s, **given)


def drawing(view: TimelineView) -> dict[str, Any]:
    return view.payload()[0]


def _event(lab: Lab, event: str, time_s: float, **details: Any) -> None:
    with (lab.telemetry.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time_s": time_s, "event": event, "details": details}) + "\n")


def test_what_is_added_piece_by_piece_is_drawn_as_the_whole(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", "cpu:0"), ("train", "cpu:1"), ("rollout", "cpu:2")])
    view, rng = TimelineView(lab, None), np.random.default_rng(3)
    for run in range(8):
        starts = 1e9 + 2 * run + rng.random(3)
        before = view.depends_on()
        lab.telemetry.append_spans(span(run, starts[n], starts[n] + rng.random(), n, tokens=run) for n in range(3))
        assert view.depends_on() != before
        after = drawing(view), view.depends_on()
        assert after[1] == view.depends_on()
    whole = drawing(TimelineView(lab, None))
    ids = re.compile(r"t[0-9a-f]{10}(-\d+)?-")
    assert ids.sub("", drawing(view)["svg"]) == ids.sub("", whole["svg"])
    assert whole["svg"].count('class="span"') == whole["spans"] == 24


def test_only_the_newest_spans_and_iterations_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench_widgets.timeline.MOST_SPANS", 30)
    lab = Lab(tmp_path, [("train", "cpu:0")])
    view = TimelineView(lab, None)
    for number in range(1, 21):
        _event(lab, "iteration", 1e9 + 10 * number, iteration=number)
        lab.telemetry.append_spans(span(number, 1e9 + 10 * number + n, 1e9 + 10 * number + n + 1) for n in (1, 2))
    assert drawing(view)["spans"] == 2
    assert [number for number, *_ in view._iterations()] == list(range(21 - MOST_ITERATIONS, 21))
    view.act("show", {"value": "several"})
    assert drawing(view)["spans"] == 2 * 3
    view.receive(iteration=15)
    assert drawing(view)["spans"] == 2 and 'value="iteration 15" selected' in view.controls()
    for act, value in (("show", "iteration 2"), ("iterations", MOST_ITERATIONS + 1)):
        with expect_error(BadInput, remedy=r"lab\.trace"):
            view.act(act, {"value": value})
    for wrong in ("0", "many", None):
        with expect_error(BadInput, rule="whole number"):
            view.act("iterations", {"value": wrong})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("timeline-view", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        wb.PPO(lab, prompts=2, sampling=wb.Sampling(max_new_tokens=2)).run(2)
        yield lab


def test_times_of_a_live_workbench_agree_with_its_spans(lab: wb.Workbench) -> None:
    view = TimelineView(lab, Driver(lab))
    spans: list[Any] = lab.spans().to_dict("records")
    (pool, device), *_ = lab.devices()
    view.on_show("several")
    for shown in ("last", "several"):
        view.on_show(shown)
        picture = view._draw()
        (row,) = picture.summary
        expected = device_times(spans, device, pool, *picture.window)
        assert row["busy_s"] == pytest.approx(expected["busy_s"], abs=1e-5)
        idle_s = sum(row[cause.column] for cause in CAUSES)
        assert idle_s == pytest.approx(expected["transfer_s"] + expected["idle_s"], abs=1e-5)


def test_a_chosen_span_tells_its_facts_and_why_nothing_ran_before_it(lab: wb.Workbench) -> None:
    view = TimelineView(lab, Driver(lab))
    drawing(view)
    row = next(
        row for row in view._spans if row["stage"] == "update_actor" and row["kind"] == "compute" and row["run"] > 10
    )
    view.act("choose", {"span": row["number"]})
    details = drawing(view)["details"]
    for fact in ("update_actor", "actor, rank 0", f"{row['device']} of pool", "before it", "waiting for data"):
        assert fact in details
    assert "was called by no cell" in details
    view.act("choose", {"gap": {"lane": 0, "start_s": 0.0, "end_s": 1.0, "cause": 3}})
    assert "nothing ran" in drawing(view)["details"]
    view.act("choose", {})
    assert drawing(view)["details"] == ""


def test_cells_of_another_kernel_are_not_taken_for_ours(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", "cpu:0")])
    view = TimelineView(lab, None)
    lab.telemetry.append_event("run", run=0, stage="update_actor", cell=4, cell_id="a")
    lab.telemetry.append_event("attached")
    lab.telemetry.append_event("run", run=1, stage="update_actor", cell=5, cell_id="b")
    lab.telemetry.append_spans([span(0, 1.0, 2.0), span(1, 2.0, 3.0)])
    drawing(view)
    assert "cell [4] of an earlier kernel" in view._cell(0)
    assert 'data-cell="5"' in view._cell(1)


def test_time_between_cells_is_folded_and_a_range_over_it_is_added_up(tmp_path: Path) -> None:
    """Cells 1 and 2 call two stages each, of one second; two minutes lie between the cells."""
    lab = Lab(tmp_path, [("train", "cpu:0"), ("rollout", "cpu:1")])
    for run, (at, device, stage) in enumerate(
        [(0, 0, "update_actor"), (1, 1, "generate"), (122, 0, "update_actor"), (123, 1, "generate")]
    ):
        lab.telemetry.append_event("run", run=run, stage=stage, cell=1 + run // 2, cell_id="")
        pool, role = ("train", "rollout")[device], ("actor", "rollout")[device]
        lab.telemetry.append_spans(
            [span(run, 1e9 + at, 1e9 + at + 1, device, stage=stage, pool=pool, role=role, tokens=100, bytes=10)]
        )
    view = TimelineView(lab, None)
    data = drawing(view)
    assert data["length_s"] == pytest.approx(4 + 0.02 * 4)
    assert "2 min 00 s, nothing called</text>" in data["svg"]
    assert "2 min 00 s, nothing called" in view.picture()
    view.act("select", {"view": [0.5, 2.58]})  # half of the first stage to half a second behind the break
    data = drawing(view)
    assert data["range"] == pytest.approx((0.5, 2.58))
    assert "from 0.500 s to 122.500 s, 2 min 02 s on 2 devices" in data["sums"]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", data["sums"])
    assert cells[:7] == ["actor", "update_actor", "compute", "2", "1.0 s", "100", "10 B"]
    assert cells[7:14] == ["rollout", "generate", "compute", "1", "1.0 s", "100", "10 B"]
    assert cells[14:] == ["waiting for another pool", "2.0 s", "50 %", "nothing called", "4 min 00 s", ""]
    view.act("fold", {"value": False})
    data = drawing(view)
    assert (data["range"], data["sums"], data["length_s"]) == (None, "", pytest.approx(124.0))
    assert ", nothing called</text>" not in data["svg"]


def test_the_still_picture_of_many_spans_stays_small(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", f"cpu:{n}") for n in range(8)])
    lab.telemetry.append_spans(
        span(run, 1e9 + run + n / 50, 1e9 + run + 0.5 + (run * 7 + n) % 11 / 25, n)
        for run in range(1000)
        for n in range(8)
    )
    view = TimelineView(lab, None)
    picture = view.picture()
    assert len(picture) < 250_000
    assert "the longest of 8,000 spans" in picture
    assert "<script" not in picture
    assert "waiting for the slowest rank" in picture
    assert (view.svg() or "").startswith("<svg")
    assert "8,000 spans on 8 devices" in view.text()
    assert "no spans" in TimelineView(Lab(tmp_path / "empty", [("train", "cpu:0")]), None).picture()


def test_after_a_move_a_pool_is_idle_only_while_it_is_there(tmp_path: Path) -> None:
    """Pool a has cpu:0 and goes with the move at 4 s; pool b has it from then on."""
    lab = Lab(tmp_path, [("a", "cpu:0")])
    view = TimelineView(lab, None)
    for number, at in enumerate((0.0, 10.0)):
        _event(lab, "iteration", at, iteration=number + 1)
    lab.telemetry.append_spans([span(0, 1.0, 3.0, pool="a")])
    drawing(view)
    lab.lanes = [("b", "cpu:0"), ("b", "cpu:1")]  # nothing runs on cpu:1
    _event(lab, "move", 5.0, placement="", seconds=1.0)
    lab.telemetry.append_spans([span(1, 6.0, 8.0, pool="b"), span(2, 11.0, 14.0, pool="b")])
    view.on_show("several")
    rows = {(row["pool"], row["device"]): row for row in view._draw().summary}
    assert {lane: (row["busy_s"], row["window_s"]) for lane, row in rows.items()} == {
        ("a", "cpu:0"): (2.0, 4.0), ("b", "cpu:0"): (5.0, 10.0), ("b", "cpu:1"): (0.0, 10.0),
    }  # fmt: skip
    assert all(row["busy_s"] + row["idle_s"] == row["window_s"] for row in rows.values())
    view.on_show("last")
    assert [row["device"] for row in view._draw().summary] == ["cpu:0", "cpu:1"]
    assert {row["pool"] for row in view._draw().summary} == {"b"}


def test_the_picture_of_the_last_iterations_is_made_from_these_and_the_one_before(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [])
    for number in range(1, 5):  # each on another device
        _event(lab, "iteration", 1e9 + 10 * number, iteration=number)
        lab.telemetry.append_spans([span(number, 1e9 + 10 * number + 1, 1e9 + 10 * number + 2, number)])
    hosts: Any = SimpleNamespace(infos=[])
    history = History(hosts, hosts, lab.telemetry)
    for iterations, devices in ((1, {3, 4}), (2, {2, 3, 4}), (4, {1, 2, 3, 4}), (None, {1, 2, 3, 4})):
        picture = history.timeline(iterations)
        assert {device for _, device in picture.lanes} == {f"cpu:{device}" for device in devices}
        assert picture.span_count == (iterations or 4)
    for number in range(5, 8):  # prompts were drawn, and no stage was called
        _event(lab, "iteration", 1e9 + 10 * number, iteration=number)
        assert {device for _, device in history.timeline(1).lanes} == {"cpu:3", "cpu:4"}


def test_time_between_two_buttons_of_a_panel_is_nothing_called_and_within_one_it_is_the_controller(
    lab: wb.Workbench,
) -> None:
    began_s = time.time()
    for _ in range(2):  # as a panel's buttons do
        with lab.driving("a test"):
            batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
            time.sleep(0.3)
            lab.actor.compute_log_prob(batch)
        time.sleep(0.3)
    view = TimelineView(lab, Driver(lab))
    view.on_show("several")
    picture = view._draw()
    gaps, folding = picture.gaps, picture.folding
    long_ones = (gaps.start_s > began_s) & (gaps.end_s - gaps.start_s > 0.2)
    assert [CAUSES[n].words for n in gaps.cause[long_ones]] == ["controller", "nothing called", "controller"]
    assert (folding.start_s + picture.window[0] > began_s).sum() == 1
    assert "was called by a button of a panel" in view._cell(max(row["run"] for row in view._spans))
    assert "nothing called</text>" in lab.timeline(None).svg
    assert ", nothing called</text>" not in lab.timeline(None, fold=False).svg
