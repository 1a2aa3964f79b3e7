"""Compare algorithms on one batch (`lab.compare`): each arm starts from the same weights; results are side by side."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd

from workbench.algorithms.graph import Graph
from workbench.algorithms.loop import Algorithm
from workbench.batches.batch import Batch
from workbench.batches.columns import Ragged
from workbench.batches.schema import STATUS
from workbench.display.curves import STROKES, Chart, Charted, Curve
from workbench.display.html import table
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, WorkbenchError
from workbench.errors.plain_text import shown
from workbench.support.replaced import replaced
from workbench.support.validation import Rule

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab

Arms = Annotated[
    Mapping[str, Algorithm], Rule("must map names to algorithms of this workbench", 'write {"ppo": wb.PPO(lab)}')
]
NUMBERS = ("token_rewards", "advantages", "returns", "values", "rewards")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The result of one algorithm. ran: stages that were run. taken: stages whose columns the batch already had."""

    name: str
    batch: Batch
    metrics: Mapping[str, float]
    ran: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


def downstream(graph: Graph, batch: Batch) -> list[str]:
    """Return the stages to run on `batch`: stages whose columns it lacks, or has from other code or arguments, and all
    stages that read the columns of these. Rollouts, and columns from `lab.put`, count as present.

    A function or a method of a batch has run if a stage that takes its output has; a stage edited in a cell has not.
    If two stages write a column, the batch has it from the later one. `STATUS` columns are ignored: many write them.
    """
    last = {name: stage.name for stage in graph.stages for name in stage.writes}
    there: dict[str, bool] = {}
    for stage in reversed(graph.stages):
        writes = [name for name in stage.writes if name not in STATUS]
        columns = [batch.columns.get(name) for name in writes]
        if stage.edited or any(last[name] != stage.name for name in writes):
            there[stage.name] = False
        elif stage.role in ("batch", "notebook"):
            there[stage.name] = any(there[consumer.name] for consumer in graph.consumers(stage.name))
        else:
            code = "" if stage.samples else stage.code  # all arms share the rollouts, however these were generated
            made = [c is not None and (not code or c.made_with in ("", code)) for c in columns]
            there[stage.name] = bool(made) and all(made)
    edges, todo = graph.edges(), set[str]()
    for stage in graph.stages:
        if not there[stage.name] or edges[stage.name] & todo:
            todo.add(stage.name)
    return [name for name in graph.names if name in todo]


def _as_given(graph: Graph, batch: Batch) -> Graph:
    """Set on_policy=False in updates if the batch has `old_log_prob`, which may come from older weights."""
    if "old_log_prob" not in batch.columns:
        return graph
    stages = tuple(
        replace(stage, kwargs={**stage.kwargs, "on_policy": False}) if stage.kwargs.get("on_policy") else stage
        for stage in graph.stages
    )
    return Graph(graph.title, stages)


@stoppable("lab.compare()", ("the system is as before", "run the same call again"))
def compare(lab: Lab, batch: Batch, arms: Arms) -> Comparison:
    """Run several algorithms on one batch: `lab.compare(batch, {"ppo": wb.PPO(lab), "grpo": wb.GRPO(lab)})`.

    Each arm runs the stages downstream of the batch's columns, from the current weights and optimizer states. Arms that
    draw more prompts draw the same ones. Afterwards the roles and the position in the prompts are restored.
    """
    runner, plans = lab.runner, {}
    for name, algorithm in arms.items():
        if algorithm.lab is not lab:
            rule = "an arm is an algorithm on this workbench"
            raise BadInput(f"arm {name!r}: {shown(algorithm)}", rule, "wb.PPO(lab)")
        with _named(name):
            graph = _as_given(algorithm.graph(), batch)
        todo = downstream(graph, batch)
        if any(graph[stage].role == "prompts" for stage in todo):
            remedy = "give a batch of lab.prompts.next(n)"
            raise BadInput(f"arm {name!r} on {batch!r}", "an arm draws no prompts: the batch must have them", remedy)
        plans[name] = (graph, todo)
    updated = {s.role for graph, todo in plans.values() for s in graph.stages if s.updates and s.name in todo}
    counters, done, put_back_prompts = runner.counters, list[Arm](), lab.prompts.snapshot()

    def put_back() -> None:
        put_back_prompts()
        runner.ownership.record()

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(counters, "last_metrics", {}))
        stack.enter_context(replaced(runner.batches, "looping", True))
        stack.callback(put_back)
        go_back = stack.enter_context(runner.snapshots.kept(*sorted(updated)))
        for name, (graph, todo) in plans.items():
            counters.last_metrics = {}
            newest, values = batch, dict[str, Any]()
            with _named(name), lab.overlap():
                for stage in graph.stages:
                    if stage.name in todo:
                        values[stage.name] = graph.call(stage, lab, values)
                    else:
                        values[stage.name] = values[stage.inputs[0]] if stage.inputs else batch
                    newest = values[stage.name] if isinstance(values[stage.name], Batch) else newest
            taken, told = tuple(n for n in graph.names if n not in todo), counters.last_metrics
            metrics = {f"{stage}/{n}": value for stage, found in told.items() for n, value in found.items()}
            done.append(Arm(name=name, batch=newest, metrics=metrics, ran=tuple(todo), taken=taken))
            go_back()
            put_back()
    return Comparison(batch, tuple(done))


