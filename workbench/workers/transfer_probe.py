"""How fast bytes go from a host to another process by the way that moves take."""

from __future__ import annotations

import time

import torch

from workbench.placement import Layout
from workbench.resharding.distribution import Distribution, WeightShard
from workbench.resharding.plan import Reshard
from workbench.resharding.weights import ModelWeights, Weight
from workbench.telemetry import Recorder
from workbench.workers.weight_exchange import Ask, Published, Snapshot, WeightExchange
from workbench.workers.weight_intake import WeightIntake

ROWS, COLUMNS = 16_384, 1024
PROBE_BYTES = 4 * ROWS * COLUMNS


def probe() -> tuple[Snapshot, Reshard]:
    """A weight of `PROBE_BYTES` that a host publishes to be timed, and the plan by which another process takes it."""
    weights = ModelWeights((Weight(name="probe", shape=(ROWS, COLUMNS), item_bytes=4),), 1)
    plan = Reshard(*(Distribution(weights, Layout(), (rank,)) for rank in (0, 1)))
    whole = WeightShard(((0, ROWS, 0, COLUMNS),), (ROWS, COLUMNS))
    return Snapshot(contents=None, slices={"probe": (torch.zeros(ROWS, COLUMNS), whole)}), plan


def timed_bytes_s(key: str, host: str, ask: Ask) -> float:
    """Bytes a second from a host, which has published a `probe` under a key, to this process: the faster of two times,
    after a first one in which memory for buckets is made. ask: as in `WeightExchange`."""
    snapshot, plan = probe()
    intake = WeightIntake(plan, 0, WeightExchange("here", Recorder(), ask), checksums=True)
    published = Published(key=key, hosts=(host, "here"), layout=Layout(), kind="move")
    took_s = []
    for _ in range(3):
        (_, shard), target = snapshot.slices["probe"], torch.empty(ROWS, COLUMNS)
        began = time.perf_counter()
        intake.place(published, {"probe": (target, shard)})
        took_s.append(time.perf_counter() - began)
    return PROBE_BYTES / min(took_s[1:])
