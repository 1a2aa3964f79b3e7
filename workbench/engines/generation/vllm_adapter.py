"""A low-rank adapter in a running vLLM engine: the sum W x + B A x is computed in the engine, as in the trainer.

Added to the weights, most of a small change would be lost where they are held in bfloat16: it is less than half of the
last place of what it is added to. The adapter is given in memory, by vLLM's own classes; no file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from workbench.models.lora import LoRA

NUMBER = 1  # of the one adapter, in vLLM's count
NAME = "adapter"


def takes_adapter(config: Any, lora: LoRA) -> bool:
    """Whether vLLM can hold such an adapter beside a model of this configuration."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    found = [ModelRegistry.models[name] for name in config.architectures or () if name in ModelRegistry.models]
    return bool(found) and lora.rank <= max(get_args(MaxLoRARanks)) and supports_lora(found[0].load_model_cls())


def start_arguments(lora: LoRA) -> dict[str, Any]:
    """Arguments of an engine that holds one adapter; room for its rank is made in sizes that vLLM has kernels for."""
    from vllm.config.lora import MaxLoRARanks

    room = min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


def request() -> Any:
    """What a row is sent with, so that it is computed with the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=NAME, lora_int_id=NUMBER, lora_path="in memory")


def give_adapter(runner: Any, tensors: Mapping[str, Tensor], lora: LoRA, dtype: torch.dtype) -> None:
    """Put it in the place of the one before. tensors: whole, by peft's names; B has been scaled by alpha / rank."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = _manager(runner)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        NUMBER,
        dict(tensors),
        PEFTHelper(r=lora.rank, lora_alpha=lora.rank, target_modules=[]),  # scaled already
        device="cpu",
        dtype=dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_adapter(NUMBER)
    manager.add_adapter(adapter)
    manager.activate_adapter(NUMBER)


def held_adapter(runner: Any, lora: LoRA) -> Iterator[tuple[str, Tensor]]:
    """The weights that the engine computes with, live, by peft's names; B scaled. Of an engine that is not cut."""
    manager = _manager(runner)
    slot = manager.lora_index_to_id.index(NUMBER)
    for name, module in manager.modules.items():
        if not isinstance(module.lora_a_stacked, tuple):  # the head, which has none
            continue
        for i, part in enumerate(manager.packed_modules.get(name) or [name]):
            a, b = module.lora_a_stacked[i][slot, 0], module.lora_b_stacked[i][slot, 0]
            yield f"base_model.model.{part}.lora_A.weight", a[: lora.rank]
            yield f"base_model.model.{part}.lora_B.weight", b[:, : lora.rank]


def _manager(runner: Any) -> Any:
    return runner.lora_manager._adapter_manager  # noqa: SLF001 (vLLM's public calls read adapters from files)
