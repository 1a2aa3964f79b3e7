"""Host memory as the place where tensors wait while the memory of their device is lent to others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.telemetry import span


@dataclass(frozen=True)
class _Emptied:
    """A storage that is empty now, of how many bytes it was, and these in host memory (None: they were not kept)."""

    storage: torch.UntypedStorage
    nbytes: int
    kept: Tensor | None


class HostMemory:
    """Takes tensors off their device in named parts, and gives them back, bit for bit.

    What is moved are storages. A tensor keeps its own, which is emptied and later filled again: so views, tied weights,
    DeepSpeed's flat buffers, and a generation engine that reads the trainer's weights, all have their memory back
    without being told. Until then these tensors must not be touched: there is nothing behind them. (What torch cannot
    empty, the memory of a mapped file, gives way to a copy first. A GPU has no such memory.)

    For tensors of a GPU host memory is page-locked; torch keeps it for the next time. Spans are "offload" and "load".
    """

    def __init__(self) -> None:
        self._away: dict[str, list[_Emptied]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that wait in host memory."""
        parts = list(self._away.values())  # others ask while something moves
        return sum(emptied.nbytes for part in parts for emptied in list(part) if emptied.kept is not None)

    def take(self, parts: Mapping[str, Sequence[Tensor]], names: Iterable[str], *, keep: bool = True) -> int:
        """Free the device of those of the parts that are named, but for what is away already; bytes freed.

        keep: False drops the bytes, for what is written anew in any case: `give_back` then brings room for them.
        """
        new = [name for name in names if name not in self._away]
        _leave_mapped_files([tensor for name in new for tensor in parts[name]])
        storages_of = distinct_storages(parts)
        going = {name: storages_of[name] for name in new}
        self._away |= {name: [] for name in going}
        freed = sum(storage.nbytes() for storages in going.values() for storage in storages)
        if not freed:
            return 0
        what = ", ".join(name for name, storages in going.items() if storages)
        with span("offload", bytes=freed, note=what if keep else f"{what}, freed"):
            _wait_for_gpu(going)  # for other streams than this one: from here on, its order is enough
            for name, storages in going.items():
                for storage in storages:
                    kept = _copy(storage) if keep else None
                    self._away[name].append(_Emptied(storage, storage.nbytes(), kept))
                    storage.resize_(0)
            _wait_for_gpu(going)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what torch keeps for itself, neither vLLM nor another process gets
        return freed

    def give_back(self, names: Iterable[str]) -> int:
        """Bring these parts back to their device, as far as they are away; bytes that have their place again."""
        coming = {name: self._away[name] for name in names if name in self._away}
        taken = sum(emptied.nbytes for part in coming.values() for emptied in part)
        if taken:
            with span("load", bytes=taken, note=", ".join(name for name, part in coming.items() if part)):
                for part in coming.values():
                    for emptied in part:
                        emptied.storage.resize_(emptied.nbytes)
                        if emptied.kept is not None:
                            emptied.storage.copy_(emptied.kept.untyped_storage(), non_blocking=True)
                _wait_for_gpu({name: [emptied.storage for emptied in part] for name, part in coming.items()})
        for name in coming:
            del self._away[name]
        return taken

    def __contains__(self, name: str) -> bool:
        """Whether a part is away."""
        return name in self._away


def distinct_storages(parts: Mapping[str, Sequence[Tensor]]) -> dict[str, list[torch.UntypedStorage]]:
    """The storages behind the tensors of each part that are not empty: each once, in the first part that has it."""
    found: dict[str, list[torch.UntypedStorage]] = {}
    seen: set[int] = set()
    for name, tensors in parts.items():
        storages = {s.data_ptr(): s for tensor in tensors if (s := tensor.untyped_storage()).nbytes()}
        found[name] = [storage for address, storage in storages.items() if address not in seen]
        seen |= storages.keys()
    return found


def _leave_mapped_files(tensors: Iterable[Tensor]) -> None:
    """Give those tensors whose storage cannot be resized a copy of it, one for all that share it."""
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.resizable():
            address = storage.data_ptr()
            copies[address] = copies.get(address) or storage.clone()
            view = (tensor.storage_offset(), tensor.shape, tensor.stride())
            tensor.data = tensor.new_empty(0).set_(copies[address], *view)


def _copy(storage: torch.UntypedStorage) -> Tensor:
    kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    kept.untyped_storage().copy_(storage, non_blocking=True)
    return kept


def _wait_for_gpu(parts: Mapping[str, Iterable[torch.UntypedStorage]]) -> None:
    for device in {storage.device for storages in parts.values() for storage in storages}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
