"""`@register(protocol)` turns a worker's method into an operation of its worker group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from workbench.batches.schema import CONTEXT_STARTS
from workbench.errors import BadInput
from workbench.messages.protocols import PROTOCOLS, THREE_D_PROTO, TransferProtocol
from workbench.models.spec import Model
from workbench.support.checked_calls import checked_call
from workbench.support.named_fields import KEYWORD, NAMED, SEVERAL, check_call
from workbench.support.validation import checked, hints_of, one_of

if TYPE_CHECKING:
    from workbench.batches.handle import BatchHandle

Columns = tuple[str, ...] | Callable[[Mapping[str, Any]], tuple[str, ...]]
ALL_TEXT = "all text"
Check = Callable[[Mapping[str, Any]], object]
CheckModel = Callable[[Mapping[str, Any], Model], object]
CheckColumns = Callable[[Mapping[str, Any], Model, Collection[str]], object]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A worker's method and how to call it on all ranks.

    reads: columns that the operation needs, or a function of the arguments that returns their names.
    optional: columns that are sent if the batch has them, or such a function; "all text" in place of them or among them
    means every column of Python objects. writes: columns that the operation adds, or such a function.
    minibatched: rows are distributed minibatch by minibatch, see `Training.minibatches`.
    updates: takes optimizer steps, so its minibatches must be equally large. With "valid" among `optional` the
    operation declares that it skips invalid rows (`Shard.valid_mask`); without, a batch with invalid rows is refused.
    generates: uses the generation engine. Other operations put the engine to sleep where roles share memory.
    samples: the argument `samples` repeats every row that many times. check: raises for arguments that are out of
    range. `reads`, `optional`, `writes` and `check` are given all arguments by name, with defaults filled in.
    check_model(arguments, model): raises for arguments that do not suit the role's model. check_columns(arguments,
    model, names): raises for a batch with these columns. Both are called before any work, by algorithms as well.
    by_hand: whether a call with these arguments makes columns that comparisons treat like columns put by hand.
    """

    name: str
    protocol: TransferProtocol
    reads: Columns = ()
    optional: Columns = ()
    writes: Columns = ()
    minibatched: bool = False
    updates: bool = False
    samples: bool = False
    generates: bool = False
    check: Check | None = None
    check_model: CheckModel | None = None
    check_columns: CheckColumns | None = None
    by_hand: Callable[[Mapping[str, Any]], bool] | None = None
    signature: inspect.Signature
    hints: Mapping[str, Any]
    doc: str

    @property
    def takes_batch(self) -> bool:
        """Whether the first argument is a batch."""
        return bool(self.reads)

    @property
    def counts_all_rows(self) -> bool:
        """Whether the operation learns from every row of its batch, also from invalid rows."""
        assert not callable(self.optional), "its arguments have to be given first"
        return self.updates and self.takes_batch and "valid" not in self.optional

    def needed(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the columns that the operation reads with these arguments."""
        return self.reads(arguments) if callable(self.reads) else self.reads

    def written(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the columns that the operation adds with these arguments."""
        return self.writes(arguments) if callable(self.writes) else self.writes

    def resolved(self, arguments: Mapping[str, Any]) -> Operation:
        """Return this operation with `optional` evaluated for these arguments."""
        return replace(self, optional=self.optional(arguments)) if callable(self.optional) else self

    def columns_to_wait_for(self, needed: tuple[str, ...], batch: BatchHandle) -> tuple[str, ...]:
        """Return the columns of a batch that must be computed before `sent_columns` is known."""
        assert not callable(self.optional)
        more = batch.unknown_names if ALL_TEXT in self.optional else ()
        return (*self.sent_columns(needed, batch), *more)

    def sent_columns(self, needed: tuple[str, ...], batch: BatchHandle) -> tuple[str, ...]:
        """Return all columns of a batch that are sent to the ranks."""
        assert not callable(self.optional), "its arguments have to be given first"
        more = batch.text_names if ALL_TEXT in self.optional else ()
        asked = (*self.optional, "valid") if self.counts_all_rows else self.optional
        named = tuple(name for name in asked if name in batch.names)
        names = dict.fromkeys((*needed, *more, *named))
        if "response_ids" in names and CONTEXT_STARTS in batch.names:
            names[CONTEXT_STARTS] = None
        return tuple(names)


@checked_call("wb.register")
def register(
    protocol: TransferProtocol | str,
    *,
    reads: Columns = (),
    optional: Columns | Literal["all text"] = (),
    writes: Columns = (),
    minibatched: bool = False,
    updates: bool = False,
    samples: bool = False,
    generates: bool = False,
    check: Check | None = None,
    check_model: CheckModel | None = None,
    check_columns: CheckColumns | None = None,
    by_hand: Callable[[Mapping[str, Any]], bool] | None = None,
) -> Callable[[F], F]:
    """Bind a protocol, given as an object or by name, to a worker's method.

    A method that reads columns takes a `Shard` first, and returns an `Output`. The other parameters are as in
    `Operation`. Arguments are checked against their annotations (including pydantic constraints such as
    `Annotated[int, Field(ge=1)]`) and normalized as in settings: NumPy numbers become Python numbers, a list becomes a
    tuple. Where the protocol has `values_per_rank`, each argument is a list of such values. The controller handles
    `timeout_s` and, for operations that draw samples, `samples`.
    """

    if isinstance(protocol, str):
        one_of("protocol", protocol, tuple(PROTOCOLS))
        protocol = PROTOCOLS[protocol]

    def bind(method: F) -> F:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())
        parameters = [p for p in parameters if p.name != "self"]
        if "timeout_s" in signature.parameters:
            raise BadInput(
                f"{method.__qualname__} takes timeout_s",
                "every operation already has it: it limits the time of the whole stage, and the worker does not see it",
                "give the argument another name, such as call_timeout_s",
            )
        method.__operation__ = Operation(  # type: ignore[attr-defined]
            name=method.__name__,
            protocol=protocol,
            reads=reads,
            optional=(optional,) if isinstance(optional, str) else optional,
            writes=writes,
            minibatched=minibatched,
            updates=updates,
            samples=samples,
            generates=generates,
            check=check,
            check_model=check_model,
            check_columns=check_columns,
            by_hand=by_hand,
            signature=signature.replace(parameters=parameters),
            hints=hints_of(method),
            doc=inspect.getdoc(method) or "",
        )
        return method

    return bind


