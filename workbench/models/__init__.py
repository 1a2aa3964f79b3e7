"""From a model's name to a folder, a model, a tokenizer.

A name is a hub id ("org/name"), a local folder, the bundled "smollm2-135m", or one of the tiny random models. To add a
bundled or a tiny model: one entry in `resolve.BUNDLED` or in `resolve.TINY`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.models.resolve import BUNDLED, TINY, resolve
from workbench.models.tokenizers import load_tokenizer, render_prompt

if TYPE_CHECKING:
    from workbench.models.loading import load_backbone, load_causal_lm, load_config

__all__ = [
    "BUNDLED",
    "TINY",
    "load_backbone",
    "load_causal_lm",
    "load_config",
    "load_tokenizer",
    "render_prompt",
    "resolve",
]

# in `loading`, which imports torch: whoever asks only where a model lies can do without
_LATER = ("load_backbone", "load_causal_lm", "load_config")


if not TYPE_CHECKING:  # a checker of types would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module 'workbench.models' has no attribute {name!r}")
        return getattr(importlib.import_module("workbench.models.loading"), name)
