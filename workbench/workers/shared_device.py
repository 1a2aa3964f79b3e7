"""The roles of one host take turns on its device: who is not at work leaves its memory (HybridFlow, arXiv:2409.19256,
section 5; verl's `param_offload`, `optimizer_offload` and `free_cache_engine`, in one)."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engines.host_memory import overlapping
from workbench.messages.calls import HostInfo
from workbench.telemetry import Recorder
from workbench.workers.worker import Worker

ONE_MEMORY = "on a CPU device and host memory are one"


class SharedDevice:
    """Decides before each stage who leaves the device and who comes back, where `info.share_memory` asks for it.

    Only what is needed moves: a stage of the role that was at work last moves nothing, and so does one without a model,
    such as a reward function. On a CPU nothing moves at all, and a span of 0 bytes says why.
    """

    def __init__(self, info: HostInfo, recorder: Recorder, workers: Mapping[str, Worker]) -> None:
        self._info, self._recorder, self._workers = info, recorder, workers
        self._at_work = ""

    def turn_to(self, role: str, method: str = "") -> None:
        """It is a role's turn, for one of its operations or to have its state read or written."""
        if not self._info.share_memory or not self._workers[role].uses_device:
            return
        with overlapping():  # what comes need not wait for what goes
            if self._at_work != role:
                self.clear_for(role)
            if self._info.offloads:
                operation = getattr(getattr(self._workers[role], method, None), "__operation__", None)
                self._workers[role].load(generates=operation is not None and operation.generates)

    def clear_for(self, role: str) -> None:
        """Have all other roles leave the device for this one, which may still have to be loaded."""
        if self._info.share_memory and not self._info.offloads and self._at_work:
            now_s = self._recorder.now_s()
            self._recorder.add("offload", now_s, now_s, note=f"{self._at_work} stays: {ONE_MEMORY}")
        for other, worker in self._workers.items():
            if self._info.offloads and other != role:
                with self._recorder.bind(role=other):
                    worker.offload()
        self._at_work = role if role in self._workers else ""
