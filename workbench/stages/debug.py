"""The last stage that failed, with its input, ranks and error, and `lab.debug()`, which runs it again in the kernel,
where pdb works."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from workbench.backends.base import Backend
from workbench.backends.inline import InlineBackend
from workbench.backends.starting import join_pools, settle
from workbench.display.html import kv
from workbench.errors import BadInput, NotFound, StageInterrupted, UpstreamError, WorkbenchError
from workbench.errors.frames import StageFailure, block, cell_names
from workbench.errors.plain_text import shown
from workbench.messages.calls import Call, HostInfo, Output
from workbench.messages.operation import Operation
from workbench.models.spec import Model
from workbench.placement import ROLLOUT, Layout
from workbench.placement.state import state_of
from workbench.support.calls.sessions import in_place
from workbench.workers.host import Host
from workbench.workers.model_worker import random_kept, set_random_state
from workbench.workers.role_state import RankState, RoleMove
from workbench.workers.roles import ROLE_WORKERS

if TYPE_CHECKING:
    from workbench.batches.batch import Batch
    from workbench.config.description import Description
    from workbench.stages.run import Run
    from workbench.stages.runner import StageRunner


@dataclass(frozen=True, kw_only=True, repr=False)
class FailedStage:
    """A stage that failed. `lab.last_error()`

    ranks: the failed ranks; empty where a process ended or a deadline passed. batch: the stage's input, kept on the
    hosts as long as this object; None for a stage without one. arguments: all, by name. calls: of each rank.
    """

    role: str
    stage: str
    pool: str
    run: int
    error: Exception
    batch: Batch | None
    arguments: Mapping[str, Any]
    operation: Operation = field(repr=False)
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        return () if self._failure is None else self._failure.ranks

    @property
    def _failure(self) -> StageFailure | None:
        return self.error.failure if isinstance(self.error, WorkbenchError) else None

    @property
    def text(self) -> str:
        """The error as the cell showed it, without the cell's own lines."""
        said = block(self.error) if isinstance(self.error, WorkbenchError) else str(self.error)
        return f"{type(self.error).__name__}: {said}"

    def __repr__(self) -> str:
        ranks = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        batch = "" if self.batch is None else f", {self.batch.id}, {self.batch.rows} rows"
        return f"<{self.role}.{self.stage} failed{ranks}: {type(self.error).__name__}{batch}>"

    def _repr_html_(self) -> str:
        values = {
            "stage": f"{self.role}.{self.stage}, run {self.run}, pool {self.pool}",
            "ranks": ", ".join(map(str, self.ranks)),
            "error": f"{type(self.error).__name__}: {self.error}",
            "batch": "" if self.batch is None else f"{self.batch.id}, {self.batch.rows} rows",
            **{name: f"{shown(value, 80)}" for name, value in self.arguments.items()},
        }
        frames = "\n".join(self._failure.lines(cell_names())) if self._failure else ""
        block = f"<pre>{escape(frames)}</pre>" if frames else ""
        return kv(values, caption=repr(self).strip("<>")) + block


class Failures:
    """Keeps the last failure of a workbench. name: the workbench's name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: FailedStage | None = None

    def note(self, run: Run, error: Exception) -> None:
        """Keep the failure of a run, unless the stage was interrupted, or its input failed."""
        if isinstance(error, StageInterrupted | UpstreamError):
            return
        self._last = FailedStage(
            role=run.group.role, stage=run.stage, pool=run.group.pool.name, run=run.number, error=error,
            batch=run.input, arguments=dict(run.arguments), operation=run.operation, calls=tuple(run.calls),
        )  # fmt: skip

    def last(self) -> FailedStage:
        """Return the last stage that failed, even if nobody waited for it: role, stage, ranks, the error and its text,
        the arguments, and in `.batch` its input, which is kept on the hosts until the next failure, or
        `lab.forget_error()`. Raises `NotFound` where none has failed."""
        if self._last is None:
            raise NotFound(f"no stage of {self._name!r} has failed", "in this kernel, or it was forgotten")
        return self._last

    def forget(self) -> None:
        """Forget the last failure, and release the batch that is kept with it."""
        self._last = None


# --- lab.debug() ----------------------------------------------------------------------------------------------------


def debug(runner: StageRunner, *, rank: int | None = None, device: Literal["cpu", "cuda"] | None = None) -> Any:
    """Run the last stage that failed again, in this kernel, where `breakpoint()`, `%debug` and pdb work.

    A new worker of the role in this kernel takes the state of the live one (weights, moments, step count, random state;
    gathered from all ranks), and is called as rank `rank` was (None: the first that failed): with its rows of the kept
    batch, its arguments, its seed. The error is raised here with its real frames. Nothing in the workbench changes; on
    the inline backend the live worker runs the stage, and the role's state is put back. Functions that score are called
    one after the other in this thread, and without a time limit.

    device: "cpu" or "cuda"; None: that of the workbench, if this process has one. If the stage does not fail here,
    prints that, and returns what the rank made: an `Output` or a value.

    The worker has the present state: an update that failed in its third step has taken two. One rank runs alone: sums
    over ranks are over its own rows, and a model that was sharded gives the same numbers within rounding. Raises
    `NotFound` where no stage has failed, `BadInput` where the stage cannot be run here.
    """
    failed = runner.failures.last()
    runner.check_driver()
    rank = (failed.ranks or (0,))[0] if rank is None else rank
    if rank not in range(len(failed.calls)):
        raise BadInput(f"rank={rank}", f"{failed.role}.{failed.stage} ran on ranks 0 to {len(failed.calls) - 1}")
    runner.require_alone("debug()", "no stage may run on the role meanwhile")
    call = failed.calls[rank]
    pulls = tuple(
        (names, tuple(pull._replace(shard=pull.shard.now(runner.hosts.shard_successors)) for pull in parts))
        for names, parts in call.pulls
    )
    call = replace(call, kept=None, pulls=pulls)
    rows = "" if call.rows is None else f", {len(call.rows)} rows of {failed.batch.id if failed.batch else ''}"
    print(f"running {failed.role}.{failed.stage} here, as rank {rank} of run {failed.run}{rows}:")
    inline = isinstance(runner.hosts.backend, InlineBackend)
    with _live_host(runner, call) if inline else _own_host(runner, failed, call, device) as host, in_place():
        output = host.replay(call if inline else replace(call, role=_role_of(call)))
    print(
        f"{failed.role}.{failed.stage} did not fail here; it failed with {type(failed.error).__name__} on "
        f"{'rank ' + ', '.join(map(str, failed.ranks)) if failed.ranks else 'pool ' + failed.pool}"
    )
    return output if isinstance(output, Output) and output.value is None else output.value


def _role_of(call: Call) -> str:
    # rollout workers have the actor's weights, so the actor generates in their place
    return "actor" if call.role == ROLLOUT else call.role


@contextmanager
def _live_host(runner: StageRunner, call: Call) -> Iterator[Host]:
    """Yield the host of an inline workbench; put the role's state back at the end."""
    backend = runner.hosts.backend
    assert isinstance(backend, InlineBackend)
    roles = [call.role] if call.role in runner.groups.by_role else []
    with random_kept(), runner.snapshots.kept(*roles):
        yield backend.host(runner.hosts.infos[0].name)


