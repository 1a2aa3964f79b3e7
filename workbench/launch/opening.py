"""Opens a workbench, attaches to a living one, and ends one: `wb.open`, `wb.restore`, `wb.attach`, `wb.stop`."""

from __future__ import annotations

import atexit
import inspect
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from workbench.backends import registry
from workbench.backends.cluster import joined_address, joined_head, start_ahead, stop_idle_head
from workbench.backends.holders import on_cluster, taken, when_free
from workbench.backends.inline import KERNEL
from workbench.backends.ray import RayBackend, end_hosts
from workbench.backends.starting import record_opening
from workbench.config.description import Description
from workbench.controller import Workbench
from workbench.data.prompts import Prompts
from workbench.display.interrupts import stoppable
from workbench.display.progress import Progress
from workbench.errors import BadInput, DevicesTaken, NameTaken, WorkbenchError
from workbench.launch import arguments
from workbench.launch.arguments import overridable
from workbench.models import resolve
from workbench.models.chat_format import template_warnings
from workbench.models.heads import saved_head
from workbench.placement import Placement
from workbench.placement.estimate import check_fit, estimate_memory
from workbench.session.checkpoint import Checkpoint, find_checkpoint
from workbench.session.checkpoint.restoring import Restoring, arguments_of
from workbench.session.journal import SessionJournal, read_journal
from workbench.session.recovering import take_over as take_over_session
from workbench.session.run_record import record_cells, write_run_record
from workbench.settings.engines import Generation, ShareMemory
from workbench.settings.training import Training
from workbench.support.checked_calls import checked_call
from workbench.support.files import check_room, locked, private_folder, real_path
from workbench.support.machine import Gpu, available_bytes, device_count, gpu_bytes, read_gpus
from workbench.support.notebook_cell import in_notebook
from workbench.support.validation import NonNegativeInt, PositiveInt


def check_memory(description: Description, replaced: Sequence[psutil.Process]) -> None:
    """Raise `BadInput` where the placement cannot fit in this machine's memory, and warn where it may not fit. The
    memory of other machines is unknown. replaced: processes whose memory will be freed."""
    if description.address is not None or _joined_elsewhere():
        return
    on_gpu, mine = description.device == "cuda", {process.pid for process in replaced}
    gpus, whole, models = list[Gpu](), 0, description.role_models()
    if on_gpu:
        gpus = read_gpus()
        whole = gpu_bytes(gpus)
        has = int(whole * description.gpus)
        if not whole:  # the driver does not answer
            return
    else:
        has = available_bytes() + sum(process.memory_info().rss for process in replaced)
    try:
        estimate = estimate_memory(
            description.placement, models, device=description.device, device_bytes=has if on_gpu else None,
            take_turns=description.takes_turns,
        )  # fmt: skip
    except BadInput:  # the configuration of some models does not tell their weights, but they may load
        return
    doubt = check_fit(estimate, has_bytes=has, models=models)
    # other processes may hold some of the GPUs. The cluster chooses the GPUs, and how it spreads shares over them; here
    # the spread is assumed to be even
    others = sorted(gpu.taken_bytes(mine) for gpu in gpus)[: description.placement.devices][-1:]
    if any(others):
        left = (whole - others[0]) // math.ceil(description.placement.devices / len(gpus))
        try:
            doubt = check_fit(estimate, has_bytes=min(has, left), models=models)
        except BadInput as error:
            raise taken(DevicesTaken(error.value, error.rule), gpus, mine=mine) from None
    if doubt:
        warnings.warn(doubt, stacklevel=7)  # show the line that calls wb.open


def _joined_elsewhere() -> bool:
    """Whether the user has joined this process to another cluster than this user's own head."""
    ray = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized() and joined_head() is None
    return bool(joined and joined_address(ray))


def say_at_opening(lab: Workbench) -> None:
    """Print what a user should know before the first stage: how prompts were read, doubtful settings, and how long the
    workbench lives."""
    description = lab.description
    for told in _about_prompts(lab):
        print(told)
    if 0 < description.gpus < 1:
        print(f"each of the {description.devices} devices has {description.gpus:g} of a GPU and of its memory")
    for role, model in description.models.items():
        if model.trained and model.training is not None and (doubt := model.training.learning_rate_warning(role)):
            print(doubt)
        if role in ("reward", "cost") and not model.trained and description.is_ours(role):
            assert model.name is not None
            if saved_head(resolve(model.name)) is None:
                print(
                    f"the {role} model {model} has no trained score head, and is not trained here: its scores are "
                    "noise. Name a model with a trained head, give a function, or train the head, with "
                    f"models={{{role!r}: wb.Model({str(model.name)!r}, training=wb.Training())}}"
                )
    if in_notebook() and description.backend == "ray":
        name = lab.name
        print(f"{name} outlives this kernel (wb.attach({name!r})), until lab.close() or `wb stop {name}`")


