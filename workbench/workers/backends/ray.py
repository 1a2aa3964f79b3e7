"""Hosts as named, detached Ray actors: they outlive the kernel, and live on one machine or many."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.dataflow.location import ShardId
from workbench.errors import BadInput, HostDied
from workbench.workers.backends.base import Backend, Pending
from workbench.workers.calls import Call, HostInfo
from workbench.workers.cluster import NAMESPACE, connect

START_TIMEOUT_S = 120
# A host on a CPU takes a share of cores that the placement declares, not what Ray counts: slots may be more than cores.
CPU_SHARE = 0.001


class RayPending(Pending):
    """A Ray reference."""

    def __init__(self, ray: Any, ref: Any, host: str) -> None:
        self._ray, self.ref, self._host = ray, ref, host

    def done(self) -> bool:
        return bool(self._ray.wait([self.ref], timeout=0)[0])

    def result(self) -> Any:
        try:
            return self._ray.get(self.ref)
        except self._ray.exceptions.RayActorError as error:
            raise HostDied(
                f"host {self._host} is gone",
                f"its process ended ({str(error).splitlines()[-1].strip()}); out of memory is the usual reason",
                "see lab.logs(), then open the workbench again with if_exists='replace'",
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if error.cause is not None else error from None


class _Peers:
    """A host's view of the others, from inside its actor."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}

    def fetch(self, shard: ShardId, columns: tuple[str, ...], positions: Any) -> dict[str, Any]:
        import ray

        if shard.host not in self._handles:
            self._handles[shard.host] = ray.get_actor(shard.host, namespace=NAMESPACE)
        # in a group of its own, so that hosts that pull from each other do not wait for each other's stages
        handle = self._handles[shard.host]
        ref = handle.data.remote("fetch", shard.key, columns, positions)
        wire: dict[str, Any] = RayPending(ray, ref, shard.host).result()
        return wire


def _actor_class(ray: Any) -> Any:
    class HostActor:
        """A thin shell: what it runs is looked up by name on the `Host` at call time."""

        def __init__(self, info: HostInfo) -> None:
            from workbench.workers.host import Host
            from workbench.workers.logs import send_output_to

            if info.log_path:
                send_output_to(info.log_path)
            self._host = Host(info, _Peers())

        def compute(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._host, method)(*args, **kwargs)

        @ray.method(concurrency_group="data")
        def data(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._host, method)(*args, **kwargs)

        @ray.method(concurrency_group="control")
        def control(self, method: str, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._host, method)(*args, **kwargs)

    return ray.remote(concurrency_groups={"data": 4, "control": 2})(HostActor)


class RayBackend(Backend):
    """One actor a device, in one detached placement group a workbench."""

    name = "ray"

    def __init__(self, lab: str, address: str | None = None, *, start: bool = True) -> None:
        self._lab, self._address = lab, address
        self._ray = connect(address, start=start)
        self._actors: dict[str, Any] = {}

    @property
    def _group_name(self) -> str:
        return f"{self._lab}/devices"

    def check(self, infos: Sequence[HostInfo]) -> None:
        """Raise `BadInput` when the cluster has fewer GPUs than the placement asks for."""
        wanted = sum(info.device.startswith("cuda") for info in infos)
        have = int(self._ray.cluster_resources().get("GPU", 0))
        if wanted > have:
            raise BadInput(
                f"a placement of {wanted} GPUs", f"the cluster has {have}", "use fewer devices, or device='cpu'"
            )

    def start(self, infos: Sequence[HostInfo]) -> None:
        ray = self._ray
        self.check(infos)
        gpu = {"GPU": 1.0} if infos[0].device.startswith("cuda") else {}
        group = ray.util.placement_group(
            [{"CPU": CPU_SHARE, **gpu} for _ in infos], strategy="PACK", name=self._group_name, lifetime="detached"
        )
        try:
            ray.get(group.ready(), timeout=START_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            ray.util.remove_placement_group(group)
            raise BadInput(
                f"a placement of {len(infos)} devices found no room in {START_TIMEOUT_S} s",
                f"the cluster has {ray.available_resources()} free",
                "close other workbenches (`wb ls`), or use fewer devices",
            ) from None
        actor_class = _actor_class(ray)
        # idle threads that spin take the cores from the other hosts: up to ten times slower
        wait = {"OMP_WAIT_POLICY": "passive"} if len(infos) > 1 else {}
        for index, info in enumerate(infos):
            threads = str(info.threads)
            self._actors[info.name] = actor_class.options(
                name=info.name,
                lifetime="detached",
                max_restarts=0,
                num_cpus=CPU_SHARE,
                num_gpus=gpu.get("GPU", 0),
                runtime_env={
                    "env_vars": {
                        "OMP_NUM_THREADS": threads,
                        "MKL_NUM_THREADS": threads,
                        **wait,
                        "TOKENIZERS_PARALLELISM": "false",
                        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                    }
                },
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(info)
        for info in infos:
            self.ask(info.name, "status").result()

    def attach(self, infos: Sequence[HostInfo]) -> None:
        for info in infos:
            try:
                self._actors[info.name] = self._ray.get_actor(info.name, namespace=NAMESPACE)
                self._ray.get(self._actors[info.name].control.remote("status"), timeout=10)
            except (ValueError, self._ray.exceptions.RayError) as error:
                raise HostDied(
                    f"host {info.name} of workbench {self._lab!r} is gone",
                    "a workbench is whole or it is not",
                    "open it again with if_exists='replace'",
                ) from error

    def _pending(self, host: str, ref: Any) -> RayPending:
        return RayPending(self._ray, ref, host)

    def execute(self, host: str, call: Call, progress: Callable[[int, int, int], None]) -> Pending:
        return self._pending(host, self._actors[host].compute.remote("execute", call))

    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self._pending(host, self._actors[host].control.remote(method, *args, **kwargs))

    def work(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self._pending(host, self._actors[host].compute.remote(method, *args, **kwargs))

    def wait_any(self, pending: Sequence[Pending], timeout_s: float) -> None:
        refs = [p.ref for p in pending if isinstance(p, RayPending)]
        if refs:
            self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def close(self) -> None:
        ray = self._ray
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        with contextlib.suppress(ValueError):
            ray.util.remove_placement_group(ray.util.get_placement_group(self._group_name))
