"""Compares two verifiers of the same responses: `batch.disagreements("math", "judge")`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from workbench.batches.columns import Ragged
from workbench.display.html import table

if TYPE_CHECKING:
    from workbench.batches.batch import Batch


SHOWN_CHARACTERS = 160
SHOWN_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Disagreements:
    """The comparison of two columns of scores, row by row.

    df: one line per valid row, the largest gap first: `row`, its number; `prompt`, `response`; both scores; `gap`, the
        distance of the scores, each scaled by its range if it leaves [0, 1]; `agree`, whether both are above their
        threshold, or neither; `rewards_notes`, if the batch has it.
    counts: number of rows by (first is above, second is above). thresholds: of both. left_out: number of rows left out
        because they failed or lack a score.
    one_sided: says which verifier gives all rows the same verdict, so that kappa is 0 or NaN; "" if neither does so.
    """

    names: tuple[str, str]
    thresholds: tuple[float, float]
    counts: Mapping[tuple[bool, bool], int]
    left_out: int
    df: pd.DataFrame

    @property
    def one_sided(self) -> str:
        if self.df.empty:
            return "no row has both scores"
        said = []
        for i, (name, limit) in enumerate(zip(self.names, self.thresholds, strict=True)):
            scores, above = self.df[name], {verdicts[i] for verdicts, rows in self.counts.items() if rows}
            if scores.nunique() == 1:
                said.append(f"{name} is {scores.iloc[0]:.4g} on every row")
            elif len(above) == 1:
                said.append(f"{name} is {'above' if above == {True} else 'not above'} {limit:.4g} on every row")
        return ", ".join(said)

    @property
    def agreement(self) -> float:
        """The share of rows on which both scores are above their threshold, or neither is."""
        return (self.counts[True, True] + self.counts[False, False]) / max(1, sum(self.counts.values()))

    @property
    def kappa(self) -> float:
        """Cohen's kappa: (p_o - p_e) / (1 - p_e), where p_o is the agreement, and p_e the agreement by chance of two
        verifiers that exceed their thresholds as often. 1: full agreement, 0: agreement by chance. If one verifier
        gives all rows the same verdict, kappa is 0; if both do, NaN: see `one_sided`.

        Source: Cohen 1960, A coefficient of agreement for nominal scales, https://doi.org/10.1177/001316446002000104.
        """
        rows = max(1, sum(self.counts.values()))
        one = (self.counts[True, True] + self.counts[True, False]) / rows
        two = (self.counts[True, True] + self.counts[False, True]) / rows
        by_chance = one * two + (1 - one) * (1 - two)
        return (self.agreement - by_chance) / (1 - by_chance) if by_chance < 1 else float("nan")

    @property
    def _told(self) -> tuple[str, str]:
        """The number of rows on which the verdicts differ, and kappa, in words."""
        apart = self.counts[True, False] + self.counts[False, True]
        kappa = f"kappa says nothing: {self.one_sided}" if self.one_sided else f"kappa {self.kappa:.2f}"
        return f"{apart} of {sum(self.counts.values())} rows", kappa

    def __repr__(self) -> str:
        apart, kappa = self._told
        return f"<{self.names[0]} and {self.names[1]} disagree on {apart}; {kappa}>"

    def _repr_html_(self) -> str:
        """Return a table of row counts by the two verdicts, and the first lines of `df`."""
        (apart, kappa), rows = self._told, len(self.df)
        one, two = (f"{name} > {limit:.4g}" for name, limit in zip(self.names, self.thresholds, strict=True))
        verdicts = [
            {"": one if mine else f"not {one}", two: self.counts[mine, True], f"not {two}": self.counts[mine, False]}
            for mine in (True, False)
        ]
        without = f"; {self.left_out} failed rows are left out" if self.left_out else ""
        more = f" (the first {SHOWN_ROWS} of {rows}; .df has all)" if rows > SHOWN_ROWS else ""
        lines: list[Any] = self.df.head(SHOWN_ROWS).map(_short).to_dict("records")
        caption = f"the verdicts differ on {apart}. Cohen's {kappa}{without}"
        return table(verdicts, caption=caption) + table(lines, caption=f"largest gaps first{more}")


def _short(value: Any) -> Any:
    long = isinstance(value, str) and len(value) > SHOWN_CHARACTERS
    return f"{value[: SHOWN_CHARACTERS - 3]}..." if long else value


def disagreements(batch: Batch, names: tuple[str, str], threshold: float | tuple[float, float] | None) -> Disagreements:
    """Compare two columns of a batch, see `Batch.disagreements`. names: the columns' names."""
    values = [_scores(batch, name) for name in names]
    valid = np.ones(batch.rows, dtype=bool)
    if "valid" in batch.names:
        valid = np.asarray(batch.fetch(["valid"])["valid"], dtype=bool)
    valid &= np.isfinite(values[0]) & np.isfinite(values[1])  # leaves out rows without a score
    spans = [_span(scores[valid]) for scores in values]
    if threshold is None:
        limits = tuple((low + high) / 2 for low, high in spans)
    else:
        limits = threshold if isinstance(threshold, tuple) else (threshold, threshold)
    one, two = ((x - low) / (high - low) for x, (low, high) in zip(values, spans, strict=True))
    above = [scores > limit for scores, limit in zip(values, limits, strict=True)]
    gap = np.abs(one - two)
    order = np.flatnonzero(valid)[np.argsort(-gap[valid], kind="stable")]
    columns: dict[str, object] = {"row": order}
    said = [n for n in ("prompt", "prompt_ids", "response_ids", "response_mask", "rewards_notes") if n in batch.names]
    texts = batch.df(said, rows=order) if said and len(order) else pd.DataFrame()
    for name, of in (("prompt", "prompt"), ("prompt", "prompt_text"), ("response", "response_text")):
        if of in texts and name not in columns:
            columns[name] = texts[of].tolist()
    columns |= {name: scores[order] for name, scores in zip(names, values, strict=True)}
    columns |= {"gap": gap[order], "agree": (above[0] == above[1])[order]}
    if "rewards_notes" in texts:
        columns["rewards_notes"] = texts["rewards_notes"].tolist()
    counts = {
        (a, b): int(((above[0] == a) & (above[1] == b) & valid).sum()) for a in (True, False) for b in (True, False)
    }
    return Disagreements(
        names=names, thresholds=(float(limits[0]), float(limits[1])), counts=counts,
        left_out=int((~valid).sum()), df=pd.DataFrame(columns),
    )  # fmt: skip


def _scores(batch: Batch, name: str) -> np.ndarray:
    """Return one number per row; a column of numbers per token is summed over the tokens that the policy chose."""
    masked = ["response_mask"] if "response_mask" in batch.names else []
    table = batch.fetch([name, *masked])
    column, mask = table[name], table.get("response_mask")
    if not isinstance(column, Ragged):
        return np.asarray(column, dtype=np.float64)
    chosen = mask.rows() if isinstance(mask, Ragged) and mask.lengths.equal(column.lengths) else None
    rows = column.rows()
    return np.array(
        [float((row if chosen is None else row[chosen[i].bool()]).double().sum()) for i, row in enumerate(rows)]
    )


def _span(scores: np.ndarray) -> tuple[float, float]:
    """Return the range of scores: (0, 1), or (least, greatest) if some score lies outside [0, 1]."""
    low, high = float(scores.min(initial=0.0)), float(scores.max(initial=1.0))
    if (low, high) != (0.0, 1.0):
        low, high = float(scores.min()), float(scores.max())
    return low, high if high > low else low + 1.0