def _about_prompts(lab: Workbench) -> list[str]:
    """Return how the rows were read, and problems with them that would otherwise stay silent."""
    source = lab.prompts.source
    read = [f"prompts are read as {source.read_as}"] if source is not None and source.read_as else []
    if source is not None and source.other_tools:
        read.append(
            f"column 'tools' of {source.other_tools} rows is not shown to the model: it is not a list of JSON schemas, "
            'such as [{"type": "function", "function": {"name": "add", "parameters": {...}}}]'
        )
    first = source.at(source.position) if isinstance(source, Prompts) else None
    ids, text = ([], "") if first is None else (first.prompt_ids, first.prompt)
    unread = source.unread if source is not None else ()
    return read + template_warnings(lab.runner.batches.tokenizer, ids, text, unread)


ROOM_BYTES = 64 * 2**10  # for the first lines of telemetry


@overridable
def open(
    name: arguments.Name = "lab",
    *,
    models: Mapping[str, Any],
    placement: Placement | None = None,
    prompts: Any = None,
    training: Training | None = None,
    generation: Generation | None = None,
    dtype: str | None = None,
    backend: arguments.Backend = "ray",
    device: arguments.Device | None = None,
    devices: PositiveInt | None = None,
    seed: NonNegativeInt = 0,
    address: arguments.Address | None = None,
    share_memory: ShareMemory = False,
    if_exists: arguments.IfExists = "attach",
    runs: arguments.Folder = "runs",
    track: arguments.Trackers = (),
    resume: arguments.Folder | None = None,
    save_every: PositiveInt | None = None,
    wait_s: float = 0.0,
    record: bool = True,
) -> Workbench:
    """Open a workbench: start its hosts, load its models, and return the controller.

    models: role -> hub id, local folder, bundled or tiny name, function (reward, cost), or `wb.Model`.
    placement: which roles share which devices; default: all on one device.
    prompts: a data set name, a file, a list, a frame, or a dict of `Prompts` options with "source"; see `read_rows`.
    training, generation, dtype: defaults of all roles; a `wb.Model` overrides them for its role. dtype: "float32" or
        "bfloat16", the dtype of computation; trained models have fp32 master weights in both cases. None: float32 on a
        CPU, where the same seed gives the same bits, and bfloat16 on a GPU.
    backend: "ray", or "inline": everything in this process on one device, no Ray.
    device, devices: default "cuda" where there is a GPU. `devices` declares slots that share the cores of a CPU, or, if
        there are more than this machine has GPUs, that share the GPUs: then each pool has one.
    address: a Ray cluster to join, "host:port" (then give device= as well); default: this user's own cluster, started
        if needed, or the cluster that this process joined with `ray.init()`.
    share_memory: True: the roles on a GPU take turns in its memory. Before a stage the parameters, gradients and
        optimizer states of other roles go to host memory, and those of its role come back, optimizers only for
        updates; vLLM's weights and key-value cache are freed while another stage computes. Results stay the same to
        the last bit; a sync is due whenever vLLM has slept. Spans "offload" and "load" show the cost, `lab.topology()`
        where the bytes are. With vLLM each device must be a whole GPU. On a CPU, which has one memory, nothing moves;
        "always" moves even there, to try it out.
    if_exists: what to do when a workbench of that name lives. "attach": attach to it if it was opened with the same
        description, or has been moved to it, else `NameTaken`; "replace": close it first; "error": `NameTaken`, which
        is the default in a script that `wb.script` runs.
    runs: folder under which the run folder (telemetry, logs) is made.
    track: trackers for the metrics: "tensorboard", "wandb", "mlflow", "trackio", each also as "NAME=PROJECT"; see
        `lab.track`.
    resume: a checkpoint of `lab.save`, or a run folder with automatic ones, of which the newest is used: the models
        continue from it. The program should be the one that saved it, run again from its start: `algo.run(n)` and
        `lab.iterations(n)` leave out the iterations that were made before. In a notebook, see `wb.restore`.
    save_every: iterations between automatic checkpoints, see `lab.autosave`; None: none.
    wait_s: how long to wait for devices, or GPU memory, that other processes hold. 0: `DevicesTaken` says within
        seconds who holds them, since when, how much, and how to stop the holder.
    record: whether the run folder records the cells that the notebook ran (numbers and digests, no text), and the
        options of a script (names, and values that are numbers or bools). False: neither is recorded, and the order in
        which cells were run cannot be exported.

    A script's command line overrides these arguments: see `wb.script`.

    Everything that can be checked is checked before a host starts; `BadInput` and other errors say what to change. A
    placement that cannot fit in this machine's memory is refused with the figures; if it may not fit, a warning is
    given. In a notebook or a terminal, a line says what is being waited for.
    """
    with stoppable(f"opening {name!r}", lambda: _left_of(name)):
        began_s = time.time()
        if backend == "ray" and address is None:
            start_ahead()  # meanwhile models and prompts are read, which takes about as long
        found = KERNEL.left_as_found() if backend == "inline" else nullcontext()
        with Progress(f"opening {name}: reading models and prompts", after_s=0.5, ticks=True), found:
            description = Description.of(
                name, models=models, placement=placement, prompts=prompts, training=training, generation=generation,
                dtype=dtype, backend=backend, device=device, devices=devices, seed=seed, address=address,
                share_memory=share_memory, record=record, elsewhere=_joined_elsewhere(),
            )  # fmt: skip
            restoring = None if resume is None else Restoring(find_checkpoint(resume), description)
        description = description if restoring is None else restoring.retrained()
        run_folder = real_path(runs, "runs") / name / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        with Progress(f"opening {name}") as bar:
            # of two notebooks that open the same name at once, the second one attaches
            turn = locked(f"open-{name}", lambda: bar.note("waiting for another process that opens it"))
            with turn if backend == "ray" else nullcontext():
                lab = _open(description, run_folder, if_exists, list(track), bar.note, restoring, began_s, wait_s)
        if save_every is not None:
            lab.autosave(save_every)
        return lab


