"""The metrics that readers look at first, and the units of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Label, in display order -> its metrics, the best first. "*" means the first stage that reports the metric. A second
# stage, such as update_actor_2, counts if the first one does not exist.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "reward": ("dynamic_sampling/rewards/mean", "compute_reward/rewards/mean", "compute_advantages/rewards/mean"),
    "cost": ("compute_cost/costs/mean",),
    "KL": ("compute_advantages/reference_kl", "update_actor/kl_loss", "update_actor/approximate_kl"),
    "accuracy": tuple(f"update_{of}/accuracy" for of in ("reward", "cost", "dpo", "ipo", "orpo")),
    "loss": ("update_actor/loss", "*/loss"),
    "gradient norm": ("update_actor/grad_norm", "*/grad_norm"),
    "clip fraction": ("update_actor/clip_fraction",),
    "response tokens": ("generate_sequences/response_tokens/mean",),
}
ON_A_LINE = ("reward", "cost", "KL", "accuracy")
OTHERWISE = "loss"  # where there is none of these


def looked_at(names: Iterable[str]) -> dict[str, str]:
    """For each label, the first of these metrics ("stage/metric") that belongs to it."""
    there = list(names)
    found = {}
    for label, wanted in HEADLINES.items():
        for name in wanted:
            stage, _, metric = name.partition("/")
            pattern = re.compile(rf"{'[^/]*' if stage == '*' else stage}(_\d+)?/{metric}")
            match = [one for one in there if pattern.fullmatch(one)]
            if match:
                found[label] = match[0]
                break
    return found


def interval_of(name: str) -> str:
    """The metric that holds half the width of a mean's confidence interval."""
    return f"{name.removesuffix('/mean')}/interval95"


def headlines(metrics: Mapping[str, float]) -> str:
    """The few metrics that fit on a line."""
    found = looked_at(metrics)
    shown = [label for label in ON_A_LINE if label in found] or [label for label in (OTHERWISE,) if label in found]
    return "  ".join(f"{label} {metrics[found[label]]:.4g}" for label in shown)


NO_UNIT, UNKNOWN = "no unit", "value"
# A pattern of a metric's name -> its unit; the first match counts. "no unit": ratios, norms and coefficients.
UNITS = {
    r"tokens(/|_per_)s(econd)?$": "tokens per second",
    r"seconds|_s$": "seconds",
    r"coefficient|learning_rate|temperature|norm|ratio|weight|loss|sample_size": NO_UNIT,
    r"fraction|share|accuracy|pass_rate|mass|explained_variance": "fraction",
    r"bytes": "bytes",
    r"(^|[/_])kl([/_]|$)|entropy|log_prob|(rollout|sync)_gap": "nats",
    r"tokens": "tokens",
    r"value_error": "reward squared",
    r"rewards?($|/)|returns|advantages|values|costs": "reward",
    r"optimizer_steps|turns|(^|/)steps($|/)": "count",
}


def unit_of(metric: str) -> str:
    """The unit of a metric in words: `NO_UNIT` if it has none, `UNKNOWN` if its name does not tell."""
    return next((unit for pattern, unit in UNITS.items() if re.search(pattern, metric)), UNKNOWN)
