"""Loads configurations, a model's limits, and models (in evaluation mode, without dropout); saves models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.models.file_weights import FileWeights, read_tensors
from workbench.models.resolve import config_file, quiet_transformers, resolve
from workbench.support.files import new_folder
from workbench.telemetry import span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


# Names under which a scalar head is saved: transformers' sequence classification, other reward models, TRL's values.
SAVED_HEADS = ("score", "value_head", "v_head.summary")


def load_config(name: str | Path, longest: int = 0) -> PreTrainedConfig:
    """Load the model's configuration with every dropout at zero: in RL, dropout would distort probability ratios. A
    router's logits, which only its auxiliary loss needs, are not asked for: no update has that loss.

    longest: the tokens of the longest sequence. It decides between the short and the long factors of "longrope" for all
    sequences; transformers would decide at each call, by its longest row, so that rows would depend on each other.
    """
    config = _configuration(resolve(name))
    rope = rope_of(config)
    if rope.get("rope_type") == "longrope":
        kind = "long" if longest > rope["original_max_position_embeddings"] else "short"
        for what in ("factor", "mscale"):  # the families of Phi-3 and of Phi-3.5-MoE
            if f"{kind}_{what}" in rope:
                rope[f"long_{what}"] = rope[f"short_{what}"] = rope[f"{kind}_{what}"]
    for key, value in config.to_dict().items():
        if key == "output_router_logits":
            config.output_router_logits = False
        # attention_dropout, resid_pdrop, embd_pdrop, layerdrop, ...
        if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, 0.0)
    return config


def read_config(name: str | Path) -> PreTrainedConfig:
    """Load an unchanged configuration by model name, from a folder or a config file, without fetching weights.

    Raises `ModelUnavailable`, or `BadInput` for a file that is no model configuration.
    """
    return _configuration(config_file(name))


def _configuration(place: Path) -> PreTrainedConfig:
    """Load the configuration of a folder or a config file. Never runs Python code from the folder."""
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # of any class: each family checks its own fields
        if "trust_remote_code" in str(error):
            raise BadInput(
                f"the model {str(place)!r} has its own Python code",
                "code from a model folder is never run, because anybody may have put it there",
                "use a model whose architecture is in transformers",
            ) from error
        raise _unreadable(place, error) from error
    return config


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A model's limits. vocabulary: number of token ids. context: tokens of the longest sequence. None: no limit."""

    vocabulary: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, name: str | Path, longest: int = 0) -> Limits:
        """Return the limits of a model by name or folder, from its configuration. longest: see `load_config`."""
        config = load_config(name)
        return cls(vocabulary=int(config.get_text_config().vocab_size), context=longest_sequence(config, longest))


def longest_sequence(config: Any, longest: int | None = None) -> int | None:
    """Return the number of positions a model supports, with its rotary embedding's scaling; None: no limit. longest:
    with which the model is loaded, see `load_config`; None: any.

    "dynamic" scales all rows of a call once one of them is longer than the original positions, so that a row's numbers
    would depend on the other rows: only the original positions count.
    """
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    rope = rope_of(config)
    if positions is None or rope.get("rope_type") not in ("linear", "longrope", "yarn"):
        return positions
    before: int = rope.get("original_max_position_embeddings") or positions
    if rope["rope_type"] == "longrope":
        return positions if longest is None or longest > before else before
    return max(positions, int(before * (rope.get("factor") or 1)))


def rope_of(config: Any) -> dict[str, Any]:
    """Return the parameters of a model's rotary embedding; empty if it has none."""
    text = config.get_text_config()
    return getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}


