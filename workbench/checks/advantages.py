"""Are the advantages those of their estimator: of the tokens that the policy chose, over all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from workbench.batches.columns import Ragged, Table
from workbench.checks.advantage_formulas import advantages
from workbench.checks.report import Finding
from workbench.checks.subject import NEW_TOKENS, SEED, Subject, rows_of
from workbench.objectives.correction import Correction

# One call for each way that a number takes through `compute_advantages`; between them, every estimate of the KL.
ESTIMATES: tuple[dict[str, Any], ...] = (
    {"estimator": "gae", "gamma": 0.9, "lam": 0.8, "kl_coefficient": 0.1},
    {"estimator": "gae", "bootstrap": True, "multiplier": 0.5, "kl_coefficient": 0.1, "kl": "k2"},
    {"estimator": "gae", "gamma": 0.9, "macro_tokens": 3},
    {"estimator": "gae_turn", "gamma": 0.9, "lam": 0.8, "bootstrap": True, "kl_coefficient": 0.1},
    {"estimator": "remax", "kl_coefficient": 0.1, "kl": "k3"},
    {"estimator": "reinforce_pp", "gamma": 0.9, "kl_coefficient": 0.1},
    {"estimator": "reinforce_pp_baseline"},
    {"estimator": "reinforce_turn", "gamma": 0.9, "kl_coefficient": 0.1},
    {"estimator": "reinforce_turn_baseline"},
    {"estimator": "grpo"},
    {"estimator": "grpo", "overlong_buffer": 4, "max_response_tokens": NEW_TOKENS - 1},
    {"estimator": "dr_grpo"},
    {"estimator": "grpo_batch_std"},
    {"estimator": "grpo_process", "kl_coefficient": 0.1},
    {"estimator": "rloo", "kl_coefficient": 0.1},
    {"estimator": "off_policy_baseline", "correction": Correction(level="sequence")},
)
VARIANTS = ("bootstrap", "macro_tokens", "multiplier", "overlong_buffer")
SCORES = ("rewards", "costs")
TOKENS = ("values", "cost_values", "old_log_prob", "ref_log_prob", "rollout_log_prob")
ROUNDING = 1e-4  # computed in float32 whatever the models are


def check_advantages(subject: Subject) -> Finding:
    """Advantages and returns are those of their estimator's formula over the whole batch, for scores of responses and
    of tokens; and they depend neither on values outside the mask nor on the order of rows."""
    table, lab = _table(subject), subject.lab
    order = np.random.default_rng(SEED).permutation(subject.rows)
    dealt, back = rows_of(table, order), np.argsort(order)
    # a response without any token inside the mask counts with all of its score
    inside = [row for row, chosen in enumerate(subject.mask.rows()) if chosen.any()]
    spoilt = subject.spoilt(subject.spoilt(table, TOKENS, range(subject.rows)), SCORES, inside)
    found: list[tuple[float, str]] = []

    def stage(inputs: Table, arguments: dict[str, Any]) -> dict[str, Ragged]:
        batch = lab.compute_advantages(subject.put(inputs), **arguments)
        names = ["advantages", "returns", *(["cost_returns"] if "multiplier" in arguments else [])]
        return {name: column for name, column in batch.fetch(names).items() if isinstance(column, Ragged)}

    def formula(inputs: Table, arguments: dict[str, Any]) -> dict[str, Ragged]:
        found = {}
        for name, numbers in advantages(inputs, arguments).items():
            column = torch.zeros(len(subject.mask.values), dtype=torch.float64)
            column[subject.mask.values] = torch.tensor(numbers, dtype=torch.float64)
            found[name] = subject.mask.like(column)
        return found

    def note(one: dict[str, Ragged], two: dict[str, Ragged], what: str) -> None:
        row_of = torch.repeat_interleave(torch.arange(subject.rows), subject.mask.lengths)[subject.mask.values]
        for name, column in two.items():
            mine, theirs = (x.values[subject.mask.values].double() for x in (one[name], column))
            gaps = (mine - theirs).abs().nan_to_num(nan=math.inf) / max(1.0, float(mine.abs().max())) / ROUNDING
            found.append((float(gaps.max()), f"{name} of row {int(row_of[gaps.argmax()])}, {what}"))

    of_responses = dict(table)
    for name in SCORES:
        column = table[name]
        assert isinstance(column, Ragged)
        of_responses[name] = torch.stack([row.sum() for row in column.rows()])
    for arguments in ESTIMATES:
        clean, name = stage(table, arguments), _name_of(arguments)
        note(clean, stage(spoilt, arguments), f"{name}, with garbage outside the mask")
        moved = {column: values.take(back.tolist()) for column, values in stage(dealt, arguments).items()}
        note(clean, moved, f"{name}, with its rows in another order, on other ranks")
        note(formula(table, arguments), clean, f"{name}, against the formula")
        whole = stage(of_responses, arguments)
        note(formula(of_responses, arguments), whole, f"{name}, with a score a response, against the formula")
    figure, culprit = max(found)
    about = "relative change of advantages or returns that should be none, in units of what rounding may do"
    return subject.finding(figure, 1.0, culprit, about)


def _table(subject: Subject) -> Table:
    """What `compute_advantages` reads, from a fixed seed; two responses a prompt."""
    generator = torch.Generator().manual_seed(SEED)
    table, rows = dict(subject.training_table), subject.rows
    for name in SCORES:
        table[name] = subject.mask.like(torch.randn(len(subject.mask.values), generator=generator))
    for name in ("baseline_rewards", "final_values", "final_cost_values"):
        table[name] = torch.randn(rows, generator=generator)
    steps = subject.mask.like(torch.rand(len(subject.mask.values), generator=generator) < 0.4)
    table["step_ends"] = steps
    turns = [row.nonzero()[:, 0].add(1).tolist() for row in steps.rows()]
    lengths = subject.mask.lengths.tolist()
    turns = [sorted({*ends, length} - {0}) for ends, length in zip(turns, lengths, strict=True)]
    table["turn_ends"] = Ragged.of(turns, torch.int64)
    table["finished"] = torch.arange(rows) % 3 > 0
    table["prompt_uid"] = (torch.arange(rows) // 2).clamp(max=rows // 2 - 1)
    table["gradient_norm"] = 0.5 + torch.rand(rows, generator=generator)
    return table


def _name_of(arguments: dict[str, Any]) -> str:
    """The estimator, and what sets this call apart from others of it."""
    variants = " and ".join(name for name in VARIANTS if name in arguments)
    return f"{arguments['estimator']}{' with ' if variants else ''}{variants}"
