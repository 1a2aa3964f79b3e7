"""In which precision a policy computes when its precisions are compared."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from workbench.support.validation import settings


@settings()
class Precision:
    """How a forward pass computes log-probabilities.

    dtype: of products. weights: "float32", as a trainer keeps them, which computes in `dtype` under autocast; or
        "same": weights and activations are in `dtype` too, as in a generation engine.
    head: "float32" computes the logits in fp32 from weights of the output head in fp32; "same": in `dtype`.
    adapter: "native" computes W x + B A x, as a trainer does; "merged" (W + B A) x, where the sum is rounded to what
        the weights are held in. Without an adapter they are one.
    sampling_mask: of rollouts with a sampling mask (`Sampling.keep_mask`) over the tokens that could be drawn; False:
        over all tokens.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    weights: Literal["float32", "same"] = "float32"
    head: Literal["float32", "same"] = "same"
    adapter: Literal["native", "merged"] = "native"
    sampling_mask: bool = True


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "float32": Precision(),
        "bfloat16": Precision(dtype="bfloat16"),
        "bfloat16_head32": Precision(dtype="bfloat16", head="float32"),
        "bfloat16_engine": Precision(dtype="bfloat16", weights="same"),
        "bfloat16_engine_head32": Precision(dtype="bfloat16", weights="same", head="float32"),
        "float16": Precision(dtype="float16"),
        "float16_engine": Precision(dtype="float16", weights="same"),
    }
)
"""Those that are compared unless others are asked for; "engine": with weights in the dtype too."""
MERGED: Mapping[str, Precision] = MappingProxyType(
    {"bfloat16_engine_merged": Precision(dtype="bfloat16", weights="same", adapter="merged")}
)
"""Those that are compared besides where there is an adapter."""
ALL_TOKENS: Mapping[str, Precision] = MappingProxyType({"float32_all_tokens": Precision(sampling_mask=False)})
"""Those that are compared besides where the rollouts have a sampling mask."""
