"""The columns that workbench's own stages write and read."""

from __future__ import annotations

# what the stages that come with workbench write: numbers, all of them
NUMBER_COLUMNS = frozenset(
    (
        *("response_ids", "response_mask", "finished", "rollout_log_prob", "old_log_prob", "ref_log_prob"),
        *("values", "rewards", "baseline_rewards", "token_rewards", "advantages", "returns"),
        *("turns", "environment_rewards", "final_values", "final_cost_values"),
        *("cost_values", "costs", "cost_returns", "pretrain_ids", "pretrain_loss"),
        *("chosen_rewards", "rejected_rewards", "chosen_costs", "rejected_costs"),
        *("chosen_log_prob", "rejected_log_prob", "ref_chosen_log_prob", "ref_rejected_log_prob"),
    )
)
# columns of token ids, which are shown as text
TOKEN_COLUMNS = ("prompt_ids", "response_ids", "chosen_ids", "rejected_ids")
