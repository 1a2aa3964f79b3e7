"""What the controller does for a stage stays cheap: how cheap, `make bench NAME=control` measures; here is what no busy
machine comes to, and what must not grow with the ranks."""

from __future__ import annotations

import pickle
import socket
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from benchmarks.control import LIMIT_S, WRITES, counted, plan_s, simulated_lab, stage_on_all
from workbench.backends import ray as ray_module
from workbench.messages.calls import Call
from workbench.support.process_environment import ProcessEnvironment


def test_a_rank_costs_less_than_the_limit(tmp_path: Path) -> None:
    assert plan_s(1024, 1000, tmp_path)[0] / 1024 < 10 * LIMIT_S


@pytest.mark.thorough
def test_planning_is_linear_in_rows(tmp_path: Path) -> None:
    few, many = (plan_s(8, rows, tmp_path)[0] for rows in (10**5, 10**6))
    assert many < 20 * few


class Ray:
    """Ray, as far as a stage needs it, with actors whose answers come one after the other while they are waited for."""

    def __init__(self) -> None:
        self.calls = self.waits = self.gets = 0

    @property
    def cloudpickle(self) -> Ray:
        return self

    def dumps(self, thing: Any) -> bytes:
        return cloudpickle.dumps(thing)

    def actor(self, rank: int, reply: Any) -> Any:
        def execute(driver: str, common: bytes, own: bytes, changes: Any) -> Any:
            return self.ref(reply(Call.of_parts(pickle.loads(common), own), rank))

        def control(driver: str, method: str, *args: Any) -> Any:
            return self.ref(("", 0, 0, 0))

        return types.SimpleNamespace(
            execute=types.SimpleNamespace(remote=execute), control=types.SimpleNamespace(remote=control)
        )

    def ref(self, value: Any) -> Any:
        self.calls += 1
        return Ref(value)

    def wait(self, refs: Sequence[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        self.waits += 1
        for ref in refs[:num_returns] if timeout else ():
            ref.done = True
        done = [ref for ref in refs if ref.done][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, refs: Any) -> Any:
        self.gets += 1
        return [ref.value for ref in refs] if isinstance(refs, list) else refs.value


class Ref:
    done = False

    def __init__(self, value: Any) -> None:
        self.value = value


def counts_of(ranks: int, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What one stage on that many ranks of Ray's asks for."""
    ray = Ray()
    for name, found in (("connect", ray), ("joined_address", None), ("joined_head", None)):
        monkeypatch.setattr(ray_module, name, lambda *_, found=found, **__: found)
    with simulated_lab(ranks, str(runs)) as lab:
        simulated: Any = lab.hosts.backend
        backend: Any = ray_module.RayBackend("lab")
        lab.hosts.backend, stage = backend, stage_on_all(lab)
        for rank, host in enumerate(lab.actor.hosts):
            backend._actors[host] = ray.actor(rank, simulated.reply)
            backend.processes[host] = types.SimpleNamespace(machine=socket.gethostname())
        stage()
        before, times = Counter(vars(ray)), 4
        here, since = ((ProcessEnvironment, name, name) for name in ("here", "since"))
        counts = counted([here, since, (Ray, "dumps", "pickled"), *WRITES], stage, times)
    return counts + Counter({name: round((count - before[name]) / times) for name, count in vars(ray).items()})


def test_what_a_stage_asks_for_does_not_grow_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (counts_of(ranks, tmp_path, monkeypatch) for ranks in (4, 64))
    assert many["calls"] - few["calls"] == 64 - 4, "one call a rank"
    for name in ("waits", "gets", "here", "since", "pickled", "telemetry", "journal"):
        assert many[name] == few[name] <= 6, name
