from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

import plotly.graph_objects
import pytest

from workbench.display.curves import (
    MIMETYPE,
    STROKES,
    Chart,
    Curve,
    figure,
    sheet,
    smoothed,
    tables,
)

NAN = math.nan


def test_smoothing_is_the_debiased_moving_average() -> None:
    x, factor = [3.0, -1.0, 4.0, 1.5, 9.0], 0.7
    for t, value in enumerate(smoothed(x, factor)):
        weights = [(1 - factor) * factor ** (t - n) for n in range(t + 1)]
        direct = sum(w * v for w, v in zip(weights, x, strict=False))
        assert value == pytest.approx(direct / (1 - factor ** (t + 1)))
    assert smoothed(x, 0.0) == x
    assert smoothed([0.1] * 50, 0.98) == [0.1] * 50  # to the last bit
    assert smoothed([], 0.5) == []


def test_smoothing_passes_over_what_is_not_finite() -> None:
    found = smoothed([1.0, NAN, math.inf, 3.0], 0.5)
    assert math.isnan(found[1])
    assert found[2] == math.inf
    assert found[3] == smoothed([1.0, 3.0], 0.5)[-1]


def traces(*charts: Chart) -> list[dict[str, Any]]:
    """The traces, as JSON has them, which plotly takes."""
    found = json.loads(json.dumps(figure(charts), allow_nan=False))
    plotly.graph_objects.Figure(found)
    traces: list[dict[str, Any]] = found["data"]
    return traces


def test_a_line_has_its_points_and_a_gap_where_they_are_not_finite() -> None:
    faint = Curve(name="raw", x=[1, 2], y=[NAN, 1.0], kind="faint", source="other")
    line = Curve(name="a & <b>", x=[1, 2, 3], y=[0.0, NAN, 4.0], words=["<x>", "", ""])
    one, two = traces(Chart(title="loss", curves=(faint, line)))
    assert (one["y"], one["meta"], one["showlegend"]) == ([None, 1.0], "other", False)
    assert (two["y"], two["name"], two["text"][0]) == ([0.0, None, 4.0], "a &amp; &lt;b&gt;", "&lt;x&gt;")
    assert two["mode"] == "lines+markers"


def test_charts_have_a_place_each_and_one_key() -> None:
    curves = (Curve(name="a", x=[1], y=[1.0]), Curve(name="b", x=[1], y=[2.0], stroke=STROKES[1]))
    made = figure([Chart(title=str(n), curves=curves, y="nats", log=n == 2, at=3, note="!") for n in range(3)])
    layout = made["layout"]
    assert (layout["grid"]["rows"], layout["grid"]["columns"], layout["showlegend"]) == (2, 2, True)
    assert [trace["showlegend"] for trace in made["data"]] == [True, True, False, False, False, False]
    assert [trace["yaxis"] for trace in made["data"]] == ["y", "y", "y2", "y2", "y3", "y3"]
    assert (layout["yaxis3"]["type"], layout["yaxis3"]["title"]["text"]) == ("log", "nats")
    assert layout["yaxis3"]["exponentformat"] == "e"
    assert [one["text"] for one in layout["annotations"][:2]] == ["<b>0</b>", "!"]
    assert [one["x0"] for one in layout["shapes"]] == [3, 3, 3]
    assert not figure([Chart(title="one look", curves=curves[:1])])["layout"]["showlegend"]


def test_an_axis_has_negative_numbers_only_where_a_curve_has() -> None:
    zeros = Curve(name="clipped", x=[1, 2], y=[0.0, NAN])
    below = Curve(name="gap", x=[1], y=[0.5], kind="intervals", low=[-0.1], high=[1.0])
    axes = figure([Chart(title="clip fraction", curves=(zeros,)), Chart(title="gain", curves=(zeros, below))])["layout"]
    assert axes["yaxis"]["rangemode"] == "nonnegative"
    assert "rangemode" not in axes["yaxis2"]


def test_areas_are_stacked_against_a_limit_and_a_band_is_the_ground_of_its_line() -> None:
    areas = (Curve(name="actor", x=[0, 1], y=[100, 200], kind="area", hatch="/"),
             Curve(name="critic", x=[0, 1], y=[300, 200], kind="area"))  # fmt: skip
    chart = Chart(title="cpu:0", curves=areas, unit="bytes", limit=(800.0, "800 B of the machine"))
    lower, upper = traces(chart)
    assert lower["stackgroup"] == upper["stackgroup"]
    assert lower["fillpattern"]["shape"] == "/" and "fillpattern" not in upper
    layout = figure([chart])["layout"]
    assert layout["shapes"][0]["y0"] == 800.0
    assert layout["annotations"][1]["text"] == "800 B of the machine"
    low, high = traces(Chart(title="t", curves=(Curve(name="a", x=[1, 2], y=[2, 3], low=[0, NAN], kind="band"),)))
    assert (low["y"], high["y"], high["fill"]) == ([0, None], [2, 3], "tonexty")


def test_many_points_are_thinned_and_keep_their_extremes() -> None:
    y = [float(n % 7) for n in range(20_000)]
    y[12_345], y[15_000] = 50.0, NAN
    (line,) = traces(Chart(title="t", curves=(Curve(name="run", x=range(20_000), y=y),)))
    assert len(line["x"]) <= 403 and line["mode"] == "lines"
    assert line["y"][line["x"].index(12_345)] == 50.0
    assert line["y"][line["x"].index(15_000)] is None


def test_a_sheet_is_plotlys_mimetype_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    chart = Chart(title="<b>", curves=(Curve(name="a & b", x=[1], y=[2.0]), Curve(name="c", x=[1], y=[NAN])), note='"')
    sheet([chart])._ipython_display_()
    assert {MIMETYPE, "text/plain"} == ast.literal_eval(capsys.readouterr().out).keys()
    assert repr(sheet([chart, Chart(title="nothing", curves=())])) == '<b>: a & b 2, c nan (")\nnothing: no points'


def test_the_last_points_are_tables_too() -> None:
    joined = Curve(name="mine <1>", x=range(100), y=[n / 4 for n in range(100)])
    faint = Curve(name="raw", x=range(100), y=range(100), kind="faint")
    other = Curve(name="other", x=[98, 99, 99.5], y=[math.nan, 2e6, 1.0])
    peaks = Curve(name="peaks", x=[1.5], y=[3.0], kind="points")
    chart = Chart(title="<reward>", curves=(joined, faint, other, peaks), y="nats")
    html = tables([chart])
    assert html.startswith("<details><summary>These charts as tables</summary>")
    assert "&lt;reward&gt;, nats, the last 50 of 101" in html
    assert html.count("<table") == 2  # what is not joined has a table of its own
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert cells[0] == ["iteration", "mine &lt;1&gt;", "other"]
    assert cells[-5:] == [
        ["98", "24.5", "not finite"], ["99", "24.75", "2e+06"], ["99.5", "", "1"], ["iteration", "peaks"], ["1.5", "3"],
    ]  # fmt: skip
    assert tables([]) == ""
    many = tables([chart] * 40)
    assert "the last 7 of 101" in many  # 1,500 cells are shared by 40 times 5 columns
    assert len(many) < 40_000
