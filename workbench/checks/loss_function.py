"""A loss that a user has written, called in the kernel on the rows of a batch, in double precision.

Suffixes: B rows, T response tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workbench.batches.columns import Ragged, Table
from workbench.checks.made_up import made_up
from workbench.workers.roles.actor import OF_TOKENS, OWN_METRICS, WITH_GRADIENT
from workbench.workers.token_logits import OF_MODEL
from workbench.workers.user_loss import Asked, UserFunction, checked_loss, selected

LOG_PROBS = ("old_log_prob", "rollout_log_prob", "ref_log_prob")  # of other policies than the one that is trained
PADDING = 3  # tokens


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values for what a loss asks for. of_tokens: the names of those that are [B, T] for the tokens of the mask.

    numbers: of the rows in the batch. sizes: of the vocabulary and of a hidden state, by the names that a loss asks
    with: their values are how far the numbers that are made up for each token have moved.
    """

    function: UserFunction
    numbers: tuple[int, ...]
    inside_BT: Tensor
    values: Mapping[str, Any]
    of_tokens: frozenset[str]
    sizes: Mapping[str, int]

    @classmethod
    def of(
        cls,
        function: UserFunction,
        table: Table,
        mask: Ragged,
        log_prob: Ragged,
        numbers: Sequence[int],
        sizes: Mapping[str, int],
    ) -> Point:
        """Of the rows of a table, where the policy gives these log-probabilities; entropies, logits and hidden states
        are made up."""
        inside_BT = mask.pad().bool()
        draws = torch.Generator().manual_seed(0)
        entropy_BT = 0.5 + 2.5 * torch.rand(inside_BT.shape, generator=draws, dtype=torch.float64)
        own = {"log_prob": _double(log_prob.pad()), "entropy": entropy_BT}
        own |= {name: torch.zeros_like(entropy_BT) for name in OF_MODEL}
        values: dict[str, Any] = {}
        of_tokens = set(own)
        for name in Asked.by(function).names:
            column = table.get(name)
            if name in own:
                values[name] = selected(own[name], inside_BT)
            elif isinstance(column, Ragged):
                values[name] = _double(column.pad())
                if torch.equal(column.lengths, mask.lengths):
                    of_tokens.add(name)
                    values[name] = selected(values[name], inside_BT)
            elif column is not None:
                values[name] = _double(column) if isinstance(column, Tensor) else column
        return cls(
            function=function,
            numbers=tuple(numbers),
            inside_BT=inside_BT,
            values=values,
            of_tokens=frozenset(of_tokens),
            sizes=sizes,
        )

    @property
    def leaves(self) -> list[str]:
        """What it asks for that has a gradient."""
        return [name for name in WITH_GRADIENT if name in self.values]

    def given(self, **values: Any) -> Point:
        """With other values."""
        return replace(self, values={**self.values, **values})

    def rows(self, index: Sequence[int]) -> Point:
        """Of these rows alone, padded as before."""
        taken = {
            name: [value[i] for i in index] if isinstance(value, list) else value[list(index)]
            for name, value in self.values.items()
        }
        numbers = tuple(self.numbers[i] for i in index)
        return replace(self, numbers=numbers, inside_BT=self.inside_BT[list(index)], values=taken)

    def moved(self, distance: float) -> Point:
        """Of a policy that has taken steps: log-probabilities inside the mask differ by so much."""
        if "log_prob" not in self.values:
            return self
        noise_BT = torch.randn(self.inside_BT.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return self.given(log_prob=self.values["log_prob"] + distance * noise_BT * self.inside_BT)

    def at_ratio_one(self) -> Point:
        """Of a policy that is that of the rollouts and of the reference."""
        now_BT = self.values["log_prob"]
        return self.given(**{name: now_BT.clone() for name in LOG_PROBS if name in self.values})

    def masked(self, inside_BT: Tensor) -> Point:
        """With another mask."""
        return replace(self, inside_BT=inside_BT)

    def spoilt(self) -> Point:
        """With other numbers outside the mask."""
        noise_BT = 3 * torch.randn(
            self.inside_BT.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        return self.given(**{n: torch.where(self.inside_BT, self.values[n], noise_BT) for n in self._numbers()})

    def padded(self) -> Point:
        """With more padding to the right."""

        def longer(x_BT: Tensor) -> Tensor:
            return torch.nn.functional.pad(x_BT, (0, PADDING))

        wider = self.given(**{name: longer(self.values[name]) for name in self.of_tokens if name in self.values})
        return replace(wider, inside_BT=longer(self.inside_BT))

    def _numbers(self) -> list[str]:
        return [n for n in self.of_tokens if n in self.values and self.values[n].is_floating_point()]

    # --- its loss and gradients ---------------------------------------------------------------------------------------

    def loss(self, held: Held | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, and what it has a gradient in; `BadInput` where it is not what a loss returns."""
        leaves = {name: self.values[name].detach().clone().requires_grad_() for name in self.leaves}
        with torch.enable_grad():
            of_model = {name: leaves[name] for name in OF_MODEL if name in leaves}
            given = {**leaves, **made_up(of_model, self.sizes, self.numbers, self.inside_BT)}
            with held or nullcontext():
                returned = self._call({**self._copies(), **given})
            shape = self.inside_BT.shape
            loss_BT, _ = checked_loss("loss", self.function, returned, shape, OWN_METRICS, OF_TOKENS)
        return loss_BT, leaves

    def overwritten(self) -> list[str]:
        """The names of columns, or of the mask, that the loss writes into."""
        copies = self._copies()
        leaves = {name: self.values[name].detach().clone().requires_grad_() for name in self.leaves}
        of_model = {name: leaves[name] for name in OF_MODEL if name in leaves}
        with torch.enable_grad():
            made = made_up(of_model, self.sizes, self.numbers, self.inside_BT)
            self._call({**copies, **leaves, **made})
        before = {**self.values, "mask": self.inside_BT}
        changed = (name for name, x in copies.items() if isinstance(x, Tensor) and name not in leaves)
        return [name for name in changed if not torch.equal(copies[name].nan_to_num(), before[name].nan_to_num())]

    def _call(self, values: Mapping[str, Any]) -> Any:
        return self.function(**{name: values[name] for name in Asked.by(self.function).names if name in values})

    def _copies(self) -> dict[str, Any]:
        """What it asks for, so that nothing is lost where it writes into that."""
        values = {**self.values, "mask": self.inside_BT}
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}

    def gradients(self, weights_BT: Tensor | None = None, held: Held | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, 0 outside the mask, and the gradients of its weighted sum inside the mask."""
        loss_BT, leaves = self.loss(held)
        inside_BT = torch.where(self.inside_BT, loss_BT, 0.0)
        total = (inside_BT if weights_BT is None else inside_BT * weights_BT).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return inside_BT.detach(), dict(zip(leaves, found, strict=True))

    def row_gradients(self, row: int) -> dict[str, Tensor]:
        """The gradients of one row's loss, in all rows."""
        weights_BT = torch.zeros(self.inside_BT.shape, dtype=torch.float64)
        weights_BT[row] = 1
        return self.gradients(weights_BT)[1]


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


class Held(TorchFunctionMode):
    """Inside, what a function takes no gradient of on purpose, by `detach` or under `torch.no_grad()`, is noted; with
    the notes of an earlier call it is what it was then. So a difference of two calls is that of the rest.
    """

    def __init__(self, notes: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.notes: list[Tensor] = [] if notes is None else list(notes)
        self._next = None if notes is None else iter(self.notes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or (torch.is_grad_enabled() and func not in STOPS):
            return out
        if self._next is None:
            self.notes.append(out.detach().clone())
            return out
        then = next(self._next, None)
        return then.clone() if then is not None and then.shape == out.shape else out


STOPS = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
