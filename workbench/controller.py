"""The Workbench: the one controller of a whole RLHF system, in the notebook.

    notebook                       hosts (one process a device)            disk
    ┌───────────────┐  calls      ┌──────────────────────────────┐       runs/<name>/...
    │ lab.prompts   ├────────────>│ actor    critic   reference  │        spans, transfers,
    │ lab.actor ... │<────────────┤ reward   ...  batches        │        metrics, logs
    │ Batch handles │  summaries  └──────────┬───────────────────┘            ^
    └───────┬───────┘                        │ rows, straight from host       │
            │                     ┌──────────┴───────────────────┐            │
            │                     │ hosts of another pool        │            │
            │                     └──────────────────────────────┘            │
            └─────────────────────────────────────────────────────────────────┘

Each part owns one thing: `Hosts` the processes, `StageRunner` the calls, `BatchStore` the rows, `Counters` the numbers,
`Topology` and `History` the views, `Position` and `Checkpoints` the state that a run continues from. A method that a
part carries out is written in that part, with its docstring; `_method_of` makes it a method of the workbench.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import psutil

from workbench.algorithms.branch import compare
from workbench.algorithms.loop import Algorithm
from workbench.backends import registry
from workbench.backends.cluster import stop_idle_head
from workbench.backends.hosts import Hosts
from workbench.batches.batch import Batch
from workbench.batches.store import Store, Weights
from workbench.checks.checking import check
from workbench.checks.compare_evaluations import compare_evaluations
from workbench.checks.evaluation import evaluate
from workbench.checks.mismatch import mismatch
from workbench.config.description import Description
from workbench.conversations import Conversations
from workbench.conversations.endpoint import serve
from workbench.data.prompt_stream import PromptStream
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, MissingDependency
from workbench.messages.metrics import StageMetrics
from workbench.placement import Placement
from workbench.session.attributes import AdvantagesOperation, no_attribute, set_attribute
from workbench.session.changed import changed
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.checkpoint.files import Checkpoint
from workbench.session.history import History
from workbench.session.iterations import Iterations
from workbench.session.moving import Mover
from workbench.session.position import Position
from workbench.session.predicting import Calibration, Predictor
from workbench.session.recovering import recover
from workbench.session.reloading import Reloader
from workbench.session.topology import Topology
from workbench.stages.batch_store import BatchStore
from workbench.stages.debug import Failures, debug
from workbench.stages.group import Groups, WorkerGroup
from workbench.stages.ledger import Counters, Ownership
from workbench.stages.run import RunLog
from workbench.stages.runner import Snapshots, StageRunner
from workbench.stages.scheduler import Scheduler
from workbench.stages.weight_sync import RolloutCaller, refresh_reference
from workbench.support.checked_calls import checks_calls
from workbench.support.notebook_cell import notebook_path
from workbench.support.sources import loaded
from workbench.telemetry.store import TelemetryStore

if TYPE_CHECKING:
    import pandas as pd

    from workbench.export import Script
    from workbench_widgets import Panel

_P = TypeVar("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _method_of(
    part: Callable[[Workbench], _P], method: Callable[Concatenate[_P, _Q], _R]
) -> Callable[Concatenate[Workbench, _Q], _R]:
    """Return a method of the workbench that calls a method of one of its parts, with that method's signature and
    docstring. method: a method of the part, or a function whose first argument is the part."""

    @functools.wraps(method)
    def call(self: Workbench, /, *args: _Q.args, **kwargs: _Q.kwargs) -> _R:
        return method(part(self), *args, **kwargs)

    signature = inspect.signature(method)
    others = list(signature.parameters.values())[1:]
    vars(call)["__signature__"] = signature.replace(parameters=[_SELF, *others])
    return call


def _field(kind: Any, read: Callable[[Workbench], _R], doc: str) -> _R:
    """Return a property that reads a value from one of the workbench's parts. kind: its type, for the API reference."""
    read.__annotations__ = {"return": kind}
    return property(read, doc=doc)  # type: ignore[return-value]


