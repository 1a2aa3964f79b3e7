from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.expected import expect_error
from workbench.display import Timeline, role_styles, timeline
from workbench.display.idle import Callers, DeviceSpans
from workbench.display.palette import BLACK, NO_ROLE, ROLE_STYLES, WHITE
from workbench.display.timeline import MOST_BARS, drawn
from workbench.errors import BadInput
from workbench.telemetry import Span, TelemetryStore

SVG = "{http://www.w3.org/2000/svg}"


def row(stage: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    base = {"run": 1, "role": "actor", "pool": "main", "rank": 0, "device": "slot:0", "kind": "compute", "parent": ""}
    return {**base, "stage": stage, "start_s": 1000.0 + start, "end_s": 1000.0 + end, **more}


def bars(picture: Timeline) -> list[ElementTree.Element]:
    return [rect for rect in ElementTree.fromstring(picture.svg).iter(f"{SVG}rect") if rect.get("class") == "span"]


def titled(picture: Timeline, text: str) -> ElementTree.Element:
    (found,) = [bar for bar in bars(picture) if text in (bar.findtext(f"{SVG}title") or "")]
    return found


def extent(bar: ElementTree.Element) -> tuple[float, float]:
    """Percent of the width."""
    x, width = (float(bar.attrib[name].removesuffix("%")) for name in ("x", "width"))
    return x, x + width


STAGE = [
    row("update_actor", 0, 1, kind="queue"),
    row("update_actor", 1, 2, kind="transfer", moved_bytes=120_000),
    row("update_actor", 2, 8, processed_tokens=1200, peak_memory_bytes=4_400_000_000),
    row("update_actor", 2, 5, kind="forward", parent="compute"),
    row("update_actor", 5, 8, kind="optimizer", parent="compute"),
    row("update_actor", 6, 7, kind="communication", parent="optimizer"),
    row("update_critic", 0, 4, role="critic", device="slot:1"),
    row("compute_values", 5, 10, role="critic", device="slot:1", run=2),
]


def test_every_span_is_a_bar_and_the_svg_is_well_formed():
    picture = timeline(STAGE)
    assert len(bars(picture)) == len(STAGE) == picture.span_count
    hover = titled(picture, "update_actor: compute\n").findtext(f"{SVG}title")
    assert hover == (
        "update_actor: compute\nactor rank 0 on slot:0, run 1\n6.0 s (from 2.000 s to 8.000 s)\n"
        "1,200 tokens (200 tokens/s)\n4.4 GB peak memory"
    )


def test_bars_lie_where_their_times_say():
    picture = timeline(STAGE)
    left, right = extent(titled(picture, "compute_values"))
    start, _ = extent(titled(picture, "update_critic"))
    scale = (right - left) / 5
    assert left - start == pytest.approx(5 * scale, abs=1e-3)
    compute = titled(picture, "update_actor: compute\n")
    for child in ("forward in compute", "optimizer in compute", "communication in optimizer"):
        bar = titled(picture, child)
        assert extent(bar)[0] >= extent(compute)[0] - 1e-3
        assert extent(bar)[1] <= extent(compute)[1] + 1e-3
        bottom = float(bar.attrib["y"]) + float(bar.attrib["height"])
        assert bottom == float(compute.attrib["y"]) + float(compute.attrib["height"])


def test_time_by_device_is_right_on_an_example_done_by_hand():
    first, second = timeline(STAGE).summary
    assert first == {
        "pool": "main", "device": "slot:0", "window_s": 10.0, "busy_s": 6.0, "transfer_s": 1.0, "idle_s": 3.0,
        "queued_s": 1.0, "idle_share": 0.3, "slowest_rank_s": 3.0, "other_pool_s": 0.0, "controller_s": 0.0,
        "uncalled_s": 0.0,
    }  # fmt: skip
    assert (second["busy_s"], second["idle_s"], second["idle_share"]) == (9.0, 1.0, 0.1)


def test_overlaps_count_once_and_compute_hides_transfer_and_queue():
    spans = [
        row("a", 0, 4),
        row("b", 2, 6, run=2),
        row("c", 3, 7, run=3, kind="transfer"),
        row("d", 1, 9, run=4, kind="queue"),
        row("e", 0, 10, device="slot:1"),
    ]
    times = timeline(spans).summary[0]
    assert [times[name] for name in ("busy_s", "transfer_s", "idle_s", "queued_s")] == [6.0, 1.0, 3.0, 2.0]


def test_spans_at_the_same_time_on_one_device_do_not_cover_each_other():
    picture = timeline([row("a", 0, 4), row("b", 2, 6, run=2), row("c", 4, 8, run=3)])
    a, b, c = (float(titled(picture, f"{stage}: compute").attrib["y"]) for stage in "abc")
    height = float(titled(picture, "a: compute").attrib["height"])
    assert abs(b - a) >= height
    assert a == c


def test_a_child_without_its_parent_in_the_window_is_a_bar_of_its_own():
    (bar,) = bars(timeline([row("a", 1, 2, kind="forward", parent="compute")]))
    assert bar.get("data-level") == "0"


def test_the_window_cuts_bars_and_drops_what_lies_outside():
    picture = timeline(STAGE, start=1004.5, end=1009.0)
    assert picture.span_count == 5
    assert not [bar for bar in bars(picture) if "update_critic" in (bar.findtext(f"{SVG}title") or "")]
    left, right = zip(*(extent(bar) for bar in bars(picture)), strict=True)
    assert min(left) == extent(titled(picture, "update_actor: compute\n"))[0]
    assert max(right) == extent(titled(picture, "compute_values"))[1]
    assert picture.summary[0]["busy_s"] == pytest.approx(3.5)
    assert picture.summary[0]["idle_s"] == pytest.approx(1.0)
    with expect_error(BadInput, rule="start must not be after the end"):
        timeline(STAGE, start=1010.0, end=1009.0)


def test_devices_come_in_the_order_asked_for_and_idle_ones_are_shown():
    spans = [row("a", 0, 1, device=f"slot:{n}") for n in (10, 2, 1)]
    assert [times["device"] for times in timeline(spans).summary] == ["slot:1", "slot:2", "slot:10"]
    picture = timeline(spans, devices=["slot:10", "slot:3"])
    assert [times["device"] for times in picture.summary] == ["slot:10", "slot:1", "slot:2", "slot:3"]
    assert picture.summary[-1]["idle_share"] == 1.0
    assert picture.svg.count("idle 100 %") == 1


def test_labels_of_users_cannot_break_the_picture():
    evil = '<b>"&\x00\x07@' + "'"
    picture = timeline([row(evil, 0, 5, role=evil, pool=evil, device=evil, note=evil, rank=1)])
    (bar,) = bars(picture)
    assert (bar.findtext(f"{SVG}title") or "").startswith("<b>\"&@'")
    assert "<b>" not in picture._repr_html_()


def test_two_pictures_on_a_page_share_no_id_and_all_references_resolve():
    one = timeline(STAGE)
    drawn = [one.svg, timeline(STAGE[:4]).svg, one.svg]  # the last again, as a browser takes an id's first place
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in drawn]
    assert all(ids)
    assert len(set().union(*ids)) == sum(map(len, ids))
    for svg, own in zip(drawn, ids, strict=True):
        assert set(re.findall(r"url\(#([^)]+)\)", svg)) == own
    first, _, again = (re.sub(r"t[0-9a-f]{10}(-\d+)?-", "", svg) for svg in drawn)
    assert first == again


