"""Are the advantages those of the tokens that the policy chose, whichever rank has which rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from workbench.batches.columns import Ragged, Table, rows_at
from workbench.checks.report import Finding, finding
from workbench.checks.subject import NEW_TOKENS, SEED, Subject
from workbench.objectives.correction import Correction

# One call for each way that a number takes through `compute_advantages`.
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
    """Advantages and returns depend neither on values outside the mask nor on the order of rows."""
    table = _table(subject)
    order = np.random.default_rng(SEED).permutation(subject.rows)
    # the score of a response without any token inside the mask counts as a whole
    scored = [row for row, inside in enumerate(subject.mask.rows()) if inside.any()]
    spoilt = subject.spoilt(subject.spoilt(table, TOKENS, range(subject.rows)), SCORES, scored)
    row_of = torch.repeat_interleave(torch.arange(subject.rows), subject.mask.lengths)
    found: list[tuple[float, str]] = []

    def made(inputs: Table, arguments: dict[str, Any]) -> dict[str, Ragged]:
        batch = subject.lab.compute_advantages(subject.put(inputs), **arguments)
        names = ["advantages", "returns", *(["cost_returns"] if "multiplier" in arguments else [])]
        return {name: column for name, column in batch.fetch(names).items() if isinstance(column, Ragged)}

    for arguments in ESTIMATES:
        clean, dealt = made(table, arguments), made(rows_at(table, order), arguments)
        others = {
            "with garbage outside the mask": made(spoilt, arguments),
            "with its rows in another order, on other ranks": {
                name: column.take(np.argsort(order).tolist()) for name, column in dealt.items()
            },
        }
        for between, other in others.items():
            for name, column in clean.items():
                one, two = (torch.where(subject.mask.values, x.values, 0.0).double() for x in (column, other[name]))
                gaps = (one - two).abs().nan_to_num(nan=math.inf) / max(1.0, float(one.abs().max())) / ROUNDING
                culprit = f"{name} of row {int(row_of[gaps.argmax()])}, {_name_of(arguments)}, {between}"
                found.append((float(gaps.max()), culprit))
    figure, culprit = max(found)
    about = "relative change of advantages or returns that should be none, in units of what rounding may do"
    return finding(figure, 1.0, culprit, about)


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