class _KernelBackend(InlineBackend):
    """A host in the kernel that pulls rows and state from the hosts of a workbench."""

    def __init__(self, live: Backend) -> None:
        super().__init__()
        self._live = live

    def call(self, host: str, method: str, *args: Any) -> Any:
        if host in self._hosts:
            return super().call(host, method, *args)
        return self._live.ask(host, method, *args).result()


@contextmanager
def _own_host(runner: StageRunner, failed: FailedStage, call: Call, device: str | None) -> Iterator[Host]:
    """Yield a host in this process with a worker of the role, in the state of the live one."""
    role, spec = _role(runner.hosts.description, failed, call)
    worker_class = spec.worker if spec.worker and role != "numeric" else ROLE_WORKERS[role]
    if not hasattr(worker_class, call.method):
        raise BadInput(f"debug() of {failed.role}.{failed.stage}", "it runs between processes; debug() has only one")
    kind = device or ("cuda" if runner.hosts.description.device == "cuda" and torch.cuda.is_available() else "cpu")
    live = runner.hosts.infos[0]
    info = HostInfo(
        lab=live.lab, pool=f"debug-{secrets.token_hex(4)}", rank=0, world_size=1, device=f"{kind}:0",
        threads=live.threads, log_path=None,
    )  # fmt: skip
    description = runner.hosts.description
    lead = description.models[description.lead]
    backend = _KernelBackend(runner.hosts.backend)
    with random_kept():
        backend.start([info])
        try:
            join_pools(backend, [info], lambda text: None)
            host = backend.host(info.name)
            host.build(
                role, worker_class, spec, layout=Layout(), seed=description.seed, tokenizer_name=str(lead.name),
                folder=str(Path.cwd()), max_model_tokens=description.max_model_tokens,
                room=description.rooms().get(role) if kind == "cuda" else None,
            )  # fmt: skip
            if role != "numeric" and spec.name is not None:
                _take_state(runner, role, host)
            yield host
        finally:
            backend.close()


def _role(description: Description, failed: FailedStage, call: Call) -> tuple[str, Model]:
    """Return the role whose worker carries out the call in one process, and its model."""
    role = _role_of(call)
    models = description.declared
    if role not in models and role != "numeric":
        raise BadInput(f"debug() of {failed.role}.{failed.stage}", f"the {role} was dropped", f"lab.add({role!r}, ...)")
    spec = models[description.lead if role == "numeric" else role]
    if role == "actor" and spec.generation is not None:
        # an engine takes memory and time to start: only operations that generate get one
        generation = replace(spec.generation, tensor_parallel_size=1) if failed.operation.generates else None
        spec = spec.changed(generation=generation)
    return role, spec


def _take_state(runner: StageRunner, role: str, host: Host) -> None:
    """Give the worker the state that the live ranks hold together; their own state stays as it is."""
    hosts, group = runner.hosts, runner.groups.by_role[role]
    runner.groups.check_alive(group)
    runner.scheduler.drain()
    model, source = hosts.description.role_models()[role], hosts.description.layout_of(role)
    if model is not None:
        source = model.rank_layout(source)
    key = f"{runner.ownership.controller}-debug-{secrets.token_hex(4)}"
    move = RoleMove(
        role=role, key=key, hosts=(*group.hosts, host.info.name),
        parts=() if model is None else tuple(state_of(model)), source=(source, tuple(range(len(group.hosts)))),
        destination=(Layout(), (len(group.hosts),)),
    )  # fmt: skip
    steps = [
        hosts.step(f"publishing {role}", name, "publish_role", move, rank) for rank, name in enumerate(group.hosts)
    ]
    try:
        states: list[RankState] = settle(hosts.backend, steps, lambda text: None)
        host.take_role(move, 0, states[0], 0, beside=False)
    finally:
        for name in group.hosts:
            hosts.backend.ask(name, "release", move.published)
    set_random_state(states[0].random)
