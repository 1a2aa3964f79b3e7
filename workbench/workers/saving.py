"""A role's model, written by its ranks together."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.engines.training import TrainingEngine
from workbench.errors import BadInput
from workbench.models.heads import TokenValues
from workbench.models.saving import write_model
from workbench.workers.worker import Context


def save_model(engine: TrainingEngine, path: str | Path, name: str | Path, context: Context) -> str:
    """Write the engine's weights to a folder; `name` is the model that they started from. Its absolute path.

    Raises `BadInput`, on all ranks, where the folder holds something.
    """
    folder = Path(context.folder, path).expanduser().resolve()
    first = context.communicator.rank == 0
    taken = first and folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    # every rank raises, or none: one that went on would wait for the others
    if context.communicator.all_reduce_max(torch.tensor([int(taken)])).item():
        raise BadInput(
            f"{str(folder)!r} holds something", "a model is saved to an empty or new folder", "choose another"
        )
    weights = {}
    for weight_name, tensor in engine.named_weights():  # gathered: every rank goes through all of them
        if first:
            weights[weight_name] = tensor.cpu().clone()
    if first:
        scalar = isinstance(engine.module, TokenValues)
        if isinstance(engine.module, TokenValues):
            bias = weights["score.bias"]
            weights["score.bias"] = (bias.float() - engine.module.score.shift).to(bias.dtype)
        write_model(folder, weights, name, scalar_head=scalar)
    context.communicator.barrier()
    return str(folder)
