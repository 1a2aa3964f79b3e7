"""Load configurations, what they say a model can read, and models: evaluation mode, no dropout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.models.resolve import config_file, quiet_transformers, resolve
from workbench.support.files import new_folder
from workbench.telemetry import span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_config(name: str | Path) -> PreTrainedConfig:
    """The model's configuration with every dropout at zero: in RL, dropout makes probability ratios lie."""
    config = _configuration(resolve(name))
    for key, value in config.to_dict().items():
        # attention_dropout, resid_pdrop, embd_pdrop, layerdrop, ...
        if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, 0.0)
    return config


def read_config(name: str | Path) -> PreTrainedConfig:
    """The configuration alone, as written: of a model by name, of a folder, or a config file; no weights are fetched.

    Raises `ModelUnavailable`, or `BadInput` for a file that is no model's configuration.
    """
    return _configuration(config_file(name))


def _configuration(place: Path) -> PreTrainedConfig:
    """That of a folder or a config file. Python code that lies beside it is never run."""
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # which kind depends on the family: each checks its own fields
        if "trust_remote_code" in str(error):
            raise BadInput(
                f"the model {str(place)!r} brings Python code of its own",
                "code from a model folder is not run: anybody may have put it there",
                "take a model whose architecture transformers has",
            ) from error
        raise _unreadable(place, error) from error
    return config


@dataclass(frozen=True, kw_only=True)
class Limits:
    """vocabulary: token ids that it knows, from 0. context: tokens of its longest sequence. None: not limited."""

    vocabulary: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, name: str | Path) -> Limits:
        """Those of a model by name or folder, from its configuration."""
        config = load_config(name)
        return cls(vocabulary=int(config.get_text_config().vocab_size), context=longest_sequence(config))


def longest_sequence(config: Any) -> int | None:
    """The positions that a model was built for, stretched as its rotary embedding stretches them; None: no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if positions is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return positions
    before = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(before * (rope.get("factor") or 1)))


def load_causal_lm(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model with its output head, in evaluation mode.

    Raises `ModelUnavailable`, or `BadInput` for a checkpoint without some of the weights (transformers would fill them
    with random numbers), or with others (it would leave them out). Weights may be mapped from the file, privately:
    changing them never changes the file.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, name, dtype, device)


def load_backbone(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model without a head, giving `last_hidden_state` [rows, tokens, hidden]. Errors as in `load_causal_lm`."""
    from transformers import AutoModel

    return _load(AutoModel, name, dtype, device)


def _load(auto: Any, name: str | Path, dtype: torch.dtype, device: torch.device | str) -> PreTrainedModel:
    folder = resolve(name)
    config = load_config(folder)
    with span("read", note=f"reading {Path(name).name}"), quiet_transformers():
        try:
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation="sdpa",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                trust_remote_code=False,
            )
        except Exception as error:  # which kind depends on the family, and on the form of the weights
            if "memory" in str(error):
                raise
            raise _unreadable(folder, error) from error
    _check_weights(report, model, f"the checkpoint {str(name)!r}")
    return model.to(device).eval()


def _check_weights(report: Mapping[str, Any], model: PreTrainedModel, what: str) -> None:
    """Raise `BadInput` unless a checkpoint had all weights of a model, in their shapes, and no others."""
    kind = type(model).__name__
    if missing := sorted(report["missing_keys"]):
        raise BadInput(
            f"{what} lacks {len(missing)} weights of {kind}: {missing[0]!r}, ...",
            "a model starts from trained weights only",
            "name a checkpoint that was saved from a causal language model",
        )
    if others := sorted(report["mismatched_keys"]):
        name, saved, wanted = others[0]
        shapes = f"{name!r} is {list(saved)}, not {list(wanted)}"
        raise BadInput(f"{what} has {len(others)} weights of other shapes than {kind}: {shapes}", *_OTHER_MODEL)
    if more := [key for key in sorted(report["unexpected_keys"]) if not _of_a_head(model, key)]:
        raise BadInput(f"{what} has {len(more)} weights that {kind} does not have: {more[0]!r}, ...", *_OTHER_MODEL)


_OTHER_MODEL = (
    "its config.json describes another model than the one whose weights these are",
    "correct config.json (such as num_hidden_layers), or take those weights out of the folder",
)


def _of_a_head(model: PreTrainedModel, key: str) -> bool:
    """Whether a weight is that of a head on top of the model, which a model without heads does without."""
    inside = {name for name, _ in model.named_children()}
    return model.base_model is model and key.removeprefix(f"{model.base_model_prefix}.").split(".")[0] not in inside


def _unreadable(folder: Path, error: Exception) -> BadInput:
    what = " ".join(str(error).split())
    return BadInput(
        f"no model loads from {str(folder)!r} ({type(error).__name__}: {what:.200})",
        "a model folder holds config.json and the weights of that model, as transformers writes them",
        "save it there with model.save_pretrained(folder)",
    )


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
