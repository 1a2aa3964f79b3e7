"""The timeline view: what it sends adds up to what was recorded, and what it says of a span is what was recorded."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from tests.cases import tiny_lab
from tests.display.by_rows import device_times
from tests.expected import expect_error
from workbench.display.idle import CAUSES
from workbench.display.span_table import SpanTable
from workbench.display.timeline import times_of
from workbench.errors import BadInput
from workbench.telemetry import Span, TelemetryStore
from workbench.telemetry.span_lines import SpanLines
from workbench_widgets import Driver
from workbench_widgets.timeline import WINDOWS, TimelineView


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
    return view.payload(whole=False)[0]


def plain(svg: str) -> str:
    """A picture without the ids of its patterns and the numbers of its spans."""
    return re.sub(r't[0-9a-f]{10}(-\d+)?-|data-n="\d+"', "", svg)


def titles(view: TimelineView) -> list[str]:
    return [section.title for section in view._sections()]


def times(view: TimelineView) -> list[dict[str, Any]]:
    return times_of(view._table, view._sections(), view._gaps())


def test_what_is_added_piece_by_piece_is_drawn_as_the_whole(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", "cpu:0"), ("train", "cpu:1"), ("rollout", "cpu:2")])
    view = TimelineView(lab, None)
    view.on_show("all")
    drawing(view)
    rng = np.random.default_rng(3)
    sizes = []
    for run in range(40):
        lab.telemetry.append_event("iteration", iteration=run // 4 + 1)
        starts = 1e9 + 2 * run + rng.random(3)
        before = view.depends_on()
        lab.telemetry.append_spans(span(run, starts[n], starts[n] + rng.random(), n, tokens=run) for n in range(3))
        assert view.depends_on() != before
        sizes.append(len(drawing(view)["svg"]))
        after = view.depends_on()
        assert after == view.depends_on()
    late = TimelineView(lab, None)
    late.on_show("all")
    assert plain(drawing(view)["svg"]) == plain(drawing(late)["svg"])
    assert drawing(view)["svg"].count('class="span"') == drawing(view)["spans"] == 120


def test_a_drawing_of_many_spans_is_not_larger_than_the_page_can_show(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", "cpu:0"), ("train", "cpu:1")])
    view = TimelineView(lab, None)
    view.on_show("all")
    lab.telemetry.append_spans(
        span(run, 1e9 + run, 1e9 + run + 0.5 + run % 7 / 14, run % 2, role=("actor", "critic")[run % 3 % 2])
        for run in range(20_000)
    )
    data = drawing(view)
    assert data["spans"] == 20_000
    assert data["svg"].count("<rect") + data["svg"].count("<path") < 200
    assert len(data["svg"]) < 200_000
    assert "spans of critic, too short to draw one by one: zoom in" in data["svg"]
    view.act("look", {"asked": "a", "width": 900, "view": [100.0, 110.0]})
    data = drawing(view)
    assert data["view"] == (100.0, 110.0)
    assert data["asked"] == "a"
    assert 18 <= data["svg"].count('class="span"') <= 22  # those in sight, and as many again at the sides
    assert "too short" not in data["svg"]
    assert 'data-n="105"' in data["svg"]
    view.act("look", {"asked": "b", "width": 10**9, "view": [5.0, 5.0]})  # whatever a page asks for
    assert drawing(view)["svg"].startswith("<svg")


def test_a_table_places_spans_as_the_static_picture_does_whenever_they_come() -> None:
    spans = [
        span(1, 2, 8), span(1, 2, 5, kind="forward", parent="compute"),
        span(1, 5, 8, kind="optimizer", parent="compute"), span(1, 6, 7, kind="communication", parent="optimizer"),
        span(1, 0, 2, kind="queue"), span(2, 4, 9), span(3, 8, 12),
    ]  # fmt: skip
    rows = [one.row() for one in spans]
    expected = {
        (1, "queue"): (0, 0), (1, "compute"): (0, 0), (1, "forward"): (0, 1), (1, "optimizer"): (0, 1),
        (1, "communication"): (0, 2), (2, "compute"): (1, 0), (3, "compute"): (0, 0),
    }  # fmt: skip
    whole = SpanTable()
    whole.add(SpanLines.of_rows(rows))
    assert places(whole) == expected
    table = SpanTable()
    table.add(SpanLines.of_rows([rows[1]]), last=False)  # a child before the bar of its stage waits for it
    assert len(table) == 0
    table.add(SpanLines.of_rows([rows[0], *rows[2:5]]), last=False)
    table.add(SpanLines.of_rows(rows[5:]), last=False)
    assert places(table) == expected
    table.add(SpanLines.of_rows([span(9, 20, 21, kind="forward", parent="compute").row()]), last=False)
    table.add(SpanLines.of_rows([]), last=False)
    assert len(table) == 8  # the bar never came


def places(table: SpanTable) -> dict[tuple[int, str], tuple[int, int]]:
    rows = map(table.row, range(len(table)))
    return {(row["run"], row["kind"]): (row["sublane"], row["depth"]) for row in rows}


def test_a_span_is_given_back_as_it_was_stored() -> None:
    given = span(7, 1.25, 3.5, tokens=11, bytes=2**40, peak_memory_bytes=2**41, note="late", parent="").row()
    table = SpanTable([("train", "cpu:0")])
    table.add(SpanLines.of_rows([given]))
    row = table.row(0)
    assert {name: row[name] for name in given} == given
    assert row["duration_s"] == 2.25


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("timeline-view", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        wb.PPO(lab, prompts=2, sampling=wb.Sampling(max_new_tokens=2)).run(2)
        yield lab


def test_times_of_a_live_workbench_agree_with_its_spans(lab: wb.Workbench) -> None:
    view = TimelineView(lab, Driver(lab))
    view.on_show("compare")
    data, _ = view.payload(whole=True)
    assert titles(view) == ["iteration 1", "iteration 2"]
    assert all(f">{title}</text>" in data["svg"] for title in titles(view))
    spans: list[Any] = lab.spans().to_dict("records")
    (pool, device), *_ = lab.devices()
    for section, row in zip(view._sections(), times(view), strict=True):
        expected = device_times(spans, device, pool, section.start_s, section.end_s)
        assert row["busy_s"] == pytest.approx(expected["busy_s"], abs=1e-5)
        assert sum(row[cause.column] for cause in CAUSES) == pytest.approx(
            expected["transfer_s"] + expected["idle_s"], abs=1e-5
        )


def test_a_chosen_span_tells_its_facts_and_why_nothing_ran_before_it(lab: wb.Workbench) -> None:
    view = TimelineView(lab, Driver(lab))
    view.payload(whole=True)
    rows = [view._table.row(n) for n in range(len(view._table))]
    number = next(n for n, row in enumerate(rows) if row["stage"] == "update_actor" and row["kind"] == "compute")
    view.act("choose", {"span": number})
    details = view.payload(whole=False)[0]["details"]
    for fact in ("update_actor", "actor, rank 0", f"{rows[number]['device']} of pool", "before it", "waiting for data"):
        assert fact in details
    assert "was called by no cell" in details
    view.act("choose", {"gap": {"lane": 0, "start_s": 0.0, "end_s": 1.0, "cause": 3}})
    assert "nothing ran" in view.payload(whole=False)[0]["details"]
    view.act("choose", {})
    assert view.payload(whole=False)[0]["details"] == ""


def test_cells_of_another_kernel_are_not_taken_for_ours(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", "cpu:0")])
    view = TimelineView(lab, None)
    lab.telemetry.append_event("run", run=0, stage="update_actor", cell=4, cell_id="a")
    lab.telemetry.append_event("attached")
    lab.telemetry.append_event("run", run=1, stage="update_actor", cell=5, cell_id="b")
    lab.telemetry.append_spans([span(0, 1.0, 2.0), span(1, 2.0, 3.0)])
    view.payload(whole=True)
    assert "cell [4] of an earlier kernel" in view._cell(0)
    assert 'data-cell="5"' in view._cell(1)


def _thinking(tmp_path: Path) -> tuple[Lab, TimelineView]:
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
    return lab, TimelineView(lab, None)


def test_time_between_cells_is_folded_and_what_is_in_sight_stays_when_it_is_unfolded(tmp_path: Path) -> None:
    lab, view = _thinking(tmp_path)
    data = drawing(view)
    assert data["length_s"] == pytest.approx(4 + 0.02 * 4)
    assert ">2 min 00 s, nothing called</text>" in data["svg"]
    assert "2 min 00 s, nothing called" in view.picture()
    assert "fold time in which nothing was called" in view.controls()
    view.act("look", {"asked": "a", "width": 900, "view": [2.08, 3.08]})  # the first second behind the break
    assert drawing(view)["view"] == pytest.approx((2.08, 3.08))
    lab.telemetry.append_event("run", run=9, stage="generate", cell=3, cell_id="")
    lab.telemetry.append_spans([span(9, 1e9 + 124, 1e9 + 160)])  # breaks are as wide as the new picture asks for
    data = drawing(view)
    assert view._times(data["view"]) == pytest.approx((122.0, 123.0))
    view.act("fold", {"value": False})
    data = drawing(view)
    assert data["view"] == pytest.approx((122.0, 123.0))
    assert data["length_s"] == pytest.approx(160.0)
    assert "2 min 00 s, nothing called" not in data["svg"]
    assert "2 min 00 s, nothing called" not in view.picture()
    view.act("fold", {"value": True})
    assert "2 min 00 s, nothing called" in view.picture()


def test_a_search_counts_marks_and_goes_from_match_to_match(tmp_path: Path) -> None:
    _, view = _thinking(tmp_path)
    assert drawing(view)["search"]["told"] == ""
    seen = []
    for given in ({"value": "generate"}, {"value": "generate", "by": 1}, {"value": "generate", "by": 1},
                  {"value": "generate", "by": -1}):  # fmt: skip
        view.act("find", given)
        data = drawing(view)
        seen.append((data["search"]["told"], data["chosen"]))
    assert seen == [("1 of 2 spans", 1), ("2 of 2 spans", 3), ("1 of 2 spans", 1), ("2 of 2 spans", 3)]
    assert data["svg"].count('class="hit"') == 1  # one line for each lane
    assert "generate" in data["details"]
    assert data["view"] is None  # it is in sight, and wide enough
    view.act("look", {"asked": "a", "width": 900, "view": [0.0, 0.5]})
    view.act("find", {"value": "cell:2 actor"})
    data = drawing(view)
    assert data["search"]["told"] == "1 of 1 span"
    from_s, to_s = view._times(data["view"])
    assert from_s <= 122.0
    assert to_s >= 123.0
    view.act("find", {"value": "nobody"})
    assert drawing(view)["search"]["told"] == "no spans"
    view.act("find", {"value": ""})
    assert 'class="hit"' not in drawing(view)["svg"]


def test_a_short_span_that_was_searched_for_is_zoomed_to_and_others_outside_are_counted(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", "cpu:0")])
    view = TimelineView(lab, None)
    for iteration in (0, 1):
        _event(lab, "iteration", 1e9 + 1000 * iteration, iteration=iteration + 1)
        start_s = 1e9 + 1000 * iteration
        lab.telemetry.append_spans([span(2 * iteration, start_s, start_s + 990)])
        lab.telemetry.append_spans([span(1 + 2 * iteration, start_s + 995, start_s + 995.01, stage="score")])
    drawing(view)
    view.act("find", {"value": "score"})
    data = drawing(view)
    assert data["search"]["told"] == "1 of 1 span; 1 in times that are not shown"
    from_s, to_s = data["view"]
    assert from_s < 995.0 < 995.01 < to_s
    assert (to_s - from_s) * 3 < 0.01 * view._width
    bar = re.search(r'class="span" data-n="3"[^>]* width="([\d.]+)"', data["svg"])
    assert bar is not None
    assert float(bar[1]) >= 3


def test_a_range_is_added_up_in_each_section(tmp_path: Path) -> None:
    _, view = _thinking(tmp_path)
    drawing(view)
    view.act("select", {"view": [0.5, 2.58]})  # half of the first stage to half a second behind the break
    data = drawing(view)
    assert data["range"] == pytest.approx((0.5, 2.58))
    assert "from 0.500 s to 122.500 s, 2 min 02 s on 2 devices" in data["sums"]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", data["sums"])
    assert cells[:7] == ["actor", "update_actor", "compute", "2", "1.0 s", "100", "10 B"]
    assert cells[7:14] == ["rollout", "generate", "compute", "1", "1.0 s", "100", "10 B"]
    assert cells[14:] == ["waiting for another pool", "2.0 s", "50 %", "nothing called", "4 min 00 s", ""]
    view.act("select", {})
    data = drawing(view)
    assert (data["range"], data["sums"]) == (None, "")


def test_windows_and_wrong_values(lab: wb.Workbench) -> None:
    view = TimelineView(lab, Driver(lab))
    view.payload(whole=True)
    found = {}
    for window in WINDOWS:
        view.act("show", {"value": window})
        drawing(view)
        found[window] = titles(view)
    assert found == {
        "last": ["iteration 2"], "several": ["iterations 1 to 2"], "all": ["all"],
        "compare": ["iteration 1", "iteration 2"],
    }  # fmt: skip
    view.receive(iteration=1)
    drawing(view)
    assert titles(view) == ["iteration 1"]
    assert "iteration 1" in view.controls()
    with expect_error(BadInput, rule="each iteration that has begun"):
        view.act("show", {"value": "iteration 9"})
    for value in ("0", "many", None):
        with expect_error(BadInput, rule="whole number"):
            view.act("iterations", {"value": value})


def test_the_still_picture_of_many_spans_stays_small(tmp_path: Path) -> None:
    lab = Lab(tmp_path, [("train", f"cpu:{n}") for n in range(8)])
    lab.telemetry.append_spans(
        span(run, 1e9 + run + n / 50, 1e9 + run + 0.5 + (run * 7 + n) % 11 / 25, n)
        for run in range(1000)
        for n in range(8)
    )
    view = TimelineView(lab, None)
    view.on_show("all")
    picture = view.picture()
    assert len(picture) < 200_000
    assert "spans are too short to draw" in picture
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
    view.payload(whole=True)
    lab.lanes = [("b", "cpu:0"), ("b", "cpu:1")]  # nothing runs on cpu:1
    _event(lab, "move", 5.0, placement="", seconds=1.0)
    lab.telemetry.append_spans([span(1, 6.0, 8.0, pool="b"), span(2, 11.0, 14.0, pool="b")])
    view.on_show("all")
    drawing(view)
    named, gaps = {lane: n for n, lane in enumerate(view._table.lanes)}, view._gaps()
    idle = {lane: float((gaps.end_s - gaps.start_s)[gaps.lane == number].sum()) for lane, number in named.items()}
    assert idle == {("a", "cpu:0"): 2.0, ("b", "cpu:0"): 5.0, ("b", "cpu:1"): 10.0}
    rows = {(row["pool"], row["device"]): row for row in times(view)}
    assert {lane: (row["busy_s"], row["window_s"]) for lane, row in rows.items()} == {
        ("a", "cpu:0"): (2.0, 4.0), ("b", "cpu:0"): (5.0, 10.0), ("b", "cpu:1"): (0.0, 10.0),
    }  # fmt: skip
    still = {(row["pool"], row["device"]): row["busy_s"] + row["idle_s"] for row in view._still().summary}
    assert still[("a", "cpu:0")] == 4.0
    assert still[("b", "cpu:0")] == 10.0
    view.on_show("last")
    drawing(view)
    assert shown(view) == {("b", "cpu:0"), ("b", "cpu:1")}
    assert {row["pool"] for row in times(view)} == {"b"}
    view.on_show("iteration 1")
    lab.lanes = [("c", "cpu:7")]
    _event(lab, "move", 16.0, placement="", seconds=1.0)
    drawing(view)
    assert ("c", "cpu:7") not in shown(view)


def shown(view: TimelineView) -> set[tuple[str, str]]:
    return {view._table.lanes[lane] for section in view._sections() for lane in section.lanes}


def _event(lab: Lab, event: str, time_s: float, **details: Any) -> None:
    with (lab.telemetry.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time_s": time_s, "event": event, "details": details}) + "\n")


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
    view.on_show("all")
    view.payload(whole=True)
    gaps = view._gaps()
    long_ones = (gaps.start_s > began_s) & (gaps.end_s - gaps.start_s > 0.2)
    assert [CAUSES[n].words for n in gaps.cause[long_ones]] == ["controller", "nothing called", "controller"]
    (folding,) = (section.folding for section in view._folded(gaps))
    start_s = folding.start_s + view._sections()[0].start_s
    assert len(start_s[start_s > began_s]) == 1
    assert "was called by a button of a panel" in view._cell(int(view._table.columns["run"].max()))
    assert "nothing called</text>" in lab.timeline(None).svg
    assert ", nothing called</text>" not in lab.timeline(None, fold=False).svg
