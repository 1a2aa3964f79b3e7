"""What `compute_advantages` is to give, written from the papers, see `by_token`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.batches.columns import Table
from workbench.checks.by_token import ByToken, Numbers, kl, on_last, raw_importance_weights

TO_GO = ("reinforce_pp", "reinforce_pp_baseline", "reinforce_turn", "reinforce_turn_baseline")
WHITENED = ("gae", "gae_turn", *TO_GO)


def advantages(table: Table, arguments: Mapping[str, Any]) -> dict[str, Numbers]:
    """`advantages`, `returns` and, with a multiplier, `cost_returns`, of the tokens inside the mask, end to end.

    arguments: of `compute_advantages`, as far as they are not its defaults.
    """
    rows = ByToken(table)
    multiplier = arguments.get("multiplier")
    found, returns = _of_signal(rows, arguments, "rewards", "values", "baseline_rewards", 1)
    columns = {"returns": _flat(returns)}
    flat = _flat(found)
    if multiplier is not None:
        of_costs, cost_returns = _of_signal(rows, arguments, "costs", "cost_values", "baseline_costs", -1)
        columns["cost_returns"] = _flat(cost_returns)
        flat = [(a - multiplier * c) / (1 + multiplier) for a, c in zip(flat, _flat(of_costs), strict=True)]
    if arguments["estimator"] in WHITENED:
        mean = sum(flat) / len(flat)
        variance = sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
        flat = [(a - mean) / (variance + 1e-8) ** 0.5 for a in flat]
    return {"advantages": flat, **columns}


def _of_signal(
    rows: ByToken, arguments: Mapping[str, Any], scores_name: str, values_name: str, baseline_name: str, sign: int
) -> tuple[list[Numbers], list[Numbers]]:
    """Advantages, before whitening, and returns of rewards (sign 1) or costs (-1)."""
    estimator, gamma, lam = arguments["estimator"], arguments.get("gamma", 1.0), arguments.get("lam", 0.95)
    scores, rewards = rows.scores(scores_name)
    coefficient, kind = arguments.get("kl_coefficient", 0.0), arguments.get("kl", "k1")
    penalties = [[0.0] * len(row) for row in rewards]
    if coefficient:
        pairs = zip(rows.tokens("old_log_prob"), rows.tokens("ref_log_prob"), strict=True)
        penalties = [[-sign * coefficient * kl(old, ref, kind) for old, ref in zip(*row, strict=True)] for row in pairs]
    overlong = [0.0] * len(rows)
    if sign == 1 and (buffer := arguments.get("overlong_buffer", 0)):
        start = arguments["max_response_tokens"] - buffer
        overlong = [-min(1.0, max(0.0, (length - start) / buffer)) for length in rows.lengths]
    last = [on_last(penalty, len(row)) for penalty, row in zip(overlong, rewards, strict=True)]
    rewards = [[sum(parts) for parts in zip(*row, strict=True)] for row in zip(rewards, penalties, last, strict=True)]

    if estimator.startswith("gae"):
        after = [0.0] * len(rows)
        if arguments.get("bootstrap"):
            ended, final = rows.numbers("finished"), rows.numbers(f"final_{values_name}")
            after = [0.0 if end else value for end, value in zip(ended, final, strict=True)]
        size = arguments.get("macro_tokens", 1)
        values = rows.tokens(values_name)
        if estimator == "gae_turn":
            both = [
                _gae_of_turns(reward, value, last, turn, gamma, lam)
                for reward, value, last, turn in zip(rewards, values, after, rows.turns(), strict=True)
            ]
            return [a for a, _ in both], [g for _, g in both]
        both = [_gae(*row, gamma, lam, size) for row in zip(rewards, values, after, strict=True)]
        return [a for a, _ in both], [g for _, g in both]

    if estimator in (*TO_GO, "remax"):
        to_go = [[sum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))] for row in rewards]
        if "turn" in estimator:
            to_go = [_to_go_of_turns(*row, gamma) for row in zip(rewards, rows.turns(), strict=True)]
        baseline = [0.0] * len(rows)
        if estimator == "remax":
            baseline = rows.numbers(baseline_name)
        elif estimator.endswith("baseline"):
            baseline = [sum(group) / len(group) for group in _groups(rows, scores)]
        return [[g - b for g in row] for row, b in zip(to_go, baseline, strict=True)], to_go

    if estimator == "grpo_process":
        ends = [[bool(end) for end in row] for row in rows.tokens("step_ends")]
        if rows.is_one_a_row(scores_name):
            ends = [[t == len(row) - 1 for t in range(len(row))] for row in rewards]
        return _over_steps(rows, rewards, ends), [[sum(row[t:]) for t in range(len(row))] for row in rewards]

    # one number a response: its score with its penalties, against those of its prompt
    totals = [s + o + sum(row) for s, o, row in zip(scores, overlong, penalties, strict=True)]
    found = _over_group(rows, totals, arguments)
    return [[a] * len(row) for a, row in zip(found, rewards, strict=True)], [
        [total] * len(row) for total, row in zip(totals, rewards, strict=True)
    ]


def _gae(
    rewards: Numbers, values: Numbers, after: float, gamma: float, lam: float, size: int
) -> tuple[Numbers, Numbers]:
    """Of one response, in steps of `size` tokens: A_m is the sum of (gamma lam)^k delta_{m+k}."""
    steps = [slice(t, t + size) for t in range(0, len(rewards), size)]
    reward = [sum(rewards[step]) for step in steps]
    value = [sum(values[step]) / len(values[step]) for step in steps]
    following = [*value[1:], after][: len(value)]  # none where every token is masked out
    delta = [r + gamma * v_next - v for r, v, v_next in zip(reward, value, following, strict=True)]
    found = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[m:])) for m in range(len(delta))]
    each = [t // size for t in range(len(rewards))]
    return [found[m] for m in each], [found[m] + value[m] for m in each]


def _gae_of_turns(
    rewards: Numbers, values: Numbers, after: float, turns: list[int], gamma: float, lam: float
) -> tuple[Numbers, Numbers]:
    """Of one response. turns: the turn of each token."""
    every = sorted(set(turns))
    reward = [sum(r for r, turn in zip(rewards, turns, strict=True) if turn == k) for k in every]
    found, returns = _gae(reward, [values[turns.index(k)] for k in every], after, gamma, lam, 1)
    each = [every.index(turn) for turn in turns]
    return [found[m] for m in each], [returns[m] for m in each]


def _to_go_of_turns(rewards: Numbers, turns: list[int], gamma: float) -> Numbers:
    """The return of each token's turn: turns that have tokens inside the mask count as steps."""
    every = sorted(set(turns))
    pairs = list(zip(rewards, turns, strict=True))
    return [sum(gamma ** (every.index(k) - every.index(turn)) * r for r, k in pairs if k >= turn) for turn in turns]


