"""Small pieces of html for reprs, and numbers formatted for people.

Colours come from the page (`currentColor`, transparent backgrounds), so that light and dark themes both work. Styles
are inline, because viewers of saved notebooks drop style sheets. A class that uses these functions defines `__repr__`
(text, under 80 characters a line) and `_repr_html_`; IPython sends both.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

REMEMBERED = 1000  # pictures
SVG = "http://www.w3.org/2000/svg"
_LINE = "1px solid color-mix(in srgb, currentColor 20%, transparent)"
_TABLE = "border-collapse:collapse;font-size:13px;background:transparent;color:inherit;margin:4px 0"
_PLAIN = "font-size:12px;display:inline-table;margin:4px 16px 4px 0;vertical-align:top"
_CELL = f"padding:2px 12px 2px 4px;border:0;border-bottom:{_LINE};background:transparent"
_CAPTION = (  # up to 60 characters wide, also above a narrower table
    "text-align:left;caption-side:top;font-weight:600;color:inherit;padding:2px 4px;margin-right:min(0px,100% - 60ch)"
)


class Markup(str):
    """Html that a table shows unescaped."""


_shown: OrderedDict[str, int] = OrderedDict()


def picture_id(content: str) -> str:
    """An id that no other picture on the page has: browsers resolve an id to its first occurrence, even a hidden one.
    It is a digest with a counter, so that rerunning a notebook gives the same file."""
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    count = _shown.pop(digest, 0) + 1
    _shown[digest] = count
    if len(_shown) > REMEMBERED:
        _shown.popitem(last=False)
    return digest if count == 1 else f"{digest}-{count}"


def table(
    rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] | None = None, caption: str = "", max_rows: int = 20
) -> str:
    """An html table of the first `max_rows` rows; a last line gives the number of hidden rows. Everything but `Markup`
    is escaped.

    columns: names in order; default: the keys in order of appearance. A missing key gives an empty cell.
    """
    shown = rows[:max_rows]
    if columns is None:
        columns = list(dict.fromkeys(key for row in shown for key in row))
    head = "".join(f'<th style="{_CELL};text-align:left;font-weight:600">{_text(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(_cell(row.get(name)) for name in columns) + "</tr>" for row in shown)
    hidden = len(rows) - len(shown)
    if hidden:
        note = f"{hidden:,} more row{'s' if hidden > 1 else ''} not shown"
        body += f'<tr><td colspan="{max(len(columns), 1)}" style="{_CELL};text-align:left;opacity:.7">{note}</td></tr>'
    return f'<table style="{_TABLE}">{_caption(caption)}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def numbers_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str = "") -> str:
    """A compact table of many figures; the first cell of a row is its name. Escaped."""
    head = "".join(f'<th scope="col">{escape(str(name))}</th>' for name in heads)
    lines = "".join(
        f'<tr><th scope="row">{escape(str(first))}</th>{"".join(f"<td>{escape(str(one))}</td>" for one in others)}</tr>'
        for first, *others in rows
    )
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<table style="{_PLAIN}">{told}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'


def folded(title: str, html: str) -> str:
    """Html behind a title that opens it; "" if there is none."""
    return f"<details><summary>{escape(title)}</summary>{html}</details>" if html else ""


def svg(inner: str, width: float, height: float, label: str, *, role: str = "img", font: str = "11px") -> str:
    """An svg of this size around a drawing. label: read by screen readers; it is escaped."""
    return (
        f'<svg xmlns="{SVG}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="{role}" aria-label="{escape(label)}" '
        f'style="font:{font} system-ui,sans-serif">{inner}</svg>'
    )


def text(text: str) -> str:
    """Escape text, and drop control characters that XML forbids."""
    return escape("".join(character for character in text if character.isprintable() or character == "\n"))


def legend(entries: Iterable[tuple[str, str, str, str]], width: float, y: float) -> tuple[str, float]:
    """Boxes with labels, in lines from y on; returns the svg and the y below it. entries: label, attributes of the box,
    and a letter in it with its colour."""
    parts, x = list[str](), 4.0
    for words, look, letter, ink in entries:
        needed = 36 + 7 * len(words)
        if x > 4 and x + needed > width:
            x, y = 4.0, y + 20
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="16" height="14" rx="2" {look}/>'
            f'<text x="{x + 8:g}" y="{y + 11:g}" text-anchor="middle" font-size="11" font-weight="700" fill="{ink}">'
            f'{text(letter)}</text><text x="{x + 21:g}" y="{y + 11:g}" fill="currentColor">{text(words)}</text>'
        )
        x += needed
    return f'<g data-legend="">{"".join(parts)}</g>', y + 20


def kv(pairs: Mapping[str, Any], *, caption: str = "") -> str:
    """An html table of names and values, one pair a row. Everything is escaped."""
    name_style = f"{_CELL};text-align:left;font-weight:600"
    body = "".join(
        f'<tr><th style="{name_style}">{escape(str(name))}</th>{_cell(value, align="left")}</tr>'
        for name, value in pairs.items()
    )
    return f'<table style="{_TABLE}">{_caption(caption)}<tbody>{body}</tbody></table>'


def bytes_text(n: float) -> str:
    """Bytes in powers of 1000: "0 B", "999 B", "1.2 GB"."""
    size, unit = float(n), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.1f} {unit}"


def seconds_text(s: float) -> str:
    """A duration: "850 us", "85 ms", "3.2 s", "42 s", "4 min 10 s", "2 h 05 min"."""
    if not math.isfinite(s):
        return "unknown"
    if s < 0:
        return f"-{seconds_text(-s)}"
    if s < 0.9995:
        return f"{s * 1e3:.0f} ms" if s >= 0.9995e-3 or s == 0 else f"{s * 1e6:.0f} us"
    if s < 59.5:
        return f"{s:.1f} s" if s < 9.95 else f"{s:.0f} s"
    minutes, seconds = divmod(round(s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _caption(text: str) -> str:
    return f'<caption style="{_CAPTION}">{escape(text)}</caption>' if text else ""


def _cell(value: Any, align: str | None = None) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else value
    style = f"{_CELL};text-align:{align or ('right' if is_number else 'left')}"
    return f'<td style="{style}">{_text(text)}</td>'


def _text(value: Any) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


# an image cannot use its page's colours: dark text on a light background is readable on every page
PAPER = "color:#222222;background:#ffffff"
_TAG = re.compile(r"<(/?)svg\b[^>]*?(/?)>")
_ATTRIBUTE = re.compile(r'\s(aria-label|width|height|style|xmlns)="([^"]*)"')
_UNSEEN = re.compile(r'<title>[^<]*</title>|\s(?:data-[\w-]+|tabindex|role|aria-[\w-]+)="[^"]*"')  # in an image
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML does not have


def as_images(html: str) -> str:
    """Replace each svg by an `<img>` that contains it, without tooltips and links: GitHub, and JupyterLab with an
    untrusted notebook, drop svg elements."""
    return _each_svg(html, _image)


def without_svgs(html: str, words: str) -> str:
    """Replace each svg by words, which are escaped."""
    return _each_svg(html, lambda drawing: f"<p>{escape(words)}</p>")


def _each_svg(html: str, put: Callable[[str], str]) -> str:
    """Replace each outer svg; svgs inside an svg stay."""
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
