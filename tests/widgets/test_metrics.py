from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from tests.cases import tiny_lab
from tests.expected import expect_error
from workbench.display.headlines import unit_of
from workbench.errors import BadInput
from workbench.telemetry import TelemetryStore
from workbench_widgets.charts import plotly_js
from workbench_widgets.driver import Driver
from workbench_widgets.metrics import MetricCurves, Metrics, first_shown


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("curves", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


@pytest.fixture
def view(lab: wb.Workbench) -> Metrics:
    view = Metrics(lab, Driver(lab))
    view.depends_on()
    return view


def line(view: Metrics, title: str, name: str) -> Any:
    (chart,) = [chart for chart in view.charts() if chart.title == title]
    return next((curve for curve in chart.curves if curve.name == name), None)


def test_the_first_metrics_are_those_that_say_most() -> None:
    names = [
        ("generate_sequences", "response_tokens/mean"), ("compute_log_prob", "entropy"), ("evaluate", "n"),
        ("compute_advantages", "rewards/mean"), ("compute_reward", "rewards/mean"), ("update_critic", "loss"),
        ("update_actor", "loss"), ("update_critic", "grad_norm"),
    ]  # fmt: skip
    assert first_shown(names) == [
        ("compute_reward", "rewards/mean"), ("update_actor", "loss"), ("update_critic", "grad_norm"),
        ("generate_sequences", "response_tokens/mean"), ("compute_log_prob", "entropy"),
    ]  # fmt: skip
    # as in the frame of `run`: with dynamic sampling, the mean over all groups, not over the kept ones
    assert first_shown([("compute_reward", "rewards/mean"), ("dynamic_sampling", "rewards/mean")]) == [
        ("dynamic_sampling", "rewards/mean")
    ]
    assert first_shown([("mine", "a"), ("mine", "b")]) == [("mine", "a"), ("mine", "b")]


def test_curves_are_the_metrics_of_the_workbench(lab: wb.Workbench, view: Metrics) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    assert "No stage has reported" in view.picture()
    assert view.text() == "Metrics: nothing"
    ppo.run(2)
    before = view.depends_on()
    assert before == view.depends_on()
    view.on_smooth("0")
    found = lab.metrics("compute_log_prob")
    curve = line(view, "compute_log_prob/entropy", "curves")
    assert (list(curve.x), list(curve.y)) == (found["iteration"].tolist(), found["entropy"].tolist())
    assert len(view.charts()) == 7
    assert f"{found['entropy'].iloc[-1]:.4g}" in view.text()

    # a comparison leaves the curve as it was, and its arms are marks beside it
    lab.compare(lab.prompts.next(2), {"again": ppo})
    assert view.depends_on() != before
    aside = line(view, "compute_log_prob/entropy", "curves, in comparisons and checks")
    assert line(view, "compute_log_prob/entropy", "curves").y == curve.y
    assert (aside.kind, list(aside.y)) == ("points", lab.metrics("compute_log_prob")["entropy"].tolist()[2:])

    # also where the files are all that is left: after another attach, and beside another run
    read = MetricCurves(TelemetryStore(lab.run_folder))
    read.read()
    name = ("compute_log_prob", "entropy")
    assert read.by_name[name] == view._own.by_name[name]
    assert read.by_name[name].values == curve.y


def test_the_figure_of_the_page_is_the_one_that_a_cell_keeps(lab: wb.Workbench, view: Metrics) -> None:
    view.on_show("mine", "loss", True)
    for loss in (1.0, math.nan, 3.0):
        lab.report("mine", {"loss": loss})
    view.shown = [("mine", "loss")]
    data, buffers = view.payload()
    assert buffers == [] and data["figure"] == view.figure()
    faint, smooth = json.loads(json.dumps(data, allow_nan=False))["figure"]["data"]
    assert (faint["y"], smooth["y"]) == ([1.0, None, 3.0], [1.0, None, pytest.approx((0.4 * 3 + 0.24) / 0.64)])
    assert "1 not finite" in [one["text"] for one in data["figure"]["layout"]["annotations"]]
    assert "<caption>mine/loss, no unit</caption>" in data["below"]
    view.on_library()
    assert view.payload()[1] == [plotly_js()] and view.payload()[1] == []
    assert b"plotly.js v" in gzip.decompress(plotly_js())[:200]


def test_other_runs_are_beside_it(lab: wb.Workbench, view: Metrics) -> None:
    other = TelemetryStore(lab.run_folder.parent.parent / "<old>" / "20250101-000000")
    other.append_metrics("update_actor", 1, 7, {"loss": 0.25})
    assert list(view.runs()) == ["<old>/20250101-000000"]
    view.on_beside("<old>/20250101-000000", True)
    view.on_smooth(0)
    assert list(line(view, "update_actor/loss", "<old>/20250101-000000").x) == [7]
    before = view.depends_on()
    other.append_metrics("update_actor", 2, 8, {"loss": 0.5})
    assert view.depends_on() != before
    assert "<old>" not in view.controls() + view.picture()
    with expect_error(BadInput, value="samples of <old>"):
        view.on_look(7, "<old>/20250101-000000")
    view.on_beside("<old>/20250101-000000", False)
    assert line(view, "update_actor/loss", "<old>/20250101-000000") is None
    with expect_error(BadInput, rule="1 others have metrics"):
        view.on_beside("nobody", True)


def test_metrics_are_found_and_chosen(lab: wb.Workbench, view: Metrics) -> None:
    first = view.drawn()
    view.act("sought", {"value": "UPDATE_critic clip"})
    assert {stage for stage, _ in view._found()} == {"update_critic"}
    view.on_show_found()
    assert len(view.drawn()) == len(first) + len(view._found())
    view.on_hide_found()
    assert view.drawn() == [name for name in view.names() if name in first]
    view.act("sought", {"value": ""})
    view.on_hide_found()
    assert "No metric is chosen" in view.picture()
    view.on_show_first()
    assert view.drawn() == first
    view.act("y", {"value": "log"})
    assert "not above 0" in str(view.figure())


def test_a_point_leads_to_the_samples(lab: wb.Workbench, view: Metrics) -> None:
    turned: list[Any] = []
    view.turn = lambda name, **given: turned.append((name, given))
    while lab.iteration < 2:
        wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4)).run(1)
    view.depends_on()
    view.on_look(1.0)
    view.on_iteration("2")
    view.on_samples()
    assert turned == [("samples", {"iteration": 1}), ("samples", {"iteration": 2})]
    assert view.charts()[0].at == 2
    for wrong in ("0", "99", "", "x"):
        with expect_error(BadInput, rule="iterations go from 1 to"):
            view.on_iteration(wrong)


