"""Hosts as named, detached Ray actors: they outlive the kernel, and live on one machine or many."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

from workbench.backends.base import Backend, Pending, Progress
from workbench.backends.cluster import NAMESPACE, connect, head_is_gone, joined_address, joined_head, running_head
from workbench.backends.environments import need_same
from workbench.backends.holders import when_free
from workbench.backends.host_server import python_for_hosts
from workbench.backends.nodes import GROUPS, NODE_LABEL, RACK_LABEL, answering, nodes_of_hosts
from workbench.errors import BadInput, DevicesTaken, HostDied, NotDriving, NotFound, WorkbenchError
from workbench.errors.containing import containing
from workbench.messages.calls import Call, HostInfo
from workbench.support.files import open_to_append, private_folder
from workbench.support.machine import Process, end
from workbench.support.process_environment import ProcessEnvironment, apply_changes

GRANT_S = 5.0  # how long a cluster may take to give devices that are free, or are being freed
ATTACH_TIMEOUT_S = 60  # for a busy machine; for an actor that is gone, Ray answers at once
END_GRACE_S = 10
SAID = 160  # characters of Ray's message
LOOK_S = 0.5  # how often to check whether the head lives
POLL_S = 0.2
BACK = "lab.recover() restarts it; all roles go back to the newest checkpoint, unless only rollout workers died"
# Methods of hosts that a kernel which does not drive the workbench may call.
LOOKS = frozenset(("status", "describe", "fetch", "lengths", "shard_keys", "source_files", "stale_sources"))
# variables that hosts set themselves: changes in the notebook are not sent
OF_HOSTS = (
    "CUDA_VISIBLE_DEVICES", "RAY_", "OMP_", "MKL_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "GLOO_", "NCCL_",
    "DS_ACCELERATOR",
)  # fmt: skip
# The placement declares a CPU host's share of cores, not Ray, because there may be more slots than cores.
CPU_SHARE = 0.001


class RayPending(Pending):
    def __init__(self, ray: Any, ref: Any, host: str, head: str | None = None) -> None:
        self._ray, self.ref, self._host, self._head = ray, ref, host, head
        self.ready = False  # whether it is known to be done
        self.answer: tuple[Any, ...] = ()  # after it was fetched

    def done(self) -> bool:
        return self.ready or bool(self.answer) or bool(self._ray.wait([self.ref], timeout=0)[0])

    def result(self) -> Any:
        self.answer = self.answer or (self._get(),)
        return self.answer[0]

    def _get(self) -> Any:
        try:
            while self._head is not None and not self._ray.wait([self.ref], timeout=LOOK_S)[0]:
                _need_head(self._head)  # without the head there may never be an answer
            return self._ray.get(self.ref)
        except self._ray.exceptions.OutOfMemoryError as error:  # it is no subclass of RayActorError
            raise HostDied(
                f"host {self._host} is gone",
                f"its machine ran out of memory, and Ray ended it ({shorten(str(error).splitlines()[0], SAID)})",
                "lab.memory() and lab.diff(...) show how much memory each role needs; give the models more devices "
                "or machines (lab.move), or use smaller batches or micro_batch_tokens; " + BACK,
            ) from error
        except self._ray.exceptions.RayActorError as error:
            _need_head(self._head)
            raise HostDied(
                f"host {self._host} is gone",
                "it was stopped: by `wb stop`, or by another kernel that closed or replaced the workbench"
                if "ray.kill" in str(error)
                else f"its process ended ({shorten(str(error).splitlines()[-1], SAID)}); "
                "somebody killed it, the system killed it because memory ran out, or its code crashed",
                f"see lab.logs(); {BACK}",
            ) from error
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            if not isinstance(cause, WorkbenchError):  # workbench errors need no traceback
                cause.add_note(f"on host {self._host}:\n{str(error).strip()}")
            raise cause from None


def _need_head(address: str | None) -> None:
    """Raise `HostDied` if this user's head, joined at that address, is gone. address: None: another cluster."""
    if address is not None and head_is_gone(address):
        raise HostDied(
            "the Ray head of this user is gone, and all hosts with it",
            "`ray stop` ends it, and the system may end it when memory runs out; the notebook keeps its variables",
            "lab.recover() restarts them and continues from the newest checkpoint",
        )