def _over_steps(rows: ByToken, rewards: list[Numbers], ends: list[list[bool]]) -> list[Numbers]:
    """Of each token the normalised rewards of the steps that end there or later, over all steps of the prompt."""
    steps: list[dict[int, float]] = []  # by last token
    for row, is_end in zip(rewards, ends, strict=True):
        of_row = {t: 0.0 for t, end in enumerate(is_end) if end}
        for t, reward in enumerate(row if of_row else []):
            of_row[min((end for end in of_row if end >= t), default=max(of_row))] += reward
        steps.append(of_row)
    prompts, found = rows.numbers("prompt_uid"), []
    for of_row, prompt, row in zip(steps, prompts, rewards, strict=True):
        every = [r for other, uid in zip(steps, prompts, strict=True) if uid == prompt for r in other.values()]
        mean = sum(every) / max(1, len(every))
        deviation = (sum((r - mean) ** 2 for r in every) / max(1, len(every) - 1)) ** 0.5
        normal = {end: (r - mean) / (deviation + 1e-6) for end, r in of_row.items()}
        found.append([sum(r for end, r in normal.items() if end >= t) for t in range(len(row))])
    return found


def _over_group(rows: ByToken, totals: Numbers, arguments: Mapping[str, Any]) -> Numbers:
    """The advantage of each response over the others to its prompt."""
    estimator, found = arguments["estimator"], []
    importance = [1.0] * len(rows)
    if estimator == "off_policy_baseline":
        pairs = zip(rows.tokens("old_log_prob"), rows.tokens("rollout_log_prob"), strict=True)
        weights = [raw_importance_weights(*pair, arguments["correction"].level) if pair[0] else [] for pair in pairs]
        importance = [sum(w * w for w in row) for row in weights]  # mean w^2 x tokens
        if rows.has("gradient_norm"):
            squares = [norm * norm for norm in rows.numbers("gradient_norm")]
            each = zip(weights, importance, squares, strict=True)
            importance = [total / max(1, len(row)) * square for row, total, square in each]
    for total, group, shares in zip(totals, _groups(rows, totals), _groups(rows, importance), strict=True):
        mean = sum(group) / len(group)
        if estimator == "rloo":
            found.append(total - (sum(group) - total) / (len(group) - 1))
        elif estimator == "off_policy_baseline":
            weighed = sum(share * other for share, other in zip(shares, group, strict=True))
            deviation = (sum((other - mean) ** 2 for other in group) / len(group)) ** 0.5
            baseline = weighed / sum(shares) if sum(shares) else mean
            found.append((total - baseline) / (deviation if deviation > 1e-8 else 1.0))
        elif estimator == "grpo_batch_std":
            middle = sum(totals) / len(totals)
            found.append((total - mean) / ((sum((x - middle) ** 2 for x in totals) / (len(totals) - 1)) ** 0.5 + 1e-6))
        elif estimator == "dr_grpo":
            found.append(total - mean)
        else:
            deviation = (sum((other - mean) ** 2 for other in group) / (len(group) - 1)) ** 0.5
            found.append((total - mean) / (deviation + 1e-6))
    return found


def _groups(rows: ByToken, numbers: Numbers) -> list[Numbers]:
    """For each response, the numbers of all responses to its prompt."""
    prompts = rows.numbers("prompt_uid")
    return [[x for x, other in zip(numbers, prompts, strict=True) if other == prompt] for prompt in prompts]


def _flat(rows: list[Numbers]) -> Numbers:
    return [x for row in rows for x in row]
