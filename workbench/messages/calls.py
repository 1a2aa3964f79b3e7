"""What the controller sends to a host for one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from workbench.batches.location import Pull, pack
from workbench.messages.replies import UpdatePart
from workbench.placement import host_name
from workbench.settings.engines import ShareMemory
from workbench.settings.training import Training


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """Who a host is: one process on one device, rank `rank` of its pool's process group.

    lab: the workbench's id. share_memory: see `workbench.open`. again: how many earlier pools of that name `lab.move`
    has ended.
    """

    lab: str
    pool: str
    rank: int
    world_size: int
    device: str
    threads: int
    log_path: str | None
    share_memory: ShareMemory = False
    again: int = 0

    @property
    def name(self) -> str:
        """Unique in the life of its workbench, because batches refer to the hosts that made them."""
        return host_name(self.pool, self.rank, self.again)

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of its pool's hosts, by rank."""
        return tuple(replace(self, rank=rank).name for rank in range(self.world_size))

    @property
    def offloads(self) -> bool:
        """Whether roles that do not compute are moved to host memory."""
        return self.share_memory == "always" or (bool(self.share_memory) and self.device.startswith("cuda"))


@dataclass(frozen=True, kw_only=True)
class Call:
    """One rank's part of a stage.

    key: name of the shard that its output becomes. keep: whether the output is part of the stage's result; what other
    ranks return is dropped. updates, resume_from: whether it updates the role, and where an interrupted update goes on.
    training: how an update trains the role. all_valid: whether rows that are not valid are refused. pulls: for each set
    of columns, which rows to pull from which shard.

    Pickled, it takes few bytes a row at most, so that the controller's messages stay small however many rows there are.
    """

    run: int
    key: str
    stage: str
    role: str
    method: str
    keep: bool = True
    batch: str = ""
    pulls: tuple[tuple[tuple[str, ...], tuple[Pull, ...]], ...] = ()
    rows: np.ndarray | None = None
    minibatch_sizes: tuple[int, ...] = ()
    sample: np.ndarray | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    submitted_s: float = 0.0
    updates: bool = False
    resume_from: UpdatePart | None = None
    training: Training | None = None
    all_valid: bool = False

    def __getstate__(self) -> dict[str, Any]:
        pulls = tuple(
            (names, tuple((p.shard, pack(p.positions), pack(p.destinations), p.name) for p in parts))
            for names, parts in self.pulls
        )
        rows, sample = (None if numbers is None else pack(numbers) for numbers in (self.rows, self.sample))
        return {**self.__dict__, "pulls": pulls, "rows": rows, "sample": sample}

    def __setstate__(self, state: dict[str, Any]) -> None:
        pulls = tuple(
            (names, tuple(Pull(shard, rows.unpack(), there.unpack(), name) for shard, rows, there, name in parts))
            for names, parts in state["pulls"]
        )
        rows, sample = (None if packed is None else packed.unpack() for packed in (state["rows"], state["sample"]))
        self.__dict__.update(state, pulls=pulls, rows=rows, sample=sample)
