"""Rows for which a function of the user failed: the columns `valid` and `failure`, and the report of a stage.

A row's `failure` has a line for each function that failed for it, "STAGE NAME: what it did"; empty where none did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from workbench.batches.columns import Table
from workbench.data.reward_function import NOT_ASKED, first_failure
from workbench.errors import StageError
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.replies import FailedRows, Failure
from workbench.messages.shards import Shard

Lines = dict[str, list[str]]  # by stage


class Status:
    """Which rows of a shard have failed, in which stages."""

    def __init__(self, batch: Shard) -> None:
        self._valid = batch.valid.tolist()
        texts = batch.columns.get("failure", [""] * len(batch))
        assert isinstance(texts, list)  # the schema has text
        self._lines: list[Lines] = [{} for _ in texts]
        for lines, text in zip(self._lines, texts, strict=True):
            for line in filter(None, text.splitlines()):
                lines.setdefault(line.partition(" ")[0], []).append(line)
        self._failed_before = [bool(lines) for lines in self._lines]

    def failed_in(self, stage: str) -> list[bool]:
        """Of each row, whether a stage failed for it."""
        return [stage in lines for lines in self._lines]

    def note(self, stage: str, row: int, failures: Mapping[str, StageError]) -> None:
        """Replace what is known of a stage for a row: by name of the function, its error."""
        self._lines[row].pop(stage, None)
        if failures:
            said = (
                f"{stage} {name}: {error.what}{error.remedy and f'; {error.remedy}'}"
                for name, error in failures.items()
            )
            self._lines[row][stage] = [" ".join(line.split()) for line in said]

    def columns(self) -> Table:
        """The columns `valid` and `failure`. A row is valid again where nothing that failed for it is left."""
        valid = [
            not lines and (was_valid or had_failed)
            for lines, was_valid, had_failed in zip(self._lines, self._valid, self._failed_before, strict=True)
        ]
        texts = ["\n".join(line for stage in lines.values() for line in stage) for lines in self._lines]
        return {"valid": torch.tensor(valid, dtype=torch.bool), "failure": texts}


def failed_rows(
    errors: Mapping[int, StageError], numbers: Sequence[int], most: float
) -> tuple[Metrics, FailedRows | None]:
    """Of a stage's errors by row: its metric, and what the controller is told. numbers: of the rows in the batch."""
    metrics: Metrics = {"failed/fraction": Mean(total=len(errors), count=len(numbers))}
    if not errors:
        return metrics, None
    first = first_failure(errors)
    row = next(numbers[i] for i, error in errors.items() if error is first)
    not_asked = sum(error.what == NOT_ASKED for error in errors.values())
    told = FailedRows(count=len(errors), not_asked=not_asked, row=int(row), most=most, first=Failure.of(first))
    return metrics, told
