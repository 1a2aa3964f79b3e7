"""Call a loss in the kernel, in double precision, on the inputs of some rows.

Suffixes: B rows, T response tokens of the longest, N tokens, V numbers of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from workbench.batches.columns import Ragged, Table, ragged_in
from workbench.workers.roles.actor import OWN_METRICS, WITH_GRADIENT
from workbench.workers.roles.critic import OWN_METRICS as OF_CRITIC
from workbench.workers.user_loss import OF_MODEL, Logits, ParameterNames, UserFunction, as_given, checked_loss, selected

OTHER_POLICIES = ("old_log_prob", "rollout_log_prob", "ref_log_prob")
PADDING = 3  # tokens


def role_of(function: UserFunction) -> str:
    """The role whose update uses this loss: a critic's loss has its gradient in `values` alone."""
    asked = ParameterNames.of(function).names
    return "critic" if "values" in asked and not set(WITH_GRADIENT) & set(asked) else "actor"


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """A loss, and a value for each of its parameters.

    leaves: parameters that get a gradient. rows: their numbers in the batch. of_tokens: how many numbers a token of the
    mask has in a value, by name: 1 for [B, T], k for [B, T * k]. sizes: of the vocabulary and of a hidden state, by the
    names of OF_MODEL that the loss reads. There is no model here: `_of_model` invents numbers, and the values of these
    names say how far each token's numbers have moved along a direction, so that their gradient is one number a token.
    """

    function: UserFunction
    leaves: tuple[str, ...]
    rows: tuple[int, ...]
    inside_BT: Tensor
    values: Mapping[str, Any]
    of_tokens: Mapping[str, int]
    sizes: Mapping[str, int]

    @classmethod
    def of(
        cls, function: UserFunction, table: Table, now: Ragged, rows: Sequence[int], sizes: Mapping[str, int]
    ) -> LossInputs:
        """The inputs of some rows of a table, with the model's log-probabilities or values; entropies are invented."""
        mask = ragged_in(table, "response_mask")
        inside_BT = mask.pad().bool()
        entropy_BT = 0.5 + 2.5 * _drawn(torch.rand, inside_BT, 0)
        given = {"log_prob": now.pad(), "entropy": entropy_BT, **dict.fromkeys(OF_MODEL, 0 * entropy_BT)}
        if role_of(function) == "critic":
            given = {"values": now.pad(), "old_values": ragged_in(table, "values").pad()}
        values: dict[str, Any] = {}
        names = ParameterNames.of(function).names
        of_tokens = {name: 1 for name in names if name in given}
        for name in names:
            value = given[name] if name in given else as_given(table.get(name))
            if isinstance(value, Ragged):
                numbers = len(value.values) // max(1, len(mask.values))
                if numbers and torch.equal(value.lengths, numbers * mask.lengths):
                    of_tokens[name] = numbers
                value = value.pad()
            if isinstance(value, Tensor):
                value = value.double() if value.is_floating_point() else value
                value = selected(value, inside_BT) if of_tokens.get(name) == 1 else value
            if value is not None:
                values[name] = value
        leaves = tuple(name for name in given if name in values and name != "old_values")
        return cls(
            function=function, leaves=leaves, rows=tuple(rows), inside_BT=inside_BT, values=values,
            of_tokens=of_tokens, sizes=sizes,
        )  # fmt: skip

    # --- variants -----------------------------------------------------------------------------------------------------

    def given(self, **values: Any) -> LossInputs:
        return replace(self, values={**self.values, **values})

    def take(self, index: list[int]) -> LossInputs:
        """Only these rows, padded as before."""
        taken = {
            name: [value[i] for i in index] if isinstance(value, list) else value[index]
            for name, value in self.values.items()
        }
        rows = tuple(self.rows[i] for i in index)
        return replace(self, rows=rows, inside_BT=self.inside_BT[index], values=taken)

    def moved(self, distance: float) -> LossInputs:
        """Inputs after simulated steps: log-probabilities, or values, inside the mask change by this distance."""
        noise_BT = distance * _drawn(torch.randn, self.inside_BT, 1) * self.inside_BT
        return self.given(
            **{name: self.values[name] + noise_BT for name in ("log_prob", "values") if name in self.leaves}
        )

    def at_ratio_1(self) -> LossInputs:
        """Inputs at which the policy equals both the rollout policy and the reference."""
        return self.given(**{name: self.values["log_prob"] for name in OTHER_POLICIES if name in self.values})

    def spoilt(self) -> LossInputs:
        """Inputs with other numbers outside the mask."""
        noise_BT = 3 * _drawn(torch.randn, self.inside_BT, 2)
        each = {name: self.values[name] for name, numbers in self.of_tokens.items() if numbers == 1}
        return self.given(
            **{name: torch.where(self.inside_BT, x, noise_BT) for name, x in each.items() if x.is_floating_point()}
        )

    def padded(self) -> LossInputs:
        wider = {name: pad(self.values[name], (0, PADDING * numbers)) for name, numbers in self.of_tokens.items()}
        return replace(self.given(**wider), inside_BT=pad(self.inside_BT, (0, PADDING)))

    # --- the loss and its gradients -----------------------------------------------------------------------------------

    def outcome(self, weights_BT: Tensor | float = 1.0, held: Held | None = None) -> dict[str, Tensor]:
        """The loss of each token, 0 outside the mask, and the gradients of the weighted sum inside it, [B, T] each, by
        their names in findings. Raises `BadInput` if the loss returns anything but a loss."""
        loss_BT, leaves, _ = self._called(held)
        loss_BT = torch.where(self.inside_BT, loss_BT, 0.0)
        total = (loss_BT * weights_BT).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        of_names = {f"the gradient of {name}": x_BT for name, x_BT in zip(leaves, gradients, strict=True)}
        return {"the loss": loss_BT.detach(), **of_names}

    def overwritten(self) -> list[str]:
        """The names of columns, or of the mask, that the loss writes into."""
        _, leaves, copies = self._called()
        before = {**self.values, "mask": self.inside_BT}
        tensors = {name: x for name, x in copies.items() if isinstance(x, Tensor) and name not in leaves}
        return [name for name, x in tensors.items() if not torch.equal(x.nan_to_num(), before[name].nan_to_num())]

    def _called(self, held: Held | None = None) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        """The loss of each token, the tensors in which it has a gradient, and copies of all inputs."""
        values = {**self.values, "mask": self.inside_BT}
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
        leaves = {name: copies[name].detach().requires_grad_() for name in self.leaves}
        with torch.enable_grad():
            given = {**copies, **leaves, **self._of_model(leaves)}
            with held or nullcontext():
                returned = self.function(
                    **{name: given[name] for name in ParameterNames.of(self.function).names if name in given}
                )
            shape = self.inside_BT.shape
            own = OF_CRITIC if role_of(self.function) == "critic" else OWN_METRICS
            loss_BT, _ = checked_loss(self.function, returned, shape, own)
        return loss_BT, leaves, copies

    def _of_model(self, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
        """Stand-ins for OF_MODEL: smooth numbers that depend on row and token."""
        row_B, token_T = (torch.tensor(x).double() for x in (self.rows, range(self.inside_BT.shape[1])))
        place_BT = row_B[:, None] * 0.37 + token_T * 1.13 + 1
        found: dict[str, Any] = {}
        if "hidden_states" in leaves:
            found["hidden_states"] = _numbers(place_BT, leaves["hidden_states"], self.sizes["hidden_states"])
        if "logits" in leaves:
            place_N, moved_N = place_BT.flatten(), leaves["logits"].flatten()

            def of_tokens(numbers: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
                logits = _numbers(place_N[numbers], moved_N[numbers], self.sizes["logits"])
                return function(logits, slice(0, len(numbers)))

            found["logits"] = Logits(self.inside_BT, of_tokens)
        return found


def _numbers(place: Tensor, moved: Tensor, size: int) -> Tensor:
    draws = torch.Generator().manual_seed(4)
    rates_V, phases_V, other_rates_V, other_phases_V = 1 + 9 * torch.rand(4, size, generator=draws, dtype=torch.float64)
    base = 2 * torch.cos(place[..., None] * rates_V + phases_V)
    return base + moved[..., None] * torch.cos(place[..., None] * other_rates_V + other_phases_V)


def _drawn(how: Callable[..., Tensor], like_BT: Tensor, seed: int) -> Tensor:
    return how(like_BT.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Held(TorchFunctionMode):
    """Record the values that a function detaches on purpose, by `detach` or under `torch.no_grad()`; given the record
    of an earlier call, reuse its values, so that a difference of two calls is that of the other values."""

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
