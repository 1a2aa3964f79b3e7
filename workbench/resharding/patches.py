"""Patches: the exact changes of a weight between two versions, found by comparing bits, encoded in few bytes.

At the learning rates of RL, an optimizer step leaves most bfloat16 weights unchanged, because the step is below their
rounding (verl's delta weight sync; PULSE, arXiv:2602.03839). A patch has the positions of changed elements and the
differences of their bits, both in the fewest bytes:

    positions     the gap to the previous position in a byte (255: add 255 and read on); or one bit per element
    differences   of the bits as integers, in one byte if they fit: to the next representable number it is 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.resharding.boxes import Box
from workbench.resharding.engine import INTEGERS, Exchange
from workbench.resharding.plan import WeightShard

# If a larger share of its elements changed, a weight is sent whole.
MOST = 0.5
FEW_WORDS = 0.25  # of the 8-byte words: if more differ, elements are compared one by one
HEAD_BYTES = 12


class Change(NamedTuple):
    """positions: of changed elements in the flattened tensor, ascending. differences: of their bits, new minus old, as
    integers of the element's size, with wrap-around."""

    positions: np.ndarray
    differences: np.ndarray

    def within(self, shard: WeightShard, box: Box) -> Change:
        """Return the part of a shard's change inside `box`, which lies in one of the shard's boxes; positions count
        from the start of `box`."""
        start = 0
        for r0, r1, c0, c1 in shard.boxes:
            width, wanted = c1 - c0, box[3] - box[2]
            if r0 <= box[0] and box[1] <= r1 and c0 <= box[2] and box[3] <= c1:
                rows = [start + (row - r0) * width for row in box[:2]]
                part = slice(*np.searchsorted(self.positions, rows))
                positions, differences = self.positions[part] - rows[0], self.differences[part]
                if wanted < width:
                    row, column = np.divmod(positions, width)
                    inside = (column >= box[2] - c0) & (column < box[3] - c0)
                    positions, differences = (row * wanted + column - (box[2] - c0))[inside], differences[inside]
                return Change(positions, differences)
            start += (r1 - r0) * width
        raise ValueError(f"{box} is inside none of {shard.boxes}")


