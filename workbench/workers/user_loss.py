"""Losses that users write: their arguments, by the names of their parameters, and what they may return.

    def loss(log_prob, old_log_prob, advantages, mask):
        return -(log_prob - old_log_prob).exp() * advantages     # the loss of each token

The losses of workbench itself have this form too.

A user's loss may also read logits from the model, a part at a time:

    def loss(log_prob, advantages, mask, logits):
        entropy = logits.map(lambda x: torch.distributions.Categorical(logits=x).entropy())
        return -log_prob * advantages - 0.01 * entropy

Suffixes: B rows of a micro-batch, R response tokens of the longest, n tokens of one part, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, Table
from workbench.batches.schema import SCHEMA
from workbench.data.user_functions import parameters_of
from workbench.errors import BadInput, StageError
from workbench.errors.containing import must_propagate
from workbench.errors.frames import is_users
from workbench.errors.plain_text import said, shown
from workbench.messages.metrics import Mean
from workbench.models.heads import PackedModule
from workbench.models.packing import to_device
from workbench.models.spec import Model
from workbench.support.calls.pickling import by_value, name_of
from workbench.support.named_fields import remedy_for
from workbench.workers.micro_batches import MicroBatch, OnDevice

UserFunction = Callable[..., Any]
# an update's own metrics, whose names a loss must not report; "name/" stands for all names that begin with it
OF_UPDATES = ("loss", "grad_norm", "learning_rate", "optimizer_steps", "skipped/", "skipped_rows/", "first_minibatch/")
CALL_IT = "call it in the notebook, with columns of batch.fetch()"
SUMMED = "was it summed or averaged? Return the loss of each token: aggregation= reduces them to one number"


@dataclass(frozen=True)
class ParameterNames:
    """The names of a function's parameters: needed: those without a default; optional: those with a default."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.needed + self.optional

    @classmethod
    def of(cls, function: UserFunction) -> ParameterNames:
        """Return what a function asks for, without parameters that `functools.partial` has bound by name."""
        bound = function.keywords if isinstance(function, functools.partial) else ()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        own = [p for p in (parameters_of(function) or {}).values() if p.kind in named and p.name not in bound]
        return cls(
            tuple(p.name for p in own if p.default is p.empty), tuple(p.name for p in own if p.default is not p.empty)
        )


def reads(function: Any, *names: str) -> bool:
    """Return whether this is a function that has all these parameters."""
    return callable(function) and set(names) <= {*ParameterNames.of(function).names}


def check_function(
    argument: str, function: UserFunction, written: str, one_of: Collection[str] = (), **options: float | None
) -> None:
    """Raise `BadInput` if a function cannot be called by its parameters' names, or cannot be sent to workers.

    argument: the argument that has the function as value, such as "loss". written: how such a function is written, for
    messages. one_of: the function must ask for at least one of these names. options: of built-in losses, which must be
    None beside a function.
    """
    what, parameters = f"{argument}={name_of(function)}", parameters_of(function)
    if parameters is None:
        raise BadInput(what, "the names of its parameters are not known", f"write {written}")
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise BadInput(f"{what} takes {parameter.name!r} by position", "it is called by name", f"write {written}")
    asked = ParameterNames.of(function)
    if not set(one_of or asked.names) & set(asked.names):
        rule = "its parameters' names select its inputs: it must have one"
        if one_of:
            rule = f"its gradient comes through {' or '.join(map(repr, one_of))}: it must have such a parameter"
        hint = "; a decorator needs functools.wraps" if parameters and not asked.names else ""
        takes = ", ".join(asked.names or map(str, parameters.values())) or "nothing"
        raise BadInput(f"{what} takes {takes}", rule, f"write {written}{hint}")
    for name, value in options.items():
        if value is not None:
            raise BadInput(
                f"{name}={value} with {what}",
                "it applies to built-in losses only: a function has its own options",
                f"leave it out, or write {name}=None; functools.partial({name_of(function)}, {name}={value}) passes it "
                "to the function",
            )
    try:
        by_value(function)
    except Exception as error:
        raise BadInput(
            f"{what} cannot be sent to workers: {said(error, 200)}",
            "it runs in the workers' processes, with copies of the variables that it uses",
            "give it numbers, texts and tensors; create other objects inside it",
        ) from error


