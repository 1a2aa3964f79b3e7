"""Checksums of slices in the memory of sender and receiver: whether what arrived is what was sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.resharding.boxes import Box

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(view: Tensor, first_row: int) -> Tensor:
    """The checksum of the bits of a slice [rows, columns] whose first row is `first_row` of its weight: int64, a
    scalar.

    Each row's elements are summed as integers of their own size, which wrap around, and the rows weighted by their
    number. Any changed bit changes it, and so do rows that change places.
    """
    integers = view.view(_INTEGERS[view.element_size()])
    rows = integers.sum(1, dtype=integers.dtype).long()
    return (rows * torch.arange(first_row + 1, first_row + 1 + len(rows), device=rows.device)).sum()


def checksums_of(views: Sequence[Tensor], slices: Sequence[tuple[str, Box]]) -> list[int]:
    sums = [checksum(view, box[0]) for (_, box), view in zip(slices, views, strict=True)]
    return torch.stack(sums).tolist() if sums else []  # one wait for a GPU


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What this rank received in a transition, compared with what was sent to it.

    sent, received: sums, modulo 2^64, of all checksums by the senders and by this rank. differ: (weight, rank that sent
    it) of those that are not equal.
    """

    sent: int = 0
    received: int = 0
    differ: tuple[tuple[str, int], ...] = ()

    def with_slices(self, rank: int, names: Sequence[str], sent: Sequence[int], received: Sequence[int]) -> Arrival:
        """This, and slices of weights from `rank`, with the checksum of each at both ends."""
        odd = [(name, rank) for name, theirs, mine in zip(names, sent, received, strict=True) if theirs != mine]
        return Arrival(
            sent=(self.sent + sum(sent)) % 2**64,
            received=(self.received + sum(received)) % 2**64,
            differ=tuple(dict.fromkeys([*self.differ, *odd])),
        )


class Checksums:
    """Checksums of what went one way, summed by the rank at the other end and by weight."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[str, Tensor]] = {}

    def add(self, ranks: Iterable[int], slices: Sequence[tuple[str, Box]], views: Sequence[Tensor]) -> None:
        """Add slices that went to each of `ranks`, or came from them. views: of the slices, [rows, columns]."""
        sums = [checksum(view, box[0]) for (_, box), view in zip(slices, views, strict=True)]
        for rank in ranks:
            mine = self._sums.setdefault(rank, {})
            for (name, _), found in zip(slices, sums, strict=True):
                mine[name] = mine[name] + found if name in mine else found

    def take(self) -> dict[int, tuple[list[str], Tensor]]:
        """By rank: names of weights, in an order that both ends know, and their sums [names]; then all are reset."""
        sums, self._sums = self._sums, {}
        return {rank: (sorted(mine), torch.stack([mine[name] for name in sorted(mine)])) for rank, mine in sums.items()}
