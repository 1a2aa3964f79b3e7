"""Moves tensors to host memory while other roles need their device memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.telemetry import begin_span

# Host memory is allocated in pieces of this size: a power of two, since torch rounds page-locked memory up to one.
PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Emptied:
    """An emptied storage, its size before, and its bytes in consecutive pieces of host memory (None: not kept)."""

    storage: torch.UntypedStorage
    nbytes: int
    kept: tuple[Tensor, ...] | None


@dataclass
class _Away:
    """An offloaded part. arrived: the event after which all its bytes are in host memory; None: they are there."""

    emptied: list[_Emptied]
    arrived: torch.cuda.Event | None = None


class HostMemory:
    """Moves tensors off their device in named parts, and back, bit for bit.

    Storages are moved. A tensor keeps its storage, which is emptied and later filled again: so views, tied weights,
    DeepSpeed's flat buffers, and a generation engine that reads the trainer's weights all get their memory back without
    a change. Until then these tensors must not be used. (Storages that torch cannot empty, the memory of a mapped file,
    are replaced by copies first. A GPU has no such memory.)

    For a GPU's tensors, host memory is page-locked, in pieces that torch keeps for the next time. All copies of a call
    are queued on a separate stream and waited for once; inside `overlapping()`, at its end. Spans are "offload" and
    "load". torch's allocator keeps the freed memory for the next tensors; vLLM empties that cache before it allocates.
    """

    def __init__(self) -> None:
        self._away: dict[str, _Away] = {}

    @property
    def nbytes(self) -> int:
        parts = list(self._away.values())  # other threads read this during moves
        return sum(emptied.nbytes for part in parts for emptied in list(part.emptied) if emptied.kept is not None)

    def offload(self, parts: Mapping[str, Sequence[Tensor]], names: Iterable[str], *, keep: bool = True) -> int:
        """Offload the named parts that are not offloaded yet; return the freed bytes.

        keep: False drops the bytes of tensors that will be written anew: `load` then only allocates memory.
        """
        new = [name for name in names if name not in self._away]
        _leave_mapped_files([tensor for name in new for tensor in parts[name]])
        storages_of = distinct_storages(parts)
        going = {name: storages_of[name] for name in new}
        self._away |= {name: _Away([]) for name in going}
        freed = sum(storage.nbytes() for storages in going.values() for storage in storages)
        if not freed:
            return 0
        what = ", ".join(name for name, storages in going.items() if storages)
        device = next(storage.device for storages in going.values() for storage in storages)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # for other streams than this one, whose own order suffices from here on
        with _Move("offload", device, freed, what if keep else f"{what}, freed") as move:
            for name, storages in going.items():
                away, room = self._away[name], _Room(pinned=device.type == "cuda")
                for storage in storages:
                    kept = room.take(storage.nbytes()) if keep else None
                    move.copy_out(storage, kept or ())
                    away.emptied.append(_Emptied(storage, storage.nbytes(), kept))
                    storage.resize_(0)
                away.arrived = move.event()
        return freed

    def load(self, names: Iterable[str]) -> int:
        """Load the named parts that are offloaded back onto their device; return their bytes."""
        coming = {name: self._away[name] for name in names if name in self._away}
        every = [emptied for part in coming.values() for emptied in part.emptied]
        taken = sum(emptied.nbytes for emptied in every)
        if taken:
            device = every[0].storage.device
            try:
                for emptied in every:
                    emptied.storage.resize_(emptied.nbytes)
            except BaseException:  # no room for all of them: free what was allocated
                for emptied in every:
                    emptied.storage.resize_(0)
                raise
            what = ", ".join(name for name, part in coming.items() if part.emptied)
            with _Move("load", device, taken, what) as move:  # after the allocation, in stream order
                for part in coming.values():
                    move.wait_for(part.arrived)
                    for emptied in part.emptied:
                        move.copy_in(emptied.storage, emptied.kept or ())
        for name in coming:
            del self._away[name]
        return taken

    def __contains__(self, name: str) -> bool:
        return name in self._away


# the moves that `overlapping()` waits for at its end; None outside it
_unfinished: ContextVar[list[_Move] | None] = ContextVar("_unfinished", default=None)


@contextmanager
def overlapping() -> Iterator[None]:
    """Inside the block, a GPU's offloads and loads run at the same time, as far as its memory has room for both; at its
    end all of them are complete."""
    if _unfinished.get() is not None:
        yield
        return
    moves: list[_Move] = []
    token = _unfinished.set(moves)
    try:
        yield
    finally:
        _unfinished.reset(token)
        for move in moves:
            move.finish()


_streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}


class _Move:
    """Copies between a device and host memory, in the order of the requests, on one stream for each direction; on a CPU
    they complete at once."""

    def __init__(self, kind: str, device: torch.device, nbytes: int, note: str) -> None:
        self._end = begin_span(kind, bytes=nbytes, note=note)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._began: torch.cuda.Event | None = None
        self._over: torch.cuda.Event | None = None
        if device.type == "cuda":
            key = kind, device
            self._stream = _streams[key] = _streams.get(key) or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._began = self.event()

    def event(self) -> torch.cuda.Event | None:
        """Return an event after the copies requested so far; None: they are complete."""
        return None if self._stream is None else self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Start later copies only after an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def copy_out(self, storage: torch.UntypedStorage, kept: Iterable[Tensor]) -> None:
        """Copy all bytes of a storage to these pieces of host memory. The storage may be emptied at once: torch reuses
        its memory only after the copies, or orders the reuse after them."""
        there = self._copy(storage, kept, back=False)
        if self._stream is not None:
            there.record_stream(self._stream)

    def copy_in(self, storage: torch.UntypedStorage, kept: Iterable[Tensor]) -> None:
        """Copy all bytes of a storage from these pieces; later work on the current stream sees them."""
        self._copy(storage, kept, back=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _copy(self, storage: torch.UntypedStorage, kept: Iterable[Tensor], *, back: bool) -> Tensor:
        there, start = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), 0
        with torch.cuda.stream(self._stream):  # None: the current stream
            for here in kept:
                part = there[start : start + len(here)]
                (part if back else here).copy_(here if back else part, non_blocking=True)
                start += len(here)
        return there

    def finish(self) -> None:
        """Wait until all copies are complete, and end the span."""
        if self._over is None or self._began is None:
            self._end(None)
        else:
            self._over.synchronize()
            self._end(self._began.elapsed_time(self._over) / 1e3)

    def __enter__(self) -> _Move:
        return self

    def __exit__(self, *raised: object) -> None:
        self._over = self.event()
        unfinished = _unfinished.get()
        if self._stream is None or unfinished is None:
            self.finish()
        else:
            unfinished.append(self)


class _Room:
    """Host memory for the bytes of many storages in sequence, page-locked or not."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned, self._free = pinned, torch.empty(0)

    def take(self, nbytes: int) -> tuple[Tensor, ...]:
        """Allocate `nbytes` bytes, in one or more pieces."""
        found: list[Tensor] = []
        while nbytes:
            if not len(self._free):
                self._free = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            found.append(self._free[:nbytes])
            self._free = self._free[nbytes:]
            nbytes -= len(found[-1])
        return tuple(found)


def distinct_storages(parts: Mapping[str, Sequence[Tensor]]) -> dict[str, list[torch.UntypedStorage]]:
    """Return the non-empty storages of each part's tensors: each storage once, in the first part that has it."""
    found: dict[str, list[torch.UntypedStorage]] = {}
    seen: set[int] = set()
    for name, tensors in parts.items():
        storages = {s.data_ptr(): s for tensor in tensors if (s := tensor.untyped_storage()).nbytes()}
        found[name] = [storage for address, storage in storages.items() if address not in seen]
        seen |= storages.keys()
    return found


def _leave_mapped_files(tensors: Iterable[Tensor]) -> None:
    """Replace these tensors' storages that cannot be resized by copies, one for all tensors that share it."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.resizable():
            address = storage.data_ptr()
            copies[address] = copies.get(address) or storage.clone()
            view = (tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = tensor.new_empty(0).set_(copies[address], *view)
