"""How likely it is that one of k samples passes, from n of them. Pure, on whole numbers."""

from __future__ import annotations

from math import comb

from workbench.errors import BadInput


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples of a prompt passes,

        1 - C(n - c, k) / C(n, k),      n = samples, c = passed of them, k <= n

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1: the share of the k-subsets of the n samples that
    hold a pass. (1 - (1 - c/n)^k is biased.) Raises `BadInput` unless 0 <= passed <= samples and 1 <= k <= samples.
    """
    if not (1 <= k <= samples and 0 <= passed <= samples):
        raise BadInput(
            f"pass_at_k(samples={samples}, passed={passed}, k={k})", "0 <= passed <= samples and 1 <= k <= samples"
        )
    return 1 - comb(samples - passed, k) / comb(samples, k)
