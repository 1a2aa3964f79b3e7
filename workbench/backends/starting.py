"""Starts the hosts of a workbench: each pool's process group, then the models; one error for all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from workbench.backends.base import Backend, Pending, failure
from workbench.config.description import Description
from workbench.errors import HostDied, StageError, WorkbenchError
from workbench.messages.calls import HostInfo
from workbench.placement import Layout
from workbench.telemetry import Span, TelemetryStore
from workbench.workers.roles import ROLE_WORKERS

POLL_S = 0.2
# How long to wait for other failures after the first one, so that equal failures are reported together.
GRACE_S = 2.0

Note = Callable[[str], None]


@dataclass(frozen=True)
class Wait:
    """A part of opening for which all devices wait: its kind of span, start and end (unix times), and a note."""

    kind: str
    start_s: float
    end_s: float
    note: str


@dataclass(frozen=True)
class Step:
    """A request to one host, such as "loading critic"."""

    what: str
    host: HostInfo
    pending: Pending


def join_pools(backend: Backend, infos: Sequence[HostInfo], note: Note) -> None:
    """Join every pool's process group. Raises the errors of `settle`."""
    first = [
        Step("opening the pool's store", ranks[0], backend.work(ranks[0].name, "open_store")) for ranks in _pools(infos)
    ]
    stores = settle(backend, first, note)
    joining = [
        Step("joining its pool", info, backend.work(info.name, "join", *store))
        for ranks, store in zip(_pools(infos), stores, strict=True)
        for info in ranks
    ]
    settle(backend, joining, note)


def begin_loading(
    backend: Backend,
    infos: Sequence[HostInfo],
    description: Description,
    note: Note,
    *,
    roles: Mapping[str, Collection[str]] | None = None,
    beside: Collection[str] = (),
) -> list[Step]:
    """Begin to load the models of roles, with different pools in parallel; `settle` waits for them.

    roles: by pool, the roles to load; None: all. beside: the pools whose hosts keep roles that these will replace.
    """
    lead = description.models[description.lead]
    options = {
        "seed": description.seed, "tokenizer_name": str(lead.name), "folder": str(Path.cwd()),
        "max_model_tokens": description.max_model_tokens,
    }  # fmt: skip
    loading, rooms = [], description.rooms()
    for pool in description.placement.pools:
        # advantages are computed where the lead role is
        here = {role: description.models[role] for role in pool.roles}
        if description.lead in here:
            here["numeric"] = lead
        for role, model in here.items():
            if roles is not None and role not in roles[pool.name]:
                continue
            worker_class = model.worker if model.worker and role != "numeric" else ROLE_WORKERS[role]
            layout = Layout(d=pool.devices) if role == "numeric" else description.layout_of(role)
            # all ranks of a pool build the roles in the same order, because DeepSpeed builds on all ranks together
            for info in (info for info in infos if info.pool == pool.name):
                note(f"loading {role}")
                pending = backend.work(
                    info.name, "build", role, worker_class, model, layout=layout, room=rooms.get(role),
                    replaces=pool.name in beside, **options,
                )  # fmt: skip
                loading.append(Step(f"loading {role}", info, pending))
                if failure(pending):  # inline, where a call has ended when it returns
                    settle(backend, loading, note)
    return loading


def record_opening(
    backend: Backend, infos: Sequence[HostInfo], telemetry: TelemetryStore, waits: Sequence[Wait]
) -> None:
    """Record where the seconds of opening went: what all devices waited for, and what each host did."""
    for info in infos:
        telemetry.append_spans(
            Span(stage="open", run=0, role="", pool=info.pool, rank=info.rank, device=info.device, **vars(wait))
            for wait in waits
        )
        telemetry.append_spans(backend.ask(info.name, "take_spans").result())


def settle(backend: Backend, steps: Sequence[Step], note: Note) -> list[Any]:
    """Wait for all steps, tell `note` what the hosts are doing, and return the answers.

    The first failure ends the waiting, because other ranks of the pool may wait in a collective for the failed one.
    Raises `HostDied`, or an error of the failure's class if it is a workbench error, otherwise `StageError` with the
    remote traceback as a note; the message names the role, the pool and the ranks.
    """
    failed_s: float | None = None
    while len(backend.wait([step.pending for step in steps], POLL_S)) < len(steps):
        note(_doing(backend, steps) or steps[0].what)
        if failed_s is None and any(failure(step.pending) for step in steps):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() - failed_s > GRACE_S:
            break
    failures = [(step, error) for step in steps if (error := failure(step.pending))]
    if failures:
        raise _one_error(failures)
    return [step.pending.result() for step in steps]


def _pools(infos: Sequence[HostInfo]) -> Iterator[list[HostInfo]]:
    for _, ranks in groupby(infos, key=lambda info: info.pool):
        yield list(ranks)


def _doing(backend: Backend, steps: Sequence[Step]) -> str:
    """Return what the hosts say they are doing; empty where none answers quickly."""
    asked = [backend.ask(name, "status") for name in dict.fromkeys(step.host.name for step in steps)]
    backend.wait(asked, POLL_S)
    said: dict[str, None] = {}
    for answer in asked:
        with suppress(WorkbenchError):
            if answer.done():
                said[answer.result()[0]] = None
    return ", ".join(filter(None, said))


def _one_error(failures: list[tuple[Step, Exception]]) -> WorkbenchError:
    # errors of other ranks follow from a host's death
    failures = sorted(failures, key=lambda failed: not isinstance(failed[1], HostDied))
    step, first = failures[0]
    same = [s for s, error in failures if (s.what, type(error), str(error)) == (step.what, type(first), str(first))]
    ranks = "; ".join(
        f"pool {pool}, rank {', '.join(str(s.host.rank) for s in group)}"
        for pool, group in groupby(same, key=lambda s: s.host.pool)
    )
    where = f"{step.what} failed on {ranks}"
    others = len(failures) - len(same)
    rule = f"{others} other step(s) failed with other errors" if others else ""
    remedy = f"its output is in {step.host.log_path}" if step.host.log_path else ""
    error: WorkbenchError
    if isinstance(first, WorkbenchError):
        remedy = remedy if isinstance(first, HostDied) else first.remedy
        error = type(first)(f"{where}: {first.value}", first.rule or rule, remedy)
    else:
        error = StageError(f"{where}: {type(first).__name__}: {first}", rule, remedy)
        for note in getattr(first, "__notes__", ()):
            error.add_note(note)
        first.__notes__ = []  # shown once
    error.__cause__ = first
    return error
