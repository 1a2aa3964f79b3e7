"""Sends metrics to a tracker as they come: TensorBoard, Weights & Biases, MLflow, trackio. A step is an iteration,
names are "stage/metric" as in `lab.metrics()`.

To add a tracker, write a class with `__init__(project, run, **options)`, `log` and `close`, and a line in `TRACKERS`.
"""

from __future__ import annotations

import importlib.util
import re
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workbench.errors import BadInput, MissingDependency
from workbench.errors.plain_text import said
from workbench.support.named_fields import remedy_for

PROJECT = "workbench"  # the default project


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The facts about a run that a tracker gets: its name, its folder, and the settings it was opened with, by name."""

    name: str
    folder: Path
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Takes metrics by name, as they come; `close` sends the rest. failed: whether the run failed."""

    def log(self, values: Mapping[str, float], iteration: int, time_s: float) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs` finds those of all runs. project: another folder.

    options: of `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, project: str | None, run: TrackedRun, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" if project is None else Path(project).expanduser() / run.name
        self._writer = SummaryWriter(folder, **{"flush_secs": 10, **options})
        rows = (f"| {name} | {value} |" for name, value in run.config.items())
        self._writer.add_text("config", "\n".join(["| | |", "| --- | --- |", *rows]))

    def log(self, values: Mapping[str, float], iteration: int, time_s: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration, walltime=time_s)

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, its files in the run folder; WANDB_MODE=offline sends nothing. project: its project.

    Curves are drawn over the iteration, not over wandb's own step, which must not decrease: a stage of an older batch
    may run again. options: of `wandb.init`.
    """

    def __init__(self, project: str | None, run: TrackedRun, **options: Any) -> None:
        import wandb

        defaults = {"project": project or PROJECT, "name": run.name, "config": dict(run.config), "dir": run.folder}
        self._run = wandb.init(**{**defaults, "reinit": "create_new", **options})
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def log(self, values: Mapping[str, float], iteration: int, time_s: float) -> None:
        self._run.log({"iteration": iteration, **values})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI, logged in the background. project: its experiment.

    options: of `MlflowClient.create_run`.
    """

    def __init__(self, project: str | None, run: TrackedRun, **options: Any) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(project or PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project or PROJECT)
        self._id = self._client.create_run(number, **{"run_name": run.name, **options}).info.run_id
        params = [Param(_mlflow_name(name), str(value)) for name, value in run.config.items()]
        self._client.log_batch(self._id, params=params)
        self._last: Any = None

    def log(self, values: Mapping[str, float], iteration: int, time_s: float) -> None:
        from mlflow.entities import Metric

        rows = [Metric(_mlflow_name(name), value, int(time_s * 1e3), iteration) for name, value in values.items()]
        self._last = self._client.log_batch(self._id, metrics=rows, synchronous=False)

    def close(self, failed: bool) -> None:
        from mlflow import flush_async_logging

        flush_async_logging()
        if self._last is not None:
            self._last.wait()  # raises its error
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run of trackio, in its folder on this machine or as its options say. project: its project.

    options: of `trackio.init`, such as `space_id=`.
    """

    def __init__(self, project: str | None, run: TrackedRun, **options: Any) -> None:
        import trackio

        defaults = {"project": project or PROJECT, "name": run.name, "config": dict(run.config)}
        self._run = trackio.init(**{**defaults, "embed": False, **options})

    def log(self, values: Mapping[str, float], iteration: int, time_s: float) -> None:
        self._run.log(dict(values), step=iteration)

    def close(self, failed: bool) -> None:
        self._run.finish()


# by the name of the package that each tracker needs
TRACKERS: Mapping[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


class Sinks:
    """The trackers that get the metrics of one workbench. A tracker that fails is dropped with a warning."""

    def __init__(self) -> None:
        self._trackers: dict[tuple[str, str | None], Tracker] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Sinks({', '.join(name for name, _ in self._trackers)})"

    def add(self, tracker: str, project: str | None, run: TrackedRun, options: Mapping[str, Any]) -> None:
        """Start a tracker, once for each tracker and project. Raises `BadInput` where the tracker does not start."""
        name, written = check_tracker(tracker)
        key = name, project if project is not None else written
        if key in self._trackers:
            return
        try:
            self._trackers[key] = TRACKERS[name](key[1], run, **options)
        except Exception as error:
            raise BadInput(
                f"track={name!r}",
                f"it did not start: {type(error).__name__}: {said(error)}",
                "see its documentation, or leave it out",
            ) from error

    def log(self, stage: str, iteration: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one stage call."""
        if not self._trackers:
            return
        named, time_s = {f"{stage}/{name}": value for name, value in values.items()}, time.time()
        with self._lock:
            for key, tracker in list(self._trackers.items()):
                try:
                    tracker.log(named, iteration, time_s)
                except Exception as error:
                    del self._trackers[key]
                    warnings.warn(
                        f"{key[0]} gets no more metrics: {type(error).__name__}: {said(error)}. The run continues, and "
                        "lab.metrics() has all metrics.",
                        stacklevel=2,
                    )

    def close(self, failed: bool = False) -> None:
        """Have all trackers send the rest. failed: whether the run failed."""
        with self._lock:
            trackers = list(self._trackers.items())
            self._trackers.clear()
        for (name, _), tracker in trackers:
            try:
                tracker.close(failed)
            except Exception as error:
                warnings.warn(f"{name} may lack the last metrics: {type(error).__name__}: {said(error)}", stacklevel=2)


def check_tracker(text: str) -> tuple[str, str | None]:
    """Return name and project of "NAME" or "NAME=PROJECT". Raises `BadInput` for an unknown tracker, and
    `MissingDependency` for one that is not installed."""
    name, _, project = str(text).partition("=")
    if name not in TRACKERS:
        raise BadInput(f"track={text!r}", f"trackers are {', '.join(TRACKERS)}", remedy_for(name, TRACKERS, repr))
    if importlib.util.find_spec(name) is None:
        raise MissingDependency(
            f"track={name!r} without the package {name!r}", "it is not installed here", f"pip install {name}"
        )
    return name, project or None


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow does not allow in names: it takes letters, digits and -_. :/"""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
