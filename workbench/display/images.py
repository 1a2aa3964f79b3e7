"""Svgs in html as images, for viewers that drop inline svg: GitHub, and JupyterLab with an untrusted notebook."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from html import escape

SVG = "http://www.w3.org/2000/svg"
# an image has no colours from its page: ink on paper, which light and dark pages both show
PAPER = "color:#222222;background:#ffffff"
_TAG = re.compile(r"<(/?)svg\b[^>]*?(/?)>")
_ATTRIBUTE = re.compile(r'\s(aria-label|width|height|style|xmlns)="([^"]*)"')
_UNSEEN = re.compile(r'<title>[^<]*</title>|\s(?:data-[\w-]+|tabindex|role|aria-[\w-]+)="[^"]*"')  # in an image
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML does not have


def as_images(html: str) -> str:
    """Html in which each svg is an `<img>` that holds it, named as it was. Tips and links of an svg are lost."""
    return _each_svg(html, _image)


def without_svgs(html: str, words: str) -> str:
    """Html with words, which are escaped, in the place of each svg."""
    return _each_svg(html, lambda drawing: f"<p>{escape(words)}</p>")


def _each_svg(html: str, put: Callable[[str], str]) -> str:
    """Html with something else in the place of each svg, those inside an svg left alone."""
    parts, at, depth, start = [], 0, 0, 0
    for tag in _TAG.finditer(html):
        if tag[1] != "/":
            start = tag.start() if depth == 0 else start
            depth += tag[2] != "/"
        else:
            depth -= 1
        if depth == 0:
            parts += [html[at:start], put(html[start : tag.end()])]
            at = tag.end()
    return "".join(parts) + html[at:]


def _image(drawing: str) -> str:
    opening = drawing[: drawing.index(">")].rstrip("/")
    known = dict(_ATTRIBUTE.findall(opening))
    style = f"{PAPER};{known.get('style', '')}"
    head = _ATTRIBUTE.sub(lambda one: "" if one[1] in ("style", "xmlns") else one[0], opening)
    picture = _UNSEEN.sub("", head + f' xmlns="{SVG}" style="{style}"' + drawing[len(opening) :])
    data = base64.b64encode(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", picture).encode()).decode()
    size = "".join(f' {name}="{known[name]}"' for name in ("width", "height") if known.get(name, "%").isdigit())
    return f'<img alt="{known.get("aria-label", "")}"{size} src="data:image/svg+xml;base64,{data}">'
