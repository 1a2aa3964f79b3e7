"""`wb.dial(lab)`: the benefit and the cost of staleness, iteration by iteration, over one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.comparisons.run_folder import ITERATION, run_folder
from workbench.display.curves import Chart, Charted, Curve, tables
from workbench.display.headlines import looked_at
from workbench.display.idle import Callers, DeviceSpans, Lane, called_s, within
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.support.checked_calls import checked_call

if TYPE_CHECKING:
    from workbench.telemetry.store import TelemetryStore

METRICS = {
    "age_steps": "buffer/age_steps/mean",
    "largest_ratio_deviation": "update_actor/rollout_ratio/max_deviation",
    "effective_sample_size": "update_actor/correction/effective_sample_size",
}
CHARTS = {
    "age_steps": "age of the rollouts, optimizer steps",
    "tokens_per_s": "response tokens a second",
    "idle_share": "idle share of the devices",
    "largest_ratio_deviation": "largest |ratio to the rollout's policy - 1|",
    "effective_sample_size": "effective sample size, share",
    "reward": "reward, mean",
}


@dataclass(frozen=True)
class Dial(Charted):
    """df: one row an iteration, NaN where a run does not report it.

    age_steps: mean age of the trained rollouts, in optimizer steps of the actor; 0 where none is reported, as for fresh
    ones: a loop of your own reports it by `lab.report("buffer", {"age_steps/mean": age})`. seconds: from the
    iteration's start to the next one's, without time in which nothing was called. tokens_per_s: response tokens
    generated for its prompts, divided by `seconds`. idle_share: of all devices in that time, 0 to 1.
    largest_ratio_deviation: of the trained policy's ratio to the policy that drew the tokens. effective_sample_size:
    before the correction bounds its weights, a share in (0, 1]. reward: mean.
    """

    df: pd.DataFrame

    def charts(self) -> list[Chart]:
        """A chart for each column with numbers, all over the iterations."""
        x = self.df.index.tolist()
        return [
            Chart(title=title, curves=(Curve(name=column, x=x, y=self.df[column].tolist()),))
            for column, title in CHARTS.items()
            if self.df[column].notna().any()
        ]

    def __repr__(self) -> str:
        if self.df.empty:
            return "<Dial: no iteration has been trained>"
        return f"<Dial of {len(self.df)} iterations>\n{self.df.to_string(float_format='%.3g')}"

    def _repr_html_(self) -> str:
        return tables(self.charts()) if self.charts() else f"<div>{repr(self)[1:-1]}</div>"


@checked_call("wb.dial")
def dial(lab: Any) -> Dial:
    """The benefit and the cost of staleness in a workbench's run so far: a `Dial`, which a notebook draws.

    It reads the run's metrics, events and spans, so it includes iterations of earlier kernels. Iterations that were
    repeated after a recovery count once. Raises `BadInput` for anything but a workbench.
    """
    from workbench.controller import Workbench

    if not isinstance(lab, Workbench):
        raise BadInput(f"wb.dial({shown(lab)})", "it must be a workbench", "give what wb.open(...) returned")
    series = run_folder(lab).series()
    found = _times(lab.telemetry, lab.devices())
    tokens = series["tokens"] - series["tokens"].shift(fill_value=0.0)
    found["tokens_per_s"] = tokens.where(tokens > 0) / found["seconds"]
    reward = looked_at(map(str, series.columns)).get("reward", "")
    for column, metric in {**METRICS, "reward": reward}.items():
        found[column] = series.get(metric, math.nan)
    found["age_steps"] = found["age_steps"].fillna(0.0)
    updates = [name for name in series.columns if str(name).startswith("update_")]
    trained = series.index[series[updates].notna().any(axis=1)]
    return Dial(found.reindex(trained)[["age_steps", "seconds", *[name for name in CHARTS if name != "age_steps"]]])


def _times(telemetry: TelemetryStore, devices: Sequence[Lane]) -> pd.DataFrame:
    """`seconds` and `idle_share` by iteration; of a repeated iteration, the last."""
    events: list[Any] = telemetry.events().to_dict("records")
    rows: list[Any] = telemetry.spans().to_dict("records")
    begun = [(int(event["details"][ITERATION]), event["time_s"]) for event in events if event["event"] == ITERATION]
    moves = [event["time_s"] - float(event["details"]["seconds"]) for event in events if event["event"] == "move"]
    spans = DeviceSpans(rows, devices)
    lives = spans.lives(devices, moves)
    bounds = [*(time_s for _, time_s in begun), max((row["end_s"] for row in rows), default=0.0)]
    gaps = spans.gaps((bounds[0], bounds[-1]), lives, Callers.of(events))
    found = dict[int, dict[str, float]]()
    for (number, _), start_s, end_s in zip(begun, bounds[:-1], bounds[1:], strict=True):
        there = {lane: within(life, start_s, end_s) for lane, life in enumerate(lives)}
        if times := spans.times({lane: life for lane, life in there.items() if life[1] > life[0]}, gaps):
            spent_s = list(map(called_s, times))
            idle_s = sum(row["idle_s"] - row["uncalled_s"] for row in times)
            found[number] = {"seconds": max(spent_s), "idle_share": idle_s / max(sum(spent_s), 1e-9)}
    return pd.DataFrame.from_dict(found, orient="index", columns=["seconds", "idle_share"]).rename_axis(ITERATION)
