"""Settings that change between two optimizer steps, under every engine on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.training_ranks import ENGINES, make_engine, run_ranks, settings, train, weights

CHANGES: dict[str, Any] = {
    "learning_rate": 7e-4, "weight_decay": 0.3, "betas": (0.5, 0.7), "eps": 1e-5, "max_grad_norm": 0.05,
    "schedule": "linear", "warmup_steps": 0, "total_steps": 8,
}  # fmt: skip


def changed_between() -> dict[str, dict[str, Any]]:
    """By engine: of one that was changed after two steps, and of one that was made with the new settings and got the
    state of the first."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ENGINES:
        engine, other = make_engine(kind), make_engine(kind, **CHANGES)
        old = train(engine, range(2))
        other.load_state_dict(engine.state_dict())
        engine.retrain(settings(kind, **CHANGES))
        reports, expected = train(engine, range(2, 4)), train(other, range(2, 4))
        new, same = weights(engine), weights(other)
        found[kind] = {
            "equal": all(torch.equal(new[name], same[name]) for name in new),
            "reports": reports == expected,
            "rates": [report["learning_rate"] for report in (*old, *reports)],
            "clips": all(report["grad_norm"] > CHANGES["max_grad_norm"] for report in reports),
        }
    return found


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_change_is_that_of_an_engine_made_so(world: int) -> None:
    for of_rank in run_ranks(changed_between, world):
        for kind, found in of_rank.items():
            assert found["equal"] and found["reports"] and found["clips"], (kind, found)
            assert found["rates"] == pytest.approx([1.5e-3, 3e-3, 7e-4 * 6 / 8, 7e-4 * 5 / 8]), kind
