from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.support.machine import total_bytes
from workbench.telemetry import MemoryReading, Span, TelemetryStore
from workbench.telemetry.store import MEMORY_COLUMNS
from workbench_widgets.driver import Driver
from workbench_widgets.memory import Memory
from workbench_widgets.saved_picture import SavedPicture


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("held", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


GPU = MemoryReading(
    time_s=10.0, iteration=1, host="main-0", device="cuda:1", held={"actor": {"parameters": 40, "offloaded": 60}},
    batch_bytes=5, resident_bytes=1000, used_bytes=50, capacity_bytes=100,
)  # fmt: skip


def test_shares_are_of_the_devices_own_memory() -> None:
    assert GPU.shares() == {("actor", "parameters"): 40, ("other", "on the device"): 10}
    cpu = MemoryReading(**{**GPU.row(), "device": "cpu:0", "used_bytes": 0})
    assert sum(cpu.shares().values()) == cpu.resident_bytes
    assert cpu.shares()["batch", "batches"] == 5
    assert MemoryReading(**json.loads(json.dumps(cpu.row()))) == cpu


def test_readings_are_kept(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path)
    assert {name: str(kind) for name, kind in store.memory().dtypes.items()} == MEMORY_COLUMNS
    store.append_memory([GPU, MemoryReading(time_s=11.0, iteration=1, host="main-1", device="cuda:2", error="gone")])
    frame: Any = store.memory()
    assert frame[["host", "owner", "use", "held_bytes"]].values.tolist() == [
        ["main-0", "actor", "parameters", 40], ["main-0", "other", "on the device", 10],
    ]  # fmt: skip


def test_what_hosts_hold_is_read_and_drawn(lab: wb.Workbench) -> None:
    wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4)).run(1)
    (reading,) = lab.read_memory()
    live: Any = lab.topology().set_index("role").filter(like="_bytes")
    for role in ("actor", "critic", "reference"):
        held = {f"{use.replace(' ', '_')}_bytes": n for use, n in reading.held[role].items()}
        assert {name: n for name, n in live.loc[role].items() if name in held} == held
        assert sum(held.values()) == sum(n for name, n in live.loc[role].items() if not name.startswith("host_"))
    assert reading.batch_bytes == live["host_batch_bytes"].iloc[0]
    assert reading.capacity_bytes == total_bytes() > reading.resident_bytes
    view: Any = Memory(lab, Driver(lab))
    view.on_read()
    (chart,) = view.charts()
    areas = {curve.name: curve.y[-1] for curve in chart.curves if curve.kind == "area"}
    assert sum(areas.values()) == view._devices["cpu:0"].last.resident_bytes
    assert areas["actor: optimizer"] == live.loc["actor", "optimizer_bytes"]
    (marks,) = [curve for curve in chart.curves if curve.kind == "points"]
    spans: Any = lab.spans()
    tops = spans[(spans["parent"] == "") & (spans["peak_memory_bytes"] > 0)]
    assert sorted(marks.y) == sorted(tops["peak_memory_bytes"])
    assert chart.limit is None
    view.act("capacity", {"value": True})
    assert view.charts()[0].limit[0] == total_bytes()
    assert "memory of held by role" in view.picture()
    json.dumps(view.payload()[0], allow_nan=False)


def test_an_idle_workbench_is_not_asked_again_for_each_saved_picture(lab: wb.Workbench) -> None:
    view: Any = Memory(lab, Driver(lab))
    saved: Any = SavedPicture()
    view._ask()
    counted = len(lab.telemetry.memory())
    for _ in range(4):
        view._asked_s = 0.0  # however long ago that was
        saved._draw_all([view])
        assert view._asking is None
    assert len(lab.telemetry.memory()) == counted
    assert not saved._changed(view)


def test_hosts_that_are_gone_hold_nothing_now(lab: wb.Workbench) -> None:
    (now,) = lab.read_memory()
    gone = replace(now, host="before-the-move-0", device="cpu:7")
    lab.telemetry.append_memory([gone, replace(gone, host="before-the-move-1", error="no answer in 1 s")])
    view: Any = Memory(lab, Driver(lab))
    assert "cpu:7" in [chart.title.partition(",")[0] for chart in view.charts()], "its past is drawn"
    assert "before-the-move" not in view.below() + view.notes()


