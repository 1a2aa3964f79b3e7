"""What metrics are counted in, by their names."""

from __future__ import annotations

import re

NO_UNIT, UNKNOWN = "no unit", "value"
# A pattern of a metric's name -> what its numbers are; the first that fits. "no unit": ratios, norms and coefficients.
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
    """The unit of a metric as a word, `NO_UNIT` where it has none, `UNKNOWN` where its name does not tell."""
    return next((unit for pattern, unit in UNITS.items() if re.search(pattern, metric)), UNKNOWN)
