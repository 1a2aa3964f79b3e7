"""The data of checks: a small batch of rollouts, and stages that run on variants of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.batches.columns import Ragged, Table, ragged_in
from workbench.batches.location import minibatch_rows
from workbench.checks.report import NotApplicable
from workbench.models.tokenizers import beginning
from workbench.objectives.correction import Correction
from workbench.workers.gradients import GradientReport

if TYPE_CHECKING:
    from workbench.algorithms.lab import Lab
    from workbench.batches.batch import Batch

SEED = 0
# Not 1, so that code that forgets the temperature is found.
TEMPERATURE = 0.7
NEW_TOKENS = 12
GARBAGE = 30.0
READ = ("prompt_ids", "response_ids", "response_mask")
# A role's forward stage, which gives one number per response token (reward and cost models: per row), and its update.
FORWARD = {
    "actor": ("compute_log_prob", "old_log_prob"),
    "reference": ("compute_ref_log_prob", "ref_log_prob"),
    "teacher": ("compute_ref_log_prob", "ref_log_prob"),
    "critic": ("compute_values", "values"),
    "cost_critic": ("compute_cost_values", "cost_values"),
    "reward": ("compute_reward", "rewards"),
    "cost": ("compute_cost", "costs"),
}
UPDATES = {"actor": "update_actor", "critic": "update_critic", "cost_critic": "update_cost_critic"}
# The arguments of measured updates: together they cover every term of a role's loss.
REGRESSION: tuple[dict[str, Any], ...] = ({"aggregation": "token-mean"}, {"aggregation": "sequence-mean-token-mean"})
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "actor": (
        # without bonus and penalty, so that rows without advantage are skipped
        {"loss": "ppo", "aggregation": "token-mean", "correction": Correction()},
        {
            "loss": "gspo", "aggregation": "sequence-mean-token-mean", "kl_coefficient": 0.1,
            "correction": Correction(level="sequence", high=10.0),
        },
        {
            "loss": "cispo", "aggregation": "fixed-length", "max_response_tokens": 16,
            "entropy_coefficient": 0.01, "pretrain_coefficient": 0.1,
        },
    ),
    "critic": REGRESSION,
    "cost_critic": REGRESSION,
}  # fmt: skip


class MeasuredUpdate(NamedTuple):
    """Each rank's measurements of a role's update with these arguments, in as few micro-batches as possible."""

    role: str
    arguments: dict[str, Any]
    name: str
    ranks: list[GradientReport]


class Subject:
    """A workbench under test. `go_back()` undoes the updates of a check.

    table: columns of a few rollouts, fetched to the kernel. The sampling is one for which engine and trainer define a
    log-probability in the same way (temperature alone: no top-p, top-k, min-p, bias or penalties), see `Sampling`.
    """

    def __init__(self, lab: Lab, go_back: Callable[[], None]) -> None:
        self.lab, self.go_back = lab, go_back

    def by_dtype(self, role: str, float32: float, bfloat16: float) -> float:
        """The threshold for a role's dtype."""
        return float32 if self.lab.groups[role].spec.dtype == "float32" else bfloat16

    def roles(self, operations: Mapping[str, Any]) -> list[str]:
        """The roles of this workbench among those named."""
        return [role for role in operations if role in self.lab.groups]

    def need_actor(self, operation: str) -> None:
        """Raise `NotApplicable` unless there is an actor that has this operation."""
        if "actor" not in self.lab.groups:
            raise NotApplicable("there is no actor")
        if operation not in self.lab.groups["actor"].operations:
            raise NotApplicable(f"the actor's worker has no {operation}")

    def unit(self, role: str) -> int:
        """The fewest rows with which each rank of this role has one row of each minibatch."""
        return minibatches_of(self.lab, role) * self.lab.groups[role].layout.d

    # --- the rollouts -------------------------------------------------------------------------------------------------

    @cached_property
    def rollouts(self) -> Batch:
        """Responses of fixed length to the check's own prompts, from a fixed seed."""
        lab = self.lab
        self.need_actor("generate_sequences")
        # at least two rows a rank and minibatch, so that there are neighbours
        unit = math.lcm(*(self.unit(role) for role in lab.groups))
        generation = lab.description.generation
        assert generation is not None
        new = min(NEW_TOKENS, generation.max_model_tokens // 2)
        prompts = []
        for row in range(unit * max(2, -(-8 // unit))):
            text = f"What is {row} plus {3 * row + 4}?" + " Think, then answer." * (row % 3)
            prompts.append(beginning(lab.runner.batches.tokenizer, text)[: generation.max_model_tokens - new])
        uids = torch.arange(len(prompts))
        batch = lab.put({"prompt_ids": Ragged.of(prompts, torch.int64), "prompt_uid": uids})
        return lab.actor.generate_sequences(
            batch, temperature=TEMPERATURE, max_new_tokens=new, ignore_eos=True, seed=SEED
        )

    @cached_property
    def table(self) -> Table:
        """prompt_ids, prompt_uid, response_ids, response_mask, rollout_log_prob; responses cut to unequal lengths."""
        names = ("response_ids", "response_mask", "rollout_log_prob")
        table = self.rollouts.fetch(["prompt_ids", "prompt_uid", *names])
        for name in names:
            column = ragged_in(table, name)
            rows = [row[: max(1, len(row) - 2 * (i % 4))] for i, row in enumerate(column.rows())]
            table[name] = Ragged.of(rows, column.values.dtype)
        return table

    @property
    def rows(self) -> int:
        return len(self.ragged("response_ids"))

    @cached_property
    def row_of(self) -> Tensor:
        """The row of each response token."""
        return torch.repeat_interleave(torch.arange(self.rows), self.ragged("response_ids").lengths)

    def ragged(self, name: str) -> Ragged:
        return ragged_in(self.table, name)

    def put(self, table: Table) -> Batch:
        """Store these columns as a batch, sampled at the check's temperature."""
        return self.lab.put(table, meta={"temperature": TEMPERATURE})

    def forward_roles(self) -> list[str]:
        """The roles with a model whose forward stage reads only prompts and responses."""
        found = []
        for role in self.roles(FORWARD):
            group, stage = self.lab.groups[role], FORWARD[role][0]
            if group.spec.name is not None and stage in group.operations:
                known, _ = group.operations[stage].arguments((), {})
                found += [role] if set(group.operations[stage].operation.needed(known)) <= set(READ) else []
        return found

    def forward(self, role: str, table: Table) -> tuple[Ragged, Batch]:
        """Run a role's forward stage on a table: its output, and the batch that has it; one number a row becomes rows
        of length one."""
        stage, column = FORWARD[role]
        if role not in self.forward_roles():
            raise NotApplicable(f"there is no {role} with a {stage} that reads only prompts and responses")
        batch = getattr(self.lab.groups[role], stage)(self.put({name: table[name] for name in READ}))
        values = batch.fetch([column])[column]
        if isinstance(values, Tensor):
            values = Ragged(values, torch.ones(len(values), dtype=torch.int64))
        assert isinstance(values, Ragged)
        return values, batch

    @cached_property
    def old_log_prob(self) -> Ragged:
        """The trainer's log-probabilities of the table's responses."""
        return self.forward("actor", self.table)[0]

    def rank_of(self, batch: Batch, column: str, row: int) -> str:
        location = batch.columns[column].location
        pool, _, rank = location.shards[location.shard[row]].host.rpartition("-")
        return f"rank {rank} of pool {pool}"

    # --- updates that take no step ------------------------------------------------------------------------------------

    @cached_property
    def mask(self) -> Ragged:
        """A response mask with holes: the middle third of each response, and all of the last one."""
        rows: list[Tensor] = []
        for length in self.ragged("response_ids").lengths.tolist():
            row = torch.ones(length, dtype=torch.bool)
            row[length // 3 : 2 * length // 3] = False
            rows.append(row)
        rows[-1][:] = False
        return Ragged.of(rows, torch.bool)

    @cached_property
    def training_table(self) -> Table:
        """The table with the mask and all columns that updates read: numbers from a fixed seed in place of rewards and
        advantages. Every fourth row has no advantage."""
        generator = torch.Generator().manual_seed(SEED)
        old = self.old_log_prob

        def drawn() -> Tensor:
            return torch.randn(len(old.values), generator=generator)

        advantages = old.like(drawn()).rows()
        for row in advantages[1::4]:
            row.zero_()
        table = {**self.table, "response_mask": self.mask, "old_log_prob": old}
        table["advantages"] = Ragged.of(advantages, torch.float32)
        table["ref_log_prob"] = old.like(old.values - 0.1 * drawn())
        table["rollout_log_prob"] = old.like(old.values - 0.3 * drawn())
        table["pretrain_ids"] = self.table["prompt_ids"]
        for values, returns in (("values", "returns"), ("cost_values", "cost_returns")):
            table |= {values: old.like(0.1 * drawn()), returns: old.like(drawn())}
        return table

    def spoilt(self, table: Table, names: Sequence[str], rows: Sequence[int]) -> Table:
        """The table with garbage outside the mask, in these token columns and rows."""
        generator = torch.Generator().manual_seed(SEED)
        outside = torch.isin(self.row_of, torch.tensor(list(rows))) & ~self.mask.values
        spoilt = dict(table)
        for name in names:
            column = ragged_in(table, name)
            noise = GARBAGE * torch.randn(len(outside), generator=generator)
            spoilt[name] = column.like(torch.where(outside, noise, column.values))
        return spoilt

    def updated_roles(self) -> list[str]:
        """The roles whose updates can be measured."""
        roles = [role for role in self.roles(UPDATES) if "measure_gradient" in self.lab.groups[role].operations]
        if not roles:
            raise NotApplicable("no role here trains with workbench's own update loop")
        return roles

    @cached_property
    def measured(self) -> list[MeasuredUpdate]:
        """The updates of all roles on the training table, with the FORMS whose arguments they accept."""
        found = []
        for role in self.updated_roles():
            known = set(self.lab.groups[role].operations[UPDATES[role]].operation.signature.parameters)
            for form in [form for form in FORMS[role] if set(form) <= known] or [{}]:
                name = ", ".join([role, *(form[name] for name in ("loss", "aggregation") if name in form)])
                ranks = self.measure(role, self.training_table, self.all_tokens, **form)
                found.append(MeasuredUpdate(role, form, name, ranks))
        return found

    @cached_property
    def all_tokens(self) -> int:
        """A micro-batch budget that fits all rows, padded or not."""
        lengths = self.ragged("prompt_ids").lengths + self.ragged("response_ids").lengths
        return int(self.rows * lengths.max())

    def measure(
        self, role: str, table: Table, micro_batch_tokens: int | None = None, **arguments: Any
    ) -> list[GradientReport]:
        """Each rank's measurements of a role's update on these columns, see `measured`."""
        return measured(self.lab, role, self.put(table), micro_batch_tokens, **arguments)

    def update(self, role: str) -> None:
        if role == "actor":
            self.need_actor(UPDATES[role])
        getattr(self.lab.groups[role], UPDATES[role])(self.put(self.training_table))


def measured(
    lab: Lab, role: str, batch: Batch, micro_batch_tokens: int | None = None, **arguments: Any
) -> list[GradientReport]:
    """Each rank's measurements of a role's update on a batch; no optimizer step is taken. micro_batch_tokens: replaces
    the setting."""
    group = lab.groups[role]
    known, _ = group.operations[UPDATES[role]].arguments((), arguments)
    operation = group.operations[UPDATES[role]].operation.resolved(known)
    columns = operation.sent_columns(operation.needed(known), batch)
    return group.measure_gradient(
        batch, update=UPDATES[role], columns=columns, arguments=arguments, micro_batch_tokens=micro_batch_tokens
    )


def minibatches_of(lab: Lab, role: str) -> int:
    training = lab.groups[role].spec.training
    return training.minibatches if training else 1


def dealt_otherwise(lab: Lab, role: str, rows: int) -> np.ndarray:
    """An order of rows in which each minibatch of a role keeps its rows, and each rank gets others."""
    minibatches, ranks = minibatch_rows(rows, minibatches_of(lab, role)), lab.groups[role].layout.d
    return np.concatenate([rows[rank::ranks] for rows in minibatches for rank in range(ranks)])


def row_gaps(one: Ragged, two: Ragged, of_row: Callable[[Tensor], Tensor] = torch.max) -> list[float]:
    """The largest difference in each row, or another statistic of it; infinite where a number is NaN."""
    gaps = (one.values.double() - two.values.double()).abs().nan_to_num(nan=math.inf)
    return [float(of_row(row)) if len(row) else 0.0 for row in one.like(gaps).rows()]


def worst(gaps: Sequence[float]) -> tuple[float, int]:
    """The largest gap, and its index."""
    row = max(range(len(gaps)), key=lambda i: gaps[i])
    return gaps[row], row


def and_more(culprits: Sequence[str]) -> str:
    """The first culprit, and the number of others."""
    more = f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
    return f"{culprits[0]}{more}" if culprits else ""