def _open(
    description: Description, run_folder: Path, if_exists: str, trackers: list[str], note: Callable[[str], None],
    restoring: Restoring | None, began_s: float, wait_s: float,
) -> Workbench:  # fmt: skip
    name = description.name
    living = _living(name)
    if living is not None and if_exists != "replace":
        _check_same(description, living, if_exists, restoring)
        return _tracked(attach(name), trackers)
    lab = _workbench(description, run_folder)  # checks the prompts, before a living workbench is replaced
    if restoring is not None:
        restoring.check(lab.prompts)
    record = registry.find(name)  # an inline workbench has none, and is in this process
    replaced = [] if living is None else [psutil.Process()] if record is None else record.running
    when_free(wait_s, note, lambda: check_memory(description, replaced))
    try:
        check_room(private_folder(run_folder), ROOM_BYTES)
        if living is not None:
            stop(name)
        _tracked(lab, trackers)  # raises for a tracker that does not start, before models load
        waits = lab.hosts.start(lab.ownership.controller, note, began_s, wait_s)
        record_opening(lab.hosts.backend, lab.hosts.infos, lab.telemetry, waits)
        if restoring is not None:
            restoring.load(lab.runner, lab.position, lab.prompts, note)
        _register(lab)
    except BaseException as error:
        if isinstance(error, DevicesTaken) and isinstance(lab.hosts.backend, RayBackend):
            error = taken(error, read_gpus(), on_cluster(lab.hosts.backend.cluster, description.device))
        _undo(lab)
        raise error
    registry.opened[name] = lab
    _record(lab, "opened")
    write_run_record(run_folder, description, lab.prompts)
    say_at_opening(lab)
    return lab


def _check_same(description: Description, living: Collection[str], if_exists: str, restoring: Restoring | None) -> None:
    """Raise `NameTaken` unless the living workbench is the requested one, and may be attached to.

    living: the digests of the descriptions that it has had.
    """
    if if_exists == "error":
        refused = "if_exists='error'"
    elif description.digest not in living:
        refused = _what_differs(description)
    elif restoring is not None:
        refused = "a running workbench is not restored to a checkpoint"
    else:
        return
    raise NameTaken(
        f"a workbench named {description.name!r} runs", refused,
        "attach to it with wb.attach(name), use another name, or open with if_exists='replace'",
    )  # fmt: skip


