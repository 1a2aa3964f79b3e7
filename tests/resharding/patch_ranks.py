"""What the tests of patches run inside ranks of their own: transitions of weights of which little changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.resharding.counting import Held
from tests.resharding.engine_ranks import ledger
from workbench.resharding.weights import ModelWeights
from workbench.workers.weight_transition import WeightTransition

SHARE = 0.05


def drawn(weights: ModelWeights) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {w.name: torch.randn(w.shape, generator=generator).bfloat16() for w in weights}


def stepped(whole: dict[str, Tensor], version: int, share: float = SHARE) -> dict[str, Tensor]:
    """A share of the elements by one rounding up or down, as a small step of an optimizer does."""
    generator, found = torch.Generator().manual_seed(version), {}
    for name, weight in whole.items():
        moved = torch.rand(weight.shape, generator=generator) < share
        step = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int16) * 2 - 1
        found[name] = (weight.view(torch.int16) + step * moved).view(torch.bfloat16)
    return found


def patched_syncs(plan: Any, weights: ModelWeights, config: Any, before: Held, t_g: int, versions: int) -> list[str]:
    """What was wrong with syncs of versions of weights, one after the other."""
    rank, wrong, whole = dist.get_rank(), list[str](), drawn(weights)
    with ledger() as books:
        transition = WeightTransition(plan, books.communicator, checksums=True)
        exchange = transition.exchange
        for version in range(versions):
            known = whole
            if version:
                whole = stepped(whole, version)
            cut = {name: before.of(name, tuple(weight.shape), rank) for name, weight in whole.items()}
            local = {name: whole[name].flatten()[ids] for name, ids in cut.items() if ids is not None}
            if version == versions // 2:
                exchange.forget()
            moved, of = exchange.received_bytes, exchange.whole_bytes
            exchange.begin(keeps=True)
            given = dict(transition.weights(local, torch.bfloat16))
            moved, of = exchange.received_bytes - moved, exchange.whole_bytes - of
            messages, arrival = books.recorder.drain()[1], transition.engine.arrival()
            if arrival.differ or arrival.sent != arrival.received:
                wrong.append(f"version {version}: checksums {arrival}")
            for weight in weights:
                for start, stop in weight.intervals(rank % t_g, t_g, 1):
                    mine, theirs = (
                        x.narrow(weight.axis or 0, start, stop - start)
                        for x in (given[weight.name], whole[weight.name])
                    )
                    if not torch.equal(mine, theirs):
                        wrong.append(f"version {version}: {weight.name}")
            if of != plan.figures().received[rank]:
                wrong.append(f"version {version}: {of} bytes whole, planned {plan.figures().received[rank]}")
            if version in (0, versions // 2):
                if moved != of:
                    wrong.append(f"version {version}: {moved} of {of} bytes, without patches")
            else:  # a byte for the gap and one for the difference of each element that changed and was not here
                lacked = {n: ~before.mask(n, tuple(w.shape), rank) for n, w in whole.items()}
                changed = sum(int((known[n] != w).flatten()[lacked[n]].sum()) for n, w in whole.items())
                expected = 2 * changed + 12 * len(messages)
                if not 0.99 * expected < moved <= expected:  # less where bits took fewer bytes
                    wrong.append(f"version {version}: {moved} bytes by patches, of {changed} elements {expected}")
    return wrong
