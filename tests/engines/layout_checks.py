"""What ranks of a layout must have seen, whatever the engine: see `layout_ranks.outcome`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.layout_ranks import model_of
from workbench.placement import Layout
from workbench.resharding.weights import model_weights


def check_numbers(ranks: list[dict[str, Any]], expected: dict[str, Any], layout: Layout) -> None:
    """They are those of one process, and the same bits on all ranks."""
    counting = [rank for rank in ranks if rank["counts"]]
    assert len(counting) == layout.d
    assert min(report["grad_norm"] for report in expected["reports"]) > 1, "the batch must be one that is clipped"
    for step, report in enumerate(expected["reports"]):
        # the loss is known where it is computed, everything else on every rank
        assert sum(rank["reports"][step]["loss"] for rank in counting) == pytest.approx(report["loss"], rel=1e-4)
        for rank in ranks:
            assert rank["reports"][step]["grad_norm"] == pytest.approx(report["grad_norm"], rel=1e-4)
            assert rank["reports"][step]["steps"] == step + 1
    for rank in ranks:
        assert all(torch.equal(weight, ranks[0]["weights"][name]) for name, weight in rank["weights"].items())
        assert rank["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            gap = (rank["gradients"][name] - gradient).abs().max()
            assert gap <= 1e-5 * gradient.abs().max() + 1e-7, name
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=0, atol=1e-5, msg=name)
        assert rank["weights"].keys() == expected["weights"].keys()
        for output, one in zip(rank["output"], expected["output"], strict=True):
            torch.testing.assert_close(output, one, rtol=0, atol=1e-4)
        assert rank["untouched"]
        assert rank["restored"]
        assert (rank["moved_bytes"] > 0) == (layout.t > 1)


def check_slices(ranks: list[dict[str, Any]], layout: Layout, case: str) -> None:
    """Each rank holds its slices of the weights, and no more."""
    config = model_of("qwen2" if case == "critic" else case).config
    cut = model_weights(config, head="scalar" if case == "critic" else "lm")
    for number, rank in enumerate(ranks):
        _, stage, j = layout.coordinates(number)
        held, whole = rank["local"], rank["weights"]
        assert list(held) == [weight.name for weight in cut.of_stage(stage, layout.p)]
        for weight in cut.of_stage(stage, layout.p):
            mine = weight.cut(whole[weight.name], j, layout.t)
            assert torch.equal(held[weight.name], mine), weight.name
