"""The picture of differences with their intervals."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from workbench.display.interval_chart import LABELS, NUMBERS, WIDTH, Difference, interval_chart


def test_points_and_ends_stand_where_their_numbers_say() -> None:
    rows = [Difference("sums", 0.2, 0.1, 0.3, True), Difference("<products>", -0.1, -0.25, 0.05, False)]
    drawing = ElementTree.fromstring(interval_chart(rows, "reward"))
    xml = "{http://www.w3.org/2000/svg}"
    middle, reach = (LABELS + WIDTH - NUMBERS) / 2, (WIDTH - NUMBERS - LABELS) / 2
    places = [(float(one.attrib["cx"]) - middle) / reach for one in drawing.iter(f"{xml}circle")]
    assert places[0] / places[1] == pytest.approx(-2, abs=0.02)
    bars = [one for one in drawing.iter(f"{xml}line") if one.attrib["stroke-width"] == "3"]
    ends = [[(float(bar.attrib[end]) - middle) / reach for end in ("x1", "x2")] for bar in bars]
    assert ends[0] == pytest.approx([places[0] / 2, places[0] * 1.5], abs=0.01)
    assert [one.attrib["fill"] == "none" for one in drawing.iter(f"{xml}circle")] == [False, True]
    texts = ["".join(one.itertext()) for one in drawing.iter(f"{xml}text")]
    assert "<products>" in texts and "0" in texts and "+0.2 [+0.1, +0.3]" in texts


@pytest.mark.parametrize("value", [0.0, 1e-9, 3.7, 1e6])
def test_any_size_and_intervals_without_ends(value: float) -> None:
    drawn = interval_chart([Difference("a", value, -math.inf, math.inf, False)], "x")
    assert not re.search(r"\b(inf|nan)\b", re.sub(r'aria-label="[^"]*"', "", drawn))
    ElementTree.fromstring(drawn)
    ElementTree.fromstring(interval_chart([], "x"))