def _register(lab: Workbench) -> None:
    """Record the hosts, so that later kernels find them, and become their driver. Inline workbenches are not
    recorded."""
    backend, description = lab.hosts.backend, lab.description
    if not isinstance(backend, RayBackend):
        return
    record = registry.Record(
        id=description.id,
        name=lab.name,
        digests=description.digests,
        run_folder=str(lab.run_folder),
        address=backend.cluster,
        hosts=backend.processes,
    )
    registry.write(record, description)
    lab.ownership.take()
    _begin_journal(lab)
    backend.drive()


def _undo(lab: Workbench) -> None:
    """After an opening that failed, end what was started, and remove its records."""
    lab.telemetry.sinks.close(failed=True)
    if hasattr(lab.hosts, "backend"):
        lab.hosts.backend.close()
    else:  # nothing was started, so the run folder has nothing to read
        shutil.rmtree(lab.run_folder, ignore_errors=True)
    registry.forget(lab.description.id)


def _left_of(name: str) -> tuple[str, str]:
    """Return what an interrupted opening has left."""
    if name in registry.opened:
        return "the workbench runs", f"use it with wb.attach({name!r})"
    return "all its processes were ended", "run the same call again"


def _begin_journal(lab: Workbench) -> None:
    journal = SessionJournal(lab.runner, lab.position, lab.checkpoints, lab.prompts)
    journal.rewrite()
    lab.ownership.journal = journal


def _drives(lab: Workbench) -> bool:
    lab.ownership.notice_takeover()
    return lab.ownership.drives


@checked_call("wb.restore")
def restore(path: str | Path | Checkpoint, **changes: Any) -> Workbench:
    """Open a checkpoint's workbench in the state in which it was saved: `wb.restore("runs/lab/20261122-101500")`.

    path: what `lab.save` wrote or returned, or a run folder, whose newest automatic checkpoint is used.
    changes: arguments of `wb.open` to change, such as `placement=wb.Placement.split(4)`, `name=`, `backend=`.
        Under the same placement the next iteration gives the numbers of a run that was never interrupted, to the last
        bit on a CPU; under another placement, within rounding.

    `lab.checkpoint` is the checkpoint. A new algorithm of the saved class continues from the saved position, and so do
    `lab.pairs(...)` and `lab.demonstrations(...)` of the same rows. Everything is checked before a process starts:
    files by their checksums, models by the shapes of their weights.
    """
    known = inspect.signature(open).parameters
    for name in changes:
        if name not in known or name == "resume":
            raise BadInput(f"wb.restore(..., {name}=)", f"the arguments are those of wb.open: {', '.join(known)}")
    checkpoint = find_checkpoint(path)
    arguments = {**arguments_of(checkpoint.controller()[0]), **changes}
    if changes.get("backend") == "inline" and "placement" not in changes:
        arguments["placement"] = None
    if "devices" not in changes and arguments["address"] is None:  # the devices of this machine; on a CPU, enough slots
        wanted = arguments["placement"].devices if arguments["placement"] is not None else 1
        here = device_count(arguments["device"] or ("cuda" if device_count("cuda") else "cpu"))
        arguments["devices"] = max(wanted, here) if arguments["backend"] == "ray" else None
    lab = open(**arguments, resume=checkpoint.folder)
    lab.runner.counters.iterations_to_skip = 0  # a notebook goes on, and repeats nothing
    return lab


def _workbench(description: Description, run_folder: Path) -> Workbench:
    lab = Workbench(description, run_folder)
    if arguments.running is not None and description.record:
        numbers = arguments.numbers_of(arguments.running.options)
        lab.history.script_options = {name: value for name, value in numbers.items() if value is not None}
    return lab


def _record(lab: Workbench, event: str) -> None:
    """Record that a workbench was opened or attached, and, with record=True, each cell that runs from now on."""
    lab.telemetry.append_event(event, name=lab.name, placement=repr(lab.placement), record=lab.description.record)
    if lab.description.record:
        record_cells(lab.telemetry, lambda: lab.ownership.closed)


def _tracked(lab: Workbench, trackers: list[str]) -> Workbench:
    for tracker in trackers:
        lab.track(tracker)
    return lab


