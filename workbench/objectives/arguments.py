"""Checks of shapes, so that a wrong shape raises instead of broadcasting silently. The operations check plain numbers.

Shape suffixes of this folder:

    B   rows (responses) of a batch or micro-batch
    T   response tokens, right-padded to the longest response
    N   samples of the whole global batch

`mask_BT` is 1 (or True) on the response tokens that the policy generated, including the first EOS; 0 on padding and on
other tokens, such as tool output. Entries outside the mask may be any finite number: results do not depend on them.
`values_BT[:, t]` is V of the state *before* token t: the critic's output at the position that predicts t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import BadInput


def same_shape(**tensors: Tensor) -> None:
    """Raise `BadInput`, with both shapes, unless all tensors have the same shape."""
    (first, head), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != head.shape:
            raise BadInput(
                f"{first} has shape {list(head.shape)}, {name} has shape {list(tensor.shape)}",
                "both must have the same shape",
                "index or pad them in the same way",
            )


def one_per_row(name: str, x_B: Tensor, mask_BT: Tensor) -> None:
    """Raise `BadInput` unless `x_B` is a vector with one entry for each row of `mask_BT`."""
    if x_B.shape != mask_BT.shape[:1]:
        raise BadInput(
            f"{name} has shape {list(x_B.shape)}, mask_BT has shape {list(mask_BT.shape)}",
            f"{name} must hold one number a row",
        )


def upcast(x: Tensor) -> Tensor:
    """Convert to at least single precision: half and bfloat16 (and bool, int) become float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
