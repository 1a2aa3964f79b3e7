"""What a model can read: how many token ids it knows, and how long a sequence may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.models.loading import load_config


@dataclass(frozen=True, kw_only=True)
class Limits:
    """vocabulary: token ids that it knows, from 0. context: tokens of its longest sequence. None: not limited."""

    vocabulary: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, name: str | Path) -> Limits:
        """Those of a model by name or folder, from its configuration."""
        config = load_config(name)
        return cls(vocabulary=int(config.get_text_config().vocab_size), context=longest_sequence(config))


def longest_sequence(config: Any) -> int | None:
    """The positions that a model was built for, stretched as its rotary embedding stretches them; None: no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if positions is None or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return positions
    before = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(before * (rope.get("factor") or 1)))
