"""What `lab.evaluate` returns: a frame with a row a data set, and one with a row a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

STANDARD_ERROR = "reward_standard_error"
SHOWN_CONDITIONS = ("samples", "seed", "sampling/temperature", "sampling/top_p", "sampling/max_new_tokens", "reward")


def of_data(name: str) -> str:
    """The name of the conditions of one data set."""
    return f"data/{name}"


class Evaluation(pd.DataFrame):
    """One row a data set; what is made from it is a plain frame.

    rows: a frame with a row a response: `data`, `prompt_index` (its place in the source), `prompt`, `sample`,
    `response`, `reward`, `passed`, `response_tokens`, `finished`, `valid`, `failure`; where they were asked for,
    `answer` and `selection_score` (NaN where the selector failed); and `reward/NAME` for each component of the reward.
    seed, threshold: those of the call. conditions: what it was done with, by name: samples, seed, threshold, all
    settings of sampling, the reward, of which the name and a digest count, and how each data set becomes prompts, such
    as "data/sums/chat/system".
    """

    _metadata = ["rows", "seed", "threshold", "conditions"]  # noqa: RUF012 - pandas reads it
    rows: pd.DataFrame
    seed: int
    threshold: float
    conditions: Mapping[str, Any]

    @classmethod
    def of(
        cls, table: pd.DataFrame, rows: pd.DataFrame, *, seed: int, threshold: float,
        conditions: Mapping[str, Any] | None = None,
    ) -> Evaluation:  # fmt: skip
        made = cls(table)
        made.rows, made.seed, made.threshold = rows, seed, threshold
        made.conditions = {"seed": seed, "threshold": threshold, **(conditions or {})}
        return made

    @property
    def _constructor(self) -> Any:
        return pd.DataFrame

    def __repr__(self) -> str:
        names = [
            name
            for name in self.columns
            if name == "prompts" or str(name).startswith(("pass@", "majority@", "best_of@"))
        ]
        names += [name for name in ("truncated_fraction", "failed_fraction") if name in self.columns]
        if "reward_mean" not in self.columns:
            return super().__repr__()
        errors = self[STANDARD_ERROR] if STANDARD_ERROR in self.columns else [float("nan")] * len(self)
        reward = [f"{mean:.4g} ± {error:.2g}" for mean, error in zip(self["reward_mean"], errors, strict=True)]
        cells = {"reward ± error": reward, **{str(name): [f"{value:.4g}" for value in self[name]] for name in names}}
        with pd.option_context("display.width", 1000):
            shown = pd.DataFrame(cells, index=self.index).to_string()
        others = len(self.columns) - len(names) - 2
        rest = f"{others} other columns, .to_string() prints all; .rows has a row a response"
        return f"{shown}\n{self.stated()}\n{rest}"

    def stated(self) -> str:
        """What it was done with, in a line."""
        known = {name: self.conditions[name] for name in SHOWN_CONDITIONS if name in self.conditions}
        chats = (f"{of_data(str(name))}/chat" for name in self.index)
        known |= {name: value for chat in chats for name, value in self.conditions.items() if name.startswith(chat)}
        return ", ".join(f"{name.removeprefix('sampling/')}={value}" for name, value in known.items())
