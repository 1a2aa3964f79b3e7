"""On which machine of a cluster each rank of each pool goes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def nodes_of_pools(pools: Sequence[int], free: Mapping[str, int]) -> list[list[str]] | None:
    """The machine of each rank, pool by pool; None: there are not devices enough.

    pools: devices of each. free: devices that each machine has free. A pool stays on one machine where one has room,
    the fullest such, larger pools first; else it lies over few machines, the emptiest first, ranks that stand side by
    side together, so that tensor groups, which are consecutive ranks, are cut as seldom as can be.
    """
    left, found = dict(free), [list[str]() for _ in pools]
    for number in sorted(range(len(pools)), key=lambda n: -pools[n]):
        wanted = pools[number]
        if wanted > sum(left.values()):
            return None
        fitting = [node for node, count in left.items() if count >= wanted]
        if fitting:
            chosen = [min(fitting, key=lambda node: left[node])]
        else:
            chosen = sorted(left, key=lambda node: -left[node])
        for node in chosen:
            taken = min(left[node], wanted - len(found[number]))
            found[number] += [node] * taken
            left[node] -= taken
    return found