@contextlib.contextmanager
def _named(arm: str) -> Iterator[None]:
    """Add the arm's name to errors raised inside."""
    try:
        yield
    except WorkbenchError as error:
        error.value = f"arm {arm!r}: {error.value}"
        raise
    except Exception as error:
        error.add_note(f"in arm {arm!r}")
        raise


@dataclass(frozen=True)
class Comparison(Charted):
    """The results of all arms on one batch. `df`: metrics by arm. `column(name)`: the mean of each row, by arm."""

    batch: Batch
    arms: tuple[Arm, ...]
    _frames: dict[str, Any] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise BadInput(f"arm {name!r}", f"there are {', '.join(arm.name for arm in self.arms)}")

    @property
    def df(self) -> pd.DataFrame:
        """One row per metric, one column per arm; NaN if an arm does not have the metric."""
        return pd.DataFrame({arm.name: dict(arm.metrics) for arm in self.arms})

    def column(self, name: str = "advantages") -> pd.DataFrame:
        """Return the mean of a numeric column over each response's tokens: one row per response, one column per arm."""
        if name not in self._frames:
            found = {}
            for arm in self.arms:
                if name in arm.batch.columns:
                    column = arm.batch.fetch([name])[name]
                    rows = map(np.asarray, column.rows() if isinstance(column, Ragged) else column)
                    found[arm.name] = [float(np.mean(row)) if np.size(row) else float("nan") for row in rows]
            if not found:
                raise BadInput(f"column {name!r}", "no arm has it")
            # arms may have different numbers of rows
            self._frames[name] = pd.DataFrame({arm: pd.Series(values) for arm, values in found.items()})
        return self._frames[name]

    def __repr__(self) -> str:
        names = ", ".join(arm.name for arm in self.arms)
        return f"<Comparison of {names} on {self.batch.name}: {len(self.df)} metrics>"

    def _compared(self) -> tuple[list[str], list[str]]:
        """Return the numeric columns that differ between arms, and the columns that are equal in all arms."""
        there = [name for name in NUMBERS if any(name in arm.batch.columns for arm in self.arms)]
        frames = {name: self.column(name) for name in there}
        equal = {name: all(one[arm].equals(one.iloc[:, 0]) for arm in one) for name, one in frames.items()}
        same = [name for name in there if equal[name] and frames[name].shape[1] > 1]
        return [name for name in there if name not in same], same

    def charts(self) -> list[Chart]:
        """Return a chart per differing column, each arm's values sorted so that arms of different sizes compare."""
        charts = []
        for name in self._compared()[0]:
            curves = list[Curve]()
            for arm, values in self.column(name).items():
                if y := sorted(value for value in values.tolist() if math.isfinite(value)):
                    x = [n / max(1, len(y) - 1) for n in range(len(y))]
                    curves.append(Curve(name=str(arm), x=x, y=y, stroke=STROKES[len(curves) % len(STROKES)]))
            title, ticks = f"{name}, mean over each response", {0.0: "smallest", 1.0: "largest"}
            charts.append(Chart(title=title, curves=tuple(curves), x="responses, sorted", ticks=ticks))
        return charts

    def _repr_html_(self) -> str:
        metrics = dict.fromkeys(name for arm in self.arms for name in arm.metrics)
        rows = [
            {"metric": name, **{arm.name: f"{arm.metrics[name]:.6g}" for arm in self.arms if name in arm.metrics}}
            for name in metrics
        ]
        same = self._compared()[1]
        note = f"<div>The same in all arms that have it: {', '.join(same)}</div>" if same else ""
        stages = [
            {"arm": arm.name, "taken from the batch": ", ".join(arm.taken), "run": ", ".join(arm.ran)}
            for arm in self.arms
        ]
        caption = f"{len(self.arms)} arms on {self.batch.name}: {self.batch.rows} rows"
        return table(stages, caption=caption) + note + table(rows, caption="metrics", max_rows=60)
