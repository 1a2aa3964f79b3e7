"""Rewards of rows by prompt, as a stage that scores tells them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """The rewards of a rank's valid rows. Arrays of [rows]: `prompt_uid`; the reward of the whole response; how many
    tokens of it the policy chose."""

    prompt_uid: np.ndarray
    reward: np.ndarray
    tokens: np.ndarray
