from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.telemetry import Span, TelemetryStore
from workbench.telemetry.span_lines import SpanLines

NAMES: dict[str, Any] = {"stage": "update_actor", "role": "actor", "pool": "main", "device": "cpu:0"}
SPANS = [
    Span(**NAMES, run=run, rank=0, kind=kind, parent=parent, start_s=run + 0.1, end_s=run + 0.7, tokens=5, note=note)
    for run in range(3)
    for kind, parent, note in (("compute", "", ""), ("forward", "compute", 'a "note",\n,"start_s":1,"end_s":'))
]


def rows_of(lines: SpanLines) -> list[dict[str, Any]]:
    numbers = zip(lines.start_s.tolist(), lines.end_s.tolist(), lines.label, lines.count, strict=True)
    return [{**lines.labels[a], **lines.counts[b], "start_s": start, "end_s": end} for start, end, a, b in numbers]


def test_spans_read_from_lines_are_those_that_were_stored(tmp_path: Path) -> None:
    store = TelemetryStore(tmp_path)
    store.append_spans(SPANS)
    lines = store.follow("spans").new_spans()
    assert rows_of(lines) == [span.row() for span in SPANS]
    assert (len(lines.labels), len(lines.counts)) == (6, 2)  # what spans share was parsed once


@pytest.mark.parametrize("torn", [b'{"stage":"x","run":1,"start_s":1', b"not json", b""])
def test_lines_that_are_torn_or_older_are_passed_over_or_read_one_by_one(tmp_path: Path, torn: bytes) -> None:
    store = TelemetryStore(tmp_path)
    store.append_spans(SPANS[:2])
    older = {name: value for name, value in SPANS[2].row().items() if name != "moved_bytes"}
    with (tmp_path / "spans.jsonl").open("ab") as file:
        file.write(torn + b"\n" + json.dumps(older).encode() + b"\n")
    follower = store.follow("spans")
    assert rows_of(follower.new_spans()) == [SPANS[0].row(), SPANS[1].row(), older]
    assert len(follower.new_spans().start_s) == 0
