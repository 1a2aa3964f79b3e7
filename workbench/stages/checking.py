"""The first step of a stage call: its arguments and its batch are checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.batches.batch import Batch
from workbench.batches.references import RowProvider
from workbench.batches.schema import OF_ONE_RESPONSE
from workbench.errors import BadInput
from workbench.messages.operation import Operation
from workbench.settings.engines import Training
from workbench.stages.group import WorkerGroup
from workbench.stages.run import Run
from workbench.support.validation import at_least


@dataclass(frozen=True, kw_only=True)
class StageCall:
    """A call of an operation that was checked as far as it can be before its inputs are there.

    args, kwargs: as they go to the ranks. arguments: all of them by name, defaults among them. samples: copies of each
    row. code: a text that is equal for equal code and arguments. timeout_s: how long it may take. training: of the
    role, when it was called; None: it updates nothing.
    """

    group: WorkerGroup
    operation: Operation
    batch: Batch | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    samples: int
    code: str
    timeout_s: float | None
    training: Training | None = None

    @property
    def updates(self) -> bool:
        """Whether it updates the role."""
        return self.operation.updates

    @property
    def draws_anew(self) -> bool:
        """Whether the same call again would draw other samples."""
        return self.operation.samples and self.arguments.get("seed") is None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return self.operation.needed(self.arguments) if self.operation.takes_batch else ()

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The columns that it is registered to write."""
        return self.operation.written(self.arguments)

    @property
    def stale(self) -> tuple[str, ...]:
        """Columns of an earlier response, which say nothing of the one that it draws."""
        return OF_ONE_RESPONSE if self.operation.samples else ()

    @cached_property
    def result_ranks(self) -> tuple[int, ...]:
        """The ranks whose outputs and metrics make the result."""
        return tuple(self.operation.protocol.collect(self.group.layout))

    @property
    def awaited(self) -> list[Run]:
        """The runs that make columns which it reads."""
        batch = self.batch
        runs = [] if batch is None else batch.makers(self.operation.awaited(self.reads, batch))
        return [run for run in runs if isinstance(run, Run)]

    def check_columns(self) -> None:
        """Raise `UnknownColumn`, or `BadInput`, where its batch will not do."""
        if self.batch is not None:
            self.group.operations[self.operation.name].check_columns(self.arguments, self.batch.names)
            self.batch.need(self.operation.needed(self.arguments), f"{self.group.role}.{self.operation.name}")

    @property
    def travelling(self) -> tuple[str, ...]:
        """The columns that go to the ranks; of a batch all of whose inputs are there."""
        assert self.batch is not None
        return self.operation.travelling(self.reads, self.batch)


def check_call(
    group: WorkerGroup,
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    source: RowProvider,
    name: str,
) -> StageCall:
    """Check a call; `StageCall.check_columns` looks at its batch.

    source: the workbench's batches. name: the workbench's, for messages.
    """
    where, called = f"{group.role}.{operation.name}", group.operations[operation.name]
    given = dict(kwargs)
    timeout_s = given.pop("timeout_s", None)
    if timeout_s is not None:
        at_least("timeout_s", timeout_s, 0, strictly=True)
    batch, args = _batch_argument(where, operation, args, given, source, name)
    arguments, samples = called.arguments(args, given)
    if operation.samples:
        given.pop("samples", None)
    code = called.code(arguments, samples)
    operation = operation.given(arguments)
    return StageCall(
        group=group, operation=operation, batch=batch, args=args, kwargs=given, arguments=arguments, samples=samples,
        code=code, timeout_s=timeout_s,
        training=group.spec.training if operation.updates and group.spec.trained else None,
    )  # fmt: skip


def _batch_argument(
    where: str, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], source: RowProvider, name: str
) -> tuple[Batch | None, tuple[Any, ...]]:
    if not operation.takes_batch:
        return None, args
    batch, rest = (kwargs.pop("batch"), args) if "batch" in kwargs else (args[0] if args else None, args[1:])
    if isinstance(batch, Run):
        if batch.batch is None:
            raise BadInput(f"{where}({batch!r})", "that run makes no batch", "give it a batch")
        batch = batch.batch
    if not isinstance(batch, Batch):
        raise BadInput(
            f"{where}({type(batch).__name__})", "its first argument is a batch", "start with lab.prompts.next(n)"
        )
    if not batch.is_of(source):
        raise BadInput(f"{batch!r}", f"comes from another workbench than {name!r}", "use this one's batches")
    return batch, rest