@checked_call("wb.attach")
@stoppable("attaching", ("the workbench is still open and unchanged", "run the same call again"))
def attach(name: str, *, take_over: bool = False) -> Workbench:
    """Attach to a living workbench of this kernel or an earlier one: its groups, placement, batches (see
    `lab.batches()`), telemetry, and positions of prompts, examples and the algorithm. A new algorithm of the class that
    stepped last continues from its position, even in the middle of an iteration. An update that went on after its
    kernel had ended is waited for, and not repeated.

    Only one kernel drives a workbench. While another kernel does, this one may only look (`lab.looks`: tables, views,
    batches), and its calls are refused with `NotDriving`. take_over: drive the workbench from here, and refuse the
    other kernel's calls from now on. After the driving kernel has ended, this one takes over without asking.

    Raises `NotFound`, `HostDied`, or `MissingDependency` where a module of its functions is missing here.
    """
    mine = _opened_here(name)
    if mine is not None and _drives(mine):
        return mine
    with Progress(f"attaching to {name}") as bar:
        moving = "waiting for the kernel that moves it to another placement"
        with registry.driving(registry.get(name).id, lambda: bar.note(moving)):
            record = registry.get(name)
            owner = registry.owner(record.id)
            others = owner is not None and owner.lives and not owner.mine and not take_over
            if mine is not None and others:
                return mine  # it may only look
            lab = _workbench(registry.description(record), Path(record.run_folder))
            lab.attached, lab.ownership.drives = True, not others
            lost = lab.hosts.attach(lab.ownership.controller, record.address)
            if not lab.looks:
                lab.ownership.take()
                lab.hosts.drive()
                if owner is None or not owner.lives:  # a living kernel ends its own
                    lab.hosts.end_others()
        recorded = read_journal(record.id)
        take_over_session(recorded, lab.runner, lab.position, lab.checkpoints, lab.prompts, bar.note)
    if not lab.looks:
        _begin_journal(lab)
    registry.opened[name] = lab
    _record(lab, "attached")
    if lost:
        print(f"{', '.join(sorted(lost))} of {name} is gone; lab.recover() restarts it")
    if lab.looks:
        assert owner is not None
        print(f"reading {name}, driven by process {owner.process.pid}; drive it: wb.attach({name!r}, take_over=True)")
    return lab


@checked_call("wb.stop")
@stoppable("stopping", ("some of its processes may still run", "run the same call again to end them"))
def stop(name: str) -> None:
    """Close the workbench with this name, from any process. Raises `NotFound` if there is none."""
    mine = _opened_here(name)
    if mine is not None:
        drives = _drives(mine)
        mine.end()
        if drives:
            return
    record = registry.get(name)
    try:
        end_hosts(record.id, record.address, record.hosts, record.hosts.values())
    except WorkbenchError as error:
        gone = f"if the cluster at {record.address} is gone for good, delete {record.folder}"
        raise type(error)(error.value, error.rule, gone) from error
    registry.forget(record.id)
    stop_idle_head()


def _opened_here(name: str) -> Workbench | None:
    """Return this process's workbench of that name, if it still is the living one of that name."""
    lab = registry.opened.get(name)
    if lab is None or lab.description.backend == "inline":
        return lab
    record = registry.find(name)
    if record is not None and record.id == lab.description.id:
        if record.digests == lab.description.digests and set(record.hosts) == {info.name for info in lab.hosts.infos}:
            return lab
        lab.ownership.closed = True  # another process moved it: this handle has hosts that have ended
        del registry.opened[name]
        return None
    lab.end()  # another process stopped or replaced it
    return None


def _what_differs(description: Description) -> str:
    """Return how the living workbench of that name differs from this description."""
    mine, text = _opened_here(description.name), "it was opened with another description"
    try:
        there = mine.description if mine is not None else registry.description(registry.get(description.name))
    except WorkbenchError:  # its code cannot be imported here
        return text
    return f"{text}: {', '.join(description.differences(there))} would differ"


def _living(name: str) -> tuple[str, ...] | None:
    """Return the digests of the living workbench of that name, or None; remove a dead one."""
    mine = _opened_here(name)
    if mine is not None and mine.description.backend == "inline":
        return mine.description.digests
    record = registry.find(name)
    if record is None:
        return None
    if record.alive is False:
        stop(name)
        return None
    return record.digests


@atexit.register
def _leave() -> None:
    for lab in list(registry.opened.values()):
        if lab.description.backend == "inline":
            lab.end()
        lab.telemetry.sinks.close()
    stop_idle_head()


os.register_at_fork(after_in_child=registry.opened.clear)  # a fork of this process must not end them