def load_causal_lm(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", longest: int = 0
) -> PreTrainedModel:
    """Load the model with its output head, in evaluation mode. longest: see `load_config`.

    Raises `ModelUnavailable`, or `BadInput` for a checkpoint that lacks weights (transformers would fill them with
    random numbers) or has additional weights (transformers would ignore them). Weights may be privately mapped from the
    file: changing them never changes the file.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, name, dtype, device, longest)


def load_backbone(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", longest: int = 0
) -> PreTrainedModel:
    """Load the model without a head: it gives `last_hidden_state` [rows, tokens, hidden]. See `load_causal_lm`."""
    from transformers import AutoModel

    return _load(AutoModel, name, dtype, device, longest)


def _load(auto: Any, name: str | Path, dtype: torch.dtype, device: torch.device | str, longest: int) -> PreTrainedModel:
    folder = resolve(name)
    config = load_config(folder, longest)
    # SDPA, or eager for a family without it, whatever the folder says; SDPA would leave out Gemma 2's cap on scores
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    config._attn_implementation = "eager" if capped else None
    with span("read", note=f"reading {Path(name).name}"), quiet_transformers():
        try:
            model, report = auto.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_weights` refuses them by name
                trust_remote_code=False,
            )
        except Exception as error:  # of any class, depending on the family and the format of the weights
            if "memory" in str(error):
                raise
            raise _unreadable(folder, error) from error
    _check_weights(report, model, f"the checkpoint {str(name)!r}")
    if model.base_model is model and hasattr(model, "model"):  # Llama 4 gives its backbone another name than it has
        model.base_model_prefix = "model"
    if steps := getattr(config, "time_step_limit", None):  # transformers gives layers of Nemotron-H another limit
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(steps)
    return model.to(device).eval()


def _check_weights(report: Mapping[str, Any], model: PreTrainedModel, what: str) -> None:
    """Raise `BadInput` unless a checkpoint has all weights of a model, in the right shapes, and no other weights."""
    kind = type(model).__name__
    if missing := sorted(report["missing_keys"]):
        raise BadInput(
            f"{what} lacks {len(missing)} weights of {kind}: {missing[0]!r}, ...",
            "all weights of a model must come from its checkpoint",
            "name a checkpoint that was saved from a causal language model",
        )
    if others := sorted(report["mismatched_keys"]):
        name, saved, wanted = others[0]
        shapes = f"{name!r} is {list(saved)}, not {list(wanted)}"
        raise BadInput(f"{what} has {len(others)} weights of other shapes than {kind}: {shapes}", *_OTHER_MODEL)
    if more := [key for key in sorted(report["unexpected_keys"]) if not _of_a_head(model, key)]:
        raise BadInput(f"{what} has {len(more)} weights that {kind} does not have: {more[0]!r}, ...", *_OTHER_MODEL)
    if unknown := sorted(set(report["unexpected_keys"]) - _known_heads(model, report["unexpected_keys"])):
        raise BadInput(
            f"{what} has an unknown head: {unknown[0]!r}",
            f"a scalar head is one layer, named {', '.join(SAVED_HEADS)}",
            "rename it in the folder, or score with a function that loads the model",
        )


_OTHER_MODEL = (
    "its config.json does not describe the model that has these weights",
    "correct config.json (such as num_hidden_layers), or remove those weights from the folder",
)


def _of_a_head(model: PreTrainedModel, key: str) -> bool:
    """Whether a weight belongs to a head on top of a model without heads, so that the model does not need it."""
    inside = {name for name, _ in model.named_children()}
    return model.base_model is model and key.removeprefix(f"{model.base_model_prefix}.").split(".")[0] not in inside


def _known_heads(model: PreTrainedModel, keys: Collection[str]) -> set[str]:
    """Return the keys that belong to a scalar head, or to the head of the family's causal language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    scalar = {f"{head}.{kind}" for head in SAVED_HEADS for kind in ("weight", "bias")}
    known = {"lm_head", "embed_out"}  # "embed_out": in files of GPT-NeoX
    if keys and type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        with quiet_transformers(), torch.device("meta"):
            causal = AutoModelForCausalLM.from_config(model.config)
        known |= {name for name, _ in causal.named_children()} - {causal.base_model_prefix}
    return {key for key in keys if key in scalar or key.split(".")[0] in known}


def _unreadable(folder: Path, error: Exception) -> BadInput:
    what = " ".join(str(error).split())
    return BadInput(
        f"no model loads from {str(folder)!r} ({type(error).__name__}: {what:.200})",
        "a model folder must have config.json and the weights of that model, as transformers writes them",
        "write it with model.save_pretrained(folder)",
    )


SHARD_GB = 5.0
CARD = "README.md"  # the name by which the hub finds a model card
# files of a model folder that training does not change: tokenizer files, and recommended sampling settings
UNCHANGED = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*", "generation_config.json",
)  # fmt: skip


def write_model(
    folder: Path, weights: Mapping[str, Tensor], name: str | Path, *, scalar_head: bool, card: str = "",
    shard_gb: float = SHARD_GB,
) -> None:  # fmt: skip
    """Write weights, given by transformers' names, with configuration and tokenizer of the model `name`, to `folder`,
    which appears atomically. The files have the names that are usual for the family, such as one for each expert.

    card: a model card in Markdown, "" for none. shard_gb: the size of a safetensors file, in 1e9 bytes; larger models
    get several files with an index, and a larger weight gets a file of its own.

    The files of `UNCHANGED` are copied byte for byte; config.json differs in the dtype, and in the entries for a scalar
    head.

    scalar_head: the model has a head of one score, which transformers calls sequence classification. transformers'
    classes read `score.weight` and drop the bias, which holds the level of the scores (the part independent of the
    tokens). So the configuration has the bias too: logits + config.score_bias are the scores of `Model(path)`.
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
        for left_out in ("torch_dtype", "quantization_config"):  # dtype's old key; our weights are not quantized
            config.pop(left_out, None)
        if scalar_head:
            config.update(_of_one_score(origin), score_bias=float(weights["score.bias"]))
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        files = FileWeights(load_config(origin), whole=scalar_head)
        written = (read_tensors(origin) if files.is_part else {}) | files.of(weights)
        for key, tensor in written.items():
            if tensor.nbytes < tensor.untyped_storage().nbytes():  # files cannot hold views of one tensor
                written[key] = tensor.clone()
        save_torch_state_dict(written, part, max_shard_size=max(1, int(shard_gb * 1e9)))
        if card:
            (part / CARD).write_text(card)


def _of_one_score(origin: Path) -> dict[str, Any]:
    """Return the config fields by which transformers makes a model of this family with a head of one score."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(origin, trust_remote_code=False)
    config.num_labels = 1
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    names = None if known is None else [str(getattr(known, "__name__", known))]
    return {"architectures": names, "id2label": config.id2label, "label2id": config.label2id}


def level_outside(bias: float) -> str:
    """Return a note for users who score with transformers' class: it drops the saved head's bias."""
    return (
        f"transformers' sequence classification drops the head's bias: add config.score_bias = {bias:.6g} to its "
        "logits for the same scores (wb.Model reads it)"
    )