def test_what_metrics_are_counted_in() -> None:
    wanted = {
        "tokens": ["response_tokens/mean", "sampling_mask_tokens/max"],
        "fraction": ["truncated/fraction", "teacher_tokens/mass", "value_clip_fraction"],
        "nats": ["entropy", "reference_kl", "reference_kl_per_response", "rollout_gap/max", "old_log_prob/mean"],
        "no unit": ["kl_coefficient", "first_minibatch/loss", "ratio/max_deviation", "learning_rate"],
        "count": ["optimizer_steps", "steps/mean"],
        "bytes": ["sync/received_bytes"], "seconds": ["weight_sync_s", "loading_seconds"], "reward": ["rewards/mean"],
        "tokens per second": ["tokens/s", "tokens_per_s"], "value": ["my_score", "skill"],
    }  # fmt: skip
    assert {unit: [name for name in names if unit_of(name) == unit] for unit, names in wanted.items()} == wanted


def test_every_metric_of_an_iteration_has_a_unit_or_is_known_to_have_none(lab: wb.Workbench, view: Metrics) -> None:
    wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4)).run(1)
    view.depends_on()
    assert [name for name in view.names() if unit_of(name[1]) == "value"] == []


def test_a_check_and_a_comparison_are_not_in_the_frame_of_a_run(lab: wb.Workbench) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=4))
    stages = set(ppo.graph().names)
    ppo.step()  # the iteration has begun: what is reported from here on is of it
    lab.check("masks")
    assert {name.partition("/")[0] for name in ppo.iterate()} <= stages
    lab.compare(lab.prompts.next(4), {"remax": wb.ReMax(lab, sampling=wb.Sampling(max_new_tokens=4))})
    assert lab.last_metrics == {}
    lab.check("masks")
    assert {name.partition("/")[0] for name in ppo.run(1).columns} <= stages
