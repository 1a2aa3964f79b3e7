"""Svgs as images: what a viewer shows that has no inline svg, no style sheet and no script."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

from workbench.display.html import as_images, folded, numbers_table, svg, without_svgs

IMAGE = re.compile(
    r'<img alt="([^"]*)"(?: width="(\d+)")?(?: height="(\d+)")? src="data:image/svg\+xml;base64,([^"]*)">'
)


def drawing(data: str) -> ElementTree.Element:
    return ElementTree.fromstring(base64.b64decode(data))


def test_each_svg_is_an_image_with_its_name_and_size() -> None:
    one, two = svg('<rect width="3" height="4"/>', 30, 40, 'a "first" <one>'), svg("<text>b</text>", 7.5, 8, "second")
    html = as_images(f"<p>before</p>{one}<table><tr><td>1</td></tr></table><div>{two}</div>after")
    assert "<svg" not in html
    assert re.sub(IMAGE, "IMAGE", html) == "<p>before</p>IMAGE<table><tr><td>1</td></tr></table><div>IMAGE</div>after"
    (first, width, height, data), (second, *_, other) = IMAGE.findall(html)
    assert (first, width, height) == ("a &quot;first&quot; &lt;one&gt;", "30", "40")
    assert second == "second"
    root = drawing(data)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("style", "").startswith(
        "color:#222222;background:#ffffff;font:"
    )  # black ink on a dark page's ground
    assert root.get("viewBox") == "0 0 30 40" and [child.get("width") for child in root] == ["3"]
    assert drawing(other)[0].text == "b"


INSIDE: list[tuple[str, list[str]]] = [
    ('<svg x="1"><text>inside</text></svg><text>behind</text>', ["inside", "behind"]),
    ('<svg x="1"/><text>behind</text>', ["behind"]),
    ("<text>\x00 and \x1b[31m</text>", ["\ufffd and \ufffd[31m"]),
    ('<g data-span="1" tabindex="0" role="button" aria-label="x"><title>a tip</title><text>a</text></g>', ["a"]),
    ("<text>&lt;/svg&gt; &amp;</text>", ["</svg> &"]),
]


def test_what_is_inside_stays_and_is_xml() -> None:
    for inner, texts in INSIDE:
        (found,) = IMAGE.findall(as_images(f'<svg viewBox="0 0 1 1" width="100%">{inner}</svg>'))
        assert found[:3] == ("", "", "")  # no name, and a size that is no number of pixels
        unseen = {"title", "data-span", "tabindex", "role", "aria-label"}  # by the reader of an image
        named = {name for one in drawing(found[3]).iter() for name in (one.tag.rpartition("}")[2], *one.keys())}
        assert not unseen & named
        assert [one.text for one in drawing(found[3]).iter("{http://www.w3.org/2000/svg}text")] == texts


def test_html_without_svg_stays() -> None:
    for html in ("", "<p>1 &lt; 2</p>", "a <svg without an end"):
        assert as_images(html) == html


def test_words_in_place_of_drawings() -> None:
    html = svg("<svg/>", 1, 1, "one") + folded("as a table", numbers_table(["x", "y<"], [[1, "a&b"]], caption="<c>"))
    assert without_svgs(html, "<too large>") == (
        "<p>&lt;too large&gt;</p><details><summary>as a table</summary>"
        '<table style="font-size:12px;display:inline-table;margin:4px 16px 4px 0;vertical-align:top">'
        "<caption>&lt;c&gt;</caption>"
        '<thead><tr><th scope="col">x</th><th scope="col">y&lt;</th></tr></thead>'
        '<tbody><tr><th scope="row">1</th><td>a&amp;b</td></tr></tbody></table></details>'
    )
    assert folded("nothing", "") == ""
