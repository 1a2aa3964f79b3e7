from __future__ import annotations

import math
from html.parser import HTMLParser

from workbench.display import bytes_text, kv, seconds_text, table


class _Reader(HTMLParser):
    """Collects rows of cells and checks that tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_a_table_has_all_keys_and_leaves_gaps_empty():
    html = table([{"role": "actor", "n": 2}, {"role": "critic", "kl": 0.123456}])
    assert _Reader(html).rows == [["role", "n", "kl"], ["actor", "2", ""], ["critic", "", "0.1235"]]
    assert _Reader(table([{"a": 1, "b": 2}], columns=["b"])).rows == [["b"], ["2"]]


def test_rows_are_capped_and_the_hidden_ones_counted():
    rows = [{"n": n} for n in range(1025)]
    read = _Reader(table(rows, max_rows=5)).rows
    assert [row[0] for row in read] == ["n", "0", "1", "2", "3", "4", "1,020 more rows not shown"]
    assert "not shown" not in table(rows[:5], max_rows=5)
    assert "1 more row not shown" in table(rows[:6], max_rows=5)


def test_everything_is_escaped():
    evil = "<script>alert('x')</script>&"
    for html in (table([{evil: evil}], caption=evil), kv({evil: evil}, caption=evil)):
        assert "<script" not in html
        assert evil in [cell for row in _Reader(html).rows for cell in row]


def test_no_ground_or_text_colour_is_fixed():
    html = table([{"a": 1}], caption="c") + kv({"a": 1})
    assert "#" not in html
    assert "background:transparent" in html


def test_an_empty_table_is_still_a_table():
    assert _Reader(table([])).rows == [[]]
    assert _Reader(table([], columns=["role"])).rows == [["role"]]


def test_pairs():
    assert _Reader(kv({"name": "lab", "bytes": 3})).rows == [["name", "lab"], ["bytes", "3"]]


BYTES: list[tuple[float, str]] = [
    (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_000_000, "1.2 GB"), (999_960, "1.0 MB"), (256e6, "256 MB"),
    (5e18, "5000 PB"),
]  # fmt: skip


def test_bytes() -> None:
    for n, text in BYTES:
        assert bytes_text(n) == text


SECONDS: list[tuple[float, str]] = [
    (0, "0 ms"), (85e-6, "85 us"), (0.085, "85 ms"), (0.9996, "1.0 s"), (3.21, "3.2 s"), (9.97, "10 s"),
    (59.7, "1 min 00 s"), (250, "4 min 10 s"), (7500, "2 h 05 min"), (-2, "-2.0 s"), (math.nan, "unknown"),
]  # fmt: skip


def test_seconds() -> None:
    for s, text in SECONDS:
        assert seconds_text(s) == text
