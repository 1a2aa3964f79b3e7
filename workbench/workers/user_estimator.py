"""Signals (rewards, costs) by their columns, and estimators that users write: they see the rows of the whole batch, in
their order, and return the advantage of each response or token.

    def estimator(rewards, group):
        mean = torch.stack([rewards[group == g].mean() for g in group])
        return rewards - mean

Suffixes: N rows of the whole batch, B rows of a rank, T response tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged
from workbench.engines.communicator import Communicator
from workbench.errors import BadInput
from workbench.messages.shards import Shard
from workbench.support.calls.pickling import name_of
from workbench.workers.user_loss import ParameterNames, UserFunction, as_given, call, kind_of, reads, selected

GIVEN = ("rewards", "token_rewards", "mask", "group")
AN_ESTIMATOR = "def estimator(rewards, group), which returns an advantage a response [rows], or a token [rows, tokens]"


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal to raise or lower, by its columns: scores, a critic's values, scores of greedy responses.

    sign: 1 for rewards; -1 for costs, to which the KL penalty is added.
    """

    scores: str
    values: str
    baseline: str
    sign: int

    @property
    def final_values(self) -> str:
        return f"final_{self.values}"

    def column(self, name: str) -> str:
        """Return this signal's column for the name that an estimator uses for rewards."""
        own = {"values": self.values, "final_values": self.final_values, "baseline_rewards": self.baseline}
        return {**own, "group": "prompt_uid"}.get(name, name)

    def columns(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the columns for an estimator's parameters, except rewards and mask."""
        return tuple(self.column(name) for name in names if name == "group" or name not in GIVEN)


REWARD = Signal(scores="rewards", values="values", baseline="baseline_rewards", sign=1)
COST = Signal(scores="costs", values="cost_values", baseline="baseline_costs", sign=-1)


def reads_greedy(estimator: UserFunction | str) -> bool:
    """Return whether the estimator uses scores of greedy responses as its baseline."""
    return reads(estimator, "baseline_rewards") or estimator == "remax"


def estimated(
    function: UserFunction,
    batch: Shard,
    scores_B: Tensor,
    rewards_BT: Tensor,
    communicator: Communicator,
    signal: Signal,
    valid_B: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages and returns (None: the function returns none) of this rank's rows, [B, T]; every rank calls it.

    scores_B: per response. rewards_BT: per token, after penalties. The function sees `rewards`, `token_rewards`,
    `mask`, `group` (the number of a row's prompt) and columns (the signal's) of the valid rows of all ranks, as a
    single rank would: every rank computes the same numbers and keeps those of its own rows. Rows that are not valid get
    0.
    """
    mask = batch.ragged("response_mask")
    rows_N = communicator.gathered(torch.as_tensor(batch.rows))
    order = torch.argsort(rows_N)
    order = order[communicator.gathered(valid_B)[order]]
    if not len(order):
        return torch.zeros_like(rewards_BT), None

    def whole(column: ColumnValues) -> ColumnValues:
        """Return a column of all valid rows, in their order."""
        if isinstance(column, list):
            rows = communicator.shared_by_group(communicator.world_size, lambda: column)
            return [rows[i] for i in order.tolist()]
        if isinstance(column, Ragged):
            lengths = communicator.gathered(column.lengths)
            return Ragged(communicator.gathered(column.values), lengths).take(order.tolist())
        return communicator.gathered(column)[order]

    everywhere = whole(mask)
    assert isinstance(everywhere, Ragged)
    inside_NT = everywhere.pad().bool()
    made: dict[str, ColumnValues] = {"rewards": scores_B, "token_rewards": Ragged.unpad(rewards_BT, mask.lengths)}
    values: dict[str, Any] = {}
    for name in ParameterNames.of(function).names:
        if name == "mask":
            values[name] = inside_NT
        elif (column := made.get(name, batch.columns.get(signal.column(name)))) is not None:
            found = as_given(whole(column))
            if isinstance(found, Ragged) and name == "baseline_rewards":  # of the tokens of other responses
                found = found.pad().double().sum(-1)
            elif isinstance(found, Ragged):
                along = torch.equal(found.lengths, everywhere.lengths)
                found = selected(found.pad(), inside_NT) if along else found.pad()
            values[name] = found
    with torch.no_grad():
        returned = call("estimator", function, values)
    mine_V = torch.searchsorted(rows_N[order], torch.as_tensor(batch.rows)[valid_B])

    def own(numbers_NT: Tensor) -> Tensor:
        """Return the numbers of this rank's rows."""
        numbers_BT, width = torch.zeros_like(rewards_BT), min(numbers_NT.shape[1], rewards_BT.shape[1])
        numbers_BT[valid_B, :width] = numbers_NT[mine_V, :width].to(numbers_BT.dtype)
        return numbers_BT

    parts = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned,)
    found = [own(_checked(function, part, inside_NT, rows_N[order])) for part in parts]
    return found[0], found[1] if len(found) > 1 else None


def _checked(function: UserFunction, returned: Any, inside_NT: Tensor, rows_N: Tensor) -> Tensor:
    """Return a function's result as numbers of tokens [N, T], 0 outside the mask. rows_N: row numbers in the batch."""
    shape, what = list(inside_NT.shape), f"estimator={name_of(function)} returned"
    rule = (
        f"it must return an advantage per response, a tensor [rows] of shape {shape[:1]}, or per token, [rows, tokens] "
        f"of shape {shape}; or (advantages, returns)"
    )
    if not isinstance(returned, Tensor) or list(returned.shape) not in (shape, shape[:1]):
        averaged = isinstance(returned, Tensor) and returned.ndim == 0
        remedy = "was it averaged over the batch? Give each response or token its own" if averaged else ""
        raise BadInput(f"{what} {kind_of(returned)}", rule, remedy)
    if returned.is_complex() or returned.dtype == torch.bool:
        raise BadInput(f"{what} a tensor of {returned.dtype}", f"{rule}, of a real dtype")
    numbers = returned.detach().float()
    numbers_NT = torch.where(inside_NT, numbers[:, None] if numbers.ndim == 1 else numbers, 0.0)
    if not torch.isfinite(numbers_NT).all():
        row = int(rows_N[(~torch.isfinite(numbers_NT)).any(-1)][0])
        raise BadInput(f"{what} a number that is not finite in row {row}", "advantages and returns must be finite")
    return numbers_NT
