"""From a model's name to a folder that transformers loads."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path

from workbench.errors import ModelUnavailable
from workbench.models.bundled import BUNDLED, TINY, bundled_folder, tiny_folder
from workbench.support.files import path_of

HUB_TIMEOUT_S = 3.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors", "*.bin")


def resolve(name: str | Path) -> Path:
    """The folder of the model `name`: a bundled or tiny name, a local folder, or a hub id.

    A hub id is answered from the local hub cache, without the network, when it is whole there; else it is downloaded.
    Raises `ModelUnavailable`, within seconds also where there is no network, and `BadInput` for what is no path.
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
    """The config.json of a model, or `name` itself where it is a file; of a hub id only that file is fetched.

    Raises `ModelUnavailable`, and `BadInput` for what is no path.
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
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)  # where there is no network the download would retry for long
        return hf_hub_download(name, "config.json")

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached) if isinstance(cached, str) else _from_hub(name, download)


def _local(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(
            f"no file {str(folder / 'config.json')!r}",
            "a model folder is one that transformers' save_pretrained wrote: config.json, weights, tokenizer",
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
    """What `download` gives; `ModelUnavailable` that says why where it fails."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return Path(download())
    except RepositoryNotFoundError as error:
        reason: tuple[str, Exception] = ("the model hub shows no such model to you", error)
    except (
        Exception
    ) as error:  # the kinds depend on the hub client's transport: no network, offline mode, gated, a full disk
        reason = (f"it could not be fetched from the model hub ({type(error).__name__}: {_first_line(error)})", error)
    raise ModelUnavailable(
        f"the model {name!r} is neither a folder nor in the local hub cache", reason[0], _alternatives(name)
    ) from reason[1]


def _cached(name: str) -> Path | None:
    """The snapshot of `name` in the local hub cache when all of its weight files are there."""
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
    """Names to use instead, the likeliest first."""
    known = [*BUNDLED, *TINY]
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], known, n=1, cutoff=0.5)
    rest = f"give a local folder, or one of {', '.join(map(repr, known))}"
    return f"did you mean {close[0]!r}? Otherwise {rest}" if close else rest


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
