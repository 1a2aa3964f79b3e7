"""Chooses the machine of a Ray cluster for each host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, groupby
from typing import Any

from workbench.backends.ray_access import silent
from workbench.errors import BadInput, DevicesTaken
from workbench.messages.calls import HostInfo

GROUPS = "/devices/"  # in the names of placement groups of workbenches
NODE_LABEL, RACK_LABEL = "ray.io/node-id", "rack"
SILENT_AT_ONCE = 64
CROSS_MACHINES = "WORKBENCH_CROSS_MACHINES"  # if set, tensor groups may span machines


def answering(ray: Any) -> dict[str, dict[str, Any]]:
    """Return Ray's record of each living machine, by its id, without machines that do not answer: Ray takes a minute to
    notice that a machine is gone."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(SILENT_AT_ONCE) as at_once:
        said = at_once.map(lambda node: silent(node["NodeManagerAddress"], node["NodeManagerPort"]), alive)
        return {node["NodeID"]: node for node, reason in zip(alive, said, strict=True) if not reason}


def nodes_of_hosts(ray: Any, infos: Sequence[HostInfo]) -> list[str]:
    """Return the machine of each host, with a pool on one machine if possible; empty if there is only one machine, or
    devices are not free yet. On machines without GPUs a device is one of the cores that Ray counts, or a share of one.
    Raises `DevicesTaken` or `BadInput` where a tensor group fits on no machine."""
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return []
    nodes = answering(ray)
    pools = [list(ranks) for _, ranks in groupby(infos, key=lambda info: info.pool)]
    sizes, groups = [len(ranks) for ranks in pools], [ranks[0].tensor_ranks for ranks in pools]
    racks = {name: node["Labels"].get(RACK_LABEL, "") for name, node in nodes.items()}
    place = partial(nodes_of_pools, sizes, racks=racks)
    kind = "GPU" if infos[0].gpus else "CPU"
    total = {name: round(node["Resources"].get(kind, 0)) for name, node in nodes.items()}
    if kind == "CPU":  # for Ray a host takes almost no CPU, so count hosts here; some of them may be about to end
        table = ray.util.placement_group_table().values()
        here = [entry for entry in table if GROUPS in entry["name"] and entry["state"] == "CREATED"]
        hosts = Counter(node for entry in here for node in entry["bundles_to_node_id"].values())
        free = {name: max(0, count - hosts[name]) for name, count in total.items()}
        shares = ({name: count * times for name, count in total.items()} for times in range(1, sum(sizes) + 1))
        return list(chain(*next(filter(None, (place(slots, groups) for slots in (free, *shares))), ())))
    available = ray._private.state.available_resources_per_node()
    free = {name: round(available.get(name, {}).get(kind, 0)) for name in nodes}
    found = place(free, None if os.environ.get(CROSS_MACHINES) else groups)
    if found is None and max(groups) > 1 and not os.environ.get(CROSS_MACHINES):
        raise (DevicesTaken if place(total, groups) else BadInput)(
            f"tensor groups of {max(groups)} GPUs, but machines have "
            + ", ".join(f"{count} of {total[name]}" for name, count in free.items() if total[name]) + " free",
            "the ranks of a tensor group exchange activations in every layer, so they stay on one machine",
            f"use fewer tensor ranks, free devices, or set {CROSS_MACHINES}=1 to spread them over machines",
        )  # fmt: skip
    return list(chain(*found or ()))


def nodes_of_pools(
    pools: Sequence[int],
    free: Mapping[str, int],
    groups: Sequence[int] | None = None,
    racks: Mapping[str, str] | None = None,
) -> list[list[str]] | None:
    """Return the machine of each rank, pool by pool; None: there are not enough devices.

    pools: devices of each pool. free: free devices of each machine. groups: by pool, how many consecutive ranks stay on
    one machine: those of a tensor group. racks: of machines. A pool goes to one machine if one has room (the fullest of
    these), larger pools first; otherwise to one rack; otherwise over few machines, the emptiest first. Consecutive
    ranks stay together.
    """
    left, found, racks = dict(free), [list[str]() for _ in pools], racks or {}
    for number in sorted(range(len(pools)), key=lambda n: -pools[n]):
        wanted, group = pools[number], groups[number] if groups else 1
        room = {node: count - count % group for node, count in left.items()}
        by_rack: dict[str, dict[str, int]] = {}
        for node, count in room.items():
            by_rack.setdefault(racks.get(node, ""), {})[node] = count
        sets = [*({node: count} for node, count in room.items()), *by_rack.values(), room]
        fitting = [nodes for nodes in sets if sum(nodes.values()) >= wanted]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda nodes: (len(nodes) > 1, len(nodes) == len(room), sum(nodes.values())))
        for node in sorted(chosen, key=lambda node: -room[node]):
            taken = min(room[node], wanted - len(found[number]))
            found[number] += [node] * taken
            left[node] -= taken
    return found