def operations(worker_class: type) -> dict[str, Operation]:
    found = {}
    for name in dir(worker_class):
        operation = getattr(getattr(worker_class, name), "__operation__", None)
        if operation is not None:
            found[name] = operation
    return found


# For most stages of models: replicas share the rows of each minibatch. An update takes optimizer steps.
row_stage = partial(register, THREE_D_PROTO, minibatched=True)
update_stage = partial(row_stage, updates=True)


def checked_arguments(
    operation: Operation, owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments by name, with defaults filled in. Raises `BadInput` for arguments that are not accepted.

    The batch and `samples` are not among them, because the controller has removed them.
    """
    parameters = list(operation.signature.parameters.values())
    if operation.takes_batch:
        parameters = parameters[1:]
    if operation.samples:  # so that an error names it, too
        parameters.append(inspect.Parameter("samples", KEYWORD, default=1))
    signature = operation.signature.replace(parameters=parameters)
    bound = check_call(f"{owner}.{operation.name}", signature, args, kwargs)
    bound.apply_defaults()
    bound.arguments.pop("samples" if operation.samples else "", None)
    for name, hint in operation.hints.items():
        parameter = signature.parameters.get(name)  # None: the batch, or the returned value
        if parameter is None or parameter.kind in (SEVERAL, NAMED):
            continue
        if (value := bound.arguments[name]) is parameter.default:
            continue
        wanted = list[hint] if operation.protocol.values_per_rank else hint  # type: ignore[valid-type]
        bound.arguments[name] = checked(name, value, wanted, parameter.default)
    if operation.check is not None:
        operation.check(bound.arguments)
    return bound.arguments
