"""Low-rank adapters on a frozen model, through peft: a linear layer computes W x + (alpha / rank) B A x, and only A and
B are trained. B starts at zero, so that at first the adapter does not change the model.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1. Shapes: W [out, in], A [rank, in], B [out, rank].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from workbench.errors import BadInput
from workbench.support.files import new_folder
from workbench.support.validation import SEQUENCE, PositiveFloat, PositiveInt, Rule, settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"  # peft's name of a model's only adapter
# Families whose kernels read out_proj's weight beside the layer, so that an adapter would not count. peft refuses most.
OF_MAMBA = ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h", "zamba2")
WITHOUT = ("shared_expert_gate",)  # Qwen's gate of shared experts, which vLLM computes without an adapter


LayerNames = Annotated[
    tuple[str, ...], Field(min_length=1), SEQUENCE, Rule("must be names of layers", "write ('q_proj', 'v_proj')")
]


@settings()
class LoRA:
    """`wb.Model(name, adapter=wb.LoRA(rank=16))`: train a low-rank adapter, and leave the model itself as it is.

    rank: the rank of each weight's change. alpha: the change is scaled by alpha / rank. targets: the last parts of the
    names of the linear layers to adapt, such as ("q_proj", "v_proj"); None: all except the output
    head, layers with a number for a name, shared_expert_gate and, in Mamba families, out_proj.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    targets: LayerNames | None = None

    def __str__(self) -> str:
        where = "" if self.targets is None else f", targets={self.targets!r}"
        return f"LoRA(rank={self.rank}, alpha={self.alpha:g}{where})"


def add_lora(model: PreTrainedModel, lora: LoRA, seed: int) -> None:
    """Put an adapter into a causal language model, in place; then only the adapter has gradients.

    A is drawn only from `seed`. Raises `BadInput` for targets that the model does not have.
    """
    from peft import LoraConfig

    there = sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    targets = there if lora.targets is None else lora.targets
    if unknown := sorted(set(targets) - set(there)):
        raise BadInput(
            f"LoRA.targets with {unknown[0]!r}",
            f"the linear layers of {type(model).__name__}, without its output head, are {', '.join(there)}",
            "name some of these",
        )
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets), lora_dropout=0.0, task_type="CAUSAL_LM"
    )  # type: ignore[arg-type, unused-ignore] # alpha may be a fraction
    with torch.random.fork_rng(devices=[]):
        # only the CPU generator, which peft uses
        torch.default_generator.manual_seed(seed)
        model.add_adapter(config, ADAPTER)


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, the model computes without its adapter."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return parameter name in `module` -> peft's layer around it, for each weight that an adapter changes."""
    # checks an attribute, not a class, so that a model without an adapter does not import peft
    layers = ((name, part) for name, part in module.named_modules() if hasattr(part, "get_delta_weight"))
    return {f"{name}.base_layer.weight": layer for name, layer in layers}


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """Return W + (alpha / rank) B A of peft's layer, fp32; the layer does not change."""
    return layer.get_base_layer().weight.float() + layer.get_delta_weight(ADAPTER).float()


def adapter_names(module: nn.Module) -> dict[str, str]:
    """Return parameter name in `module` -> name in peft's files, for each weight of an adapter.

    The module has the causal language model as its attribute `model`.
    """
    names = (name for name, _ in module.named_parameters() if ".lora_" in name)
    return {name: f"base_model.{name.replace(f'.{ADAPTER}.', '.')}" for name in names}


def write_adapter(folder: Path, weights: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained(base, folder)` can load."""
    from safetensors.torch import save_file

    with new_folder(folder, needed=sum(weight.nbytes for weight in weights.values())) as part:
        model.peft_config[ADAPTER].save_pretrained(str(part))
        save_file(dict(weights), part / "adapter_model.safetensors", metadata={"format": "pt"})


def linear_layers(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return name -> (outputs, inputs) of the linear layers that may get an adapter: all except the output head, those
    whose adapter would not count, and those with a number for a name, which peft would take for other layers."""
    from transformers.pytorch_utils import Conv1D

    head, found = model.get_output_embeddings(), dict[str, tuple[int, int]]()
    for name, part in model.named_modules():
        last = name.rpartition(".")[2]
        refused = last.isdigit() or last in WITHOUT or (model.config.model_type in OF_MAMBA and last == "out_proj")
        if isinstance(part, nn.Linear | Conv1D) and part is not head and not refused:
            shape = part.weight.shape[::-1] if isinstance(part, Conv1D) else part.weight.shape
            found[name] = (shape[0], shape[1])
    return found
