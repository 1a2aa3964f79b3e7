"""Turns rollouts into columns of a batch and into metrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.batches.columns import Ragged, Table, numbers_in, ragged_in
from workbench.batches.schema import CONTEXT_STARTS
from workbench.messages.metrics import Mean, Metrics
from workbench.settings.engines import Sampling
from workbench.support.calls.pickling import name_of
from workbench.workers.conversation import Conversation
from workbench.workers.sampling_mask import MASK_COLUMNS, mask_columns, mask_metrics

CUT = ("length", "max_turns", "max_tokens", "max_seconds", "max_calls")  # endings by a limit
COMPONENTS = "environment_components"  # what an agent returned, by name
PAUSED = "paused"  # ending of a response that continues in a later call, see `workbench.workers.partial_rollouts`
FAILED = "failed"  # ending of a row whose environment failed
# further columns of responses of several turns
TURN_COLUMNS = ("turns", "environment_rewards", "turn_starts", "turn_ends", "turn_rewards")
ENDINGS = ("eos", "stop", "done", *CUT)


def single_turn(ids: Sequence[list[int]], log_probs: Sequence[list[float]], endings: Sequence[str]) -> Table:
    """Return the columns of responses without an environment."""
    responses = Ragged.of(ids, torch.int64)
    return {
        "response_ids": responses,
        "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
        "rollout_log_prob": Ragged.of(log_probs, torch.float32),
        **ending_columns(endings),
    }


def several_turns(conversations: Sequence[Conversation], *, keeps_mask: bool, contexts: bool) -> Table:
    """Return the columns of conversations. contexts: whether a conversation may have several contexts."""
    return {
        "prompt_ids": Ragged.of([c.prompt_ids for c in conversations], torch.int64),
        "response_ids": Ragged.of([c.response_ids for c in conversations], torch.int64),
        "response_mask": Ragged.of([c.mask for c in conversations], torch.bool),
        "rollout_log_prob": Ragged.of([c.log_probs for c in conversations], torch.float32),
        **ending_columns([c.ending or "max_tokens" for c in conversations]),
        "turns": torch.tensor([c.turns for c in conversations]),
        "environment_rewards": Ragged.of([c.rewards for c in conversations], torch.float32),
        "turn_starts": Ragged.of([c.turn_starts for c in conversations], torch.int64),
        "turn_ends": Ragged.of([c.turn_ends for c in conversations], torch.int64),
        "turn_rewards": Ragged.of([[c.rewards[end - 1] for end in c.turn_ends] for c in conversations], torch.float32),
        **(mask_columns([c.sets for c in conversations]) if keeps_mask else {}),
        **({CONTEXT_STARTS: Ragged.of([_context_starts(c) for c in conversations], torch.bool)} if contexts else {}),
    }


def _context_starts(conversation: Conversation) -> torch.Tensor:
    starts = torch.zeros(len(conversation.response_ids), dtype=torch.bool)
    starts[conversation.context_starts] = True
    return starts


def ending_columns(endings: Sequence[str]) -> Table:
    """Return the columns of each response's ending and of whether the response finished by itself."""
    finished = torch.tensor([ending not in (*CUT, FAILED, PAUSED) for ending in endings], dtype=torch.bool)
    return {"finished": finished, "ending": list(endings)}


def never_answered(conversations: Sequence[Conversation], sampling: Sampling, rank: int) -> tuple[str, ...]:
    """Return a warning for the user if the policy read no answer of its environment, else nothing. rank: named in the
    message."""
    if not conversations or any(c.ending != "max_tokens" or c.turns > 1 for c in conversations):
        return ()
    context = f", Context.max_tokens={sampling.context.max_tokens}" if sampling.context else ""
    return (
        f"no reply of environment {name_of(sampling.environment)} was read on rank {rank}: all {len(conversations)} "
        "conversations were cut in their first turn, or had no room for its reply, because of "
        f"max_new_tokens={sampling.max_new_tokens}{context} or Generation.max_model_tokens. Raise "
        "them, or end turns with stop=",
    )


def rollout_metrics(columns: Table) -> Metrics:
    """Return metrics: lengths in the policy's tokens, shares of each ending and of cut responses, numbers of turns."""
    mask, endings = ragged_in(columns, "response_mask"), columns["ending"]
    assert isinstance(endings, list)
    rows, written = len(mask), float(mask.values.sum())

    def mean(total: float) -> Mean:
        return Mean(total=total, count=rows)

    metrics: Metrics = {"response_tokens/mean": mean(written)}
    metrics["truncated/fraction"] = mean(sum(ending in CUT for ending in endings))
    # the same names on every rank, or the counts of a rank without an ending would be missing
    metrics |= {f"ending_{name}/fraction": mean(sum(ending == name for ending in endings)) for name in ENDINGS}
    if MASK_COLUMNS[0] in columns:
        metrics |= mask_metrics(*(ragged_in(columns, name) for name in MASK_COLUMNS))
    if "turns" in columns:
        turns, rewards = numbers_in(columns, "turns"), ragged_in(columns, "environment_rewards")
        metrics["observation_tokens/mean"] = mean(len(mask.values) - written)
        metrics["turns/mean"] = mean(float(turns.sum()))
        starts = columns.get(CONTEXT_STARTS)
        if isinstance(starts, Ragged):
            metrics["contexts/mean"] = mean(rows + float(starts.values.sum()))
        metrics["environment_rewards/mean"] = mean(float(rewards.values.sum()))
    return metrics