def check_names(argument: str, function: UserFunction, given: Collection[str], columns: Collection[str]) -> None:
    """Raise `BadInput` if a function needs a parameter that is neither `given` nor a column, nor a column that a stage
    could make."""
    for name in ParameterNames.of(function).needed:
        if name in given or name in columns or name in SCHEMA:
            continue
        known = [*dict.fromkeys((*given, *columns))]
        near = remedy_for(name, known, repr)
        raise BadInput(
            f"{argument}={name_of(function)} takes {name!r}",
            f"its parameters must be among: {', '.join(known)}",
            f"{near + ', or ' if near else ''}give the parameter a default",
        )


def check_asked(
    argument: str, given: Collection[str], arguments: Mapping[str, Any], model: Model, columns: Collection[str]
) -> None:
    """Call `check_names` for an operation's argument if it is a function: `check_columns` of the operation."""
    if callable(arguments[argument]):
        check_names(argument, arguments[argument], given, columns)


@dataclass(frozen=True, kw_only=True)
class TokenFunction:
    """A loss of a role's update, called for one micro-batch at a time. Its parameters are looked up once.

    columns, mask: the shard's. Outside the mask the function sees 0 in response columns, so that it computes finite
    numbers there. own: as in `checked_loss`. around_call: a context of each call in a pass: if a user's function may
    raise on one replica alone, all replicas end the pass, see `Communicator.all_or_none`.
    """

    function: UserFunction
    columns: Table
    mask: Ragged
    own: tuple[str, ...]
    around_call: Callable[[], AbstractContextManager[None]] = nullcontext

    @cached_property
    def asked(self) -> tuple[str, ...]:
        """The names of the function's parameters."""
        return ParameterNames.of(self.function).names

    @cached_property
    def _table(self) -> list[tuple[str, ColumnValues | None, bool]]:
        """For each parameter: its column in the shard, and whether that column has one number per response token."""
        columns = [as_given(self.columns.get(name)) for name in self.asked]
        of_tokens = [isinstance(c, Ragged) and torch.equal(c.lengths, self.mask.lengths) for c in columns]
        return list(zip(self.asked, columns, of_tokens, strict=True))

    def __call__(
        self, index: list[int], padded: Callable[[Ragged], Tensor], given: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token [B, R] of some rows, and metrics. padded: these rows of a column, [B, R].

        given: values beside columns, also response numbers [B, R, ...]; they go before columns of the same name.
        """
        with self.around_call():
            return self._called(index, padded, given)

    def _called(
        self, index: list[int], padded: Callable[[Ragged], Tensor], given: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inside_BR = padded(self.mask).bool()
        values: dict[str, Any] = {}
        for name, column, of_tokens in self._table:
            if name in given:
                value = given[name]
                values[name] = selected(value, inside_BR) if isinstance(value, Tensor) else value
            elif name == "mask":
                values[name] = inside_BR
            elif isinstance(column, list):
                values[name] = [column[row] for row in index]
            elif isinstance(column, Tensor):
                values[name] = to_device(column[index], inside_BR.device)
            elif isinstance(column, Ragged) and of_tokens:
                values[name] = selected(padded(column), inside_BR)
            elif isinstance(column, Ragged):  # a column of other tokens, such as the prompt's
                values[name] = to_device(column.take(index).pad(), inside_BR.device)
        returned = call("loss", self.function, values)
        return checked_loss(self.function, returned, inside_BR.shape, self.own)

    def rehearse(
        self,
        gradients: Collection[str],
        given: Mapping[str, Ragged] = MappingProxyType({}),
        of_model: Callable[[Tensor], Mapping[str, Any]] = lambda inside_BR: {},
    ) -> None:
        """Call the function once with the first two rows that have a token inside the mask, before any pass, so that a
        mistake in it is an error on every rank at once. Without such a row it is not called.

        gradients: the names of values with a gradient; they get numbers near those of the update, or zeros. given:
        columns under the function's own names for them. of_model: returns, from the mask [B, R], stand-ins for the
        model's outputs.
        """
        index = self.mask.pad().bool().any(-1).nonzero()[:2, 0].tolist()
        if not index:
            return
        values = {name: column.take(index).pad() for name, column in given.items()}
        zeros = self.mask.take(index).pad().float() * 0
        near = self.columns.get("old_log_prob")
        for name in gradients:
            known = near.take(index).pad() if name == "log_prob" and isinstance(near, Ragged) else zeros
            values[name] = known.detach().clone().requires_grad_()
        if near is None and "log_prob" in values:
            values["old_log_prob"] = values["log_prob"].detach()
        values |= of_model(self.mask.take(index).pad().bool())
        with torch.enable_grad():
            self._called(index, lambda column: column.take(index).pad(), values)


def as_given(column: ColumnValues | None) -> ColumnValues | None:
    """Return a column as functions get it: a list of numbers, such as a number of each row of the prompts' data set, as
    a tensor [rows]; any other column unchanged."""
    if isinstance(column, list) and all(isinstance(value, int | float) for value in column):
        return torch.tensor(column)
    return column


def selected(x_BR: Tensor, inside_BR: Tensor) -> Tensor:
    """Return numbers [B, R, ...] inside the mask, and 0 outside; integers, such as token ids, stay unchanged."""
    inside = inside_BR.view(*inside_BR.shape, *(1 for _ in x_BR.shape[2:]))
    return torch.where(inside, x_BR, 0.0) if x_BR.is_floating_point() else x_BR


def call(argument: str, function: UserFunction, values: Mapping[str, Any]) -> Any:
    """Call a function with arguments by name. If it raises, raise a `StageError` that names it. Out-of-memory errors
    pass unchanged: the update then continues with smaller micro-batches."""
    try:
        return function(**values)
    except BaseException as error:
        if must_propagate(error) or isinstance(error, torch.OutOfMemoryError | MemoryError):
            raise
        try_it = f"{CALL_IT}; lab.check(loss=, batch=) tries it" if argument == "loss" else CALL_IT
        raise StageError(f"{argument}={name_of(function)} raised {error_with_line(error)}", "", try_it) from error


def own_state(function: Any) -> bytes:
    """Return the fields of a callable object, or of a bound method's object, pickled; b"" for plain functions."""
    owner = getattr(function, "__self__", function)
    try:
        return b"" if inspect.isroutine(owner) or isinstance(owner, type) else by_value(getattr(owner, "__dict__", {}))
    except Exception:  # it made something that cannot be pickled, such as a client
        return b"not known"


def notes_on_state(argument: str, function: Any, before: bytes) -> tuple[str, ...]:
    """Return a note for the user if calls have changed the function's `own_state` from `before`."""
    if own_state(function) == before:
        return ()
    return (
        f"{argument}={name_of(function)} changed its own fields. With Ray, workers get a new copy of it for each "
        "stage, and the change is lost: keep such numbers in the notebook, and give them with functools.partial",
    )


def error_with_line(error: BaseException) -> str:
    """Describe an exception of a user's function in words, with the last line of the user's code."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    words = f"{type(error).__name__}: {said(error, 400)}"
    if not frames:
        return words
    last = frames[-1]
    return f"{words}, in line {last.lineno} of {last.name}" + (f": {last.line}" if last.line else "")


def checked_loss(
    function: UserFunction, returned: Any, shape: tuple[int, ...], own: Collection[str] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Split a function's return value into the loss of each token [rows, tokens] and metrics. Raises `BadInput` for
    another shape or dtype, or a loss without a gradient.

    own: names of metrics that the role's update reports itself, beside OF_UPDATES.
    """
    what = f"loss={name_of(function)} returned"
    loss, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    rule = f"it must return the loss of each token, a tensor of shape {list(shape)} [rows, tokens], or (loss, metrics)"
    if not isinstance(loss, Tensor):
        raise BadInput(f"{what} {kind_of(returned)}", rule, SUMMED if isinstance(loss, int | float) else "")
    if loss.shape != shape:
        fewer = loss.numel() < torch.Size(shape).numel()
        raise BadInput(f"{what} a tensor of shape {list(loss.shape)}", rule, SUMMED if fewer else "")
    if not loss.is_floating_point():
        raise BadInput(f"{what} a tensor of {loss.dtype}", f"{rule} of float32 or another real dtype")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise BadInput(
            f"{what} a loss without a gradient",
            "the loss must depend on the parameter that has a gradient",
            "do not use .detach(), .data, .item() or torch.no_grad() to compute it",
        )
    if not isinstance(metrics, Mapping):
        raise BadInput(f"{what} {kind_of(metrics)} as its metrics", "metrics must be a dict from a name to a tensor")
    found, own = {}, (*OF_UPDATES, *own)
    for name, value in metrics.items():
        if not isinstance(name, str) or any(name.startswith(n) if n.endswith("/") else name == n for n in own):
            listed = ", ".join(f"{n}..." if n.endswith("/") else n for n in own)
            rule = f"a name must be a text, and not one of the update's own metrics: {listed}"
            raise BadInput(f"{what} a metric {name!r}", rule, "give it another name")
        if not isinstance(value, Tensor) or value.shape not in (shape, shape[:1]) or value.is_complex():
            raise BadInput(
                f"{what} {kind_of(value)} as metric {name!r}",
                f"it must be a tensor [rows, tokens] of shape {list(shape)}, or [rows] of shape {list(shape[:1])}; the "
                "mean over the tokens in the mask, or over the rows, is reported",
            )
        value = value.detach().to(loss.device)
        found[name] = value if value.is_floating_point() else value.float()
    return loss, found


def kind_of(value: Any) -> str:
    """Describe a function's return value for messages."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {shown(value)}"


def reported(micro: MicroBatch, values: Tensor, mask_BR: Tensor) -> OnDevice:
    """Return the mean of a metric [B, R] over the mask, or of a metric [B] over the rows of a micro-batch."""
    if values.ndim == 2:
        return micro.mean_over(mask_BR)(values)
    # a selection, not a product: a number may be infinite in a pass that only keeps in step with other ranks
    total = values.sum() if micro.weight else values.new_zeros(())
    return OnDevice(Mean, {"total": total, "count": len(values) * micro.weight})


OF_MODEL = ("logits", "hidden_states")  # names that a loss may ask for, with a gradient

# (numbers of chosen tokens, function of a part's logits [n, V] and of its place) -> results of all parts, in order
OfTokens = Callable[[Tensor, Callable[[Tensor, slice], Tensor]], Tensor]
REHEARSED_TOKENS = 8


class Logits:
    """The logits of a micro-batch's response tokens, divided by the temperature, in float32 and with a gradient.

    If the batch has a sampling mask, the logits of tokens that could not be drawn are -1e9: probabilities and entropies
    are over the same tokens as `log_prob`.

    inside_BR: the mask of response tokens. of_tokens: calls a function for parts of the tokens with these numbers (of B
    x R).
    """

    def __init__(self, inside_BR: Tensor, of_tokens: OfTokens) -> None:
        self._inside_BR, self._of_tokens = inside_BR, of_tokens

    def map(self, function: Callable[..., Tensor], *others: Tensor, where: Tensor | None = None) -> Tensor:
        """Return `function(logits, *others)` for each token: [rows, tokens] or [rows, tokens, ...], 0 at tokens not
        read.

        The function is called for at most 512 tokens at a time, with logits [n, V] and the same tokens of `others`,
        each given as [rows, tokens, ...], and returns [n] or [n, ...]. The backward pass calls it again, so that no
        more logits are in memory at once: it must have no side effects and return the same again. where: bool [rows,
        tokens], the positions to read; None: those inside the mask. Positions outside the mask are never read.

        With ZeRO stage 3 or tensor parallel ranks a loss must call `map` equally often for each micro-batch.
        """
        chosen_BR = self._chosen(where)
        for other in others:
            if not isinstance(other, Tensor) or other.shape[:2] != chosen_BR.shape:
                raise BadInput(
                    f"logits.map with {kind_of(other)}",
                    f"other arguments must be tensors [rows, tokens, ...], here {list(chosen_BR.shape)}",
                    "use numbers, and tensors of other shapes, inside the function itself",
                )
        # a micro-batch without a chosen token reads one anyway: every rank calls the head equally often
        read_BR = chosen_BR.clone()
        if not read_BR.any():
            read_BR.view(-1)[:1] = True
        rows = [other[read_BR] for other in others]

        def of_part(logits: Tensor, place: slice) -> Tensor:
            found = function(logits, *(other[place] for other in rows))
            if not isinstance(found, Tensor) or found.shape[:1] != logits.shape[:1]:
                raise BadInput(
                    f"{name_of(function)} returned {kind_of(found)} for logits of shape {list(logits.shape)}",
                    f"it must return one or more numbers for each of the {len(logits)} tokens",
                    "reduce over the last dimension only: dim=-1",
                )
            return found

        found = self._of_tokens(read_BR.flatten().nonzero()[:, 0], of_part)
        out = found.new_zeros((*chosen_BR.shape, *found.shape[1:])).index_put(read_BR.nonzero(as_tuple=True), found)
        return torch.where(chosen_BR.view(*chosen_BR.shape, *(1 for _ in found.shape[1:])), out, 0)

    def _chosen(self, where: Tensor | None) -> Tensor:
        if where is None:
            return self._inside_BR
        if not isinstance(where, Tensor) or where.shape != self._inside_BR.shape or where.dtype != torch.bool:
            raise BadInput(
                f"logits.map(where={kind_of(where)})",
                f"it must be a bool tensor of shape {list(self._inside_BR.shape)} [rows, tokens]",
            )
        return where & self._inside_BR


def of_model(
    micro: MicroBatch, mask: Ragged, asked: Collection[str], hidden_N: Tensor, each_logits: Callable[..., Tensor]
) -> dict[str, Any]:
    """Return the arguments of a loss that come from the model, see OF_MODEL. hidden_N, each_logits: as
    `TokenLogProbs.read` returns them for a micro-batch, N response tokens."""
    number_BR = micro.to_BR(torch.arange(len(hidden_N), device=hidden_N.device)).flatten()

    def of_tokens(numbers: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        chosen = number_BR[numbers]
        return each_logits(hidden_N[chosen], function, numbers=chosen)

    found: dict[str, Any] = {"logits": Logits(micro.column_BR(mask).bool(), of_tokens)}
    return found | ({"hidden_states": micro.to_BR(hidden_N.float())} if "hidden_states" in asked else {})


def stand_ins(inside_BR: Tensor, module: PackedModule) -> dict[str, Any]:
    """Return zeros in place of OF_MODEL, for a call before any pass; the function of `map` sees only a few tokens."""
    config = module.get_backbone().config.get_text_config()

    def of_tokens(numbers: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        few = min(REHEARSED_TOKENS, len(numbers))
        found = function(torch.zeros(few, config.vocab_size, requires_grad=True), slice(0, few))
        return torch.cat([found, found.new_zeros((len(numbers) - few, *found.shape[1:]))])

    hidden = torch.zeros(*inside_BR.shape, config.hidden_size, requires_grad=True)
    return {"logits": Logits(inside_BR, of_tokens), "hidden_states": hidden}
