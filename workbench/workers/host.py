"""A host: one process on one device that runs its roles' workers, one call at a time, and keeps rows of batches."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from workbench.batches.schema_check import check_columns
from workbench.engines.communicator import Communicator, join_pool, open_store
from workbench.errors import StageError
from workbench.errors.containing import must_propagate
from workbench.errors.plain_text import shown
from workbench.messages.calls import Call, Failure, HostInfo, Output, Reply, column_summary
from workbench.messages.metrics import Metrics, as_metrics
from workbench.messages.shards import Shard
from workbench.models.spec import Model
from workbench.placement.state import Part
from workbench.support.machine import (
    available_bytes,
    own_gpu_bytes,
    own_gpu_free_bytes,
    return_freed_memory,
    total_bytes,
)
from workbench.support.sources import SourceFile, loaded
from workbench.telemetry import Recorder, Span
from workbench.workers.hints import memory_remedy, require_finite
from workbench.workers.model_worker import random_kept, set_random_state
from workbench.workers.patching import Models, Patch, Patched
from workbench.workers.role_state import (
    RankState,
    Received,
    RoleFiles,
    RoleMove,
    engine_of,
    publish_state,
    read_role,
    take_state,
    write_role,
)
from workbench.workers.shards import Shards
from workbench.workers.stopping import StageStopped, Stopping
from workbench.workers.weight_exchange import Contents, HostCall, Slice, WeightExchange
from workbench.workers.weight_intake import probe, timed_bytes_s
from workbench.workers.worker import Context, SharedDevice, Worker

QUESTIONS = 5


class Host(Shards):
    """Rank `info.rank` of a pool. Works the same inside a Ray actor and inside the kernel."""

    def __init__(self, info: HostInfo, call: HostCall) -> None:
        super().__init__(info, Recorder(), call)
        self._exchange = WeightExchange(info.name, self.recorder, call)
        self.workers: dict[str, Worker] = {}
        self._incoming: dict[str, Worker] = {}  # workers that `replace_roles` will put into `workers`
        self._device = SharedDevice(info, self.recorder, self.workers)
        self._snapshots: dict[str, dict[str, dict[str, Any]]] = {}
        self._progress: tuple[int, int, int] = (0, 0, 0)
        self._busy: str = ""
        self._stopping = Stopping(info.rank, info.world_size)
        self._last: tuple[int, Reply] | None = None
        # set where the controller cannot ask for the status while a stage runs
        self.on_progress: Callable[[int, int, int], None] | None = None
        self._patch = Patch()
        self._began_s = time.time()  # when the process was created, if it is this host's alone
        self._start_s, self._load_s = 0.0, dict[str, float]()
        self._computing = threading.Lock()  # held while a stage computes, or while roles' tensors are looked at
        self._role_facts: dict[str, dict[str, Any]] = {}  # what `_describe_roles` last found
        self._store: torch.distributed.Store | None = None
        loaded.note()
        torch.set_num_threads(info.threads)

    # --- opening ------------------------------------------------------------------------------------------------------

    def _labels(self, stage: str = "open", run: int = 0, role: str = "") -> AbstractContextManager[None]:
        info = self.info
        return self.recorder.bind(stage=stage, run=run, role=role, pool=info.pool, rank=info.rank, device=info.device)

    def note_start(self, asked_s: float) -> None:
        """Record how long this process took to start. asked_s: the unix time at which the process was requested."""
        import psutil

        now_s = time.time()
        self._began_s = created_s = min(max(asked_s, psutil.Process().create_time()), now_s)
        with self._labels():
            self.recorder.add("start", asked_s, created_s, note="the host's process")
            self.recorder.add("import", created_s, now_s, note="the host's packages")

    def take_spans(self) -> list[Span]:
        """Return the spans recorded since the last stage or the last call of this method."""
        return self.recorder.drain()[0]

    def open_store(self) -> tuple[str, int]:
        """On rank 0, open the pool's rendezvous store; return its address and port."""
        self._store, address, port = open_store(several=self.info.world_size > 1)
        return address, port

    def join(self, address: str, port: int) -> None:
        """On every rank, join the pool's process group, see `join_pool`."""
        with self._labels(), self.recorder.span("join", note="joining the pool's process group"):
            self._stopping.store = join_pool(self.info, address, port, self._store)
        if 0 < self.info.gpus < 1:
            torch.cuda.set_per_process_memory_fraction(self.info.gpus)
        self._start_s = time.time() - self._began_s

    # --- roles --------------------------------------------------------------------------------------------------------

    def build(self, role: str, worker_class: type[Worker], spec: Model, *, replaces: bool = False, **more: Any) -> None:
        """Load a role's model and engines. replaces: build beside the live roles, to replace one of them at
        `replace_roles`. more: `layout`, `seed`, `tokenizer_name`, `folder`, `max_model_tokens` and `room` of its
        `Context`."""
        info = self.info
        context = Context(
            host=info,
            communicator=Communicator(info.rank, info.world_size, self.recorder, hosts=info.peers),
            recorder=self.recorder,
            progress=self._note_progress,
            exchange=self._exchange,
            stopping=self._stopping,
            replaces_live=replaces,
            **more,
        )
        self._busy, began = f"loading {role}", time.monotonic()
        loaded.note()
        try:
            with self._labels():
                self._device.clear_for(role)
            # loading beside live roles leaves the random generators as they were
            with random_kept(replaces), self._labels(role=role), self.recorder.span("build"):
                (self._incoming if replaces else self.workers)[role] = worker_class(spec, context)
            self._load_s[role] = time.monotonic() - began
        finally:
            self._busy = ""
            loaded.note()

    def execute(self, call: Call) -> Reply:
        """Run one rank's part of a stage. An error comes back as a `Failure` inside the reply. If the stage was
        stopped, or an update failed between two steps, the reply says how many steps were taken."""
        recorder = self.recorder
        recorder.drain()
        loaded.note()
        self.release(call.released)
        self._progress, self._busy = (0, 0, 0), call.stage
        output, columns, metrics, failure, stopped = Output(), {}, Metrics(), None, None
        self._stopping.begin(call.run, call.resume_from, updates=call.updates)
        try:
            with self._while_computing(), self._labels(call.stage, call.run, call.role):
                recorder.add("queue", call.submitted_s, time.time())
                output = self._carry_out(call)
                metrics = as_metrics(output.metrics)
                columns = self._keep(output.columns, call)
        except StageStopped as stop:
            stopped = stop.part
        except BaseException as error:
            if must_propagate(error):
                raise
            failure = Failure.of(error, memory_remedy(error, self, call))
            engine = engine_of(self.workers[call.role]) if call.updates and call.role in self.workers else None
            if engine is not None and not engine.half_moved:
                stopped = self._stopping.part_if_failed
        finally:
            self._stopping.end()
            self._busy = ""
            loaded.note()
        spans, transfers, syncs = recorder.drain()
        reply = Reply(
            rank=self.info.rank,
            columns={name: column_summary(column) for name, column in columns.items()},
            metrics=metrics,
            meta=output.meta,
            notes=output.notes,
            value=output.value,
            spans=spans,
            transfers=transfers,
            syncs=syncs,
            failure=failure,
            stopped=stopped,
            failed=output.failed,
            scored=output.scored,
        )
        self._last = call.run, reply
        return reply

    def reply_of(self, run: int) -> Reply | None:
        """Return the last stage's reply if that stage was this run, else None; for a kernel that reattaches."""
        return self._last[1] if self._last is not None and self._last[0] == run else None

    def _carry_out(self, call: Call) -> Output:
        """Call the worker's method and return its output."""
        recorder, worker, arguments, shard = self.recorder, self.workers[call.role], call.args, None
        if call.rows is not None:
            with worker.context.communicator.all_or_none():
                shard = self._shard(call, call.rows, worker)
            arguments = (shard, *arguments)
        with recorder.span("compute"):
            self._device.turn_to(call.role, call.method)
            # looked up by name at call time, so that reloaded code takes effect with state kept
            if call.training is not None:
                worker.retrain(call.training)
            result = getattr(worker, call.method)(*arguments, **call.kwargs)
        output = result if isinstance(result, Output) else Output(value=result)
        output = replace(output, notes=(*output.notes, *worker.take_notes()))
        require_finite(output, call, shard, worker)
        return output

    def _shard(self, call: Call, rows: np.ndarray, worker: Worker) -> Shard:
        """Pull this rank's rows of a stage's batch, and check the columns against their schema."""
        with self.recorder.span("transfer") as counted:
            columns = self._pull(call, counted)
            check_columns(columns, rows, worker.limits, all_valid=call.all_valid)
        sizes, sample = call.minibatch_sizes, call.sample
        return Shard(columns=columns, rows=rows, minibatch_sizes=sizes, sample=sample, meta=call.meta)

    def replay(self, call: Call) -> Output:
        """Run one rank's part of a stage again, without keeping its results or catching its errors."""
        listener, self.on_progress = self.on_progress, None
        try:
            with self._while_computing(), self._labels(call.stage, call.run, call.role):
                output = self._carry_out(call)
                as_metrics(output.metrics)
                self._keep(output.columns, replace(call, kept=None))
            return output
        finally:
            self.on_progress = listener
            self.recorder.drain()

    def _note_progress(self, done: int, total: int, tokens: int) -> None:
        self._progress = (done, total, tokens)
        if self.on_progress is not None:
            self.on_progress(done, total, tokens)

    # --- for other hosts ----------------------------------------------------------------------------------------------

    def release(self, keys: Collection[str]) -> None:
        """Forget shards to which no handle refers any more, and published weights that have been taken."""
        self._exchange.release(keys)
        super().release(keys)

    def published_contents(self, key: str) -> Contents | None:
        return self._exchange.snapshot(key).contents

    def cut_weights(
        self, key: str, wanted: Sequence[Slice], checksums: bool, since: str
    ) -> tuple[list[Any], list[int]]:
        """Return slices of published weights for another process, or patches of them: see `WeightExchange.served`."""
        return self._exchange.served(key, wanted, checksums, since)

    def publish_probe(self, key: str) -> None:
        self._exchange.publish(key, probe()[0])

    def probe_link(self, key: str, host: str) -> float:
        """Measure the bytes a second that this host receives from another host, which has published a probe."""
        return timed_bytes_s(key, host, self._call_host)

    def probe_answer(self, host: str) -> float:
        """Measure the seconds in which another host answers: the least of `QUESTIONS` attempts."""
        took_s = []
        for _ in range(QUESTIONS):
            began = time.perf_counter()
            self._call_host(host, "status")
            took_s.append(time.perf_counter() - began)
        return min(took_s)

    def rates(self, devices: int) -> Any:
        """Measure the rates of this machine's hardware, divided into `devices` slots."""
        from workbench.mapping.probe import this_machine

        return this_machine(devices)

    # --- moves and checkpoints ----------------------------------------------------------------------------------------

    def publish_role(self, move: RoleMove, rank: int) -> RankState:
        self._device.turn_to(move.role)
        return publish_state(self.workers[move.role], move, rank, self._exchange)

    def take_role(self, move: RoleMove, rank: int, state: RankState, run: int, *, beside: bool) -> Received:
        """Take the state of a role that was built here. beside: the role waits for `replace_roles`."""
        built = self._incoming if beside else self.workers
        if move.role not in built:  # the other dict may have a worker of the same name that stays
            raise StageError(f"{move.role} was not built", "loading it has failed")

        def take() -> None:
            take_state(built[move.role], move, rank, self._exchange, state)

        with self._while_computing():
            return self._received(take, f"taking {move.role}", run, move.role)

    def take_shards(self, host: str, run: int) -> Received:
        """Take over the shards of a host that is about to end."""
        return self._received(lambda: self.inherit(host), f"taking the batches of {host}", run, "")

    def _received(self, take: Callable[[], None], what: str, run: int, role: str) -> Received:
        start_s = time.time()
        self.recorder.drain()
        self._busy, self._progress = what, (0, 0, 0)
        try:
            with self._labels("move", run, role):
                take()
        finally:
            self._busy = ""
        return Received(transfers=self.recorder.drain()[1], start_s=start_s, end_s=time.time())

    def save_role(self, files: RoleFiles, rank: int) -> RankState:
        """Write this rank's part of a role's state. rank: this host's rank in the role's layout."""
        self._device.turn_to(files.role)
        return write_role(self.workers[files.role], files, rank)

    def save_model(self, files: RoleFiles, rank: int) -> None:
        """Write a role's model in the format that transformers loads; all ranks of the role call it together."""
        self._device.turn_to(files.role)
        self.workers[files.role].save_model(f"{files.folder}/model")  # type: ignore[attr-defined]

    def load_role(self, files: RoleFiles, parts: Sequence[Part], rank: int, state: RankState) -> None:
        """Restore a role's state from files; see `role_state.read_role`."""
        with self._while_computing(), random_kept():
            self._device.turn_to(files.role)
            read_role(self.workers[files.role], files, parts, rank, state)

    def continue_random(self, state: dict[str, Any]) -> None:
        set_random_state(state)

    def set_threads(self, threads: int) -> None:
        self.info = replace(self.info, threads=threads)
        torch.set_num_threads(threads)

    def replace_roles(self, closed: Collection[str], opened: Collection[str], engines: Mapping[str, Model]) -> None:
        """Close roles, change whether other roles generate (engines: their new models), and install the workers that
        were built beside them. All ranks of the pool call this method."""
        with self._while_computing():
            for role in closed:
                worker = self.workers.pop(role)
                _end(role, worker.close, worker.context.calls.close, worker.context.leave_groups)
                del worker
            _return_memory()
            for role, spec in dict(engines).items():
                with random_kept():
                    self.workers[role].change(spec)
            for role in opened:
                worker = self._incoming.pop(role)
                with random_kept():
                    worker.begin()
                self.workers[role] = worker

    def abandon_move(self, hosts: Sequence[str]) -> None:
        """Discard workers that were built beside live roles, and shards inherited from hosts that stay."""
        _close(self._incoming)
        _return_memory()
        self.disinherit(hosts)

    def snapshot(self, key: str, roles: Iterable[str]) -> int:
        self._snapshots[key] = {}
        with self._while_computing():
            for role in roles:
                self._device.turn_to(role)
                self._snapshots[key][role] = self.workers[role].state()
        tensors = torch.utils._pytree.tree_leaves(self._snapshots[key])
        return sum(leaf.nbytes for leaf in tensors if isinstance(leaf, torch.Tensor))

    def restore(self, key: str) -> None:
        with self._while_computing():
            for role, state in self._snapshots[key].items():
                self._device.turn_to(role)
                self.workers[role].load_state(state)

    def drop_snapshot(self, key: str) -> None:
        self._snapshots.pop(key, None)

    # --- edited code --------------------------------------------------------------------------------------------------

    def stale_sources(self) -> dict[str, SourceFile]:
        """Return the files of this process's modules whose text differs from the code that runs."""
        loaded.note()
        return loaded.stale()

    def source_files(self) -> list[str]:
        return [source.path for source in loaded.texts.values()]

    def patch(self, texts: Mapping[str, SourceFile], models: bytes | Models) -> Patched:
        self._patch = Patch()
        return self._patch.apply(texts, self.workers, models, strict=True)

    def settle_patch(self, keep: bool) -> None:
        (self._patch.keep if keep else self._patch.undo)()

    # --- while a stage computes ---------------------------------------------------------------------------------------

    def stop(self, run: int) -> None:
        """Stop a run at a point where all ranks in step can stop, see `workbench.workers.stopping`."""
        self._stopping.stop(run)

    def status(self) -> tuple[str, int, int, int]:
        """Return (what is running, done, total, tokens); answered while a stage computes."""
        return (": ".join(filter(None, (self._busy, self.recorder.doing))), *self._progress)

    def describe(self) -> dict[str, Any]:
        """Describe the process, its machine and device; roles' layouts, bytes and settings; and which of their
        optimizers have taken a step. During a stage, facts about roles are those of the last look before it."""
        import psutil

        return_freed_memory()  # called once per iteration
        info, on_gpu = self.info, self.info.device.startswith("cuda")
        # a thread must not read a gradient while another one drops it: torch does not guard against that
        if self._computing.acquire(blocking=False):
            try:
                self._role_facts = self._describe_roles()
            finally:
                self._computing.release()
        return {
            "host": info.name,
            "pool": info.pool,
            "rank": info.rank,
            "device": info.device,
            "process": os.getpid(),
            "machine": socket.gethostname(),
            "available_bytes": available_bytes(),
            "machine_bytes": total_bytes(),
            "device_bytes": own_gpu_bytes() if on_gpu else None,
            # used by all processes, contexts and caches included; with a share of a GPU, by this process
            "device_used_bytes": own_gpu_bytes() - own_gpu_free_bytes() if on_gpu else None,
            "threads": info.threads,
            "resident_bytes": psutil.Process().memory_info().rss,
            "start_s": self._start_s,
            "load_s": self._load_s,
            "batch_bytes": self.shard_bytes,
            "shards": len(self.shard_keys()),
            "published_bytes": self._exchange.held_bytes,
            "moments": [role for role, held in self._role_facts.items() if held["has_moments"]],
            "layouts": {role: held["layout"] for role, held in self._role_facts.items()},
            "roles": {role: held["state"] for role, held in self._role_facts.items()},
        }

    @contextmanager
    def _while_computing(self) -> Iterator[None]:
        """Reserve the roles' tensors for this thread, which computes or changes them; others must not look at them."""
        with self._computing:
            if self._role_facts.keys() != self.workers.keys():
                self._role_facts = self._describe_roles()
            yield

    def _describe_roles(self) -> dict[str, dict[str, Any]]:
        """Return what the roles hold now."""
        return {
            role: {
                "has_moments": bool(getattr(getattr(worker, "engine", None), "has_moments", False)),
                "layout": worker.layout,
                "state": {**worker.describe(), **worker.memory_bytes()},
            }
            for role, worker in self.workers.items()
        }

    def close(self) -> None:
        """Free the workers and batches. The process group ends with the process, or inline with the last workbench."""
        _close(self.workers)
        self._shards.clear()
        if torch.cuda.is_initialized():  # inline, where the process goes on
            _return_memory()


def _end(role: str, *steps: Callable[[], None]) -> None:
    """Run the steps that end a role. If a step fails, warn and run the others: the role is gone all the same."""
    for step in steps:
        try:
            step()
        except Exception as error:
            warnings.warn(f"closing {role} failed: {shown(error, 400)}", stacklevel=2)


def _close(workers: dict[str, Worker]) -> None:
    while workers:
        role, worker = workers.popitem()
        _end(role, worker.close, worker.context.calls.close)


def _return_memory() -> None:
    """Free the memory of closed workers for libraries that allocate beside torch, such as NCCL and vLLM."""
    gc.collect()  # engines have reference cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
