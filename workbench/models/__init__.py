"""What is trained: from a name to a folder, a model, a tokenizer.

A name is a hub id ("org/name"), a local folder, the bundled "smollm2-135m", or one of the tiny random models.
To add a bundled or a tiny model: one entry in `bundled.BUNDLED` or in `tiny.TINY`.
"""

from workbench.models.bundled import BUNDLED
from workbench.models.dtypes import bf16_is_fast
from workbench.models.loading import load_backbone, load_causal_lm, load_config
from workbench.models.resolve import resolve
from workbench.models.tiny import TINY
from workbench.models.tokenizers import load_tokenizer, render_prompt

__all__ = [
    "BUNDLED",
    "TINY",
    "bf16_is_fast",
    "load_backbone",
    "load_causal_lm",
    "load_config",
    "load_tokenizer",
    "render_prompt",
    "resolve",
]
