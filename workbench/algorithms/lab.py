"""What an algorithm asks of a workbench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from workbench.algorithms.buffer import Buffer
from workbench.batches.batch import Batch
from workbench.batches.store import Weights
from workbench.config.description import Description
from workbench.data.prompt_stream import PromptStream
from workbench.messages.metric_values import MetricValues
from workbench.stages.group import GroupOperation, WorkerGroup
from workbench.stages.runner import StageRunner
from workbench.telemetry.store import TelemetryStore


class Progress(Protocol):
    """Where the algorithms of a workbench stand: see `workbench.session.position`."""

    algorithm: Any
    saved_algorithm: dict[str, Any] | None
    first_states: dict[str, dict[str, Any]]

    def take_up(self, algorithm: Any) -> None: ...


class Lab(Protocol):
    """The public calls of a `Workbench` that algorithms, comparisons and checks use; its roles are attributes."""

    name: str
    seed: int
    prompts: PromptStream
    runner: StageRunner
    telemetry: TelemetryStore

    buffer: Buffer

    @property
    def position(self) -> Progress: ...
    @property
    def description(self) -> Description: ...
    @property
    def groups(self) -> Mapping[str, WorkerGroup]: ...
    @property
    def compute_advantages(self) -> GroupOperation: ...
    @property
    def weights(self) -> Mapping[str, Weights]: ...
    @property
    def iteration(self) -> int: ...
    @property
    def last_metrics(self) -> dict[str, MetricValues]: ...

    def __getattr__(self, name: str) -> WorkerGroup: ...

    @staticmethod
    def apply(function: Callable[..., Any], *batches: Batch, **kwargs: Any) -> Any: ...
    def put(self, table: Any, *, meta: Any = None, owner: str = "notebook") -> Batch: ...
    def report(self, stage: str, metrics: Mapping[str, float]) -> None: ...
    def reported_as(self, stage: str) -> AbstractContextManager[None]: ...
    def overlap(self) -> AbstractContextManager[None]: ...
    def kept(self, *roles: str) -> AbstractContextManager[Callable[[], None]]: ...
    def before_close(self, act: Callable[[], object]) -> None: ...
    def take_edits(self) -> None: ...
    def note_position(self) -> None: ...
    def save_if_due(self, algorithm: Any = None) -> None: ...
    def passed_over(self, iterations: int) -> int: ...
