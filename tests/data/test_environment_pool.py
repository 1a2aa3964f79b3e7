"""The role "environment": processes of environments, and what becomes of the conversations in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.calculator import Calculator, sums
from tests.cases import TINY, tiny_lab
from tests.workers.test_kept_conversations import columns
from workbench.errors import BadInput

SHARED = {"shared": (1, ["actor"])}


def with_processes(n: int) -> wb.Placement:
    return wb.Placement.of({**SHARED, "environments": (n, ["environment"])})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    path = tmp_path_factory.mktemp("runs")
    with tiny_lab("pooled", path, backend="inline", models={"actor": TINY}, placement=with_processes(3)) as lab:
        yield lab


@pytest.fixture
def noted(tmp_path: Path) -> Any:
    """An environment that notes its process, and those it has noted: (process, sample's seed)."""

    class Noted(Calculator):
        folder = tmp_path

        def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
            (self.folder / f"{os.getpid()} {sample_seed}").touch()
            return super().reset(prompt, sample_seed, **row)

    def found() -> list[tuple[int, int]]:
        names = (path.name.split() for path in tmp_path.iterdir())
        return [(int(process), int(seed)) for process, seed in names]

    return Noted, found


def test_conversations_are_dealt_to_the_processes_and_are_those_of_one(lab: wb.Workbench, noted: Any) -> None:
    environment, found = noted
    batch, options = lab.prompts.next(4), {"samples": 2, "seed": 5, **sums(environment=environment)}
    many = columns(lab.actor.generate_sequences(batch, **options))
    processes = [process for process, _ in found()]
    assert sorted(map(processes.count, {*processes})) == [2, 3, 3]
    lab.move(with_processes(1))
    assert columns(lab.actor.generate_sequences(batch, **options)) == many
    assert sum(map(alive, {*processes})) == 1  # the others are in no placement any more
    assert {process for process, _ in found()} == {*processes}
    lab.move(wb.Placement.of(SHARED))
    assert columns(lab.actor.generate_sequences(batch, **options)) == many
    lab.move(with_processes(3))


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_ends_takes_its_own_conversations_alone(lab: wb.Workbench, tmp_path: Path) -> None:
    class Ends(Calculator):
        """That of one row ends its process in its first step, once."""

        folder = tmp_path

        def reset(self, prompt: str, sample_seed: int, **row: Any) -> str:
            self.mark = self.folder / f"{sample_seed} {len(list(self.folder.iterdir()))}"
            self.mark.touch()
            return super().reset(prompt, sample_seed, **row)

        def step(self, response: str) -> Any:
            with contextlib.suppress(FileExistsError):
                (self.folder / "ended").touch(exist_ok=False)
                os._exit(3)
            return super().step(response)

    batch = lab.prompts.next(6)
    made = lab.actor.generate_sequences(batch, seed=5, retries=1, **sums(environment=Ends))
    assert made.df()["ending"].isin(["done", "max_turns", "max_tokens"]).all()
    begun = [path.name.split()[0] for path in tmp_path.iterdir() if path.name != "ended"]
    again = [seed for seed in {*begun} if begun.count(seed) == 2]
    assert len({*begun}) == 6 and len(again) == 2  # of six conversations, those of the process that ended


def test_the_placement_shows_it(lab: wb.Workbench) -> None:
    placement = with_processes(3)
    assert placement == lab.placement and eval(repr(placement), {"Placement": wb.Placement}) == placement
    assert str(placement) == "shared[1]: actor | environments[3]: environment" and placement.devices == 1
    assert [(row["role"], row["devices"]) for row in placement.rows()] == [("actor", 1), ("environment", 3)]
    assert placement.pool_of("environment").name == "environments" and placement.roles == ("actor",)
    assert placement.with_devices("environments", 5) == with_processes(5)
    assert placement.without("environment") == wb.Placement.of(SHARED)
    assert wb.Placement.of(SHARED).with_role("environment", "environments", 3) == placement
    assert placement.restrict(["actor"]) == placement
    assert "3 processes" in lab._repr_html_()
    wanted = lab.diff(with_processes(2))
    assert wanted.total_bytes == 0 and wanted.fits


def test_wrong_pools(lab: wb.Workbench, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="environments need their own processes"):
        wb.Placement.of({"shared": (1, ["actor", "environment"])})
    with pytest.raises(BadInput, match="without pools of devices"):
        wb.Placement.of({"environments": (2, ["environment"])})
    for call in (lambda: lab.add("environment", TINY), lambda: lab.drop("environment")):
        with pytest.raises(BadInput, match="only a placement can have it"):
            call()
    with pytest.raises(BadInput, match="role 'environment' twice"):
        wb.Placement.of({**SHARED, "a": (1, ["environment"]), "b": (1, ["environment"])})
    with pytest.raises(BadInput, match="leave it out"):
        wb.Placement.of({**SHARED, "a": (2, ["environment"])}, {"environment": (1, 2, 1)})
    two = wb.Placement.of({"shared": (2, ["actor"]), "environments": (1, ["environment"])})
    with pytest.raises(BadInput, match="1 processes of environments, for 2 ranks that generate"):
        replace(lab.description, backend="ray", devices=2).placed(two)
    critic = wb.Placement.of({"shared": (1, ["critic"]), "environments": (1, ["environment"])})
    with pytest.raises(BadInput, match="role 'actor' has no pool"):
        wb.open("none", models={"critic": TINY}, placement=critic, backend="inline", runs=tmp_path)
