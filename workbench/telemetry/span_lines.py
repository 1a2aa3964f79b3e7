"""Spans as they are stored, parsed so that what many of them share is parsed once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The keys of a stored span are in the order of `Span.row`; these three cut its line into four pieces. They cannot occur
# inside a text, whose quotes JSON escapes.
CUTS = (b',"start_s":', b',"end_s":', b',"moved_bytes":')


@dataclass(frozen=True, kw_only=True)
class SpanLines:
    """N spans. start_s, end_s: unix times, [N]. labels: the different rows of what is stored before the times (stage,
    run, role, pool, rank, device, kind); label: the number of each span's row among them, [N]. counts, count: the same
    of what is stored after the times (bytes, tokens, memory, note, parent)."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    labels: Sequence[Mapping[str, Any]]
    label: NDArray[np.intp]
    counts: Sequence[Mapping[str, Any]]
    count: NDArray[np.intp]

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> SpanLines:
        """From one mapping a span."""
        start_s, end_s = (np.array([row[name] for row in rows], np.float64) for name in ("start_s", "end_s"))
        each = np.arange(len(rows))
        return cls(start_s=start_s, end_s=end_s, labels=rows, label=each, counts=rows, count=each)

    @classmethod
    def of_text(cls, text: bytes) -> SpanLines | None:
        """From whole lines of spans.jsonl; None where a line is not a span as it is written now."""
        lines = text.count(b"\n")
        for cut in CUTS:
            text = text.replace(cut, b"\n")
        pieces = text.split(b"\n")
        if len(pieces) != 4 * lines + 1:
            return None
        (heads, label), (tails, count) = _different(pieces[0:-1:4]), _different(pieces[3::4])
        try:
            labels = json.loads(b"[" + b",".join(head + b"}" for head in heads) + b"]")
            counts = json.loads(b"[" + b",".join(b'{"moved_bytes":' + tail for tail in tails) + b"]")
            start_s, end_s = (np.array(list(map(float, pieces[at::4]))) for at in (1, 2))
        except ValueError:
            return None
        return cls(start_s=start_s, end_s=end_s, labels=labels, label=label, counts=counts, count=count)


def _different(pieces: Sequence[bytes]) -> tuple[list[bytes], NDArray[np.intp]]:
    """The different ones, in order, and the number of each piece among them."""
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return list(numbers), np.fromiter(map(numbers.__getitem__, pieces), np.intp, len(pieces))
