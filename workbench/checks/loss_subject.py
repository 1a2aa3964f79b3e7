"""What the checks of a loss look at: the loss, and the rollouts that it is to learn from."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from workbench.batches.columns import ColumnValues, Ragged, Table
from workbench.checks.gradients import ROUNDING
from workbench.checks.loss_function import Point
from workbench.checks.report import Finding, finding
from workbench.errors import BadInput
from workbench.models.loading import load_config
from workbench.workers.gradients import GradientReport
from workbench.workers.roles.actor import token_function
from workbench.workers.token_logits import OF_MODEL
from workbench.workers.user_loss import Asked, UserFunction

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab
    from workbench.batches.batch import Batch

FEW_ROWS = 12
FEW_LOGITS = 20_000_000  # of all tokens, where a loss reads logits
NOT_REPEATED = "two calls with the same numbers give two losses or gradients, as with random numbers"
MOVED = 0.3  # nats: so that ratios lie on both sides of 1, within a clip and outside


class LossSubject:
    """A loss, and the rollouts that it is to learn from. The weights stay as they are."""

    def __init__(self, lab: Lab, loss: str | UserFunction, batch: Batch) -> None:
        self.lab, self.loss, self.batch, self.check = lab, loss, batch, ""
        self.function = token_function(loss, None, None, None)  # type: ignore[arg-type]
        self.valid = self._valid()

    def finding(self, figure: float, threshold: float, culprit: str, about: str) -> Finding:
        """The finding of the check under way."""
        return finding(self.check, figure, threshold, culprit, about)

    @cached_property
    def log_prob(self) -> Ragged:
        """The policy's log-probabilities as they are now, of all rows."""
        return ragged_of(self.lab.actor.compute_log_prob(self.batch).fetch(["old_log_prob"]), "old_log_prob")

    @cached_property
    def whole(self) -> Table:
        """What the loss and its checks read; `old_log_prob` is the present one where there is none."""
        wanted = (*Asked.by(self.function).names, "response_mask", "advantages", "rewards", "prompt_uid")
        table = self.batch.fetch([name for name in dict.fromkeys(wanted) if name in self.batch.names])
        if "old_log_prob" not in self.batch.names:
            table["old_log_prob"] = self.log_prob
        return table

    def _valid(self) -> list[int]:
        """The rows that an update learns from: those that are `valid`."""
        if "valid" not in self.batch.names:
            return list(range(self.batch.rows))
        valid = self.batch.fetch(["valid"])["valid"]
        assert isinstance(valid, Tensor)  # the schema has numbers
        rows: list[int] = valid.bool().nonzero()[:, 0].tolist()
        if not rows:
            raise BadInput(
                "a batch whose rows are all not valid",
                "a loss is checked on the rows that an update learns from",
                "give it a batch with a valid row; batch.failed() says why each row is not valid",
            )
        return rows

    @cached_property
    def table(self) -> Table:
        """Of the valid rows, what the loss and its checks read."""
        return {name: _rows(column, self.valid) for name, column in self.whole.items()}

    @cached_property
    def rollouts(self) -> Batch:
        """The batch, with what an update needs of it."""
        if "old_log_prob" in self.batch.names:
            return self.batch
        return self.batch.join(self.lab.put({"old_log_prob": self.log_prob}))

    @cached_property
    def at_ratio_1(self) -> Batch:
        """The same, with `old_log_prob` of the policy as it is now."""
        others = self.batch.drop("old_log_prob") if "old_log_prob" in self.batch.names else self.batch
        return others.join(self.lab.put({"old_log_prob": self.log_prob}))

    @cached_property
    def point(self) -> Point:
        """The loss on the valid rows of these rollouts; where it reads logits or hidden states, on few of them."""
        mask, index = ragged_of(self.table, "response_mask"), list(range(len(self.valid)))
        if self.sizes:
            index = _few(mask, FEW_LOGITS // max(self.sizes.values()))
        table = {name: _rows(column, index) for name, column in self.table.items()}
        numbers = [self.valid[i] for i in index]
        return Point.of(self.function, table, mask.take(index), self.log_prob.take(numbers), numbers, self.sizes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of the vocabulary and of a hidden state, by the names of what the loss asks for."""
        asked = set(OF_MODEL).intersection(Asked.by(self.function).names)
        name = self.lab.groups["actor"].spec.name
        if not asked or name is None:
            return {}
        config = load_config(name).get_text_config()
        sizes = {"logits": int(config.vocab_size), "hidden_states": int(config.hidden_size)}
        return {name: size for name, size in sizes.items() if name in asked}

    @cached_property
    def repeats(self) -> tuple[float, str]:
        """How far apart two calls of the loss with the same numbers are, and why."""
        if wrote := self.point.overwritten():
            named = ", ".join(map(repr, wrote))
            return math.inf, f"it writes into {named}, which others read too: x = x * 2, not x.mul_(2)"
        one, two = self.point.gradients(), self.point.gradients()
        pairs = zip((one[0], *one[1].values()), (two[0], *two[1].values()), strict=True)
        gap = max(relative_gap(first_BT - second_BT, first_BT) for first_BT, second_BT in pairs)
        return gap, NOT_REPEATED

    @cached_property
    def points(self) -> list[Point]:
        """It on a few rows, where the policy is now, and after steps."""
        few = self.point.rows(range(min(FEW_ROWS, len(self.point.inside_BT))))
        return [few, few.moved(MOVED)]

    @property
    def rounding(self) -> float:
        """What rounding may change of a gradient of the actor."""
        return ROUNDING[self.lab.groups["actor"].spec.dtype != "float32"]

    def measure(self, batch: Batch, micro_batch_tokens: int | None = None, **arguments: Any) -> list[GradientReport]:
        """What each rank sees of an update on this batch; no step is taken."""
        group = self.lab.groups["actor"]
        update = group.operations["update_actor"]
        known, _ = update.arguments((), arguments)
        operation = update.operation.given(known)
        columns = operation.travelling(operation.needed(known), batch)
        return group.measure_gradient(
            batch, update="update_actor", columns=columns, arguments=arguments, micro_batch_tokens=micro_batch_tokens
        )

    @cached_property
    def measured(self) -> list[GradientReport]:
        """The gradient of the loss, in the micro-batches of an update."""
        return self.measure(self.rollouts, loss=self.loss)


def _few(mask: Ragged, tokens: int) -> list[int]:
    """The shortest rows, as many as have so few tokens together, and at least 2; in their order."""
    lengths = mask.lengths.tolist()
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    fit = int((np.cumsum([lengths[row] for row in order]) <= tokens).sum())
    return sorted(order[: min(FEW_ROWS, max(2, fit))])


def _rows(column: ColumnValues, index: list[int]) -> ColumnValues:
    if isinstance(column, Ragged):
        return column.take(index)
    return [column[row] for row in index] if isinstance(column, list) else column[index]


def ragged_of(table: Table, name: str) -> Ragged:
    column = table[name]
    assert isinstance(column, Ragged)
    return column


def relative_gap(gap_BT: Tensor, of_BT: Tensor) -> float:
    """The largest of a gap, in units of the largest number."""
    scale = max(float(of_BT.abs().nan_to_num(nan=0.0, posinf=0.0).max()), 1e-6)
    return float(gap_BT.abs().nan_to_num(nan=math.inf).max()) / scale if gap_BT.numel() else 0.0
