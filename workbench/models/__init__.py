"""Finds a model's folder by its name, and loads models and tokenizers; `loading` has the functions that import torch.

A name is a hub id ("org/name"), a local folder, the bundled "smollm2-135m", or one of the tiny random models. To add a
bundled or a tiny model: one entry in `resolve.BUNDLED` or in `resolve.TINY`.
"""

from workbench.models.resolve import BUNDLED, TINY, resolve
from workbench.models.tokenizers import load_tokenizer, render_prompt

__all__ = ["BUNDLED", "TINY", "load_tokenizer", "render_prompt", "resolve"]
