"""Rollouts that wait for training: the batches of the stages up to generation, made for one later iteration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged
from workbench.messages.metrics import MetricValues
from workbench.workers.partial_rollouts import COLUMNS as PART_COLUMNS
from workbench.workers.rollout_columns import PAUSED

UNKNOWN = -1  # the weights version of rollouts that do not say which weights generated them
RESUMED = "begun"  # a key of `made` beside the stages: the rows that the current generation resumes


@dataclass(kw_only=True, eq=False)
class WaitingRollouts:
    """The batches made so far for one later iteration: an entry of `lab.buffer`.

    iteration: the iteration that the prompts are for. stages: the stages up to generation, in order; () for a batch
    from `Buffer.add`. made: by stage, the batches made so far; the last stage's are the rollouts. metrics: by stage,
    the metrics that it reported. times_drawn: how often each row of the rollouts was drawn; None before the first use.
    generated_in: the iteration in which the responses were last generated or resumed.
    """

    iteration: int
    stages: tuple[str, ...] = ()
    made: dict[str, Batch] = field(default_factory=dict)
    metrics: dict[str, MetricValues] = field(default_factory=dict)
    times_drawn: np.ndarray | None = None
    generated_in: int = 0
    _rows: Mapping[str, np.ndarray] | None = None

    @property
    def whole(self) -> bool:
        """Whether all stages have run."""
        return bool(self.made) and all(stage in self.made for stage in self.stages)

    def made_by(self, stages: Sequence[str] | None) -> bool:
        """Whether this entry is whole and was made by these stages; None: by any stages."""
        return self.whole and (stages is None or self.stages == tuple(stages))

    @property
    def paused(self) -> list[int]:
        """The uids of prompts with a paused response. Waits until the responses are generated."""
        if "token_versions" not in self.rollouts.names:
            return []
        return list(dict.fromkeys(self.rows["prompt_uid"][self.rows["paused"]].tolist()))

    @property
    def group_count(self) -> int:
        """The number of groups. It equals the rows of the first stage's batch, which are the prompts."""
        return self.made[self.stages[0]].rows if self.stages else len(self.versions())

    @property
    def rollouts(self) -> Batch:
        """The batch with the responses."""
        return self.made[self.stages[-1]] if self.stages else next(iter(self.made.values()))

    @property
    def version(self) -> int:
        """The version (optimizer steps) of the actor's weights that generated the rollouts; of several, the oldest."""
        if "token_versions" in self.rollouts.names:
            return int(self.rows["weights_version"].min())
        return int(self.rollouts.meta.get("weights_version", UNKNOWN))

    @property
    def rows(self) -> Mapping[str, np.ndarray]:
        """Columns about each row of the rollouts: `prompt_uid`, `weights_version` (the oldest among its tokens),
        `response_tokens`, `reward` (NaN before it is scored), and `paused` (whether the response has paused)."""
        if self._rows is None:
            batch = self.rollouts
            read = ("prompt_uid", "rewards", "token_versions", "ending")
            table = batch.fetch([name for name in read if name in batch.names])  # an interrupt leaves `_rows` unset
            self.made.pop(RESUMED, None)  # the generation that resumed these rows has ended
            rewards: Any = table.get("rewards", torch.full((batch.rows,), torch.nan))
            endings: Any = table.get("ending", [""] * batch.rows)
            if isinstance(rewards, Ragged):
                rewards = np.array([float(row.double().sum()) for row in rewards.rows()])
            version = int(batch.meta.get("weights_version", UNKNOWN))
            versions = np.full(batch.rows, version)
            if isinstance(of_tokens := table.get("token_versions"), Ragged):
                versions = np.array([int(row.min()) if len(row) else version for row in of_tokens.rows()])
            self._rows = {
                "prompt_uid": np.asarray(table["prompt_uid"]),
                "weights_version": versions,
                "response_tokens": batch.lengths("response_ids"),
                "reward": np.asarray(torch.as_tensor(rewards).double()),
                "paused": np.array([ending == PAUSED for ending in endings]),
            }
        return self._rows

    @property
    def draw_counts(self) -> np.ndarray:
        """How often each row was drawn."""
        if self.times_drawn is None:
            self.times_drawn = np.zeros(self.rollouts.rows, dtype=np.int64)
        return self.times_drawn

    def versions(self) -> dict[int, int]:
        """Return the prompt uids of the groups, in order, each with the weights version of its oldest token."""
        found = dict[int, int]()
        for uid, version in zip(self.rows["prompt_uid"].tolist(), self.rows["weights_version"].tolist(), strict=True):
            found[uid] = min(version, found.get(uid, version))
        return found

    def with_groups(self, uids: Iterable[int]) -> WaitingRollouts:
        """Return an entry with the rows of these prompts only, in each batch; this entry if it has no others."""
        wanted, made = list(uids), dict[str, Batch]()
        if wanted == list(self.versions()):
            return self
        kept = np.flatnonzero(np.isin(self.rows["prompt_uid"], wanted))
        for stage, batch in self.made.items():
            there = np.asarray(batch.fetch(["prompt_uid"])["prompt_uid"])
            made[stage] = batch.take(np.flatnonzero(np.isin(there, wanted)))
        rows = {name: column[kept] for name, column in self.rows.items()}
        return WaitingRollouts(
            iteration=self.iteration, stages=self.stages, made=made, metrics=self.metrics,
            times_drawn=self.draw_counts[kept], generated_in=self.generated_in, _rows=rows,
        )  # fmt: skip

    def state(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return this entry as plain values, for checkpoints and for the next kernel. kept: the batches by stage, in
        the form in which they are kept."""
        return {
            "iteration": self.iteration,
            "stages": list(self.stages),
            "made": dict(kept),
            "metrics": {stage: dict(values) for stage, values in self.metrics.items()},
            "times_drawn": None if self.times_drawn is None else self.times_drawn.tolist(),
            "drawn_in": self.generated_in,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], made: Mapping[str, Batch]) -> WaitingRollouts:
        """Return the entry that `state` describes. made: its batches."""
        drawn, generated_in = state["times_drawn"], state.get("drawn_in", 0)  # older checkpoints have no "drawn_in"
        return cls(
            iteration=state["iteration"], stages=tuple(state["stages"]), made=dict(made),
            metrics={stage: MetricValues(values) for stage, values in state["metrics"].items()},
            times_drawn=None if drawn is None else np.asarray(drawn, dtype=np.int64), generated_in=generated_in,
        )  # fmt: skip


def concat_rollouts(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches. If only some have the columns of partial rollouts, these columns are left out."""
    if len({set(PART_COLUMNS) <= set(batch.names) for batch in batches}) > 1:
        batches = [batch.select(*(name for name in batch.names if name not in PART_COLUMNS)) for batch in batches]
    return Batch.concat(batches)


def _metrics(parts: Sequence[WaitingRollouts]) -> dict[str, MetricValues]:
    """Combine the metrics of several generations: the largest value of metrics such as "tokens/max", else the mean,
    weighted by rows. A part of a generation counts with the metrics of the whole generation."""
    rows, found = np.array([len(part.rows["prompt_uid"]) for part in parts]), dict[str, MetricValues]()
    for stage in parts[0].metrics:
        told = [part.metrics.get(stage, MetricValues()) for part in parts]
        found[stage] = MetricValues()
        for name in told[0]:
            there = np.array([one.get(name, np.nan) for one in told])
            largest = name.rpartition("/")[2].startswith("max")
            known = ~np.isnan(there)
            weighed = np.average(there[known], weights=rows[known]) if known.any() else np.nan
            found[stage][name] = float(there[known].max() if largest and known.any() else weighed)
    return found


Chosen = Sequence[tuple[WaitingRollouts, list[int]]]  # entries with the uids of chosen prompts


def rollouts_of(chosen: Chosen, iteration: int) -> WaitingRollouts:
    """Concatenate the chosen groups, stage by stage, as the batches of one iteration. If different weights generated
    the rows, the meta has each prompt's version, `weights_versions`, and the oldest, `weights_version`."""
    parts = [found.with_groups(uids) for found, uids in chosen]
    first = parts[0]
    if len(parts) == 1 and all(batch.meta.get("iteration") == iteration for batch in first.made.values()):
        return first
    versions = {str(uid): version for part in parts for uid, version in part.versions().items()}
    made, oldest = {}, min(versions.values())
    for stage in first.made:
        batch = concat_rollouts([part.made[stage] for part in parts])
        told: dict[str, Any] = {"weights_version": oldest} if "weights_version" in batch.meta else {}
        if told and any(version != oldest for version in versions.values()):
            told["weights_versions"] = versions
        made[stage] = batch.derive("draw", batch.columns, {**told, "iteration": iteration})
    return WaitingRollouts(
        iteration=first.iteration, stages=first.stages, made=made, metrics=_metrics(parts),
        times_drawn=np.concatenate([part.draw_counts for part in parts]),
        _rows={name: np.concatenate([part.rows[name] for part in parts]) for name in first.rows},
    )  # fmt: skip
