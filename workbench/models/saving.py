"""Write a model folder that `Model(path)`, transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from workbench.models.quiet import quiet_transformers
from workbench.models.resolve import resolve
from workbench.models.tokenizers import load_tokenizer
from workbench.support.files import new_folder

SHARD_GB = 5.0
CARD = "README.md"  # where the hub looks for it


def write_model(
    folder: Path, weights: Mapping[str, Tensor], name: str | Path, *, scalar_head: bool, card: str = "",
    shard_gb: float = SHARD_GB,
) -> None:  # fmt: skip
    """Weights by transformers' names, with configuration and tokenizer of the model `name`, appear in `folder` at once.
    card: a model card in Markdown, "" for none. shard_gb: of a safetensors file, in 1e9 bytes; more weights go into
    several with an index, and one weight that is larger has a file of its own.

    scalar_head: it is a model with a head of one score, which transformers calls sequence classification. Its classes
    read `score.weight` and drop the bias, which holds the level of the scores (the part that does not depend on the
    tokens). So the configuration has it as well: logits + config.score_bias are the scores that `Model(path)` gives.
    """
    from huggingface_hub import save_torch_state_dict
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, GenerationConfig

    origin = resolve(name)
    with quiet_transformers(), new_folder(folder, needed=sum(w.nbytes for w in weights.values())) as part:
        config = AutoConfig.from_pretrained(origin, trust_remote_code=False)
        config.dtype = next(iter(weights.values())).dtype
        if scalar_head:
            config.num_labels = 1
            config.score_bias = float(weights["score.bias"])
            known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
            config.architectures = None if known is None else [str(getattr(known, "__name__", known))]
        elif (origin / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(origin).save_pretrained(part)
        config.save_pretrained(part)
        load_tokenizer(name).save_pretrained(part)
        save_torch_state_dict(dict(weights), part, max_shard_size=max(1, int(shard_gb * 1e9)))
        if card:
            (part / CARD).write_text(card)


def level_outside(bias: float) -> str:
    """What somebody must know who scores with transformers' class of a saved model whose head has this bias."""
    return (
        f"transformers' sequence classification drops the head's bias: add config.score_bias = {bias:.6g} to its "
        "logits for the same scores (wb.Model reads it)"
    )
