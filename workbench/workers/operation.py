"""`@register(protocol)`: makes a worker's method an operation of its worker group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from workbench.errors import BadInput
from workbench.workers.protocols import TransferProtocol

Reads = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A worker's method and how to call it on all ranks.

    reads: columns that it needs (and that travel), or a function of the arguments that names them.
    optional: columns that travel if they are there; "all text": every column of Python objects.
    writes: columns that it adds. minibatched: rows are dealt out minibatch by minibatch, see `Training.minibatches`.
    updates: takes optimizer steps, so its minibatches must be equally large.
    samples: the argument `samples` asks for every row that many times.
    """

    name: str
    protocol: TransferProtocol
    reads: Reads = ()
    optional: tuple[str, ...] | Literal["all text"] = ()
    writes: tuple[str, ...] = ()
    minibatched: bool = False
    updates: bool = False
    samples: bool = False
    signature: inspect.Signature
    doc: str

    @property
    def takes_batch(self) -> bool:
        """Whether the first argument is a batch."""
        return bool(self.reads)

    def needed(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The columns that it reads with these arguments."""
        return self.reads(arguments) if callable(self.reads) else self.reads

    def travelling(self, needed: tuple[str, ...], there: Mapping[str, Any]) -> tuple[str, ...]:
        """All columns that go to the ranks, of those that are `there` (by name, with a `dtype`)."""
        if self.optional == "all text":
            more = tuple(name for name, column in there.items() if column.dtype == "object")
        else:
            more = tuple(name for name in self.optional if name in there)
        return tuple(dict.fromkeys((*needed, *more)))


def register(
    protocol: TransferProtocol,
    *,
    reads: Reads = (),
    optional: tuple[str, ...] | Literal["all text"] = (),
    writes: tuple[str, ...] = (),
    minibatched: bool = False,
    updates: bool = False,
    samples: bool = False,
) -> Callable[[F], F]:
    """Bind a protocol to a worker's method. One that reads columns takes a `Shard` first, and returns an `Output`."""

    def bind(method: F) -> F:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())
        parameters = [p for p in parameters if p.name != "self"]
        method.__operation__ = Operation(  # type: ignore[attr-defined]
            name=method.__name__,
            protocol=protocol,
            reads=reads,
            optional=optional,
            writes=writes,
            minibatched=minibatched,
            updates=updates,
            samples=samples,
            signature=signature.replace(parameters=parameters),
            doc=inspect.getdoc(method) or "",
        )
        return method

    return bind


def operations(worker_class: type) -> dict[str, Operation]:
    """The operations of a worker class, by name."""
    found = {}
    for name in dir(worker_class):
        operation = getattr(getattr(worker_class, name), "__operation__", None)
        if operation is not None:
            found[name] = operation
    return found


def check_arguments(operation: Operation, owner: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `BadInput` for arguments that the operation does not take, before anything is sent."""
    parameters = list(operation.signature.parameters.values())
    if operation.takes_batch:
        parameters = parameters[1:]
    names = [p.name for p in parameters]
    if operation.samples:
        names.append("samples")
    try:
        operation.signature.replace(parameters=parameters).bind(
            *args, **{k: v for k, v in kwargs.items() if not (operation.samples and k == "samples")}
        )
    except TypeError as error:
        raise BadInput(f"{owner}.{operation.name}: {error}", f"it takes {', '.join(names) or 'nothing more'}") from None
