"""How far two right computations of the same number may lie apart."""

from __future__ import annotations

import math

import torch


def rounding(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The difference, relative to the size of the terms, that two sums of `terms` terms may have when they are added in
    another order, as other processors, layouts and micro-batches do.

    Each addition rounds by at most half of the dtype's epsilon, to either side, so that the errors of n additions grow
    as the root of n (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Eight times that is allowed:
    a comparison that is right then uses a third of it at most (`make margins`), and a wrong formula is off by far more.
    """
    return 8 * math.sqrt(terms) * torch.finfo(dtype).eps
