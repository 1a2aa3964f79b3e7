"""What-if sliders: what they show is what searches by hand find."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

import workbench as wb
from tests.expected import expect_error
from workbench.errors import BadInput, MissingDependency, ModelUnavailable
from workbench.mapping.hardware import PRESETS
from workbench.mapping.what_if import AXES, NOTHING, TOGETHER, words
from workbench.mapping.workload import config_of
from workbench_widgets.what_if import WhatIf

A100 = PRESETS["a100-80g"]
REMAX = wb.mapping.Workload(algorithm="remax", response_tokens=256)


def asked(size: Any = "llama-7b", **options: Any) -> WhatIf:
    return wb.mapping.what_if(dict.fromkeys(("actor", "reference", "reward"), size), **{"workload": REMAX, **options})


@pytest.fixture(autouse=True)
def few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"devices": (4, 16), "link_speed": (1.0, 4.0), "response_tokens": (256, 4096), "model": AXES["model"][::3]}
    for axis, values in small.items():
        monkeypatch.setitem(AXES, axis, values)


def test_the_frame_is_what_searches_find() -> None:
    shown = asked(devices=16, across="link_speed")
    frame = shown.frame()
    assert len(frame) == 4
    for speed, tokens, *found in frame[
        ["link_speed", "response_tokens", "placement", "iteration_s", "next", "slower"]
    ].values:
        links = {"inside_bytes_s": speed * A100.inside_bytes_s, "machine_bytes_s": speed * A100.machine_bytes_s}
        best, other, *_ = wb.mapping.search(shown.grid.models, devices=16, hardware=replace(A100, **links),
                                            workload=replace(REMAX, response_tokens=tokens))  # fmt: skip
        slower = other.iteration_s / best.iteration_s - 1
        assert found == [words(best), pytest.approx(best.iteration_s), words(other), pytest.approx(slower)]


def test_a_slider_that_is_moved_changes_the_answer_and_the_map() -> None:
    shown = asked(devices=16)
    shown.drawing.join(60)
    before = [html.value for html in (shown._map, shown._answer)]
    shown.sliders["model"].value = "llama-70b"
    shown.drawing.join(60)
    assert all(html.value != old for html, old in zip((shown._map, shown._answer), before, strict=True))
    frame = shown.frame()
    assert frame[frame["devices"] == 4]["placement"].tolist() == [NOTHING, NOTHING]
    assert NOTHING in shown._map.value
    assert "llama-70b" in repr(shown)

    shown.sliders["devices"].value = 4  # the answer says why nothing fits
    shown.drawing.join(60)
    assert "no layout was found that fits" in shown._answer.value
    assert "32 devices they fit" in shown._answer.value

    shown.across.value = "response_tokens"  # which was the other axis
    assert shown.seen[1:] == ("response_tokens", "devices")


def test_until_all_is_searched_the_nearest_cell_lends_its_colour() -> None:
    shown = asked(devices=16)
    grid, seen = shown.grid, shown.seen
    shown.drawing.join(60)
    fresh = type(grid)(grid.models, 16, A100, REMAX)
    assert "not searched yet" in fresh.picture(*seen)
    next(fresh.refine(*seen))
    picture = fresh.picture(*seen)
    assert (picture.count("not searched yet"), picture.count(f"background:{fresh._looks(TOGETHER)[0]}")) == (3, 5)
    assert shown._repr_mimebundle_()["text/html"].startswith(grid.picture(*seen))  # also without a kernel


def test_a_sample_of_lengths_is_stretched_and_models_may_be_as_given() -> None:
    sample = replace(REMAX, response_tokens=[100, 300])
    shown = asked(config_of("llama-7b"), devices=4, workload=sample, across="devices", up="model")
    assert (shown.sliders["response_tokens"].value, shown.sliders["model"].value) == (200, "as given")
    assert list(shown.frame()["model"].unique()) == ["llama-70b", "llama-7b", "as given"]


def test_wrong_input_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with expect_error(ModelUnavailable, value="llama-14b", remedy="or a size: llama-7b"):
        asked("llama-14b")
    with expect_error(BadInput, value="across='speed'", rule="link_speed", remedy="write across="):
        asked(across="speed")
    with expect_error(BadInput, value="up='devices'", rule="must be one of", remedy="write up="):
        asked(up="devices")
    monkeypatch.setitem(sys.modules, "workbench_widgets.what_if", None)
    with expect_error(MissingDependency, rule="sliders need it", remedy="notebook"):
        asked()