@torch.no_grad()
def change(old: Tensor, new: Tensor) -> Change | None:
    """Return the change from `old` to `new`, both contiguous and of the same shape, dtype and device; None if more than
    a share of `MOST` elements changed."""
    a, b = (_bits(tensor).view(-1) for tensor in (old, new))
    kind = np.int32 if len(a) < 2**31 else np.int64
    if a.is_cuda:
        differs = a != b
        if int(differs.sum()) > MOST * len(a):
            return None
        at = differs.nonzero()[:, 0]
        return Change(at.cpu().numpy().astype(kind), (b[at] - a[at]).cpu().numpy())
    x, y = a.numpy(), b.numpy()
    each = 8 // x.itemsize if len(x) % (8 // x.itemsize) == 0 else 1  # compare 8 bytes at a time if few differ
    wide = [bits.view(f"i{each * bits.itemsize}") for bits in (x, y)]
    differing = wide[0] != wide[1]
    if np.count_nonzero(differing) > FEW_WORDS * len(differing):
        differing = x != y
        if np.count_nonzero(differing) > MOST * len(a):
            return None
        places = np.flatnonzero(differing)
        return Change(places.astype(kind), y[places] - x[places])
    words = np.flatnonzero(differing)
    x, y = (bits[words].view(f"i{old.element_size()}") for bits in wide)
    inside = np.flatnonzero(x != y)
    return Change((words[inside // each] * each + inside % each).astype(kind), (y - x)[inside])


class Patch(NamedTuple):
    """An encoded `Change`. elements: of the slice. at: the positions, as bytes of gaps or as a bitmap. small: the
    differences, one byte each, -128 for those in `wide`; empty if this saves no bytes: then all are in `wide`."""

    elements: int
    at: np.ndarray
    is_bitmap: bool
    small: np.ndarray
    wide: np.ndarray

    @classmethod
    def of(cls, change: Change, elements: int) -> Patch:
        positions, differences = change
        gaps = np.diff(positions, prepend=-1) - 1
        jumps = gaps // 255
        if is_bitmap := len(gaps) + int(jumps.sum()) > -(-elements // 8):
            bits = np.zeros(elements, np.bool_)
            bits[positions] = True
            at = np.packbits(bits)
        else:
            at = np.full(len(gaps) + int(jumps.sum()), 255, np.uint8)
            at[np.cumsum(jumps + 1) - 1] = gaps % 255
        fits = np.abs(differences.astype(np.int64)) < 128
        small, wide = np.where(fits, differences, -128).astype(np.int8), differences[~fits]
        if small.nbytes + wide.nbytes > differences.nbytes:
            small, wide = small[:0], differences
        return cls(elements, at, is_bitmap, small, wide)

    def as_bytes(self) -> np.ndarray:
        """Return the patch as one array of bytes, with a header that has the lengths of its parts."""
        head = np.array([len(self.at), self.is_bitmap, len(self.small)], np.int32)
        return np.concatenate([part.view(np.uint8) for part in (head, self.at, self.small, self.wide)])

    @classmethod
    def from_bytes(cls, message: np.ndarray, elements: int, item_bytes: int) -> Patch:
        at, is_bitmap, small = message[:HEAD_BYTES].view(np.int32).tolist()
        parts = np.split(message[HEAD_BYTES:], [at, at + small])
        wide = np.frombuffer(parts[2].tobytes(), f"i{item_bytes}")
        return cls(elements, parts[0], bool(is_bitmap), parts[1].view(np.int8), wide)

    @property
    def nbytes(self) -> int:
        return int(self.at.nbytes + self.small.nbytes + self.wide.nbytes)

    @property
    def whole_bytes(self) -> int:
        return self.elements * self.wide.itemsize

    @torch.no_grad()
    def add_to(self, view: Tensor) -> None:
        """Turn the old version into the new one, in place. view: of the slice, [rows, columns]."""
        if self.is_bitmap:
            positions = np.flatnonzero(np.unpackbits(self.at, count=self.elements))
        else:
            ends = np.flatnonzero(self.at != 255)
            positions = np.cumsum(self.at, dtype=np.int64)[ends] + np.arange(len(ends))
        differences = self.small.astype(self.wide.dtype) if len(self.small) else self.wide
        if len(self.small):
            differences[self.small == -128] = self.wide
        bits = _bits(view)
        if view.is_cuda:
            at = torch.from_numpy(positions).to(view.device)
            bits[at // view.shape[1], at % view.shape[1]] += torch.from_numpy(differences).to(view.device)
        elif view.is_contiguous():
            bits.view(-1).numpy()[positions] += differences
        else:
            bits.numpy()[np.divmod(positions, view.shape[1])] += differences


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


class PatchingExchange:
    """An `Exchange` that sends patches of weights if both ends kept the previous message.

    Messages are identified by their order, which is the same in each transition. received_bytes: the bytes received so
    far; whole_bytes: the bytes that they would have been without patches.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.rank = exchange, exchange.rank
        self.received_bytes, self.whole_bytes, self.keeps = 0, 0, False
        self._sent: dict[tuple[int, int], Tensor] = {}
        self._received: dict[tuple[int, int], Tensor] = {}
        self._calls = 0

    def begin(self, *, keeps: bool) -> None:
        """Begin a transition. keeps: whether to keep the messages, for patches in the next transition."""
        self.keeps, self._calls = keeps, 0
        if not keeps:
            self.forget()

    def forget(self) -> None:
        """Send everything whole in the next transition. Every rank must call this at the same time."""
        self._sent, self._received = {}, {}

    @property
    def kept_bytes(self) -> int:
        return sum(tensor.nbytes for kept in (self._sent, self._received) for tensor in kept.values())

    @torch.no_grad()
    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], weights: str = ""
    ) -> None:
        if not weights:
            self._exchange.exchange(sends, receives)
            return
        arriving = receives
        if self.keeps:
            self._calls += 1
            known: dict[int, Tensor] = {}  # one message may go to several ranks
            for n, (_, tensor) in enumerate(sends):
                if id(tensor) not in known:
                    known[id(tensor)] = self._message((self._calls, n), tensor)
            sends = [(rank, known[id(tensor)]) for rank, tensor in sends]
            sizes = [(rank, torch.zeros(1, dtype=torch.int64, device=tensor.device)) for rank, tensor in receives]
            mine = [(rank, torch.tensor([len(message)], device=message.device)) for rank, message in sends]
            self._exchange.exchange(mine, sizes)
            arriving = [
                (rank, torch.empty(int(size), dtype=torch.uint8, device=tensor.device))
                for (rank, size), (_, tensor) in zip(sizes, receives, strict=True)
            ]
        self._exchange.exchange(sends, arriving, weights)
        self.received_bytes += sum(tensor.nbytes for _, tensor in arriving)
        self.whole_bytes += sum(tensor.nbytes for _, tensor in receives)
        for n, ((_, tensor), (_, message)) in enumerate(zip(receives, arriving, strict=True) if self.keeps else ()):
            self._arrived((self._calls, n), tensor, message)

    def _message(self, key: tuple[int, int], tensor: Tensor) -> Tensor:
        """Return the bytes to send instead of a tensor, and keep the tensor."""
        before = self._sent.get(key)
        if before is None:
            self._sent[key] = tensor.flatten().clone()
            return self._sent[key].view(torch.uint8)
        found = change(before, tensor)
        before.copy_(tensor.flatten())
        if found is not None:
            patch = Patch.of(found, tensor.numel())
            if patch.nbytes + HEAD_BYTES < tensor.nbytes:
                return torch.from_numpy(patch.as_bytes()).to(tensor.device)
        return before.view(torch.uint8)

    def _arrived(self, key: tuple[int, int], target: Tensor, message: Tensor) -> None:
        if message.nbytes == target.nbytes:
            self._received[key] = message.view(target.dtype)
        else:
            patch = Patch.from_bytes(message.cpu().numpy(), target.numel(), target.element_size())
            patch.add_to(self._received[key].view(1, -1))
        target.copy_(self._received[key].view(target.shape))