class _Peers:
    """Calls other hosts of the workbench, from inside a host's actor."""

    def __init__(self, lab: str) -> None:
        self._lab = lab
        self._handles: dict[str, Any] = {}

    def call(self, host: str, method: str, *args: Any) -> Any:
        import ray

        if host not in self._handles:
            try:
                self._handles[host] = ray.get_actor(_actor_name(self._lab, host), namespace=NAMESPACE)
            except ValueError as error:
                raise HostDied(f"host {host} is gone", "its process has ended") from error
        # its own concurrency group: hosts that pull from each other do not wait for each other's stages
        return RayPending(ray, self._handles[host].data.remote(method, *args), host).result()


def send_output_to(path: str) -> None:
    """Append this process's stdout and stderr, including those of C++ libraries, to a file, to keep the notebook
    quiet."""
    logs = Path(path).parent
    private_folder(logs.parent)  # the run folder
    private_folder(logs)
    file = open_to_append(Path(path))
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Ray has wrapped these two; plain ones write directly to the file
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)


def _actor_class(ray: Any) -> Any:
    class HostActor:
        """A thin wrapper: it looks up methods by name on the `Host` at call time."""

        def __init__(self, info: HostInfo, asked_s: float) -> None:
            from workbench.backends.ray import send_output_to
            from workbench.workers.host import Host

            if info.log_path:
                send_output_to(info.log_path)
            self._host = Host(info, _Peers(info.lab).call)
            self._host.note_start(asked_s)
            self._driver = ""

        @ray.method(concurrency_group="control")
        def process(self) -> tuple[Process, set[str]]:
            return Process.current(), set(os.environ)

        @ray.method(concurrency_group="control")
        def drive(self, driver: str) -> None:
            self._driver = driver

        def compute(self, driver: str, method: str, *args: Any, **kwargs: Any) -> Any:
            self._check(driver, method)
            with containing():
                return getattr(self._host, method)(*args, **kwargs)

        def execute(self, driver: str, common: bytes, own: bytes, changes: Mapping[str, Any]) -> Any:
            self._check(driver, "execute")
            if changes:
                apply_changes(changes)
            with containing():
                return self._host.execute(Call.of_parts(pickle.loads(common), own))

        @ray.method(concurrency_group="data")
        def data(self, method: str, *args: Any, **kwargs: Any) -> Any:
            with containing():
                return getattr(self._host, method)(*args, **kwargs)

        @ray.method(concurrency_group="control")
        def control(self, driver: str, method: str, *args: Any, **kwargs: Any) -> Any:
            return self.compute(driver, method, *args, **kwargs)

        def _check(self, driver: str, method: str) -> None:
            if driver != self._driver and self._driver and method not in LOOKS:
                raise NotDriving(
                    f"{method} on host {self._host.info.name}", "another kernel has taken over the workbench",
                    "only read it, or take it back with wb.attach(name, take_over=True)",
                )  # fmt: skip

    return ray.remote(concurrency_groups={"data": 4, "control": 2})(HostActor)


@contextlib.contextmanager
def _sending(host: str) -> Iterator[None]:
    """Around the pickling of arguments: raise `BadInput` for an argument that cannot be sent."""
    try:
        yield
    except TypeError as error:  # Ray's message shows the whole argument, over pages
        raise BadInput(
            f"an argument cannot be sent to host {host}: {error.__cause__ or error}",
            "Ray sends a function together with the objects that it uses, also with own_process=False",
            "create locks, clients and models inside the function, at its first call, or use backend='inline'",
        ) from None


def _actor_name(lab: str, host: str) -> str:
    return f"{lab}/{host}"


def end_hosts(lab: str, address: str | None, hosts: Iterable[str], processes: Iterable[Process]) -> None:
    """End the hosts of the workbench with this id, and give back its devices. Returns when their memory on this machine
    is free again. address: of the cluster; None: this user's own head."""
    with contextlib.suppress(NotFound):  # without a head the hosts have ended, too
        ray = connect(address, start=False)
        for host in hosts:
            with contextlib.suppress(ValueError):  # it has ended already
                ray.kill(ray.get_actor(_actor_name(lab, host), namespace=NAMESPACE))
        _remove_groups(ray, _groups_prefix(lab))
    end(processes, grace_s=END_GRACE_S)


