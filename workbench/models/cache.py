"""Folders that are made once and shared by every process of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from workbench.support.home import home

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
