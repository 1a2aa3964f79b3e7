"""What a live panel leaves in its cell: when it is drawn, what it leaves out, what readers without a kernel show."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import bleach
import nbformat
import pytest
from nbconvert import HTMLExporter

import workbench as wb
from tests.cases import tiny_lab
from workbench.display.curves import MIMETYPE
from workbench_widgets import View
from workbench_widgets.driver import Driver
from workbench_widgets.metrics import Metrics
from workbench_widgets.saved_picture import SavedPicture

WIDGET = "application/vnd.jupyter.widget-view+json"
# What GitHub lets through of html that users give it, as it published it: html-pipeline, `sanitization_filter.rb`. No
# svg, style, class, id or script, and no image but those of a web address.
TAGS = re.findall(
    r"\w+",
    "h1 h2 h3 h4 h5 h6 br b i strong em a pre code img tt div ins del sup sub p ol ul table thead tbody tfoot "
    "blockquote dl dt dd kbd q samp var hr ruby rt rp li tr td th s strike summary details",
)
ATTRIBUTES = re.findall(
    r"\w+",
    "abbr align alt axis border cellpadding cellspacing cite colspan color cols datetime dir height hreflang href "
    "label lang name nowrap open rel rows rowspan rules scope shape size span src start summary title type valign "
    "value width",
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("saved", tmp_path_factory.mktemp("runs"), backend="inline") as lab:
        yield lab


def as_github(html: str) -> str:
    cleaned: str = bleach.clean(
        html, tags=TAGS, attributes=ATTRIBUTES, protocols=["http", "https", "mailto"], strip=True
    )
    return cleaned


def rows(html: str, caption: str) -> list[str]:
    """The iterations of a table of a curve. Where captions are dropped, their text stays above the table."""
    table = re.split(f"{re.escape(caption)}(?:</caption>|<table>)", html)[1].partition("</table>")[0]
    return re.findall(r'<th scope="row">(\d+)</th>', table)


def test_what_readers_without_a_kernel_leave_of_it(lab: wb.Workbench) -> None:
    ppo = wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))
    ppo.run(2)
    views = list(lab.panel(algorithm=ppo).views.values())
    kept = SavedPicture()
    places: list[dict[str, Any]] = []
    place = SimpleNamespace(update=lambda bundle, raw: places.append(bundle))
    kept._places += [(mark, place) for mark in kept._bundles(views, lab)]
    kept.save(views, lab)
    bundle, *charts = places
    html = bundle["text/html"]
    assert html.count("<img ") >= 3
    # charts are outputs of their own, which JupyterLab and VS Code draw; one that was not asked for yet says nothing
    figures = [one[MIMETYPE] for one in charts]
    assert [len(figure["data"]) > 0 for figure in figures] == [True, True]
    assert len({figure["layout"]["meta"] for figure in figures}) == 2
    assert kept.hides(views).count(":has(") == 2

    # where the strictest rules hold, each drawing is its words and its table
    left = as_github(html)
    assert not re.search(r"<(svg|style|script|link|iframe)|class=|style=|src=", left)
    assert left.lstrip().startswith("<div><p>saved, iteration 2, "), left[:200]
    assert left.count("<img ") == left.count('<img alt="') - left.count('<img alt=""') == html.count("<img ")
    titles = [view.title for view in views]
    assert [title for title in re.findall(r"<summary>([^<]*)</summary>", left) if title in titles] == titles
    assert rows(left, "compute_reward/rewards/mean, reward") == ["1", "2"]
    assert "<td>update_actor</td>" in left and left.count("<table") == html.count("<table")

    # nbconvert: of the widget, which it has no state of, and of the picture beside it
    live = nbformat.v4.new_output("display_data", {WIDGET: {"model_id": "gone"}, "text/plain": "<Panel>"})
    cell = nbformat.v4.new_code_cell("lab.panel()", outputs=[live, nbformat.v4.new_output("display_data", bundle)])
    (page, _) = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count("data:image/svg+xml;base64,") >= html.count("<img ")
    assert rows(page, "compute_reward/rewards/mean, reward") == ["1", "2"]
    assert "saved, iteration 2, " in page


def test_a_saved_picture_that_is_too_large_keeps_its_tables(lab: wb.Workbench) -> None:
    class Large(View):
        name, title = "large", "Large"

        def depends_on(self) -> int:
            return 0

        def picture(self) -> str:
            return f"<svg><text>{'x' * 300_000}</text></svg><table><tr><td>its table</td></tr></table>"

    class Small(Large):
        name, title = "small", "Small"

        def picture(self) -> str:
            return "<svg><text>small</text></svg>"

    class Larger(Large):
        name, title = "larger", "Larger"

        def picture(self) -> str:
            return f"<table><tr><td>{'x' * 300_000}</td></tr></table>"

    views = [made(lab, Driver(lab)) for made in (Large, Larger, Small)]
    kept = SavedPicture()
    kept._draw_all(views)
    html = kept._bundle(views, lab)["text/html"]
    assert len(html.encode()) < 2000
    assert "400 kB, too large to be saved. lab.panel(&#x27;large&#x27;).still() shows all of it." in html
    assert "its table" in html
    assert html.count("<img ") == 1
    assert "300 kB, too large" in html


def test_what_is_chosen_in_a_view_is_in_its_saved_picture(lab: wb.Workbench) -> None:
    view, saved = Metrics(lab, Driver(lab)), SavedPicture()
    saved._draw_all([view])
    assert not saved._changed(view)
    view.act("y", {"value": "log"})
    assert saved._changed(view)


def test_the_saved_picture_is_renewed_after_each_change_and_takes_a_twentieth_of_the_time(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now_s": 100.0, "drawing_s": 0.0}

    class Changing(View):
        title, count = "Changing", 0

        def depends_on(self) -> int:
            return self.count

        def picture(self) -> str:
            clock["drawing_s"] += 0.5
            return f"<p>{self.name} {self.count}</p>"

    views = [type(name, (Changing,), {"name": name})(lab, Driver(lab)) for name in ("one", "two", "three")]
    shown: list[str] = []
    place = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/html"]))
    times = SimpleNamespace(
        monotonic=lambda: clock["now_s"], thread_time=lambda: clock["drawing_s"], strftime=time.strftime
    )
    monkeypatch.setattr("workbench_widgets.saved_picture.time", times)
    kept = SavedPicture()
    kept._places.append((kept.name, place))
    assert [kept.refresh(views, lab) for _ in range(4)] == [True, True, False, False]  # one at a time, then nothing
    assert len(shown) == 1
    for view in views:
        view.count = 1
    clock["now_s"] += 29.9  # 1.5 s were drawn
    assert not kept.refresh(views, lab)
    clock["now_s"] += 0.2
    assert [kept.refresh(views, lab) for _ in range(4)] == [True, True, False, False]
    assert len(shown) == 2 and all(f"<p>{view.name} 1</p>" in shown[1] for view in views)
    views[0].count = 2
    clock["now_s"] += 31
    assert not kept.refresh(views, lab)
    assert "<p>one 2</p>" in shown[2]

    # while something runs it rests; when nothing does, it is new at the second look
    running = [SimpleNamespace(name="update_actor", state="running"), SimpleNamespace(name="later", state="waiting")]
    busy: Any = SimpleNamespace(name="busy", iteration=3, open_runs=lambda: running)
    views[0].count = 3
    assert not any(kept.refresh(views, busy) for _ in range(5))
    assert len(shown) == 3
    views[0].count = 4
    assert not kept.refresh(views, lab)
    assert len(shown) == 3
    assert not kept.refresh(views, lab)
    assert "<p>one 4</p>" in shown[3]

    # one that is drawn while an iteration is under way says so, and another follows when that has ended
    clock["now_s"] += 100
    views[0].count = 5
    kept.refresh(views, busy)
    assert "busy, iteration 3 while update_actor ran, " in shown[4] and "<p>one 5</p>" in shown[4]
    running.clear()
    views[0].count = 6
    assert [kept.refresh(views, busy) for _ in range(3)] == [False, False, False]  # the first look, the picture, rest
    assert len(shown) == 6
    assert "busy, iteration 3, " in shown[5] and "<p>one 6</p>" in shown[5]
