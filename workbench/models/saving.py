"""Write a model folder that `Model(path)`, transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from workbench.models.quiet import quiet_transformers
from workbench.models.resolve import resolve
from workbench.models.tokenizers import load_tokenizer
from workbench.support.files import new_folder


def write_model(folder: Path, weights: Mapping[str, Tensor], name: str | Path, *, scalar_head: bool) -> None:
    """Weights by transformers' names, with configuration and tokenizer of the model `name`, appear in `folder` at once.

    scalar_head: it is a model with a head of one score, which transformers calls sequence classification. (Its classes
    read `score.weight` and know no bias: scores that they compute differ from ours by `score.bias`.)
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, GenerationConfig

    origin = resolve(name)
    with quiet_transformers(), new_folder(folder, needed=sum(w.nbytes for w in weights.values())) as part:
        config = AutoConfig.from_pretrained(origin, trust_remote_code=False)
        config.dtype = next(iter(weights.values())).dtype
        if scalar_head:
            config.num_labels = 1
            known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
            config.architectures = None if known is None else [str(getattr(known, "__name__", known))]
        elif (origin / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(origin).save_pretrained(part)
        config.save_pretrained(part)
        load_tokenizer(name).save_pretrained(part)
        save_torch_state_dict(dict(weights), part)
