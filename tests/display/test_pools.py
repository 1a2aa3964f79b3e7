"""Pools as boxes and memory as bars: what they say, to scale, and that nothing of a name is taken for html."""

from __future__ import annotations

import re

from workbench.display.memory_bars import BARS, DeviceMemory, memory_svg
from workbench.display.pools import Card, PoolBox, pools_html


def test_cards_say_role_model_and_what_becomes_of_them() -> None:
    cards = (Card("actor", "<model>", "p=1 t=2 d=1"), Card("critic", "m", "p=1 t=1 d=2", "moves from scorers"))
    html = pools_html([PoolBox("policy", ("cuda:0", "cuda:1"), cards)])
    text = re.sub("<[^>]*>", " ", html)
    for told in ("policy", "2 devices", "cuda:1", " A ", "&lt;model&gt;", "p=1 t=2 d=1", "moves from scorers"):
        assert told in text
    assert "class=" not in html, "a saved notebook has no style sheet"


def widths(svg: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect [^>]*? width="([\d.]+)"', svg)]


def test_bars_have_one_scale_and_a_line_at_the_capacity() -> None:
    svg = memory_svg([DeviceMemory("cuda:0", 100, 400, 200, 300, 500), DeviceMemory("cuda:1", 0, 50, 50, 50, 500)])
    assert widths(svg) == [BARS * n / 500 for n in (100, 400, 200, 300, 0, 50, 50, 50)]
    assert svg.count("<line") == 2
    assert "400 B, 80.0%" in svg
    assert "too much" not in svg
    assert "too much" in memory_svg([DeviceMemory("cuda:0", 1, 600, 1, 1, 500)])


def test_where_nothing_moves_there_is_what_is_held() -> None:
    svg = memory_svg([DeviceMemory("cuda:0", 100, 100, 100, 400, 500)], moves=False)
    assert widths(svg) == [BARS * n / 500 for n in (100, 400)]
    assert ">held</text>" in svg
    assert "while it moves" not in svg


def test_bars_can_be_seen_beside_a_large_capacity() -> None:
    svg = memory_svg([DeviceMemory("this machine", 50, 100, 50, 80, 10**9)])
    assert widths(svg) == [BARS / 2, BARS, BARS / 2, BARS * 0.8]
    assert "<line" not in svg
    assert "of 1.0 GB" in svg
