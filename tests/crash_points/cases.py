"""What is run up to a point, and what is compared after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

ALGORITHM = """
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
from workbench.telemetry.store import TelemetryStore
def algorithm(lab):
    return wb.PPO(lab, prompts=2, kl_coefficient=0.1, sampling=wb.Sampling(max_new_tokens=12))
def state(lab, ppo):
    roles = ("actor", "critic")
    steps = {role: lab.weights[role].steps for role in roles}
    return ppo.iteration, ppo.metrics(), steps, {role: getattr(lab, role).weights_checksum() for role in roles}
"""
# up to the end of an iteration: all of its metrics, optimizer steps, and sums of the weights' bits
REST = "while ppo.iteration < {0} or ppo.under_way:\n    ppo.step()\nout = state(lab, ppo)"

# hosts of a workbench that are on no placement of it, as soon as there are none, or after 20 s
OTHERS = """
import ray, time
def others():
    there = {actor["name"] for actor in ray.util.list_named_actors(True)}
    return sorted(name for name in there if name.startswith(lab.description.id + "/")
                  and name.partition("/")[2] not in [info.name for info in lab.hosts.infos])
until_s = time.monotonic() + 20
while (out := others()) and time.monotonic() < until_s:
    time.sleep(0.1)
"""


def spread(points: Sequence[str], count: int) -> list[int]:
    """Numbers of points that are spread over all."""
    return sorted({1 + number * (len(points) - 1) // (count - 1) for number in range(count)})


def same(found: Any, clean: Any) -> None:
    """Fail with what differs between two states."""
    (iteration, metrics, *rest), (clean_iteration, clean_metrics, *clean_rest) = found, clean
    names = {*metrics, *clean_metrics}
    differ = {
        name: (metrics.get(name), clean_metrics.get(name))
        for name in names if metrics.get(name) != clean_metrics.get(name)
    }  # fmt: skip
    if (iteration, differ, rest) != (clean_iteration, {}, clean_rest):
        raise AssertionError(f"iteration {iteration} of {clean_iteration}, {differ}, {rest} in place of {clean_rest}")


def failures(trial: Callable[[int], None], points: Iterable[int]) -> str:
    """Of the first of these points at which something went wrong."""
    for point in points:
        try:
            trial(point)
        except (AssertionError, TimeoutError) as error:
            return f"point {point}: {error}"
    return ""
