"""A role's model, or its adapter, written by its ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from workbench.engines.training import TrainingEngine
from workbench.errors import BadInput, StageError, WriteFailed
from workbench.errors.plain_text import said
from workbench.models.heads import TokenValues
from workbench.models.lora import write_adapter
from workbench.models.saving import SHARD_GB, level_outside, write_model
from workbench.support.files import new_or_empty, path_of
from workbench.workers.tensor_group import shared_by_group
from workbench.workers.worker import Context

Result = TypeVar("Result")


def save_model(
    engine: TrainingEngine, path: str | Path, name: str | Path, context: Context, card: str = "",
    shard_gb: float = SHARD_GB,
) -> str:  # fmt: skip
    """Write the engine's weights to a folder; `name` is the model that they started from. Its absolute path.
    card: of the model, in Markdown. shard_gb: see `write_model`.

    Raises `BadInput`, on all ranks, where the folder holds something, and `WriteFailed` where writing fails.
    """
    folder, weights = _free_folder(path, context), _copies(engine.named_weights(), context)

    def write() -> None:
        scalar = isinstance(engine.module, TokenValues)
        if isinstance(engine.module, TokenValues):
            bias = weights["score.bias"]
            weights["score.bias"] = (bias.float() - engine.module.shift).to(bias.dtype)
        write_model(folder, weights, name, scalar_head=scalar, card=card, shard_gb=shard_gb)
        if scalar and float(weights["score.bias"]):
            print(f"{folder}: {level_outside(float(weights['score.bias']))}")

    _on_first_rank(write, folder, context)
    return str(folder)


def save_adapter(engine: TrainingEngine, path: str | Path, context: Context) -> str:
    """Write the adapter of the engine's module to a folder, as peft does. Its absolute path; raises as `save_model`."""
    folder, weights = _free_folder(path, context), _copies(engine.named_adapter(), context)
    _on_first_rank(lambda: write_adapter(folder, weights, engine.module.model), folder, context)  # type: ignore[arg-type]
    return str(folder)


def _free_folder(path: str | Path, context: Context) -> Path:
    folder = Path(context.folder, path_of(path, "path"))
    return Path(_on_first_rank(lambda: str(new_or_empty(folder)), folder, context))


def _on_first_rank(action: Callable[[], Result], folder: Path, context: Context) -> Result:
    """`action()` on the first rank, for which the others wait; where it raises, all raise the same error."""
    communicator = context.communicator
    first = communicator.rank == 0
    try:
        (result,) = shared_by_group(communicator, communicator.world_size, lambda: [action()] if first else [])
    except BadInput:
        raise
    except WriteFailed as error:
        what = f"nothing was saved to {str(folder)!r}: {error.value}"
        raise WriteFailed(what, error.rule, error.remedy) from error
    except Exception as error:
        raise StageError(
            f"nothing was saved to {str(folder)!r}",
            f"{type(error).__name__}: {said(error)}",
            "give a folder that rank 0 can write, with room for the model",
        ) from error
    found: Result = result
    return found


def _copies(tensors: Iterator[tuple[str, Tensor]], context: Context) -> dict[str, Tensor]:
    """Copies on the CPU of the first rank; the other ranks iterate to the end too, as weights are gathered."""
    first, copies = context.communicator.rank == 0, {}
    for name, tensor in tensors:
        if first:
            copies[name] = tensor.cpu().clone()
    return copies
