"""A role's model, or its adapter, written by its ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.errors import BadInput, StageError
from workbench.models.heads import TokenValues
from workbench.models.lora import write_adapter
from workbench.models.saving import write_model
from workbench.workers.worker import Context


def save_model(engine: TrainingEngine, path: str | Path, name: str | Path, context: Context) -> str:
    """Write the engine's weights to a folder; `name` is the model that they started from. Its absolute path.

    Raises `BadInput`, on all ranks, where the folder holds something, and `StageError` where writing fails.
    """
    folder, weights = _free_folder(path, context), _on_first_rank(engine.named_weights(), context)

    def write() -> None:
        scalar = isinstance(engine.module, TokenValues)
        if isinstance(engine.module, TokenValues):
            bias = weights["score.bias"]
            weights["score.bias"] = (bias.float() - engine.module.shift).to(bias.dtype)
        write_model(folder, weights, name, scalar_head=scalar)

    _first_rank_does(write, folder, context)
    return str(folder)


def save_adapter(engine: TrainingEngine, path: str | Path, context: Context) -> str:
    """Write the adapter of the engine's module to a folder, as peft does. Its absolute path; raises as `save_model`."""
    folder, weights = _free_folder(path, context), _on_first_rank(engine.named_adapter(), context)
    _first_rank_does(lambda: write_adapter(folder, weights, engine.module.model), folder, context)  # type: ignore[arg-type]
    return str(folder)


def _free_folder(path: str | Path, context: Context) -> Path:
    folder = Path(context.folder, path).expanduser().resolve()
    found: list[bool] = []
    _first_rank_does(
        lambda: found.append(folder.exists() and (not folder.is_dir() or any(folder.iterdir()))), folder, context
    )
    # every rank raises, or none: one that went on would wait for the others
    if context.communicator.all_reduce_max(torch.tensor([int(any(found))])).item():
        raise BadInput(
            f"{str(folder)!r} holds something", "a model is saved to an empty or new folder", "choose another"
        )
    return folder


def _first_rank_does(action: Callable[[], None], folder: Path, context: Context) -> None:
    """`action()` on the first rank, for which the others wait; where it raises, all raise the same `StageError`."""
    communicator, cause, text = context.communicator, None, b"-"  # never empty: it goes through a collective
    if communicator.rank == 0:
        try:
            action()
        except Exception as error:
            cause, text = error, f"{type(error).__name__}: {error}".encode()
    told = bytes(communicator.all_gather(torch.tensor(list(text), dtype=torch.uint8))[0].tolist()).decode()
    if told != "-":
        raise StageError(
            f"nothing was saved to {str(folder)!r}",
            told,
            "give a folder that rank 0 can write, with room for the model",
        ) from cause


def _on_first_rank(tensors: Iterator[tuple[str, Tensor]], context: Context) -> dict[str, Tensor]:
    """Copies on the CPU; empty on the other ranks, which go through all of them too: they are gathered."""
    first, copies = context.communicator.rank == 0, {}
    for name, tensor in tensors:
        if first:
            copies[name] = tensor.cpu().clone()
    return copies