def _remove_groups(ray: Any, prefix: str, kept: Collection[str] = ()) -> None:
    """Give back the devices of the placement groups whose names begin with `prefix`, and end the hosts on them."""
    from ray.util.placement_group import PlacementGroup

    for group, entry in ray.util.placement_group_table().items():
        if entry["name"].startswith(prefix) and entry["name"] not in kept and entry["state"] != "REMOVED":
            ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))


def _groups_prefix(lab: str) -> str:
    return f"{lab}{GROUPS}"


def _group_name(info: HostInfo) -> str:
    """Return the name of the placement group of a host's pool."""
    return f"{_groups_prefix(info.lab)}{info.pool}.{info.again}."


class RayBackend(Backend):
    """One actor per device, in one detached placement group per pool. A pool gives its devices back when it ends.

    lab: the workbench's id, part of all its names on the cluster. driver: names the kernel: hosts obey the kernel that
    called `drive` last, and only answer questions of others (`LOOKS`). note: called with a text about what is waited
    for. cluster: address of the cluster for other processes; None: this user's own head. processes: of each host.
    wait_s: how long `start` waits for devices that others hold.
    """

    name = "ray"

    def __init__(
        self, lab: str, address: str | None = None, *, driver: str = "", start: bool = True,
        note: Callable[[str], None] = lambda _: None, wait_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._lab, self._note, self._driver, self._wait_s = lab, note, driver, wait_s
        self._ray = connect(address, start=start, note=note)
        self.cluster = joined_address(self._ray)
        self._head = joined_head()
        self._actors: dict[str, Any] = {}
        self._looked_s = time.monotonic()
        # the notebook's environment, and those that each host knows: changes are sent with the next stage
        self._before, self._known = ProcessEnvironment.here(), dict[str, ProcessEnvironment]()
        self.processes: dict[str, Process] = {}

    def rejoin(self, note: Callable[[str], None]) -> bool:
        """If this user's head is gone, join another one, started if needed; return whether it was gone."""
        if not self._without_head():
            return False
        self._ray = connect(None, note=note)
        self._head = joined_head()
        self._actors.clear()
        return True

    def _without_head(self) -> bool:
        return self._head is not None and head_is_gone(self._head)

    def _actor(self, host: str) -> Any:
        """Return the actor of a host. Raises `HostDied`."""
        if time.monotonic() > self._looked_s + LOOK_S:  # without a head, a call would never be answered
            _need_head(self._head)
            self._looked_s = time.monotonic()
        if host not in self._actors:
            raise HostDied(f"host {host} is gone", "the rows that it kept are lost", "run their stages again")
        return self._actors[host]

    def check(self, infos: Sequence[HostInfo]) -> None:
        """Raise `BadInput` when the cluster has fewer GPUs than the placement asks for."""
        _need_head(self._head)
        wanted, have = sum(info.gpus for info in infos), self._ray.cluster_resources().get("GPU", 0)
        if round(wanted, 4) > round(have, 4):  # Ray counts in ten-thousandths
            raise BadInput(
                f"a placement of {wanted:g} GPUs", f"the cluster has {have:g}", "use fewer devices, or device='cpu'"
            )

    def check_free(self, pools: Sequence[str], gpus: float) -> None:
        _need_head(self._head)
        free = self._ray.available_resources().get("GPU", 0)
        if round(gpus * len(pools), 4) > round(free, 4):
            raise BadInput(
                f"{len(pools)} new processes, each with {gpus:g} GPU",
                f"the cluster has {free:g} free GPUs; the GPUs of old processes become free only when these have ended",
                "keep pools (by name and number of devices), or close and open again",
            )

    def start(self, infos: Sequence[HostInfo]) -> None:
        asked_s = time.time()
        self.check(infos)
        nodes, first = when_free(max(self._wait_s, GRANT_S), self._note, lambda: nodes_of_hosts(self._ray, infos)), 0
        self._need_same_code(infos, nodes)
        for _, ranks in groupby(infos, key=lambda info: info.pool):
            pool = list(ranks)
            self._start_pool(pool, nodes[first : first + len(pool)], asked_s)
            first += len(pool)
        asked = {info.name: self._pending(info.name, self._actors[info.name].process.remote()) for info in infos}
        while len(self.wait(list(asked.values()), POLL_S)) < len(asked):
            _need_head(self._head)
            self._note("starting hosts")
        self.processes |= {name: pending.result()[0] for name, pending in asked.items()}

    def _start_pool(self, infos: Sequence[HostInfo], nodes: Sequence[str], asked_s: float) -> None:
        ray = self._ray
        group = self._devices(infos, nodes)
        actor_class = _actor_class(ray)
        for index, info in enumerate(infos):
            self._actors[info.name] = actor_class.options(
                name=_actor_name(self._lab, info.name),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                num_cpus=CPU_SHARE,
                num_gpus=info.gpus,
                runtime_env=self._runtime_env(info),
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            ).remote(info, asked_s)

    def _runtime_env(self, info: HostInfo) -> dict[str, Any]:
        threads = str(info.threads)
        variables = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # idle threads that spin take cores from other hosts, which makes those up to ten times slower
            "OMP_WAIT_POLICY": "passive",
            "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "0"),
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",  # a host uses GPU 0, and sees only its own
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        head = running_head() if self._head is not None else None
        if head is None or info.gpus:
            return {"env_vars": variables}
        return {"env_vars": variables, "py_executable": python_for_hosts(head["hosts"])}  # in place of a new Python

    def _need_same_code(self, infos: Sequence[HostInfo], nodes: Sequence[str]) -> None:
        """Raise `MissingDependency` where a machine for hosts has other code. nodes: empty: check all machines."""
        here, there = self._ray.get_runtime_context().get_node_id(), answering(self._ray)
        others = {name: there[name]["NodeManagerHostname"] for name in {*nodes} or there if name != here}
        need_same(self._ray, others, self._runtime_env(infos[0]))

    def machines(self, infos: Sequence[HostInfo]) -> list[str]:
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        return [names[node] for node in nodes_of_hosts(self._ray, infos)] if infos else []

    def machines_now(self) -> dict[str, str]:
        return {name: process.machine for name, process in self.processes.items()}

    def racks(self) -> dict[str, str]:
        nodes = self._ray.nodes()
        return {node["NodeManagerHostname"]: node["Labels"].get(RACK_LABEL, "") for node in nodes if node["Alive"]}

    def end(self, infos: Sequence[HostInfo]) -> None:
        gone = [self.processes.pop(info.name) for info in infos if info.name in self.processes]
        actors = [self._actors.pop(info.name) for info in infos if info.name in self._actors]
        if not self._without_head():  # otherwise they ended with the head
            for actor in actors:
                self._ray.kill(actor)
            for name in dict.fromkeys(map(_group_name, infos)):
                _remove_groups(self._ray, name)
        end(gone, grace_s=END_GRACE_S)

    def _devices(self, infos: Sequence[HostInfo], nodes: Sequence[str]) -> Any:
        """Reserve one device for each host of a pool, in a placement group. nodes: their machines; empty: any."""
        ray = self._ray
        group = ray.util.placement_group(
            [{"CPU": CPU_SHARE, **({"GPU": info.gpus} if info.gpus else {})} for info in infos],
            strategy="PACK",
            name=_group_name(infos[0]),
            lifetime="detached",
            # without it, PACK fills one machine after the other, and ignores pools
            **({"bundle_label_selector": [{NODE_LABEL: node} for node in nodes]} if nodes else {}),
        )
        ready, deadline = group.ready(), time.monotonic() + max(self._wait_s, GRANT_S)
        while not ray.wait([ready], timeout=POLL_S)[0]:
            _need_head(self._head)
            self._note(f"waiting for {len(infos)} free device(s)")
            if time.monotonic() > deadline:
                kind = "GPU" if infos[0].gpus else "CPU"
                free, total = (f().get(kind, 0) for f in (ray.available_resources, ray.cluster_resources))
                raise DevicesTaken(
                    f"{len(infos)} device(s) for pool {infos[0].pool!r} are not free",
                    f"{free:g} of the cluster's {total:g} {kind}(s) are free",
                    "close other workbenches (`wb ls`), or use fewer devices",
                )
        return group

    def attach(self, infos: Sequence[HostInfo]) -> set[str]:
        """Find hosts that an earlier kernel started. Returns the names of those that are gone; `HostDied` for all."""
        lost = set[str]()
        for info in infos:
            try:
                actor = self._ray.get_actor(_actor_name(self._lab, info.name), namespace=NAMESPACE)
                self.processes[info.name], known = self._ray.get(actor.process.remote(), timeout=ATTACH_TIMEOUT_S)
                variables = {name: value for name, value in self._before.variables.items() if name in known}
                self._known[info.name] = replace(self._before, variables=variables)
                self._actors[info.name] = actor
            except (ValueError, self._ray.exceptions.RayError) as error:
                lost.add(info.name)
                if len(lost) == len(infos):
                    raise HostDied(
                        f"all hosts of workbench {self._lab} are gone", "none of its processes is left",
                        "open it again with if_exists='replace', or continue from a checkpoint with wb.restore(path)",
                    ) from error  # fmt: skip
        return lost

    def end_others(self, infos: Sequence[HostInfo]) -> None:
        """End the hosts of this workbench other than these: a kernel that was killed during a move or a restart has
        left them."""
        _remove_groups(self._ray, _groups_prefix(self._lab), [_group_name(info) for info in infos])

    def _pending(self, host: str, ref: Any) -> RayPending:
        machine = self.processes[host].machine if host in self.processes else ""
        where = f" on machine {machine}" if machine and machine != socket.gethostname() else ""
        return RayPending(self._ray, ref, f"{host}{where}", self._head)

    def _send(self, host: str, call: Any, *args: Any, **kwargs: Any) -> RayPending:
        """Call a host. Raises `BadInput` for arguments that cannot be sent."""
        with _sending(host):
            return self._pending(host, call.remote(self._driver, *args, **kwargs))

    def drive(self) -> None:
        """Make the hosts obey this kernel, and no other."""
        asked = [self._pending(host, actor.drive.remote(self._driver)) for host, actor in self._actors.items()]
        for pending in asked:
            pending.result()

    def execute(self, hosts: Sequence[str], calls: Sequence[Call], progress: Progress) -> Iterator[Pending]:
        machine, now, pickled = socket.gethostname(), ProcessEnvironment.here(), dict[tuple[int, ...], bytes]()
        for host, call in zip(hosts, calls, strict=True):
            actor, changes = self._actor(host), dict[str, Any]()
            if self.processes[host].machine == machine and (known := self._known.get(host, self._before)) != now:
                changes, self._known[host] = now.since(known), now
                variables = changes.get("variables", {})
                changes |= {"variables": {name: variables[name] for name in variables if not name.startswith(OF_HOSTS)}}
            common, own = call.parts()
            arguments = tuple(map(id, common.values()))
            if arguments not in pickled:  # most ranks have the same common part
                with _sending(host):
                    pickled[arguments] = self._ray.cloudpickle.dumps(common)
            yield self._send(host, actor.execute, pickled[arguments], own, changes)

    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self._send(host, self._actor(host).control, method, *args, **kwargs)

    def work(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self._send(host, self._actor(host).compute, method, *args, **kwargs)

    def wait(self, pending: Sequence[Pending], timeout_s: float, count: int | None = None) -> list[Pending]:
        asked = [one for one in pending if isinstance(one, RayPending)]
        if left := {one.ref: one for one in asked if not one.ready}:
            wanted = len(left) if count is None else count - len(asked) + len(left)
            if timeout_s and wanted > 0:
                self._ray.wait([*left], num_returns=wanted, timeout=timeout_s)
            ready = self._ray.wait([*left], num_returns=len(left), timeout=0)[0]
            for ref in ready:
                left[ref].ready = True
            with contextlib.suppress(Exception):  # the error of one host: its `result` raises it
                for ref, value in zip(ready, self._ray.get(ready), strict=True):
                    left[ref].answer = (value,)
        return [one for one in asked if one.ready]

    def close(self) -> None:
        end_hosts(self._lab, self.cluster, self._actors, self.processes.values())
        self._actors.clear()