def test_a_long_record_costs_what_is_added_and_is_drawn_in_few_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.light import describe
    from workbench.controller import Workbench

    lab = Workbench(describe({"actor": None, "reward": None}, wb.Placement.split(2)), tmp_path)
    store, view = lab.telemetry, Memory(lab, Driver(lab))
    count, highest = 4000, 1234

    def reading(n: int, **held: int) -> MemoryReading:
        return replace(GPU, time_s=float(n), used_bytes=900 if n == highest else 50, held={"actor": held})

    def span(n: int) -> Span:
        labels: dict[str, Any] = {"stage": "update_actor", "run": n, "role": "actor", "pool": "main", "rank": 0}
        peak = 5000 if n == highest else n
        return Span(**labels, device="cuda:1", kind="compute", start_s=n, end_s=n + 0.5, peak_memory_bytes=peak)

    store.append_memory(reading(n, parameters=40) for n in range(count))
    store.append_spans(span(n) for n in range(1, count))
    (chart,) = view.charts()
    *areas, peaks = chart.curves
    assert [curve.name for curve in areas] == ["actor: parameters", "other: on the device"]
    for curve in chart.curves:
        assert 200 < len(curve.x) == len(curve.y) == len(curve.words) <= 500
        assert list(curve.x) == sorted(set(curve.x))
    assert (max(areas[1].y), areas[1].x[areas[1].y.index(860)]) == (860, highest)
    assert (max(peaks.y), peaks.x[peaks.y.index(5000)]) == (5000, highest + 0.5)
    assert areas[0].x[-1] == count - 1
    assert "the highest of 16 readings" in chart.note

    asked: list[MemoryReading] = []
    shares = MemoryReading.shares

    def counted(self: MemoryReading) -> dict[tuple[str, str], int]:
        asked.append(self)
        return shares(self)

    monkeypatch.setattr(MemoryReading, "shares", counted)
    store.append_memory([reading(count, parameters=30)])
    (chart,) = view.charts()
    assert {one.time_s for one in asked} == {count}
    assert [curve.y[-1] for curve in chart.curves[:2]] == [30, 20]
    store.append_memory([reading(count + 1, parameters=30, gradients=5)])
    (chart,) = view.charts()
    late = chart.curves[1]
    assert (late.name, set(late.y[:-1]), late.y[-1]) == ("actor: gradients", {0}, 5)
    assert len(late.y) == len(chart.curves[0].y)


def test_hosts_are_asked_after_something_has_happened_and_not_often(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = Memory(lab, Driver(lab))
    passed_s = [0.0]
    clock = SimpleNamespace(time=lambda: time.time() + passed_s[0])
    monkeypatch.setattr("workbench_widgets.memory.time", clock)

    def readings() -> int:
        return len(lab.telemetry.memory()["time_s"].unique())

    def look() -> int:
        for _ in range(4):
            view.depends_on()
            if view._asking is not None:
                view._asking.join()
            passed_s[0] += 1.0
        return readings()

    once = look()
    assert look() == once  # nothing has happened
    lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2))
    assert look() == once + 2  # as prompts begin an iteration, and for the view


def test_one_host_that_is_gone_leaves_the_figures_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.light import Together, describe
    from workbench.backends.base import Pending
    from workbench.controller import Workbench

    lab = Workbench(describe({"actor": None, "reward": None}, wb.Placement.split(2)), tmp_path)
    lab.hosts.backend = Together()
    lab.hosts.backend.start(lab.hosts.infos)
    ask = lab.hosts.backend.ask

    questions: list[Silent] = []

    class Silent(Pending):
        over = False

        def done(self) -> bool:
            return self.over

        def result(self) -> Any:
            assert self.over, "nobody waits for it"
            return ask(second, "describe").result()

    def ask_or_not(host: str, *args: Any) -> Pending:
        if host != second:
            return ask(host, *args)
        questions.append(Silent())
        return questions[-1]

    first, second = (info.name for info in lab.hosts.infos)
    monkeypatch.setattr(lab.hosts.backend, "ask", ask_or_not)
    good, silent = lab.read_memory(timeout_s=0.5)
    assert (good.host, good.error, good.resident_bytes > 0) == (first, "", True)
    assert (silent.host, silent.error, silent.resident_bytes) == (second, "no answer in 0.5 s", 0)
    view = Memory(lab, Driver(lab))
    view.depends_on()
    assert f"{second} ({silent.device}): no answer" in view.notes()
    lab.read_memory(timeout_s=0.5)
    assert len(questions) == 1  # it has not answered the first
    assert [chart.title for chart in view.charts()] == [f"{good.device}, {first}"]
    picture = lab.memory()._repr_html_()
    assert "no answer" in picture
    assert first in picture
    questions[0].over = True
    lab.read_memory(timeout_s=0.5)
    assert len(questions) == 2


def test_a_closed_workbench_shows_what_was_read(tmp_path: Path) -> None:
    models = {"actor": TINY, "reward": vowels}
    with tiny_lab("over", tmp_path, backend="inline", models=models) as lab:
        view = Memory(lab, Driver(lab))
        assert "cpu:0" in view.picture()
    view.on_read()
    assert "is closed" in view.notes()
    assert len(view.charts()) == 1
