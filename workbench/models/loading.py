"""Load configurations and models: evaluation mode, no dropout, nothing left to chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from workbench.errors import BadInput
from workbench.models.quiet import quiet_transformers
from workbench.models.resolve import config_file, resolve
from workbench.telemetry import span

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_config(name: str | Path) -> PreTrainedConfig:
    """The model's configuration with every dropout at zero: in RL, dropout makes probability ratios lie."""
    from transformers import AutoConfig

    config = _config_of(AutoConfig, resolve(name))
    for key, value in config.to_dict().items():
        # attention_dropout, resid_pdrop, embd_pdrop, layerdrop, ...
        if "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, 0.0)
    return config


def _config_of(auto: Any, folder: Path) -> PreTrainedConfig:
    """The configuration in a folder. Python code that lies beside the weights is never run."""
    try:
        return cast("PreTrainedConfig", auto.from_pretrained(folder, trust_remote_code=False))
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise BadInput(
            f"the model {str(folder)!r} brings Python code of its own",
            "code from a model folder is not run: anybody may have put it there",
            "take a model whose architecture transformers has",
        ) from error


def read_config(name: str | Path) -> PreTrainedConfig:
    """The configuration alone, as written: of a model by name, of a folder, or a config file; no weights are fetched.

    Raises `ModelUnavailable`, or `BadInput` for a file that is no model's configuration.
    """
    from transformers import CONFIG_MAPPING

    file = config_file(name)
    try:
        values = json.loads(file.read_text())
        config: PreTrainedConfig = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except Exception as error:  # which kind depends on the family: each checks its own fields
        raise BadInput(
            f"{str(file)!r} ({type(error).__name__}: {' '.join(str(error).split())})",
            "must be a model's config.json, with a model_type that transformers knows",
            "name a model, its folder, or such a file",
        ) from error
    return config


def load_causal_lm(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The model with its output head, in evaluation mode.

    Raises `ModelUnavailable`, or `BadInput` for a checkpoint without some of the weights (transformers would fill them
    with random numbers). Weights may be mapped from the file, privately: changing them never changes the file.
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
        model, report = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
            trust_remote_code=False,
        )
    if missing := sorted(report["missing_keys"]):
        raise BadInput(
            f"the checkpoint {str(name)!r} lacks {len(missing)} weights of {type(model).__name__}: {missing[0]!r}, ...",
            "a model starts from trained weights only",
            "name a checkpoint that was saved from a causal language model",
        )
    return model.to(device).eval()
