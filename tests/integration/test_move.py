"""Changing the placement while models live: the same numbers as without, to the last bit where layouts are the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, update_on, vowels
from workbench.backends import registry
from workbench.errors import HostDied
from workbench.export.recorded import read_record
from workbench.messages.protocols import ONE_TO_ALL
from workbench.placement import ROLES
from workbench.placement.change import PlacementChange
from workbench.workers.model_worker import digest
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CriticWorker

pytestmark = pytest.mark.slow

TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}  # fp32 sums in another order, over the steps of updates
TRAINED = ("actor", "critic")


class WatchedActor(ActorWorker):
    """An actor whose moments of Adam can be told apart."""

    @wb.register(ONE_TO_ALL)
    def moment_digests(self) -> dict[str, str]:
        kinds: Any = ("exp_avg", "exp_avg_sq")
        return {f"{kind} {name}": digest(tensor) for kind in kinds for name, tensor in self.engine.held_state(kind)}


class WatchedCritic(CriticWorker):
    """A critic of that kind, which takes its time to take over what another held."""

    moment_digests = WatchedActor.moment_digests

    def __init__(self, spec: Any, context: Any) -> None:
        super().__init__(spec, context)
        pull = context.exchange.pull

        def slowly(*args: Any) -> Any:
            time.sleep(0.1)
            return pull(*args)

        context.exchange.pull = slowly


def open_lab(name: str, runs: Any, placement: wb.Placement, **options: Any) -> wb.Workbench:
    models = {
        "actor": wb.Model(TINY, worker=WatchedActor),
        "critic": wb.Model(TINY, worker=WatchedCritic),
        "reference": TINY,
        "reward": vowels,
    }
    return tiny_lab(name, runs, models=models, placement=placement, devices=4, **options)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with open_lab("moving", tmp_path_factory.mktemp("runs"), wb.Placement.colocate(2)) as opened:
        yield opened


def state(lab: wb.Workbench) -> dict[str, Any]:
    """What must not change, of the first rank of each role: all weights, all moments, all counts."""
    found: dict[str, Any] = {}
    for role in (*TRAINED, "reference"):
        found[role] = getattr(lab, role).weight_digests()[0]
    for role in TRAINED:
        moments = getattr(lab, role).moment_digests()
        assert all(other == moments[0] for other in moments)
        found[f"{role} moments"] = moments[0]
    return {**found, "weights": dict(lab.weights), "iteration": lab.iteration, "drawn": lab.prompts.drawn}


def moved(lab: wb.Workbench, placement: wb.Placement) -> PlacementChange:
    """Move; what must hold of every move."""
    said = lab.diff(placement)
    change = lab.move(placement)
    assert change.total_bytes == said.total_bytes
    assert lab.placement == said.new
    assert eval(read_record([lab.run_folder]).placements[lab.name], {"wb": wb}) == said.new
    transfers = lab.transfers("move")
    mine = transfers[transfers["run"] == lab.runner.counters.run]
    pairs = mine.groupby(["source", "destination"])["moved_bytes"].sum()
    expected = change.traffic().frame().set_index(["source", "destination"])["moved_bytes"]
    assert pairs[pairs > 0].to_dict() == expected.to_dict()
    assert int(mine["moved_bytes"].sum()) == change.total_bytes
    seen = lab.topology()
    assert {(row.role, row.pool) for row in seen.itertuples()} == {
        (role, pool.name) for pool in said.new.pools for role in pool.roles
    }
    assert len(lab.hosts.backend.processes) == said.new.devices  # type: ignore[attr-defined]
    return change


@pytest.mark.thorough
def test_ppo_walks_over_placements(lab: wb.Workbench, tmp_path: Any) -> None:
    table = stored()
    held = lab.actor.compute_log_prob(lab.put(table), temperature=1.0)
    before: Any = held.fetch(["old_log_prob"])["old_log_prob"]
    metrics = [update_on(lab, table)]
    steps = [
        wb.Placement.of({"other": (2, ROLES)}),
        wb.Placement.split(2),
        wb.Placement.standalone(actor=1, critic=1, reference=1, reward=1),
        wb.Placement.colocate(2),
    ]
    for placement in steps:
        here = state(lab)
        change = moved(lab, placement)
        assert change.total_bytes > 0
        assert state(lab) == here
        metrics.append(update_on(lab, table))
    # batches of processes that have ended are where they can be reached, for the notebook and for stages
    after: Any = held.fetch(["old_log_prob"])["old_log_prob"]
    assert torch.equal(after.values, before.values)
    assert held.lengths("old_log_prob").tolist() == before.lengths.tolist()
    assert lab.critic.compute_values(held).rows == 4
    with open_lab("still", tmp_path, wb.Placement.colocate(2)) as still:
        expected = [update_on(still, table) for _ in metrics]
        assert metrics[:2] == expected[:2]  # the same layouts, in other processes
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name in mine:
                assert mine[name] == pytest.approx(theirs[name], **TOLERANCE), name
    drawn = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2)
    assert drawn.meta["weights_version"] == lab.weights["actor"].steps == 2 * len(metrics)
    assert max(lab.actor.check_sync()) < 1e-3


def test_a_role_changes_its_layout_and_goes_back(lab: wb.Workbench) -> None:
    update_on(lab, stored())
    here, placement = state(lab), lab.placement
    processes = dict(lab.hosts.backend.processes)  # type: ignore[attr-defined]
    change = moved(lab, placement.with_layout("actor", (1, 2, 1)))
    assert change.total_bytes == 0  # each rank has all that it keeps
    assert lab.hosts.backend.processes == processes  # type: ignore[attr-defined]
    assert lab.actor.layout.t == 2
    assert lab.actor.weight_digests() == [here["actor"]] * 2
    first, second = lab.actor.moment_digests()
    assert first != second
    lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2))
    assert lab.last_metrics["compute_log_prob"]["rollout_gap/max"] < 1e-3
    assert moved(lab, placement).total_bytes > 0
    assert state(lab) == {**here, "drawn": lab.prompts.drawn, "iteration": lab.iteration}


@pytest.mark.thorough
def test_a_destination_that_dies_leaves_everything_as_it_was(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, placement = state(lab), lab.placement
    backend: Any = lab.hosts.backend
    work, hosts = backend.work, set(backend.processes)

    def killing(host: str, method: str, *args: Any, **kwargs: Any) -> Any:
        pending = work(host, method, *args, **kwargs)
        process = backend.processes.get(host)
        alive = process is not None and psutil.pid_exists(process.pid)
        if method == "take_role" and host not in hosts and host.startswith("scorers-0") and alive:
            while backend.ask(host, "status").result()[0] != "taking critic":
                time.sleep(0.02)
            time.sleep(0.2)  # some of the critic is there, and more is on its way
            assert not pending.done()
            killed = psutil.Process(process.pid)
            killed.kill()
            killed.wait(300)
        return pending

    monkeypatch.setattr(backend, "work", killing)
    with pytest.raises(HostDied, match=r"moving to .*taking critic failed on pool scorers, rank 0.*still in use"):
        lab.move(wb.Placement.split(2))
    monkeypatch.undo()
    assert set(backend.processes) == hosts
    assert lab.placement == placement
    assert state(lab) == here
    assert all(host["published_bytes"] == 0 for host in lab.hosts.describe())
    assert lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=2).rows == 2
    moved(lab, wb.Placement.split(2))


@pytest.mark.thorough
def test_a_new_kernel_finds_it_where_it_went(lab: wb.Workbench) -> None:
    here, placement = state(lab), lab.placement
    del registry.opened[lab.name]
    try:
        again = wb.attach(lab.name)
        assert again is not lab
        assert again.placement == placement
        there = state(again)
        steps, expected = ({role: w.steps for role, w in each.pop("weights").items()} for each in (there, here))
        assert (there, steps) == (here, expected)
    finally:
        registry.opened[lab.name] = lab
    again.critic.move("own", devices=1)  # as another process may, while this one knows the hosts of before
    third = wb.attach(lab.name)
    try:
        assert third is not lab
        assert third.placement == again.placement
        assert {row.role: row.pool for row in third.topology().itertuples()}["critic"] == "own"
        assert wb.attach(lab.name) is third
    finally:
        third.close()
