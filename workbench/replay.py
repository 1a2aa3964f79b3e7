"""Running a failed stage again in the kernel: `lab.debug()`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from workbench.engines.settings import one_of
from workbench.errors import BadInput
from workbench.models.spec import Model
from workbench.placement import ROLLOUT, Layout
from workbench.placement.state import state_of
from workbench.starting import Step, join_pools, settle
from workbench.workers.backends import Backend, InlineBackend
from workbench.workers.calls import Call, HostInfo, Output
from workbench.workers.host import Host
from workbench.workers.model_worker import set_random_state
from workbench.workers.role_state import Carried, RoleMove
from workbench.workers.roles import ROLE_WORKERS
from workbench.workers.user_calls import in_place

if TYPE_CHECKING:
    from workbench.controller import Workbench
    from workbench.failing import FailedStage


def replay(lab: Workbench, failed: FailedStage, *, rank: int | None, device: str | None, post_mortem: bool) -> Any:
    """`lab.debug(...)`."""
    lab._check_open()
    lab.check_driver()
    one_of("device", device, (None, "cpu", "cuda"))
    rank = (failed.ranks or (0,))[0] if rank is None else rank
    if rank not in range(len(failed.calls)):
        raise BadInput(f"rank={rank}", f"{failed.role}.{failed.stage} ran on ranks 0 to {len(failed.calls) - 1}")
    if lab.overlapping or lab._keeping:
        where = "overlap()" if lab.overlapping else "kept()"
        raise BadInput(f"debug() inside lab.{where}", "it needs the role as it is, and not at work", "do it afterwards")
    call = failed.calls[rank]
    pulls = tuple(
        (names, tuple(pull._replace(shard=pull.shard.now(lab._heirs)) for pull in parts)) for names, parts in call.pulls
    )
    call = replace(call, keep=False, pulls=pulls)
    rows = "" if call.rows is None else f", {len(call.rows)} rows of {failed.batch.id if failed.batch else ''}"
    print(f"{failed.role}.{failed.stage} as rank {rank} of run {failed.run} was asked{rows}, here:")
    inline = isinstance(lab._backend, InlineBackend)
    with _live_host(lab, call) if inline else _own_host(lab, failed, call, device) as host:
        try:
            with in_place():
                output = host.replay(replace(call, role=ROLE_OF.get(call.role, call.role)) if not inline else call)
        except Exception as error:
            if not post_mortem:
                raise
            _enter_debugger(error.__traceback__)
            return None
    print(
        f"{failed.role}.{failed.stage} did not fail here; it failed with {type(failed.error).__name__} on "
        f"{'rank ' + ', '.join(map(str, failed.ranks)) if failed.ranks else 'pool ' + failed.pool}"
    )
    return output if isinstance(output, Output) and output.value is None else output.value


# rollout workers hold the actor's weights: in their place the actor generates
ROLE_OF = {ROLLOUT: "actor"}


@contextmanager
def _live_host(lab: Workbench, call: Call) -> Iterator[Host]:
    """The host of an inline workbench; the state of the role is put back at the end."""
    assert isinstance(lab._backend, InlineBackend)
    roles = [call.role] if call.role in lab.groups else []
    with torch.random.fork_rng(), lab.kept(*roles):
        yield lab._backend.host(lab._infos[0].name)


class _Beside(InlineBackend):
    """A host in the kernel that pulls from those of a workbench."""

    def __init__(self, live: Backend) -> None:
        super().__init__()
        self._live = live

    def call(self, host: str, method: str, *args: Any) -> Any:
        if host in self._hosts:
            return super().call(host, method, *args)
        return self._live.ask(host, method, *args).result()


@contextmanager
def _own_host(lab: Workbench, failed: FailedStage, call: Call, device: str | None) -> Iterator[Host]:
    """A host in this process with a worker of the role, in the state of the live one."""
    role, spec = _role(lab, failed, call)
    worker_class = spec.worker if spec.worker and role != "numeric" else ROLE_WORKERS[role]
    if not hasattr(worker_class, call.method):
        raise BadInput(f"debug() of {failed.role}.{failed.stage}", "it is between processes, and there is one here")
    kind = device or ("cuda" if lab.description.device == "cuda" and torch.cuda.is_available() else "cpu")
    live = lab._infos[0]
    info = HostInfo(
        lab=live.lab, pool=f"debug-{secrets.token_hex(4)}", rank=0, world_size=1, device=f"{kind}:0",
        threads=live.threads, log_path=None,
    )  # fmt: skip
    lead = lab.description.models[lab.description.lead]
    backend = _Beside(lab._backend)
    with torch.random.fork_rng():
        backend.start([info])
        try:
            join_pools(backend, [info], lambda text: None)
            host = backend.host(info.name)
            host.build(
                role, worker_class, spec, layout=Layout(), seed=lab.description.seed, tokenizer_name=str(lead.name),
                folder=str(Path.cwd()), room=lab.description.rooms().get(role) if kind == "cuda" else None,
            )  # fmt: skip
            if role != "numeric" and spec.name is not None:
                _take_state(lab, role, host)
            yield host
        finally:
            backend.close()


def _role(lab: Workbench, failed: FailedStage, call: Call) -> tuple[str, Model]:
    """Whose worker carries out the call in one process, and its model."""
    role = ROLE_OF.get(call.role, call.role)
    models = lab.description.declared
    if role not in models and role != "numeric":
        raise BadInput(f"debug() of {failed.role}.{failed.stage}", f"the {role} was dropped", f"lab.add({role!r}, ...)")
    spec = models[lab.description.lead if role == "numeric" else role]
    if role == "actor" and spec.generation is not None:
        # an engine takes memory, and a while to start: only for what asks something of it
        generation = replace(spec.generation, tensor_parallel_size=1) if failed.operation.generates else None
        spec = spec.generating(generation)
    return role, spec


def _take_state(lab: Workbench, role: str, host: Host) -> None:
    """Give the worker what the live ranks hold together; their own goes on as it is."""
    group = lab.groups[role]
    lab._check_alive(group)
    lab.scheduler.drain()
    model, source = lab.description.role_models()[role], lab.description.layout_of(role)
    if model is not None:
        source = model.standing(source)
    move = RoleMove(
        role=role, key=f"{lab._id}-debug-{secrets.token_hex(4)}", hosts=(*group.hosts, host.info.name),
        parts=() if model is None else tuple(state_of(model)), source=(source, tuple(range(len(group.hosts)))),
        destination=(Layout(), (len(group.hosts),)),
    )  # fmt: skip
    infos = {info.name: info for info in lab._infos}
    steps = [
        Step(f"publishing {role}", infos[name], lab._backend.work(name, "publish_role", move, rank))
        for rank, name in enumerate(group.hosts)
    ]
    try:
        carried: list[Carried] = settle(lab._backend, steps, lambda text: None)
        host.take_role(move, 0, carried[0], 0, beside=False)
    finally:
        for name in group.hosts:
            lab._backend.ask(name, "release", move.published)
    state = carried[0].random
    set_random_state({**state, "cuda": state["cuda"] if len(state["cuda"]) == torch.cuda.device_count() else []})


def _enter_debugger(trace: TracebackType | None) -> None:
    """The notebook's debugger, or Python's, at the last frame."""
    try:
        from IPython import get_ipython
    except ImportError:
        shell = None
    else:
        shell = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    if shell is None:
        import pdb

        pdb.post_mortem(trace)
        return
    debugger = shell.debugger_cls()
    debugger.reset()
    debugger.interaction(None, trace)
