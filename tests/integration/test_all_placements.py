"""PPO on every placement of its four roles, one iteration each: the metrics are those of a run that never moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

FOUR = ("actor", "critic", "reference", "reward")
TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}  # as in test_ray: other threads sum in another order


def partitions(roles: tuple[str, ...]) -> Iterator[list[list[str]]]:
    """Every way to part roles into groups."""
    if not roles:
        yield []
        return
    first, *rest = roles
    for groups in partitions(tuple(rest)):
        yield [[first], *groups]
        for n, group in enumerate(groups):
            yield [[first, *group], *groups[:n], *groups[n + 1 :]]


def all_placements() -> list[wb.Placement]:
    """One process a pool, each called after its first role: so neighbours keep most of their processes."""
    return [wb.Placement.of({roles[0]: (1, roles) for roles in groups}) for groups in partitions(FOUR)]


def ppo(name: str, runs: Any, **options: Any) -> tuple[wb.Workbench, wb.PPO]:
    models = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}
    lab = tiny_lab(name, runs, models=models, prompts="arithmetic/test", **options)
    return lab, wb.PPO(lab, prompts=4, sampling=wb.Sampling(max_new_tokens=6))


def test_metrics_do_not_depend_on_the_placement(tmp_path: Any) -> None:
    placements = all_placements()
    assert len(placements) == len(set(placements)) == 15
    assert {p.devices for p in placements} == {1, 2, 3, 4}
    still, expecting = ppo("still", tmp_path, backend="inline")
    with still:
        expected = [expecting.iterate() for _ in placements]
    lab, algorithm = ppo("walking", tmp_path, placement=placements[0], devices=4)
    with lab:
        for placement, wanted in zip(placements, expected, strict=True):
            lab.move(placement)
            assert {row.role: row.pool for row in lab.topology().itertuples()} == {
                role: pool.name for pool in placement.pools for role in pool.roles
            }
            metrics = algorithm.iterate()
            assert metrics.keys() == wanted.keys()
            for name, value in metrics.items():
                assert value == pytest.approx(wanted[name], **TOLERANCE, nan_ok=True), (str(placement), name)
