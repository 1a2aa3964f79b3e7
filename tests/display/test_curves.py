from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from workbench.display.compare import overlay
from workbench.display.curves import (
    BOTTOM,
    HATCHES,
    HEIGHT,
    STROKES,
    TOP,
    WIDTH,
    Chart,
    Curve,
    draw,
    key,
    sheet,
    smoothed,
    summary,
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


def points(svg: str) -> list[list[tuple[float, ...]]]:
    return [
        [tuple(map(float, pair.split(","))) for pair in drawn.split()]
        for drawn in re.findall(r'<poly(?:line|gon) points="([^"]*)"', svg)
    ]


def test_a_line_reaches_the_corners_and_breaks_at_gaps() -> None:
    svg = sheet([Chart(title="loss", curves=(Curve(name="run", x=[1, 2, 3, 4, 5], y=[0.0, 1.0, NAN, 3.0, 4.0]),))])
    first, second = points(svg)
    assert (len(first), len(second)) == (2, 2)
    xs, ys = zip(*first, *second, strict=True)
    assert xs[0] < xs[-1] <= WIDTH
    assert ys[0] > ys[-1] >= 0
    assert [ys[0] - y for y in ys] == pytest.approx(
        [0, (ys[0] - ys[-1]) / 4, 3 * (ys[0] - ys[-1]) / 4, ys[0] - ys[-1]], abs=0.2
    )
    ElementTree.fromstring(svg)


def test_log_leaves_out_what_has_no_logarithm() -> None:
    svg = sheet([Chart(title="kl", log=True, curves=(Curve(name="run", x=[1, 2, 3, 4], y=[0.01, 0.1, 0.0, 1.0]),))])
    (line, alone) = points(svg)
    assert len(alone) == 1
    bottom, middle = line[0][1], line[1][1]
    assert bottom - middle == pytest.approx(middle - alone[0][1], abs=0.2)
    assert all(f">{tick}<" in svg for tick in ("0.01", "0.1", "1"))


def test_areas_are_stacked_against_a_limit() -> None:
    area: dict[str, Any] = {"x": [0, 1], "kind": "area"}
    curves = (
        Curve(name="actor", y=[100, 200], hatch="/", **area),
        Curve(name="critic", y=[300, 200], stroke=STROKES[1], **area),
    )
    svg = sheet([Chart(title="cpu:0", curves=curves, unit="bytes", limit=(800.0, "800 B of the machine"))])
    lower, upper = points(svg)
    assert lower[:2] == upper[:1:-1]  # the top of one is the ground of the next
    height = lower[-1][1] - upper[0][1]  # 400 of 800
    assert lower[-1][1] - lower[0][1] == pytest.approx(height / 4, abs=0.2)
    assert upper[0][1] == upper[1][1]
    assert "800 B of the machine" in svg
    found = re.findall(r'id="(wb-[0-9a-f-]+)"', svg)
    assert set(re.findall(r"url\(#([^)]*)\)", svg)) == set(found)
    for other in (sheet([Chart(title="cpu:1", curves=curves)]), key([Chart(title="cpu:0", curves=curves)])):
        assert not set(found) & set(re.findall(r'id="([^"]*)"', other))  # each has its own, on one page
    assert set(HATCHES) >= {"", "/"}


def test_many_points_are_thinned_and_keep_their_extremes() -> None:
    y = [float(n % 7) for n in range(20_000)]
    y[12_345] = 50.0
    svg = sheet([Chart(title="t", curves=(Curve(name="run", x=range(20_000), y=y),))])
    (line,) = points(svg)
    assert len(line) <= 402
    assert sum(point[1] < HEIGHT / 3 for point in line) == 1


def test_names_are_escaped_and_told() -> None:
    chart = Chart(title="<b>", curves=(Curve(name="a & b", x=[1], y=[2.0]), Curve(name="c", x=[1], y=[NAN])), note='"')
    svg = sheet([chart, Chart(title="nothing", curves=())])
    ElementTree.fromstring(svg)
    assert "<b>" not in svg
    assert summary(chart) == '<b>: a & b 2, c nan (")'
    assert "nothing: no points" in svg


def test_overlay_sorts_what_is_finite() -> None:
    svg = overlay({"one": [3.0, 1.0, NAN, 2.0], "none": [NAN], "two": [1.0, 3.0]}, "rewards", x="responses, sorted")
    one, two = points(svg)
    assert [len(one), len(two)] == [3, 2]
    assert (one[0], one[-1]) == (two[0], two[-1])
    assert "smallest" in svg
    assert ">none<" not in svg


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
    many = tables([chart] * 40, most_cells=1000)
    assert "the last 5 of 101" in many  # 1,000 cells are shared by 40 times 5 columns
    assert len(many) < 40_000


def test_a_band_is_the_ground_of_its_line() -> None:
    band = Curve(name="a", x=[1, 2, 3], y=[2.0, 3.0, 9.0], low=[1.0, 0.0, -4.0], kind="band")
    line = Curve(name="a", x=[1, 2, 3], y=[1.5, 1.5, 2.5])
    drawn = draw(Chart(title="t", curves=(band, line)))
    (points,) = re.findall(r'<polygon points="([^"]+)"', drawn)
    assert len(points.split()) == 6
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert min(heights) == TOP and max(heights) == HEIGHT - BOTTOM  # the axis goes from -4 to 9
