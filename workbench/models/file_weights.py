"""Weights as a model's files hold them, which is how vLLM and other programs read them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.models.resolve import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class FileWeights:
    """Gives weights of a transformers model the names and shapes that they have in files of its family: the experts of
    a layer, one tensor in the model, are two or three tensors an expert in most files.

    whole: the weights are of all parts of the model, as beside a scalar head. is_part: they are of the part for texts
    of a model that takes images, such as Qwen3.5.
    """

    def __init__(self, config: PreTrainedConfig, *, whole: bool = False) -> None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
        with quiet_transformers(), torch.device("meta"):
            self._model: Any = auto.from_config(config)
        found = get_model_conversion_mapping(self._model, add_legacy=False)
        of_texts = not whole and type(self._model.config) is not type(config)
        # transformers leaves these out where it saves: it saves a part as a model of its own
        found = [one for one in found if of_texts or not isinstance(one, PrefixChange)]
        self.is_part = any(isinstance(one, PrefixChange) for one in found)
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


def read_tensors(folder: Path, keys: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return those of these tensors that a folder of weights has; None: all."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}

    def wanted(there: Iterable[str]) -> list[str]:
        return [key for key in there if key not in found and (keys is None or key in keys)]

    for file in sorted(folder.glob("*.safetensors")) if keys != set() else ():
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in wanted(tensors.keys())}
    for file in sorted(folder.glob("pytorch_model*.bin")) if keys is None or set(keys) - found.keys() else ():
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        found |= {key: tensors[key] for key in wanted(tensors)}
    return found
