"""A schedule from a cell on live ranks: its factors, what a checkpoint keeps, what a later kernel has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle

import workbench as wb
from tests.cases import TINY, stored, tiny_lab


def rates(lab: wb.Workbench, updates: int) -> list[float]:
    batch: Any = lab.put(stored())
    found = [lab.actor.update_actor(batch) for _ in range(updates)]
    return [metrics["learning_rate"] for metrics in found]


def test_a_schedule_from_a_cell(tmp_path: Path) -> None:
    top = 8.0

    def falling(step: int) -> float:
        return 2.0 ** -(step % top)  # reads a variable of the cell

    models = {"actor": TINY}
    with tiny_lab("cells", tmp_path, backend="inline", models=models, training={"minibatches": 1}) as lab:
        lab.actor.training.schedule = falling
        assert rates(lab, 3) == [1e-3, 5e-4, 2.5e-4]
        assert lab.history.changes()[["setting", "after"]].to_numpy().tolist() == [
            ["lab.actor.training.schedule", "falling"]
        ]
        lab.save(tmp_path / "three", models=False)
        sent = cloudpickle.loads(cloudpickle.dumps(lab.description))  # as a later kernel has it
        assert sent.models["actor"].training.schedule(3) == 0.125
        expected = rates(lab, 2)
        digests = lab.actor.weight_digests()
    with wb.restore(tmp_path / "three", name="again", runs=tmp_path) as lab:
        assert rates(lab, 2) == expected == [1.25e-4, 6.25e-5]
        assert lab.actor.weight_digests() == digests
