"""Responses of several turns, for reading: who wrote what, and means over what the policy wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np


def marked(token_ids: Sequence[int], mask: Sequence[bool], decode: Callable[[Sequence[int]], str]) -> str:
    """The text of a response; what stands outside its mask, the environment's part, in ⟦ ⟧."""
    text = ""
    for chosen, part in groupby(zip(token_ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        words = decode([token for token, _ in part])
        text += words if chosen else f"⟦{words}⟧"
    return text


def chosen_mean(row: Sequence[float], mask: Sequence[bool] | None) -> float:
    """The mean over the tokens inside the mask, over all where the row is of other tokens; NaN where there are none."""
    values = np.asarray(row, dtype=np.float64)
    if mask is not None and len(mask) == len(values):
        values = values[np.asarray(mask, dtype=bool)]
    return float(values.mean()) if len(values) else float("nan")
