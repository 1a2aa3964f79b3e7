"""Weights as a model's files hold them, which is how vLLM and other programs read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.models.resolve import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class FileWeights:
    """Gives weights of a transformers model the names and shapes that they have in files of its family: the experts of
    a layer, one tensor in the model, are two or three tensors an expert in most files."""

    def __init__(self, config: PreTrainedConfig) -> None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
        with quiet_transformers(), torch.device("meta"):
            self._model: Any = auto.from_config(config)
        found = get_model_conversion_mapping(self._model, add_legacy=False)
        found = [one for one in found if not isinstance(one, PrefixChange)]  # as transformers does where it saves
        self._model._weight_conversions, self.converts = found, bool(found)  # noqa: SLF001 (as transformers' loader does)
        self._constants = defaultdict[str, dict[str, Tensor]](dict)  # by the weight that they follow

    def of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what files hold for weights, named as in transformers; views of these, where that is possible."""
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = dict(weights)
        if self.converts:
            found = revert_weight_conversion(self._model, found)
        for name in weights.keys() & self._constants.keys():
            found |= self._constants[name]
        return found

    def add_constants(self, folder: Path) -> None:
        """Let `of` return the tensors of a model's folder that are no parameters, such as a router's bias, each with a
        weight near it. They never change, but vLLM loses them when it sleeps, or loads other weights of the module."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        fixed = {name: tensor for name, tensor in self._model.state_dict().items() if name not in parameters}
        names = {key: name for name, tensor in fixed.items() for key in self.of({name: tensor})}
        for key, tensor in read_tensors(folder, set(names)).items():
            near, beside = names[key], list[str]()
            while not beside:
                near = near.rpartition(".")[0]
                beside = [name for name in parameters if name.startswith(f"{near}." if near else "")]
            self._constants[beside[0]][key] = tensor


def read_tensors(folder: Path, keys: set[str]) -> dict[str, Tensor]:
    """Return those of these tensors that a folder of weights has."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")) if keys else ():
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in keys.intersection(tensors.keys())}
    for file in sorted(folder.glob("pytorch_model*.bin")) if keys - found.keys() else ():
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        found |= {key: tensors[key] for key in keys.intersection(tensors)}
    return found
