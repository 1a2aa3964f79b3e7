"""Finds spans by what is typed: the words that their stage, role or kind hold, or the cell that called them."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from workbench.display.callers import Callers
from workbench.display.span_table import SpanTable

WHERE = ("stage", "role", "kind")


def found_spans(spans: SpanTable, callers: Callers, query: str, lanes: Collection[int]) -> NDArray[np.intp]:
    """Numbers of the spans on these lanes that every word of a query matches, by start.

    A word is a part of a stage's, role's or kind's name, such as "critic"; "role:critic" looks at roles alone.
    "cell:3", or "[3]", are the spans that cell 3 of this kernel called. Letters are small or large alike. An empty
    query finds nothing.
    """
    words = query.lower().split()
    if not words:
        return np.empty(0, np.intp)
    matches = np.isin(spans.columns["lane"], list(lanes))
    for word in words:
        matches &= _matching(spans, callers, word)
    found = np.flatnonzero(matches)
    return found[np.lexsort((found, spans.columns["lane"][found], spans.columns["start_s"][found]))]


def _matching(spans: SpanTable, callers: Callers, word: str) -> NDArray[np.bool_]:
    if cell := re.fullmatch(r"\[(\d+)\]|cell:(\d+)", word):
        asked = int(cell[1] or cell[2]), callers.session
        return np.isin(spans.columns["run"], [run for run, caller in callers.of_run.items() if caller == asked])
    where, colon, part = word.partition(":")
    columns, part = ((where,), part) if colon and where in WHERE else (WHERE, word)
    found = np.zeros(len(spans), bool)
    for name in columns:
        holds = np.array([part in str(one).lower() for one in spans.names[name].all], bool)
        found |= holds[spans.columns[name]]
    return found
