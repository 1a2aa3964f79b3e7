"""torch.compile of a model's layers: the operations between two matrix products become one kernel.

Attention is not compiled: it is a kernel already, and takes the lengths of a pack, for each of which it would be
compiled again. So a layer is three or four graphs, compiled once for all layers, and for any number of tokens.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from workbench.errors import MissingDependency
from workbench.models.packing import NAME, packed_attention
from workbench.support.home import home


def compile_layers(module: nn.Module) -> None:
    """Compile the layers of a transformers model at their first run, into `$WORKBENCH_HOME/compiled`.

    Raises `MissingDependency` without a C++ compiler.
    """
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        raise MissingDependency(
            "there is no C++ compiler", "Training(compile=True) writes C++ and compiles it", "install g++"
        )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / "compiled"))
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)
