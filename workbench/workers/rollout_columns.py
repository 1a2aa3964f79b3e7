"""Rollouts as columns of a batch, and the metrics of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.batches.columns import Ragged, Table
from workbench.engines.generation import Rollout
from workbench.messages.metrics import Mean, Metrics
from workbench.workers.conversation import Conversation

CUT = ("length", "turns")  # endings that are not the response's own
FAILED = "failed"  # that of a row whose environment failed
ENDINGS = ("eos", "stop", "done", *CUT)


def single_turn(rollout: Rollout, rows: slice) -> Table:
    """The columns of `generate_sequences` without an environment, for some rows of a rollout."""
    responses = Ragged.of(rollout.response_ids[rows], torch.int64)
    return {
        "response_ids": responses,
        "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
        "rollout_log_prob": Ragged.of(rollout.log_probs[rows], torch.float32),
        **_endings(rollout.endings[rows]),
    }


def several_turns(conversations: Sequence[Conversation]) -> Table:
    return {
        "response_ids": Ragged.of([c.response_ids for c in conversations], torch.int64),
        "response_mask": Ragged.of([c.mask for c in conversations], torch.bool),
        "rollout_log_prob": Ragged.of([c.log_probs for c in conversations], torch.float32),
        **_endings([c.ending or "length" for c in conversations]),
        "turns": torch.tensor([c.turns for c in conversations]),
        "environment_rewards": Ragged.of([c.rewards for c in conversations], torch.float32),
    }


def _endings(endings: Sequence[str]) -> Table:
    finished = torch.tensor([ending not in (*CUT, FAILED) for ending in endings], dtype=torch.bool)
    return {"finished": finished, "ending": list(endings)}


def rollout_metrics(columns: Table) -> Metrics:
    """Lengths in tokens (of what the policy wrote), shares of the endings and of those that were cut, turns."""
    mask, endings = columns["response_mask"], columns["ending"]
    assert isinstance(mask, Ragged)
    assert isinstance(endings, list)
    rows, written = len(mask), float(mask.values.sum())

    def mean(total: float) -> Mean:
        return Mean(total=total, count=rows)

    metrics: Metrics = {"response_tokens/mean": mean(written)}
    metrics["truncated/fraction"] = mean(sum(ending in CUT for ending in endings))
    # the same names on every rank, or the counts of a rank without an ending would be missing
    metrics |= {f"ending_{name}/fraction": mean(sum(ending == name for ending in endings)) for name in ENDINGS}
    if "turns" in columns:
        turns, rewards = columns["turns"], columns["environment_rewards"]
        assert isinstance(turns, torch.Tensor) and isinstance(rewards, Ragged)
        metrics["observation_tokens/mean"] = mean(len(mask.values) - written)
        metrics["turns/mean"] = mean(float(turns.sum()))
        metrics["environment_rewards/mean"] = mean(float(rewards.values.sum()))
    return metrics
