"""The answer of `wb reshard`: a transition between two layouts of a model, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import BadInput
from workbench.models.dense_config import read_plan_config
from workbench.resharding.strategies import plan_transition
from workbench.resharding.weights import ModelWeights, model_weights
from workbench.settings.layout import Layout

MOST_RANKS = 8192  # of whose matrix 512 MiB are held


def report(model: str | Path, train: str, generate: str, strategy: str, dtype: str | None = None) -> dict[str, Any]:
    """The figures of a transition as plain values.

    model: a name, a folder, or a config file; its weights are not read. train: "P-T-D". generate: "PG-TG".
    dtype: None: the config's, else float32. Raises `BadInput` or `ModelUnavailable`.
    """
    layout = parse_layouts(train, generate)
    if layout.size > MOST_RANKS:
        raise BadInput(
            f"--train {train}, {layout.size} ranks",
            f"the matrix of who sends to whom has a place for each pair: at most {MOST_RANKS} ranks",
            "plan fewer replicas (d): each training replica moves what every other does",
        )
    weights = model_weights(read_plan_config(model), dtype=dtype)
    plan = plan_transition(weights, layout, strategy)
    figures = plan.figures()
    columns = {
        "rank": range(layout.size),
        "received_bytes": figures.received.tolist(),
        "sent_bytes": figures.sent.tolist(),
        "peak_parameter_bytes": figures.peak_parameter.tolist(),
        "kept_twice_bytes": figures.kept_twice.tolist(),
    }
    return {
        "ranks": layout.size,
        "model_bytes": weights.nbytes,
        "sharded_bytes": sharded_bytes(weights, layout),
        "groups": {
            "generation_tensor": plan.generation_tensor_groups(),
            "micro_data": plan.micro_data_groups(),
        },
        "per_rank": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        "matrix": figures.matrix.tolist(),
    }


def parse_layouts(train: str, generate: str) -> Layout:
    p, t, d = _sizes("--train", train, "P-T-D", "1-4-2")
    p_g, t_g = _sizes("--generate", generate, "PG-TG", "1-2")
    return Layout(p, t, d, p_g, t_g)


def sharded_bytes(weights: ModelWeights, layout: Layout) -> int:
    """Bytes of the weights that the ranks of a training replica share out: cut by t, or on some of p stages only."""
    every = tuple(range(layout.p))
    shared_out = (
        weight
        for weight in weights
        if weight.local_shape(0, layout.t) != weight.shape or weights.stages(weight, layout.p) != every
    )
    return sum(weight.nbytes for weight in shared_out)


def _sizes(option: str, text: str, form: str, example: str) -> list[int]:
    parts = text.split("-")
    if len(parts) != form.count("-") + 1 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise BadInput(
            f"{option} {text}", f"must be {form}: whole numbers of at least 1, with dashes between", f"write {example}"
        )
    return [int(part) for part in parts]
