"""The columns that workbench's own stages write and read, and the rules for their values.

`schema_check` compares a batch with this table. A column that is not in the table is the user's, and may hold anything.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import numpy as np

Holds = Literal["token ids", "whole numbers", "zeros and ones", "numbers", "text"]
Row = Literal["one", "tokens", "either"]
FINITE = sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class ColumnSchema:
    """The rules for a column.

    holds: the kind of its values, which decides the dtype: token ids are int64 below the size of the model's
    vocabulary, whole numbers have an integer dtype, zeros and ones any, and numbers are finite, of any real dtype. Text
    is a list.
    row: "one" number per row (a Tensor [rows]), one per token ("tokens", a Ragged), or "either".
    along: columns with the same `along` have equally many numbers in each row. follows: columns of token ids; this
    column continues the sequences of the first of them that the batch has. empty: whether a row may have no token.
    least, most: the range, both ends included.
    """

    holds: Holds = "numbers"
    row: Row = "one"
    along: str = ""
    follows: tuple[str, ...] = ()
    empty: bool = True
    least: float = -FINITE
    most: float = FINITE


_ids = partial(ColumnSchema, holds="token ids", row="tokens", least=0)
_per_token = partial(ColumnSchema, row="tokens", along="response")
_NUMBER, _SCORES = ColumnSchema(), ColumnSchema(row="either", along="response")
_FLAG = ColumnSchema(holds="zeros and ones", least=0, most=1)
_OF_OTHERS = ColumnSchema(row="either")  # scores of other responses, with lengths of their own
_TOKEN_NUMBER = _per_token()

SCHEMA: Mapping[str, ColumnSchema] = MappingProxyType(
    {
        "prompt_ids": _ids(empty=False),
        "prompt_uid": ColumnSchema(holds="whole numbers"),
        "response_ids": _ids(along="response", follows=("prompt_ids", "teacher_prompt_ids")),
        "response_mask": _per_token(holds="zeros and ones", least=0, most=1),
        "finished": _FLAG,
        "valid": _FLAG,
        "counted": _FLAG,
        "failure": ColumnSchema(holds="text"),
        "demonstrated": _FLAG,
        "turns": ColumnSchema(holds="whole numbers", least=0),
        "environment_rewards": _TOKEN_NUMBER,
        "turn_starts": ColumnSchema(holds="whole numbers", row="tokens", along="turn", least=0),
        "turn_ends": ColumnSchema(holds="whole numbers", row="tokens", along="turn", least=1),
        "turn_rewards": ColumnSchema(row="tokens", along="turn"),
        "context_starts": _per_token(holds="zeros and ones", least=0, most=1),
        "step_ends": _per_token(holds="zeros and ones", least=0, most=1),
        "rollout_log_prob": _TOKEN_NUMBER,
        "token_versions": _per_token(holds="whole numbers"),
        "sample_seed": ColumnSchema(holds="whole numbers"),
        "sampling_mask_ids": ColumnSchema(holds="whole numbers", row="tokens", least=0),
        "sampling_mask_sizes": _per_token(holds="whole numbers", least=0),
        "old_log_prob": _TOKEN_NUMBER,
        "gradient_norm": ColumnSchema(least=0),
        "ref_log_prob": _TOKEN_NUMBER,
        "rewards": _SCORES,
        "rewards_notes": ColumnSchema(holds="text"),
        "baseline_rewards": _OF_OTHERS,
        "baseline_valid": _FLAG,
        "token_rewards": _TOKEN_NUMBER,
        "values": _TOKEN_NUMBER,
        "final_values": _NUMBER,
        "advantages": _TOKEN_NUMBER,
        "returns": _TOKEN_NUMBER,
        "costs": _SCORES,
        "costs_notes": ColumnSchema(holds="text"),
        "baseline_costs": _OF_OTHERS,
        "cost_values": _TOKEN_NUMBER,
        "final_cost_values": _NUMBER,
        "cost_returns": _TOKEN_NUMBER,
        "pretrain_ids": _ids(empty=False),
        "pretrain_loss": _NUMBER,
        "chosen_ids": _ids(follows=("prompt_ids",), empty=False),
        "rejected_ids": _ids(follows=("prompt_ids",), empty=False),
        "teacher_prompt_ids": _ids(empty=False),
        "teacher_ids": ColumnSchema(holds="whole numbers", row="tokens", least=0),
        "teacher_log_prob": ColumnSchema(row="tokens"),
        "teacher_tail_log_prob": _TOKEN_NUMBER,
        "mismatched_ids": _ids(follows=("prompt_ids",), empty=False),
        "desirable": _FLAG,
        "chosen_rewards": _NUMBER,
        "rejected_rewards": _NUMBER,
        "chosen_costs": _NUMBER,
        "rejected_costs": _NUMBER,
        "chosen_log_prob": _NUMBER,
        "rejected_log_prob": _NUMBER,
        "ref_chosen_log_prob": _NUMBER,
        "ref_rejected_log_prob": _NUMBER,
        "response_log_prob": _NUMBER,
        "mismatched_log_prob": _NUMBER,
        "ref_response_log_prob": _NUMBER,
        "ref_mismatched_log_prob": _NUMBER,
    }
)
# `valid` is 0 if a user's function failed for a row, and `failure` has the error. Several stages write both, and keep
# the entries of earlier stages.
STATUS = ("valid", "failure")
# 1 at the first token of each further context of a response. A context is a sequence of its own: its tokens do not
# attend to earlier ones. It begins with a prompt, outside the response mask. Sent wherever `response_ids` is sent.
CONTEXT_STARTS = "context_starts"
# Columns along the tokens or the turns of a response: they are not valid for another response to the same prompt.
OF_ONE_RESPONSE = (
    "turns", *(name for name, schema in SCHEMA.items() if schema.row == "tokens" and schema.along)
)  # fmt: skip
# The columns that decide which rows an update counts. Each `compute_advantages` writes a new `counted`: 0 for rows that
# were not valid, or had no baseline.
COUNTING = ("valid", "counted")
# columns of token ids; frames show them as text
TOKEN_COLUMNS = tuple(name for name, schema in SCHEMA.items() if schema.holds == "token ids")
# the stage that makes a column, for messages
MADE_BY = {
    "response_ids": "actor.generate_sequences", "rollout_log_prob": "actor.generate_sequences",
    "environment_rewards": "actor.generate_sequences(environment=...)",
    "turn_starts": "actor.generate_sequences(environment=...)",
    "turn_ends": "actor.generate_sequences(environment=...)",
    "response_mask": "actor.generate_sequences", "old_log_prob": "actor.compute_log_prob",
    "gradient_norm": "actor.compute_gradient_norm",
    "final_values": "critic.compute_values(final=True)",
    "ref_log_prob": "reference.compute_ref_log_prob", "values": "critic.compute_values",
    "rewards": "reward.compute_reward", "advantages": "compute_advantages",
    "returns": "compute_advantages", "costs": "cost.compute_cost",
    "cost_values": "cost_critic.compute_cost_values",
    "cost_returns": "compute_advantages(multiplier=...)", "pretrain_ids": "actor.compute_loss",
    "ref_chosen_log_prob": "reference.compute_ref_pair_log_prob",
    "ref_rejected_log_prob": "reference.compute_ref_pair_log_prob",
    "ref_response_log_prob": "reference.compute_ref_feedback_log_prob",
    "ref_mismatched_log_prob": "reference.compute_ref_feedback_log_prob",
    "teacher_ids": "teacher.compute_teacher_log_prob",
    "teacher_log_prob": "teacher.compute_teacher_log_prob",
    "teacher_tail_log_prob": "teacher.compute_teacher_log_prob",
}  # fmt: skip
# the remedy for a missing column that only the user can put
PUT = {
    "prompt_uid": "take rows of lab.prompts.next(n), or put it: the number of each row's prompt, such as [0, 0, 1]",
    "prompt_ids": "take rows of lab.prompts.next(n), or put it: the token ids of each row's prompt",
}


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """The rewards of a rank's valid rows. Arrays of [rows]: `prompt_uid`; the reward of the whole response; the number
    of response tokens that the policy chose."""

    prompt_uid: np.ndarray
    reward: np.ndarray
    tokens: np.ndarray
