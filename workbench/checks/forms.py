"""What updates are measured with: between them, the forms have every term of a role's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.objectives.correction import Correction

REGRESSION: tuple[dict[str, Any], ...] = (
    {"aggregation": "token-mean"},
    {"aggregation": "sequence-mean-token-mean"},
)
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "actor": (
        # without bonus and penalty: rows without advantage are skipped
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

# What `check_losses` holds to formulas: between them, every policy loss, aggregation, form of the KL and correction.
LOSSES: dict[str, tuple[dict[str, Any], ...]] = {
    "actor": (
        {"loss": "ppo", "aggregation": "token-mean", "clip": 0.2, "clip_high": 0.3, "correction": Correction()},
        {
            "loss": "ppo", "aggregation": "sequence-mean-token-sum", "dual_clip": 1.5, "kl_coefficient": 0.1,
            "kl": "k3_corrected", "correction": Correction(level="geometric", bound="mask"),
        },
        {
            "loss": "gspo", "aggregation": "sequence-mean-token-mean", "clip": 0.1, "kl_coefficient": 0.1, "kl": "k2",
            "correction": Correction(level="sequence", high=10.0),
        },
        {
            "loss": "cispo", "aggregation": "fixed-length", "max_response_tokens": 16, "clip": 0.3, "clip_high": 0.4,
            "kl_coefficient": 0.1, "kl": "k3",
        },
        {
            "loss": "sapo", "aggregation": "sequence-mean-token-mean",
            "correction": Correction(bound="second_moment", second_moment=0.02),
        },
    ),
    "critic": REGRESSION,
    "cost_critic": REGRESSION,
}  # fmt: skip


def form_name(form: Mapping[str, Any]) -> str:
    """What tells a form from others of its role, to go on with after the role's name."""
    return "".join(f", {form[name]}" for name in ("loss", "aggregation") if name in form)
