"""The findings of checks, one row a check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pandas as pd

from workbench.display.html import table
from workbench.errors import BadInput, CheckFailed

if TYPE_CHECKING:
    from workbench.batches.batch import Batch

Verdict = Literal["ok", "failed", "not applicable"]
SIGNS = {"ok": "\N{CHECK MARK}", "failed": "\N{MULTIPLICATION X}", "not applicable": "\N{EN DASH}"}


class NotApplicable(Exception):
    """Raised by a check that does not apply to this workbench; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check. figure: the measurement; it may be at most `threshold`. Both are NaN if nothing was
    measured.

    culprit: role, rank, row or weight to look at; empty unless it failed. about: what the figure is, or why the check
    does not apply.
    """

    check: str = ""
    verdict: Verdict
    figure: float = float("nan")
    threshold: float = float("nan")
    culprit: str = ""
    about: str = ""


def finding(figure: float, threshold: float, culprit: str, about: str) -> Finding:
    """The result of a measurement; it fails if the figure is above the threshold, or NaN."""
    holds = figure <= threshold
    verdict: Verdict = "ok" if holds else "failed"
    return Finding(verdict=verdict, figure=figure, threshold=threshold, culprit="" if holds else culprit, about=about)


def largest(found: Iterable[tuple[float, str]], threshold: float, about: str) -> Finding:
    """The largest of several measurements, each with its culprit."""
    figure, culprit = max(found)
    return finding(figure, threshold, culprit, about)


@dataclass(frozen=True)
class CheckReport:
    """The findings of `lab.check()`: `report["ratio"]`, `report.df`, `report.ok`, `report.raise_if_failed()`.

    batch: the rollouts of a checked loss, with each token's contribution to the loss and to its gradient.
    """

    findings: tuple[Finding, ...]
    batch: Batch | None = None

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def state(self) -> str:
        return "all that apply passed" if self.ok else f"{len(self.failed)} failed"

    def raise_if_failed(self) -> CheckReport:
        """Raise `CheckFailed`, naming every failed check with figure and culprit; else return the report."""
        if self.failed:
            # figure and threshold, if the check measured one
            said = "; ".join(
                f"{f.check}: {'' if math.isnan(f.threshold) else f'{f.figure:.3g} > {f.threshold:.3g}, '}{f.culprit}"
                for f in self.failed
            )
            raise CheckFailed(
                f"{len(self.failed)} of {len(self.findings)} checks failed: {said}",
                "a system that trains correctly passes every check",
                "lab.check() shows all of them",
            )
        return self

    @property
    def df(self) -> pd.DataFrame:
        """One row a check, by name."""
        return pd.DataFrame(self.findings, columns=[*Finding.__dataclass_fields__]).set_index("check")

    def __getitem__(self, check: str) -> Finding:
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise BadInput(f"check {check!r}", f"there are {', '.join(finding.check for finding in self.findings)}")

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __repr__(self) -> str:
        head = ("check", "verdict", "figure", "threshold", "look at, or what it is")
        rows = [head, *((*_texts(finding).values(), finding.culprit or finding.about) for finding in self.findings)]
        return "\n".join(f"{row[0]:<14}{row[1]:<16}{row[2]:>9}{row[3]:>10}  {row[4]}".rstrip() for row in rows)

    def _repr_html_(self, when: str = "") -> str:
        rows = [
            {**_texts(one), "verdict": f"{SIGNS[one.verdict]} {one.verdict}", "look at": one.culprit}
            | {"what it is": one.about}
            for one in self.findings
        ]
        return table(rows, caption=f"{len(rows)} checks{when}: {self.state}")


def _texts(finding: Finding) -> dict[str, str]:
    measured = finding.verdict != "not applicable" and not math.isnan(finding.threshold)
    return {
        "check": finding.check,
        "verdict": finding.verdict,
        "figure": f"{finding.figure:.2g}" if measured else "",
        "threshold": f"{finding.threshold:.2g}" if measured else "",
    }