@checks_calls(
    "lab",
    internal="before_close call check_driver driving end lead note_position open_runs passed_over reported_as "
    "run_log save_if_due scheduler submit sync_plans take_edits",
)
class Workbench:
    """Live handles to the worker groups of one RLHF system. Made by `wb.open` and `wb.attach`.

    lab.actor, lab.critic, ...: worker groups; lab.rollout: the workers that generate for the actor, where the placement
    has them. lab.prompts: the stream of prompts. lab.buffer: rollouts that wait for training. lab.conversation(row):
    one conversation, by hand. lab.topology(), lab.timeline(), lab.spans(), lab.transfers(), lab.syncs(), lab.metrics(),
    lab.logs(): the current state and the history. lab.close(): free everything.

    Its parts are `hosts`, `ownership`, `runner`, `position`, `checkpoints`, `history` and `telemetry`. attached:
    whether `wb.attach` found this workbench already open. stays: whether its hosts live on after `close`.
    """

    def __init__(self, description: Description, run_folder: Path) -> None:
        self.hosts, self.ownership = Hosts(description, run_folder), Ownership(description)
        self.name, self.seed, self.run_folder = description.name, description.seed, run_folder
        self.attached = self.stays = False
        self._before_close: list[Callable[[], object]] = []
        self.telemetry, counters = TelemetryStore(run_folder), Counters()
        groups = Groups(self.hosts, self.ownership, counters, self)
        batches = BatchStore(self.hosts, groups, self.ownership, counters, psutil.virtual_memory().total // 10)
        # the types of parts are declared for `_method_of` and `_field`, which the class body calls
        self.runner: StageRunner = StageRunner(self.hosts, self.ownership, groups, counters, batches, self.telemetry)
        loaded.note()
        self._reloader: Reloader = Reloader(self.runner)
        groups.delegate_rollout = lambda: RolloutCaller(self.runner)
        groups.make()
        self.position: Position = Position(counters, batches, self.runner.live.note)
        self.conversation = Conversations(self)
        self.buffer = self.position.buffer
        self.history: History = History(self.hosts, groups, self.telemetry)
        self._topology: Topology = Topology(self.hosts, self.ownership, groups, counters, self.telemetry)
        self._mover: Mover = Mover(self.runner, self._topology)
        self._predictor: Predictor = Predictor(
            self.hosts, self.ownership, self._topology, self.position, self.telemetry
        )
        self.checkpoints: Checkpoints = Checkpoints(self.runner, self.position, lambda: self.prompts)
        self._iterations: Iterations = Iterations(self.runner, self.position, self.checkpoints, self._topology)
        self.prompts = PromptStream(
            description.prompts, self._iterations, seed=self.seed, tokenizer=batches.tokenizer,
            generation=description.generation,
        )  # fmt: skip

    # --- its state ----------------------------------------------------------------------------------------------------

    description = _field(Description, lambda self: self.hosts.description, "Its models, settings and placement.")
    placement = _field(Placement, lambda self: self.hosts.placement, "Which roles share which devices.")
    groups = _field(Mapping[str, WorkerGroup], lambda self: self.runner.groups.by_role, "The worker groups by role.")
    lead = _field(WorkerGroup, lambda self: self.runner.groups.lead, "The group whose tokenizer makes the tokens.")
    store = _field(Store, lambda self: self.runner.batches.store, "The batches that stages made, by name and version.")
    scheduler = _field(Scheduler, lambda self: self.runner.scheduler, "Decides when each run starts.")
    run_log = _field(RunLog, lambda self: self.runner.run_log, "The stages that this kernel called.")
    weights = _field(Mapping[str, Weights], lambda self: self.runner.counters.weights, "Which weights each role has.")
    iteration = _field(int, lambda self: self.runner.counters.iteration, "The number of the current or last iteration.")
    last_metrics = _field(
        StageMetrics,
        lambda self: StageMetrics(self.runner.counters.last_metrics),
        "The metrics of this iteration, by stage.",
    )
    looks = _field(
        bool, lambda self: not self.ownership.drives, "Whether another kernel drives it: this one may only read."
    )
    checkpoint = _field(Checkpoint | None, lambda self: self.position.checkpoint, "The checkpoint it continued from.")
    calibration = _field(Calibration | None, lambda self: self._predictor.calibration, "The result of `calibrate`.")
    compute_advantages = AdvantagesOperation()  # of no role

    @property
    def algorithm(self) -> Algorithm | None:
        """The algorithm that took the last step, while a variable holds it."""
        return self.position.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | None) -> None:
        self.position.algorithm = algorithm

    def __getattr__(self, name: str) -> WorkerGroup:
        roles = self.__dict__["runner"].groups.by_role if "runner" in self.__dict__ else {}
        if name in roles:
            return roles[name]
        raise no_attribute(name, roles, dir(self))

    __setattr__ = set_attribute

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.groups]

    def __repr__(self) -> str:
        state = " (closed)" if self.ownership.closed else ""
        shared = "; reference: the actor" if self.description.actor_is_reference else ""
        state += f" ({unwritten} rows of telemetry not on disk)" if (unwritten := self.telemetry.unwritten) else ""
        return f"<Workbench {self.name}{state}: {self.placement}{shared}>"[:79]

    def _repr_html_(self) -> str:
        state = ", closed" if self.ownership.closed else ""
        state += f", {unwritten} rows of telemetry not on disk" if (unwritten := self.telemetry.unwritten) else ""
        caption = f"Workbench {self.name} ({self.description.backend}{state}), run folder {self.run_folder}"
        return self._topology.summary_html(caption)

    # --- leaving ------------------------------------------------------------------------------------------------------

    @stoppable("closing", ("some of its processes may still run", "wb.stop(name) ends them"))
    def close(self) -> None:
        """End the hosts, wait until they have ended, and free what they hold; the run folder stays. Closing twice is
        fine, and so is closing after another kernel took over the workbench or its name: only hosts that this opening
        started and this kernel drives are ended. In a script that was started with --keep the hosts live on, and
        trackers get their last metrics."""
        if self.stays:
            self.telemetry.sinks.close()
        else:
            self.end()

    def end(self) -> None:
        """Close the workbench as `close` does, even where `stays` is set."""
        if self.ownership.closed:
            return
        for act in self._before_close:
            with suppress(Exception):  # an error of a panel or an endpoint does not keep the workbench from closing
                act()
        self.telemetry.sinks.close()
        self.ownership.closed = True
        if registry.opened.get(self.name) is self:
            del registry.opened[self.name]
        self.scheduler.close()
        self.ownership.notice_takeover()
        if not self.ownership.drives:
            print(f"detached from {self.name}, which another kernel drives")
            return
        self.hosts.backend.close()
        if not self.hosts.inline:
            registry.forget(self.description.id)
            stop_idle_head()
        self.telemetry.flush()

    def before_close(self, act: Callable[[], object]) -> None:
        """Call `act` when the workbench closes, while its hosts still answer."""
        self._before_close.append(act)

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.telemetry.sinks.close(failed=error is not None)
        self.close()

    # --- stages -------------------------------------------------------------------------------------------------------

    call = _method_of(lambda self: self.runner, StageRunner.call)
    submit = _method_of(lambda self: self.runner, StageRunner.submit)
    open_runs = _method_of(lambda self: self.runner, StageRunner.open_runs)
    runs = _method_of(lambda self: self.run_log, RunLog.frame)
    check_driver = _method_of(lambda self: self.runner, StageRunner.check_driver)
    wait = _method_of(lambda self: self.scheduler, Scheduler.wait)
    report = _method_of(lambda self: self.runner, StageRunner.report)
    last_error = _method_of(lambda self: self.runner.failures, Failures.last)
    forget_error = _method_of(lambda self: self.runner.failures, Failures.forget)
    debug = _method_of(lambda self: self.runner, debug)
    driving = _method_of(lambda self: self.runner, StageRunner.driving)
    overlap = _method_of(lambda self: self.scheduler, Scheduler.overlapping)
    reuse = _method_of(lambda self: self.runner, StageRunner.reuse)
    reported_as = _method_of(lambda self: self.runner, StageRunner.reported_as)

    # --- batches ------------------------------------------------------------------------------------------------------

    put = _method_of(lambda self: self.runner.batches, BatchStore.put)
    load = _method_of(lambda self: self.runner.batches, BatchStore.load)
    decode = _method_of(lambda self: self.runner.batches, BatchStore.decode)
    demonstrations = _method_of(lambda self: self._iterations, Iterations.demonstrations)
    feedback = _method_of(lambda self: self._iterations, Iterations.feedback)
    pairs = _method_of(lambda self: self._iterations, Iterations.pairs)
    batches = _method_of(lambda self: self.store, Store.frame)
    batch = _method_of(lambda self: self.runner.batches, BatchStore.get)
    release = _method_of(lambda self: self.runner.batches, BatchStore.forget)

    def lineage(self, batch: Batch | str) -> pd.DataFrame:
        """Return a batch (or its name, as in `batch`) and all batches that it was made from, newest first."""
        return self.store.lineage((batch if isinstance(batch, Batch) else self.batch(batch)).id)

    @staticmethod
    def apply(function: Callable[..., Any], *batches: Batch, **kwargs: Any) -> Any:
        """Call a function of batches. In an algorithm's `define`, the call becomes a stage of the graph."""
        return function(*batches, **kwargs)

    # --- iterations and checkpoints -----------------------------------------------------------------------------------

    iterations = _method_of(lambda self: self._iterations, Iterations.numbers)
    passed_over = _method_of(lambda self: self._iterations, Iterations.passed_over)
    save = _method_of(lambda self: self.checkpoints, Checkpoints.save)
    autosave = _method_of(lambda self: self.checkpoints, Checkpoints.autosave)
    save_if_due = _method_of(lambda self: self.checkpoints, Checkpoints.save_if_due)
    note_position = _method_of(lambda self: self.ownership, Ownership.record)

    def recover(self, path: str | Path | None = None) -> Checkpoint | None:
        """Restart processes that died, and put every role back to the last checkpoint, so that all have the same state:
        weights, optimizers, random states, prompts, examples, and the algorithm that this notebook holds. Handles stay
        valid: `lab.actor`, `lab`, the algorithm; the next iteration is the one that would have followed the checkpoint.
        Returns the checkpoint; None: there was no checkpoint, and the workbench is as it was just after it was opened.

        Where only rollout workers in a pool of their own died, nothing goes back: they are restarted, and generate
        again what they had not finished. Returns None.

        path: a checkpoint to use instead of the newest of `lab.save`, `lab.autosave` and the one that the run was
        resumed from. Only pools that are no longer whole get new processes, and lose the batches that they kept. All
        pools do where there is no checkpoint, after an edit of code that only new processes take (see `reload`), and
        when this user's Ray head was gone; another head is started then. Raises `BadInput`, with nothing touched, where
        the checkpoint does not fit.
        """
        return recover(self.runner, self.position, self.prompts, path, self._reloader.reload)

    # --- code ---------------------------------------------------------------------------------------------------------

    reload = _method_of(lambda self: self._reloader, Reloader.reload)
    autoreload = _method_of(lambda self: self._reloader, Reloader.autoreload)
    take_edits = _method_of(lambda self: self._reloader, Reloader.take_edits)

    # --- placement ----------------------------------------------------------------------------------------------------

    move = _method_of(lambda self: self._mover, Mover.move)
    add = _method_of(lambda self: self._mover, Mover.add)
    drop = _method_of(lambda self: self._mover, Mover.drop)
    resize = _method_of(lambda self: self._mover, Mover.resize)
    topology = _method_of(lambda self: self._topology, Topology.frame)
    memory = _method_of(lambda self: self._topology, Topology.memory)
    read_memory = _method_of(lambda self: self._topology, Topology.read_memory)
    estimate = _method_of(lambda self: self._topology, Topology.estimate)
    diff = _method_of(lambda self: self._topology, Topology.diff)
    calibrate = _method_of(lambda self: self._predictor, Predictor.calibrate)
    predict = _method_of(lambda self: self._predictor, Predictor.predict)
    suggest = _method_of(lambda self: self._predictor, Predictor.suggest)

    # --- what happened ------------------------------------------------------------------------------------------------

    spans = _method_of(lambda self: self.telemetry, TelemetryStore.spans)
    transfers = _method_of(lambda self: self.history, History.transfers)
    traffic = _method_of(lambda self: self.history, History.traffic)
    sync_plans = _method_of(lambda self: self.history, History.sync_plans)
    syncs = _method_of(lambda self: self.telemetry, TelemetryStore.syncs)
    changed = _method_of(lambda self: self.runner, changed)
    metrics = _method_of(lambda self: self.history, History.metrics)
    track = _method_of(lambda self: self.history, History.track)
    timeline = _method_of(lambda self: self.history, History.timeline)
    opening = _method_of(lambda self: self.history, History.opening)
    trace = _method_of(lambda self: self.telemetry, TelemetryStore.chrome_trace)
    logs = _method_of(lambda self: self.history, History.logs)

    def devices(self) -> list[tuple[str, str]]:
        """Return (pool, device) of every host, as the placement has them, without a call to the hosts."""
        return [(info.pool, info.device) for info in self.hosts.infos]

    def panel(self, *views: str, algorithm: Any = None) -> Panel:
        """Return a live widget with one tab per view: of all views, `lab.panel()`, or of some: `lab.panel("timeline")`.

        The widget follows what cells do, and its buttons do what cells could do. Repeated calls for the same views
        return the same panel. algorithm: the one that the panel steps; None: the one that took the last step. Where
        widgets cannot be shown, and in a saved notebook, the panel is a picture. Raises `BadInput` for an unknown view,
        `MissingDependency` without the packages of the extra "notebook".
        """
        try:
            from workbench_widgets import panel
        except ImportError as error:
            raise MissingDependency.of(f"{error.name}", "a live panel needs it", "notebook") from error
        return panel(self, views, algorithm)

    def strip(self) -> Panel:
        """Return a status line that stays in sight: connection, what runs and how far it is, tokens per second, the
        reward of the last iterations, memory, warnings. In JupyterLab it sticks to the top of the notebook, elsewhere
        it is in its cell. Raises `MissingDependency` as `panel` does."""
        return self.panel("strip")

    @stoppable("lab.export()", ("the script is written completely, or not at all", "run the same call again"))
    def export(self, output: str | Path, notebook: str | Path | None = None, **options: Any) -> Script:
        """Write this notebook as a script: `lab.export("script.py")`; `.told` has notes for the script's reader.

        notebook: its file; None: this kernel's notebook, where the front end tells. Save it first: the export reads the
        file, and the record of the cells that were run; `BadInput` after wb.open(record=False). options: see
        `workbench.export.export_notebook`. `wb export NOTEBOOK --check` proves that notebook and script agree.
        """
        from workbench.export import export_notebook

        if not self.description.record:
            raise BadInput(
                f"{self.name!r} was opened with record=False", "its cells were not recorded",
                "`wb export NOTEBOOK` writes the cells of the page",
            )  # fmt: skip
        runs = {self.run_folder, *(other.run_folder for other in registry.opened.values())}
        recorded = sorted((run for run in runs if (run / "events.jsonl").is_file()), key=lambda run: run.name)
        return export_notebook(notebook or notebook_path(), output, **{"runs": recorded, **options})

    # --- branches, checks, evaluation ---------------------------------------------------------------------------------

    compare = _method_of(lambda self: self, compare)
    check = _method_of(lambda self: self, check)
    mismatch = _method_of(lambda self: self, mismatch)
    evaluate = _method_of(lambda self: self, evaluate)
    compare_evaluations = staticmethod(compare_evaluations)
    serve = _method_of(lambda self: self, serve)
    refresh_reference = _method_of(lambda self: self.runner, refresh_reference)
    kept = _method_of(lambda self: self.runner.snapshots, Snapshots.kept)
