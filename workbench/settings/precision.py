"""The precisions in which a policy can compute, for comparisons of them."""

from __future__ import annotations

from typing import Literal

from workbench.support.validation import settings


@settings()
class Precision:
    """How a forward pass computes log-probabilities.

    dtype: of matrix products. weights: "float32": fp32 weights and autocast to `dtype`, as in a trainer; "same":
        weights and activations are in `dtype` too, as in a generation engine.
    head: "float32": compute the logits in fp32 from fp32 weights of the output head; "same": in `dtype`.
    adapter: "native": compute W x + B A x, as a trainer does; "merged": (W + B A) x, with the sum rounded to the
        weights' dtype. Without an adapter both are the same.
    sampling_mask: for rollouts with a sampling mask (`Sampling.keep_mask`): compute over the tokens in the mask; False:
        over all tokens.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    weights: Literal["float32", "same"] = "float32"
    head: Literal["float32", "same"] = "same"
    adapter: Literal["native", "merged"] = "native"
    sampling_mask: bool = True


PRECISIONS = {
    "float32": Precision(),
    "bfloat16": Precision(dtype="bfloat16"),
    "bfloat16_head32": Precision(dtype="bfloat16", head="float32"),
    "bfloat16_engine": Precision(dtype="bfloat16", weights="same"),
    "bfloat16_engine_head32": Precision(dtype="bfloat16", weights="same", head="float32"),
    "float16": Precision(dtype="float16"),
    "float16_engine": Precision(dtype="float16", weights="same"),
}
"""The precisions compared by default; "engine": weights in the dtype too."""
MERGED = {"bfloat16_engine_merged": Precision(dtype="bfloat16", weights="same", adapter="merged")}
"""Also compared if there is an adapter."""
ALL_TOKENS = {"float32_all_tokens": Precision(sampling_mask=False)}
"""Also compared if the rollouts have a sampling mask."""
