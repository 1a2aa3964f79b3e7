"""The algorithms, line for line as they stand in `workbench.algorithms`, under three placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from workbench.algorithms.loop import Algorithm
from workbench.batches.columns import Table

# as in test_ray: fp32 on other micro-batches and other orders of summation, over six updates
TOLERANCE: dict[str, Any] = {"rel": 2e-3, "abs": 2e-4}
ROWS = 8
SAMPLING = wb.Sampling(max_new_tokens=12, temperature=0.8)
PLACEMENTS = {"one": wb.Placement.colocate(1), "two": wb.Placement.colocate(2), "split": wb.Placement.split(2)}

Stored = dict[str, tuple[Table, dict[str, Any]]]


def length(prompt: str, response: str, **row: Any) -> float:
    """A cost: tens of characters."""
    return len(response) / 10


MAKERS: dict[str, Callable[[Any], Algorithm]] = {
    "PPO": lambda lab: wb.PPO(lab, prompts=ROWS, sampling=SAMPLING),
    "ReMax": lambda lab: wb.ReMax(lab, prompts=ROWS, sampling=SAMPLING),
    "ReinforcePP": lambda lab: wb.ReinforcePP(lab, prompts=ROWS, sampling=SAMPLING),
    "SafeRLHF": lambda lab: wb.SafeRLHF(lab, prompts=ROWS, sampling=SAMPLING, limit=0.5, pretrain="prompt"),
}


class Replayed:
    """A workbench that gives stored rollouts in place of new ones, and notes which operations are called."""

    def __init__(self, lab: wb.Workbench, stored: Stored) -> None:
        self._lab, self._stored = lab, stored
        self.called: list[str] = []
        self.groups, self.prompts = lab.groups, self

    def next(self, n: int) -> wb.Batch:
        """Rollouts stand in for the prompts that they answer."""
        assert n == ROWS
        self._lab.runner.counters.last_metrics = {}
        table, meta = self._stored["sampled"]
        return self._lab.put({name: table[name] for name in ("prompt", "prompt_ids", "prompt_uid")}, meta=meta)

    def _generate(self, batch: wb.Batch, **settings: Any) -> wb.Batch:
        table, meta = self._stored["greedy" if settings["temperature"] == 0 else "sampled"]
        return self._lab.put(table, meta=meta)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lab, name)
        if name not in self._lab.groups and name != "compute_advantages":
            return found
        return _Noted(self, found, name)


class _Noted:
    def __init__(self, replayed: Replayed, found: Any, name: str) -> None:
        self._replayed, self._found, self._name = replayed, found, name

    def __getattr__(self, operation: str) -> Any:
        return _Noted(self._replayed, getattr(self._found, operation), f"{self._name}.{operation}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._replayed.called.append(self._name)
        if self._name == "actor.generate_sequences":
            return self._replayed._generate(*args, **kwargs)
        return self._found(*args, **kwargs)


def replay(lab: wb.Workbench, name: str, stored: Stored) -> tuple[dict[str, float], list[str], Algorithm]:
    """One iteration of an algorithm on stored rollouts: its metrics, the operations called, and itself."""
    replayed = Replayed(lab, stored)
    algorithm = MAKERS[name](lab)
    algorithm.define(replayed)
    return algorithm.metrics(), replayed.called, algorithm


def open_lab(name: str, runs: Path) -> wb.Workbench:
    models = {
        "actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels, "cost": length, "cost_critic": TINY
    }  # fmt: skip
    backend: Any = "inline" if name == "one" else "ray"
    devices = PLACEMENTS[name].devices
    return tiny_lab(name, runs, models=models, placement=PLACEMENTS[name], devices=devices, backend=backend)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(runs: Path) -> Iterator[tuple[Stored, dict[str, dict[str, float]], dict[str, list[str]], float]]:
    """Stored rollouts, and what each algorithm did with them on one rank."""
    with open_lab("one", runs) as lab:
        prompts = lab.prompts.next(ROWS)
        stored: Stored = {}
        for kind, temperature in (("sampled", 0.8), ("greedy", 0.0)):
            batch = lab.actor.generate_sequences(prompts, max_new_tokens=12, temperature=temperature)
            stored[kind] = (batch.fetch(), dict(batch.meta))
        metrics, called = {}, {}
        for name in MAKERS:
            metrics[name], called[name], _ = replay(lab, name, stored)
        yield stored, metrics, called, lab.actor.weights_checksum()[0]


def test_the_lines_differ_from_ppo_as_the_paper_lists(one: Any) -> None:
    _, _, called, _ = one
    ppo = called["PPO"]
    assert ppo == [
        "actor.generate_sequences", "actor.compute_log_prob", "reference.compute_ref_log_prob",
        "critic.compute_values", "reward.compute_reward", "compute_advantages",
        "critic.update_critic", "actor.update_actor",
    ]  # fmt: skip
    greedy = ["actor.generate_sequences", "reward.compute_reward"]
    assert called["ReinforcePP"] == [name for name in ppo if not name.startswith("critic.")]
    assert called["ReMax"] == greedy + [name for name in ppo if not name.startswith("critic.")]
    costs = {
        "cost.compute_cost", "actor.compute_loss", "cost_critic.compute_cost_values", "cost_critic.update_cost_critic"
    }  # fmt: skip
    assert [name for name in called["SafeRLHF"] if name not in costs] == ppo
    assert len(called["SafeRLHF"]) == len(ppo) + len(costs)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLACEMENTS)
def test_an_iteration_under_each_placement(one: Any, runs: Path, name: str) -> None:
    """Two ranks and two pools give the metrics of one rank on the same rollouts; then each draws its own and learns."""
    stored, expected, _, checksum = one
    with open_lab(name, runs) as lab:  # "one" is open already
        if name != "one":
            for algorithm in MAKERS:
                metrics, _, made = replay(lab, algorithm, stored)
                assert metrics.keys() == expected[algorithm].keys()
                first = "update_actor/first_minibatch/ratio/max_deviation"
                assert metrics[first] <= 1e-5
                for metric in metrics.keys() - {first}:
                    assert metrics[metric] == pytest.approx(expected[algorithm][metric], **TOLERANCE), metric
            assert isinstance(made, wb.SafeRLHF)
            mean_cost = metrics["compute_advantages/costs/mean"]
            made.finish(metrics)
            assert mean_cost > made.limit
            assert made.multiplier > 1  # in step with what the cost asks for
            checksums = lab.actor.weights_checksum()
            assert len(set(checksums)) == 1
            assert checksums == pytest.approx([checksum] * len(checksums), rel=1e-5)
        for algorithm, make in MAKERS.items():
            steps = lab.last_metrics["update_actor"]["optimizer_steps"]
            metrics = make(lab).iterate()
            assert metrics["update_actor/optimizer_steps"] == steps + 2, algorithm
            assert metrics["update_actor/grad_norm"] > 0
            assert metrics["update_actor/first_minibatch/ratio/max_deviation"] <= 1e-5
