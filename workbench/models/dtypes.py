"""The number formats in which a device computes fast."""

from __future__ import annotations

import torch


def bf16_is_fast(device: torch.device | str = "cpu") -> bool:
    """Whether `device` has matrix instructions for bfloat16: most CUDA devices; CPUs with AMX or AVX512-BF16."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
