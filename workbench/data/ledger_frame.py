"""The ledger of prompts as frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.data.ledger import UNSCORED, Ledger
from workbench.data.prompts import Prompts
from workbench.objectives.preference import CONFIDENCE_95
from workbench.support.intervals import wilson_bounds

if TYPE_CHECKING:
    import pandas as pd


def usual_order(prompts: Prompts, drawn: np.ndarray) -> np.ndarray:
    """The rows in the order in which they come without an order of one's own: those first that were drawn least often,
    among these as the epoch of that number has them. drawn: how often each row was drawn."""
    place = np.arange(len(drawn))
    if prompts.shuffle:
        for epoch in np.unique(drawn).tolist():
            of_epoch = np.empty(len(drawn), np.int64)
            of_epoch[np.random.default_rng([prompts.seed, epoch]).permutation(len(drawn))] = np.arange(len(drawn))
            place[drawn == epoch] = of_epoch[drawn == epoch]
    return np.lexsort((place, drawn))


def ledger_frame(prompts: Prompts, ledger: Ledger, iteration: int) -> pd.DataFrame:
    """A row a prompt, see `PromptStream.ledger`, in `usual_order`."""
    import pandas as pd

    totals = ledger.totals()
    drawn, sums, last = totals.drawn, totals.sums, totals.last
    values: dict[str, Any] = {
        "drawn": drawn,
        "iterations_since": np.where(drawn > 0, np.maximum(float(iteration) - totals.iteration, 0), np.nan),
        "responses": sums["responses"],
        **_rates("pass", sums),
        "reward_mean": _ratio(sums["total"], sums["responses"]),
        "reward_variance": _variance(sums),
        "response_tokens_mean": _ratio(sums["tokens"], sums["responses"]),
        "last_version": np.where(last["version"] == UNSCORED, np.nan, last["version"]),
        **_rates("last_pass", last),
        "last_reward": _ratio(last["total"], last["responses"]),
        "last_variance": _variance(last),
        "last_response_tokens": _ratio(last["tokens"], last["responses"]),
    }
    source = prompts.frame.rename(columns={name: f"data_{name}" for name in values})
    known = pd.DataFrame(values, index=source.index)
    first = ["prompt", "prompt_tokens"]
    found = pd.concat([source[first], known, source.drop(columns=first)], axis=1)
    return found.iloc[usual_order(prompts, drawn)]


def versions_frame(prompts: Prompts, ledger: Ledger) -> pd.DataFrame:
    """A row a prompt and weights version, see `PromptStream.ledger`."""
    import pandas as pd

    totals = ledger.totals()
    rows, places = np.nonzero(totals.versions != UNSCORED)
    versions = totals.versions[rows, places]
    responses, passed = totals.responses[rows, places], totals.passed[rows, places]
    low, high = _bounds(passed, responses)
    index = prompts.frame.index[rows]
    values = {"version": versions, "responses": responses, "passed": passed,
              "pass_rate": _ratio(passed, responses), "pass_low": low, "pass_high": high}  # fmt: skip
    found = pd.DataFrame(values, index=index).iloc[np.lexsort((versions, rows))]
    return found.set_index("version", append=True)


def _rates(name: str, scores: np.ndarray) -> dict[str, np.ndarray]:
    low, high = _bounds(scores["passed"], scores["responses"])
    return {f"{name}_rate": _ratio(scores["passed"], scores["responses"]), f"{name}_low": low, f"{name}_high": high}


def _bounds(passed: np.ndarray, responses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the 95 % interval; NaN without responses."""
    low, high = wilson_bounds(passed, np.maximum(responses, 1), CONFIDENCE_95)
    return tuple(np.where(responses > 0, np.clip(bound, 0, 1), np.nan) for bound in (low, high))  # type: ignore[return-value]


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.where(below > 0, above / np.maximum(below, 1), np.nan)


def _variance(scores: np.ndarray) -> np.ndarray:
    """The unbiased one; NaN of fewer than two responses."""
    n = scores["responses"]
    squares = scores["squares"] - scores["total"] ** 2 / np.maximum(n, 1)
    return np.where(n > 1, np.maximum(squares, 0) / np.maximum(n - 1, 1), np.nan)
