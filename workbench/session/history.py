"""What happened in a workbench, and when, read from disk. (`Topology` shows the current state.)"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.backends.hosts import Hosts
from workbench.display.idle import Callers
from workbench.display.timeline import Timeline, timeline
from workbench.display.traffic import Traffic, traffic
from workbench.errors import NotFound
from workbench.placement import ROLLOUT
from workbench.settings.engines import SYNC_STRATEGIES
from workbench.stages.group import Groups
from workbench.stages.live_settings import EVENT
from workbench.support.checked_calls import checked_call
from workbench.support.named_fields import remedy_for
from workbench.support.validation import NonNegativeInt, PositiveInt, one_of
from workbench.telemetry.sinks import TrackedRun
from workbench.telemetry.spans import TransferKind
from workbench.telemetry.store import TelemetryStore

if TYPE_CHECKING:
    from workbench.resharding.strategies import Transition, ZeroSync


SHORTEST_S = 0.01  # parts of opening that took less time are not listed


class History:
    """What happened in a workbench, and when; read from the disk.

    script_options: the numbers and bools among the options of the script that opened it, for trackers.
    """

    def __init__(self, hosts: Hosts, groups: Groups, telemetry: TelemetryStore) -> None:
        self._hosts, self._groups, self._telemetry = hosts, groups, telemetry
        self.script_options: Mapping[str, Any] = {}
        self._planned: tuple[Any, ...] = ()  # layouts and hosts, and the result of `_plans` for them

    def transfers(self, kind: TransferKind | None = None) -> pd.DataFrame:
        """Return every transfer between hosts, one per row. kind: "batch" (rows for stages), "weights" (for
        generation), "move" (what `lab.move` moves); None: all."""
        moved = self._telemetry.transfers()
        return moved if kind is None else moved[moved["kind"] == kind].reset_index(drop=True)

    def metrics(self, stage: str | None = None) -> pd.DataFrame:
        """Return one row per stage call, one column per metric. stage: only this one; `NotFound` if it is unknown."""
        found = self._telemetry.metrics(stage)
        if stage is None or len(found):
            return found
        recorded = list(dict.fromkeys(self._telemetry.metrics()["stage"]))
        operations = {name for group in self._groups.by_role.values() for name in group.operations}
        known = [*recorded, *sorted({*operations, "compute_advantages", "evaluate"} - {*recorded})]
        near = remedy_for(stage, known, "lab.metrics({!r})".format)
        if stage not in known and (recorded or near):
            raise NotFound(f"no metrics of stage {stage!r}", f"the stages with metrics are {', '.join(known)}", near)
        return found

    def traffic(self, kind: TransferKind | None = None, *, stage: str | None = None) -> Traffic:
        """Return who sent how many bytes to whom: a matrix as a picture, `.matrix` and `.frame()` as tables.

        kind: as in `transfers`. stage: only the bytes that moved for stages of this name. For "weights" the picture
        also has the least that their syncs could move: the bytes that each rank lacks.
        """
        moved = self._telemetry.transfer_sums.frame(kind)
        if stage is not None:
            known = sorted(set(moved["stage"]))
            if stage not in known:
                raise NotFound(
                    f"stage {stage!r}", f"bytes moved for {', '.join(known) or 'no stage'}", "choose one of these"
                )
            moved = moved[moved["stage"] == stage]
        what = {"batch": "rows", "weights": "weights", "move": "state", None: "all bytes"}[kind]
        return traffic(
            moved,
            names=[info.name for info in self._hosts.infos],
            what=f"{what} for {stage}" if stage else what,
            minimum_bytes=self._plans()[1] * self._syncs_of(stage) if kind == "weights" else None,
        )

    def _syncs_of(self, stage: str | None) -> int:
        """Return how many stage calls moved weights; transfers to the reference do not count as syncs."""
        runs = self._telemetry.transfer_sums.runs("weights")
        wanted = [found for name, found in runs.items() if name != "take_weights" and stage in (None, name)]
        return len(frozenset().union(*wanted))

    def sync_plans(self) -> pd.DataFrame:
        """Return what a sync of the actor's weights would move with each strategy, one per row: strategy; in_use;
        moved_bytes on all ranks; least_bytes, which every strategy has to move; and the maxima over ranks:
        received_bytes, peak_parameter_bytes, kept_twice_bytes (kept beside the generation weights). Without rows where
        ranks hold whole models and generate with them, or where rollout workers generate."""
        return self._plans()[0].copy()

    def _plans(self) -> tuple[pd.DataFrame, int]:
        """Return what `sync_plans` returns, and the least bytes that a sync of the actor's weights moves: between its
        ranks, or to the rollout workers. Computed once for a layout, because a plan takes up to a second."""
        groups = [self._groups.by_role[role] for role in ("actor", ROLLOUT) if role in self._groups.by_role]
        standing = [(group, group.spec, group.layout, group.hosts) for group in groups]
        if not self._planned or self._planned[0] != standing:
            self._planned = standing, *self._make_plans()
        return self._planned[1:]

    def _make_plans(self) -> tuple[pd.DataFrame, int]:
        from workbench.workers.roles.rollout import plan_of_rollout, rollout_layout

        actor, rollout = self._groups.by_role.get("actor"), self._groups.by_role.get(ROLLOUT)
        plans = {strategy: plan.figures() for strategy in SYNC_STRATEGIES if (plan := self._transition(strategy))}
        least = int(plans["hybridflow"].received.sum()) if plans else 0
        if actor is not None and rollout is not None:
            model = self._hosts.description.role_models()[ROLLOUT]
            if model is not None and model.adapter is not None:
                least = model.adapter_bytes * len(rollout.hosts)
            else:
                taker = rollout_layout(rollout.spec, len(rollout.hosts))
                least = int(plan_of_rollout(rollout.spec, actor.layout, taker).figures().received.sum())
        in_use = actor.spec.generation.strategy if actor is not None and actor.spec.generation is not None else None
        rows = [
            (strategy, strategy == in_use, int(plan.received.sum()), least,
             int(plan.received.max()), int(plan.peak_parameter.max()), int(plan.kept_twice.max()))
            for strategy, plan in plans.items()
        ]  # fmt: skip
        columns = ["strategy", "in_use", "moved_bytes", "least_bytes", "received_bytes", "peak_parameter_bytes"]
        return pd.DataFrame(rows, columns=[*columns, "kept_twice_bytes"]), least

    def _transition(self, strategy: str) -> Transition | ZeroSync | None:
        """Return the plan of a sync between the actor's ranks; None if they hold whole models, or others generate."""
        from workbench.models.loading import load_config
        from workbench.workers.weight_transition import plan_of, trained_slices

        actor = self._groups.by_role.get("actor")
        if actor is None or ROLLOUT in self._groups.by_role:
            return None
        spec, slices = actor.spec, trained_slices(actor.spec, actor.layout)
        if slices is None or spec.generation is None:
            return None
        assert spec.name is not None
        assert spec.dtype is not None
        return plan_of(load_config(spec.name), actor.layout, spec.generation, spec.dtype, strategy, slices)

    @checked_call("lab.history.changes")
    def changes(self) -> pd.DataFrame:
        """Return, in order, one row per setting that was assigned while the workbench lived, and per stage of an
        algorithm that was inserted, replaced or removed: `time` (this machine's clock), `iteration` (the current or the
        last one), `cell` (`In [cell]`, or "panel"; None outside a notebook), `setting`, and its value `before` and
        `after`. For a clip of None these are the clip of its loss."""
        events = self._telemetry.events()
        found = events[events["event"] == EVENT]
        names = ["iteration", "cell", "setting", "before", "after"]
        rows = [
            {
                **{name: details.get(name) for name in names},
                "time": datetime.fromtimestamp(time_s),
                "cell": (details.get("by") or "").removeprefix("the ") or details.get("cell"),
            }
            for time_s, details in zip(found["time_s"], found["details"], strict=True)
        ]
        frame = pd.DataFrame(rows, columns=["time", *names], dtype=object)
        return frame.astype({"time": "datetime64[ms]", "iteration": "Int64"})

    def track(self, tracker: str, project: str | None = None, **options: Any) -> None:
        """Send every metric from now on to a tracker as well: `lab.track("wandb", project="arithmetic")`.

        tracker: "tensorboard", "wandb", "mlflow" or "trackio", also as "NAME=PROJECT". Steps are iterations, names are
        "stage/metric". Comparisons and checks are not sent, because they change nothing. project, options: see the
        tracker's class in `workbench.telemetry.sinks`. A tracker that fails later is dropped with a warning.

        Raises `BadInput` where the tracker does not start, `MissingDependency` where it is not installed.
        """
        config = {**self._hosts.description.summary, **self.script_options}
        run = TrackedRun(
            name=f"{self._hosts.description.name}-{self._hosts.run_folder.name}",
            folder=self._hosts.run_folder,
            config=config,
        )
        self._telemetry.sinks.add(tracker, project, run, options)

    def timeline(self, iterations: PositiveInt | None = 1, *, fold: bool = True) -> Timeline:
        """Return a picture of the last iterations (None: all) by device: what ran where and when, and idle times.

        fold: draw long stretches without a call as narrow breaks. `.summary` has the times of each device,
        `.sums(from_s, to_s)` those of each stage between two times.
        """

        events, start = self._telemetry.events(), None
        begun = events[events["event"] == "iteration"]["time_s"]
        since_s = None if iterations is None else max(begun[: -iterations - 1], default=None)
        spans = self._telemetry.spans(since_s=since_s)
        if since_s is not None and not (spans["end_s"] >= begun.iloc[-2]).any():  # the last two called no stage
            spans = self._telemetry.spans()
        if iterations is not None and len(spans):
            starts = begun[begun <= spans["end_s"].max()].to_list()  # the newest may have no span yet
            start = starts[-iterations:][0] if starts else None
            if len(starts) > iterations:  # a cell that called the iteration before may be between two of its stages
                spans = spans[spans["end_s"] >= starts[-iterations - 1]]
        devices = [info.device for info in self._hosts.infos]
        records: list[Any] = events.to_dict("records")
        return timeline(spans, devices=devices, start=start, callers=Callers.of(records), fold=fold)

    def opening(self) -> pd.DataFrame:
        """Return where the seconds of opening went: a row for each part of it on each rank, by start.

        kind and note name the part. start_s: since `wb.open` was called. parent: the kind of the row that this row lies
        inside.
        """
        spans = self._telemetry.spans(run=0)
        spans["start_s"] -= spans["start_s"].min()
        columns = ["pool", "device", "role", "parent", "kind", "note", "start_s", "duration_s"]
        return spans.loc[spans["duration_s"] >= SHORTEST_S, columns].round(2).reset_index(drop=True)

    def logs(self, pool: str | None = None, rank: NonNegativeInt | None = None, lines: PositiveInt = 40) -> None:
        """Print the last lines of the logs of the worker processes. pool, rank: only of these."""
        pools = tuple(dict.fromkeys(info.pool for info in self._hosts.infos))
        if pool is not None:
            one_of("pool", pool, pools)
        for info in self._hosts.infos:
            if pool in (None, info.pool) and rank in (None, info.rank) and info.log_path:
                print(f"--- {info.name}: {info.log_path}")
                path = Path(info.log_path)
                written = path.read_text(errors="replace") if path.exists() else ""
                print("\n".join(written.splitlines()[-lines:]))
