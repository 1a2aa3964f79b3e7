"""Write a model folder that `Model(path)`, transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.models.quiet import quiet_transformers
from workbench.models.resolve import resolve
from workbench.support.files import new_folder

SHARD_GB = 5.0
CARD = "README.md"  # where the hub looks for it
# files of a model folder that training does not change: those of the tokenizer, and how the model likes to be sampled
UNCHANGED = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*", "generation_config.json",
)  # fmt: skip


def write_model(
    folder: Path, weights: Mapping[str, Tensor], name: str | Path, *, scalar_head: bool, card: str = "",
    shard_gb: float = SHARD_GB,
) -> None:  # fmt: skip
    """Weights by transformers' names, with configuration and tokenizer of the model `name`, appear in `folder` at once.
    card: a model card in Markdown, "" for none. shard_gb: of a safetensors file, in 1e9 bytes; more weights go into
    several with an index, and one weight that is larger has a file of its own.

    The files of `UNCHANGED` are copied, byte for byte; config.json differs in the dtype of the weights, and in what
    follows from a head of one score.

    scalar_head: it is a model with a head of one score, which transformers calls sequence classification. Its classes
    read `score.weight` and drop the bias, which holds the level of the scores (the part that does not depend on the
    tokens). So the configuration has it as well: logits + config.score_bias are the scores that `Model(path)` gives.
    """
    from huggingface_hub import save_torch_state_dict

    origin = resolve(name)
    with quiet_transformers(), new_folder(folder, needed=sum(w.nbytes for w in weights.values())) as part:
        for path in {path for pattern in UNCHANGED for path in origin.glob(pattern) if path.is_file()}:
            if not (scalar_head and path.name == "generation_config.json"):
                (part / path.relative_to(origin)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, part / path.relative_to(origin))
        config = json.loads((origin / "config.json").read_text())
        config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        for left_out in ("torch_dtype", "quantization_config"):  # the dtype's older name; the weights are whole
            config.pop(left_out, None)
        if scalar_head:
            config.update(_of_one_score(origin), score_bias=float(weights["score.bias"]))
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_torch_state_dict(dict(weights), part, max_shard_size=max(1, int(shard_gb * 1e9)))
        if card:
            (part / CARD).write_text(card)


def _of_one_score(origin: Path) -> dict[str, Any]:
    """The fields by which transformers makes a model of this family with a head of one score."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(origin, trust_remote_code=False)
    config.num_labels = 1
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    names = None if known is None else [str(getattr(known, "__name__", known))]
    return {"architectures": names, "id2label": config.id2label, "label2id": config.label2id}


def level_outside(bias: float) -> str:
    """What somebody must know who scores with transformers' class of a saved model whose head has this bias."""
    return (
        f"transformers' sequence classification drops the head's bias: add config.score_bias = {bias:.6g} to its "
        "logits for the same scores (wb.Model reads it)"
    )