def test_the_bundle_holds_html_svg_and_short_text():
    picture = timeline(STAGE)
    bundle = picture._repr_mimebundle_()
    assert bundle.keys() == {"text/html", "image/svg+xml", "text/plain"}
    assert max(len(line) for line in bundle["text/plain"].splitlines()) < 80
    assert "busy  60 % transfer  10 % idle  30 % (queued 10 %)" in bundle["text/plain"]
    assert "<script" not in bundle["text/html"]
    # inline it takes the page's text colour; as an image it cannot
    assert ' color="#' not in bundle["text/html"]
    assert ' color="#' in bundle["image/svg+xml"]
    assert "currentColor" in bundle["text/html"]


def test_nothing_to_draw_is_said():
    picture = timeline([])
    ElementTree.fromstring(picture.svg)
    assert "no spans in this window" in picture.svg
    assert repr(picture) == "timeline of 0 ms: 0 spans on 0 devices"


def test_of_very_many_spans_the_longest_are_drawn_and_the_rest_is_for_perfetto():
    spans = [row("a", 0, 2000), *(row("a", n, n + 0.01, kind="forward", parent="compute") for n in range(1999))]
    picture = timeline(spans)
    assert len(bars(picture)) == MOST_BARS
    assert f"the longest of 2,000 spans; {2000 - MOST_BARS} more are in lab.trace(), for Perfetto" in picture.svg


def test_what_has_room_only_in_a_wider_picture_is_in_it_hidden():
    spans = [row("a", 0, 1000), row("b", 500, 501, run=2), row("c", 1000, 1001, run=3)]
    found, gaps = DeviceSpans(spans, [("main", "slot:0")]), DeviceSpans(spans).gaps((1000.0, 2001.0))
    window = (1000.0, 2001.0)
    wide, plain = (drawn(spans, found, gaps, {0: window}, window, fold=False, zoom=zoom) for zoom in (50.0, 1.0))
    assert "</tspan> b<" in wide.svg and "</tspan> b<" not in plain.svg  # the label of one pixel's bar
    assert 'style="display:none"' in wide.svg and 'style="display:none"' not in plain.svg
    ticks = [float(at.replace(",", "")) for at in re.findall(r">([\d,.]+) s</text>", wide.svg)]
    assert len(ticks) == len(set(ticks)) == 201  # every 5 s


def test_the_frame_of_a_store_draws_the_same_picture(tmp_path: Path):
    store = TelemetryStore(tmp_path)
    given = Span(stage="s", run=1, role="actor", pool="p", rank=0, device="d", kind="compute", start_s=1.0, end_s=2.0)
    store.append_spans([given])
    assert timeline(store.spans()).svg == timeline([given.row()]).svg


def test_role_colours_and_letters_differ_and_text_on_them_can_be_read():
    styles = role_styles(ROLE_STYLES)
    assert len({style.letter for style in styles.values()}) == len(styles)
    assert len({style.colour for style in styles.values()}) == len(styles)
    assert role_styles(["", "actor"]) == {"actor": ROLE_STYLES["actor"], "": NO_ROLE}

    def luminance(colour: str) -> float:
        channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for style in styles.values():
        light, dark = sorted((luminance(style.colour), luminance(style.ink)), reverse=True)
        assert style.ink in (BLACK, WHITE)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.2, 1.4.3


def test_a_window_begins_between_two_stages_of_one_cell():
    callers = Callers(of_run={1: (7, 0), 2: (7, 0)})
    spans = [row("update_actor", 0, 2), row("generate", 5, 9, run=2)]
    (times,) = timeline(spans, start=1003.0, callers=callers).summary
    assert (times["controller_s"], times["uncalled_s"], times["idle_s"]) == (2.0, 0.0, 2.0)
