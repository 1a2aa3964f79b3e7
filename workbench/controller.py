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

Its parts, each with one owner: `Hosts` the processes, `StageRunner` the calls, `BatchStore` the rows, `Counters` the
numbers, `Topology` and `History` the views, `Position` and `Checkpoints` what a run goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, SupportsFloat

import psutil

from workbench.algorithms.branch import Comparison, compare
from workbench.algorithms.loop import Algorithm
from workbench.backends import registry
from workbench.backends.cluster import stop_idle_head
from workbench.backends.hosts import Hosts
from workbench.batches.batch import Batch
from workbench.batches.columns import Table
from workbench.batches.store import Store, Weights
from workbench.checks.compare_evaluations import compare_evaluations
from workbench.checks.evaluation import Asked, evaluate
from workbench.config.description import Description
from workbench.conversations import Conversations
from workbench.conversations.endpoint import serve
from workbench.data.examples import ExampleStream, Kind
from workbench.data.prompt_stream import PromptStream
from workbench.data.sources import Source
from workbench.display.interrupts import stoppable
from workbench.errors import BadInput, MissingDependency
from workbench.mapping.costs import Constants
from workbench.mapping.hardware import Hardware
from workbench.mapping.plan import Plans
from workbench.messages.metrics import MetricValues
from workbench.messages.operation import Operation
from workbench.placement import ROLLOUT, Placement
from workbench.placement.estimate import MemoryEstimate
from workbench.session.assigning import set_attribute
from workbench.session.checkpoint.checkpoints import Checkpoints
from workbench.session.checkpoint.files import Checkpoint
from workbench.session.history import History
from workbench.session.iterations import Iterations
from workbench.session.moving import add, drop, move
from workbench.session.position import Position
from workbench.session.predicting import Calibration, Prediction, Predictor
from workbench.session.recovering import recover
from workbench.session.reloading import Reloader, ReloadReport
from workbench.session.topology import ANSWER_S, Topology
from workbench.settings.engines import Sampling
from workbench.settings.precision import Precision
from workbench.stages.batch_store import BatchStore
from workbench.stages.debug import FailedStage, replay
from workbench.stages.group import GroupOperation, Groups, WorkerGroup
from workbench.stages.ledger import Counters, Ownership
from workbench.stages.run import Run, RunLog
from workbench.stages.runner import StageRunner
from workbench.stages.scheduler import Scheduler
from workbench.stages.weight_sync import RolloutCaller, refresh_reference
from workbench.support.checked_calls import checks_calls
from workbench.support.files import path_of
from workbench.support.named_fields import meant
from workbench.support.notebook_cell import notebook_path
from workbench.support.sources import loaded
from workbench.support.validation import NonNegativeInt, PositiveFloat, PositiveInt, Rule
from workbench.telemetry.memory import MemoryReading
from workbench.telemetry.spans import TransferKind
from workbench.telemetry.store import TelemetryStore
from workbench.workers.roles import ROLE_WORKERS

if TYPE_CHECKING:
    import pandas as pd
    from tensordict import TensorDict

    from workbench.checks import CheckReport
    from workbench.checks.mismatch import Mismatch
    from workbench.display.devices import DeviceMap
    from workbench.display.timeline import Timeline
    from workbench.display.traffic import Traffic
    from workbench.export import Script
    from workbench.placement.change import PlacementChange
    from workbench_widgets import Panel

Arms = Annotated[
    Mapping[str, Algorithm], Rule("must be algorithms by name, of this workbench", 'write {"ppo": wb.PPO(lab)}')
]
Precisions = Annotated[
    Mapping[str, Precision], Rule("must be precisions by name", 'write {"mine": wb.Precision(dtype="bfloat16")}')
]
Metrics = Annotated[Mapping[str, SupportsFloat], Rule("must be numbers by name", 'write {"mean": 1.0}')]


@checks_calls("lab")
class Workbench:
    """Live handles to the worker groups of one RLHF system. Made by `wb.open` and `wb.attach`.

    lab.actor, lab.critic, ...: worker groups; lab.rollout: those who generate for the actor, where the placement names
    them. lab.prompts: where prompts come from. lab.buffer: rollouts that wait to be trained on. lab.conversation(row):
    one conversation, by hand. lab.topology(), lab.timeline(), lab.spans(), lab.transfers(), lab.syncs(), lab.metrics(),
    lab.logs(): what is where and what happened. lab.close(): free all.

    Its parts are `hosts`, `ownership`, `runner`, `position`, `checkpoints`, `history` and `telemetry`.
    attached: it was opened before, and `wb.attach` found it. stays: its hosts live on when it is closed.
    """

    def __init__(self, description: Description, run_folder: Path) -> None:
        self.hosts, self.ownership = Hosts(description, run_folder), Ownership(description)
        self.name, self.seed, self.run_folder = description.name, description.seed, run_folder
        self.attached = self.stays = False
        self._before_close: list[Callable[[], object]] = []
        self.telemetry, counters = TelemetryStore(run_folder), Counters()
        groups = Groups(self.hosts, self.ownership, counters, self)
        batches = BatchStore(self.hosts, groups, self.ownership, counters, psutil.virtual_memory().total // 10)
        self.runner = StageRunner(self.hosts, self.ownership, groups, counters, batches, self.telemetry)
        loaded.note()
        self._reloader = Reloader(self.runner, _groups_of_process)
        groups.delegate_rollout = lambda: RolloutCaller(self.runner)
        groups.make()
        self.position, self.conversation = Position(counters, batches, self.runner.live.note), Conversations(self)
        self.buffer = self.position.buffer
        self.history = History(self.hosts, groups, self.telemetry)
        self._topology = Topology(self.hosts, self.ownership, groups, counters, self.telemetry)
        self._predictor = Predictor(self.hosts, self.ownership, self._topology, self.position, self.telemetry)
        self.checkpoints = Checkpoints(self.runner, self.position, lambda: self.prompts)
        self._iterations = Iterations(self.runner, self.position, self.checkpoints, self._topology)
        self.prompts = PromptStream(
            description.prompts, self._iterations, seed=self.seed, tokenizer=batches.tokenizer,
            generation=description.generation,
        )  # fmt: skip

    # --- its state ----------------------------------------------------------------------------------------------------

    @property
    def description(self) -> Description:
        """What it was opened with, or moved to."""
        return self.hosts.description

    @property
    def placement(self) -> Placement:
        """Which roles share which devices."""
        return self.hosts.placement

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """The worker groups by role."""
        return self.runner.groups.by_role

    @property
    def lead(self) -> WorkerGroup:
        """The group whose tokenizer makes the tokens."""
        return self.runner.groups.lead

    @property
    def compute_advantages(self) -> GroupOperation:
        """The operation of no role: advantages from scores."""
        return self.runner.groups.compute_advantages

    @property
    def store(self) -> Store:
        """What stages made, by name and version."""
        return self.runner.batches.store

    @property
    def scheduler(self) -> Scheduler:
        """Decides when each run starts."""
        return self.runner.scheduler

    @property
    def run_log(self) -> RunLog:
        """The stages that this kernel called."""
        return self.runner.run_log

    @property
    def weights(self) -> Mapping[str, Weights]:
        """Which weights each role has."""
        return self.runner.counters.weights

    @property
    def iteration(self) -> int:
        """The number of the iteration under way, or of the last one."""
        return self.runner.counters.iteration

    @property
    def last_metrics(self) -> dict[str, MetricValues]:
        """The metrics of this iteration, by stage."""
        return self.runner.counters.last_metrics

    @property
    def looks(self) -> bool:
        """Whether another kernel drives it, so that this one may only look."""
        return not self.ownership.drives

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that it went on from."""
        return self.position.checkpoint

    @property
    def algorithm(self) -> Algorithm | None:
        """The algorithm that took the last step, while a variable holds it."""
        return self.position.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | None) -> None:
        self.position.algorithm = algorithm

    @property
    def calibration(self) -> Calibration | None:
        """What `calibrate` has found."""
        return self._predictor.calibration

    def __getattr__(self, name: str) -> WorkerGroup:
        roles = self.__dict__["runner"].groups.by_role if "runner" in self.__dict__ else {}
        if name in roles:
            return roles[name]
        if name == ROLLOUT:
            rule = "the actor generates. Name 'rollout' in a pool, or lab.add('rollout', pool=...)"
            raise AttributeError(f"this workbench has no rollout workers: {rule}")
        if name in ROLE_WORKERS:
            remedy = f"Declare it in models=, or lab.add({name!r}, ...)"
            raise AttributeError(f"this workbench has no {name}; it has {', '.join(roles)}. {remedy}")
        near = meant(name, [*roles, *(known for known in dir(self) if not known.startswith("_"))], str)
        raise AttributeError(f"a Workbench has no attribute {name!r}" + (f": {near}" if near else ""))

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
        """End the hosts, wait until they have ended, and free what they hold; the run folder stays. Closing twice, or
        after another kernel took the workbench or its name, is fine: only what this opening started, and this kernel
        drives, is ended. In a script that was started with --keep the hosts live on, and trackers get their last
        metrics."""
        if self.stays:
            self.telemetry.sinks.close()
        else:
            self.end()

    def end(self) -> None:
        """`close`, also where the workbench is to stay."""
        if self.ownership.closed:
            return
        for act in self._before_close:
            with suppress(Exception):  # what looks at a workbench keeps none from closing
                act()
        self.telemetry.sinks.close()
        self.ownership.closed = True
        if registry.opened.get(self.name) is self:
            del registry.opened[self.name]
        self.scheduler.close()
        self.ownership.notice_takeover()
        if not self.ownership.drives:
            print(f"left {self.name}, which another kernel drives")
            return
        self.hosts.backend.close()
        if not self.hosts.inline:
            registry.forget(self.description.id)
            stop_idle_head()
        self.telemetry.flush()

    def before_close(self, act: Callable[[], object]) -> None:
        """Have `act` called when the workbench closes, while its hosts still answer."""
        self._before_close.append(act)

    def __enter__(self) -> Workbench:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.telemetry.sinks.close(failed=error is not None)
        self.close()

    # --- stages -------------------------------------------------------------------------------------------------------

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on all ranks of its group.

        Returns the batch's next version, an update's metrics, or what each rank returned. Inside `overlap()`, returns
        at once: a batch that waits when it is read, or the `Run`.
        """
        return self.runner.call(group, operation, args, kwargs)

    def submit(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Run an operation in the background (on the inline backend: now)."""
        return self.runner.submit(group, operation, args, kwargs)

    def open_runs(self) -> Sequence[Run]:
        """What was called and has not ended, in call order."""
        return self.runner.open_runs()

    def runs(self) -> pd.DataFrame:
        """What stages this kernel called, one a row, in order: which cell called it, how far it is, how it ended."""
        return self.runner.run_log.frame()

    def driving(self, what: str, stopping: Callable[[], bool] = lambda: False) -> AbstractContextManager[None]:
        """Inside, only this thread calls stages: a panel's button and a cell do not mix their steps.

        what: is doing it, for the `BadInput` that calls of other threads get. stopping: where it says so, the next call
        raises `StageInterrupted`.
        """
        return self.runner.driving(what, stopping)

    def check_driver(self) -> None:
        """Raise `BadInput` while another thread drives, `StageInterrupted` where this one is to stop."""
        self.runner.check_driver()

    def overlap(self) -> AbstractContextManager[None]:
        """Inside, a stage's call returns at once, and it runs when its inputs are there and its pool is free.

        So stages of different pools run at the same time, with the same lines as one by one. Waits at the end.
        """
        return self.runner.scheduler.overlapping()

    def reuse(self) -> AbstractContextManager[None]:
        """Inside, a stage whose code, arguments, input columns and weights are those of an earlier one is answered from
        the store, and says so. Updates never are; generation only where a seed is given. Variables that a function
        reads from the notebook are not part of its code."""
        return self.runner.reuse()

    def wait(self) -> None:
        """Wait for every stage of `overlap()`; raises the error of the first one that failed."""
        self.runner.scheduler.wait()

    def report(self, stage: str, metrics: Metrics) -> None:
        """Record metrics of a stage that is a function, beside the metrics of the operations."""
        self.runner.report(stage, metrics)

    def reported_as(self, stage: str) -> AbstractContextManager[None]:
        """Inside, calls report their metrics under a stage's own name: an algorithm may have two of one operation."""
        return self.runner.reported_as(stage)

    def last_error(self) -> FailedStage:
        """The last stage that failed, whether it was waited for or not: role, stage, ranks, the error and its text, the
        arguments, and in `.batch` what it was given. That is kept on the hosts until the next stage fails, or
        `lab.forget_error()`. Raises `NotFound` where none has failed.
        """
        return self.runner.failures.last()

    def forget_error(self) -> None:
        """Forget the last failure, and release the batch that is kept with it."""
        self.runner.failures.forget()

    def debug(self, *, rank: int | None = None, device: str | None = None, post_mortem: bool = False) -> Any:
        """Run the last stage that failed again, in this kernel, where `breakpoint()`, `%debug` and pdb work.

        A worker of the role is made here, takes the state of the live one (weights, moments, step count, random state;
        gathered where it is cut over ranks), and is called as rank `rank` was (None: the first that failed): with its
        rows of the kept batch, its arguments, its seed. The error is raised here with its real frames. Nothing of the
        workbench changes; on the inline backend the stage is run in its place, and the role's state put back.
        Functions that score are called one after the other in this thread, and without a time limit.

        device: "cpu" or "cuda"; None: as the workbench's, where this process has such a one. post_mortem: enter the
        debugger where it fails, instead of raising. Where it does not fail: says so, and returns what the rank made, an
        `Output` or a value.

        It is the state as it is now: an update that failed in its third step has taken two. One rank runs alone: sums
        over ranks are over its own rows, and a model that was cut over ranks gives the same numbers within rounding.
        Raises `NotFound` where no stage has failed, `BadInput` where this one cannot be run here.
        """
        return replay(self.runner, self.last_error(), rank=rank, device=device, post_mortem=post_mortem)

    # --- batches ------------------------------------------------------------------------------------------------------

    def put(
        self, table: Table | TensorDict, *, meta: Mapping[str, Any] | None = None, owner: str = "notebook"
    ) -> Batch:
        """A batch from columns made here: they go to the first host of the actor's pool
        (without an actor, of the first role's that has a model).

        table: name -> Tensor [rows, ...], `Ragged`, or list of Python objects, all of equally many rows (what
        `Batch.fetch` gives); or a TensorDict. meta: plain values that travel along, such as the sampling temperature.
        """
        return self.runner.batches.put(table, meta=meta, owner=owner)

    def load(self, path: str | Path) -> Batch:
        """A batch that `Batch.save` wrote, from this workbench or another: the same rows, columns and meta.

        It goes where `put` puts tables. Raises `BadInput` for a file that is not there or not such a batch, and for one
        with token ids of another tokenizer.
        """
        return self.runner.batches.load(path)

    def decode(self, token_ids: Iterable[NonNegativeInt]) -> str:
        """Text of token ids, special tokens included."""
        return self.runner.batches.decode(token_ids)

    def demonstrations(self, source: Source, **options: Any) -> ExampleStream:
        """Prompts with the responses to learn: `lab.demonstrations("sft.jsonl", held_out=100).next(64)` is a batch for
        `update_sft`. Rows and options: see `Examples`; seed: default the workbench's."""
        return self._stream(source, "demonstrations", options)

    def feedback(self, source: Source, **options: Any) -> ExampleStream:
        """Prompts with an answer and a label, whether it is good, for `update_kto`: `lab.feedback("rated.jsonl")` of
        rows such as {"prompt": ..., "response": ..., "label": true}. Rows and options: see `Examples`."""
        return self._stream(source, "feedback", options)

    def pairs(self, source: Source, **options: Any) -> ExampleStream:
        """Prompts with a chosen and a rejected answer, for `update_reward`, `update_cost`, `update_dpo` and the like:
        `lab.pairs("pairs.jsonl", held_out=200, max_tokens=512).next(64)`. Rows and options: see `Examples`."""
        return self._stream(source, "pairs", options)

    def _stream(self, source: Source, kind: Kind, options: Mapping[str, Any]) -> ExampleStream:
        given: dict[str, Any] = {"seed": self.seed, "tokenizer": self.runner.batches.tokenizer, "options": options}
        return self.position.add_stream(ExampleStream(self._iterations, source, kind, **given))

    def batches(self) -> pd.DataFrame:
        """What stages made and the store keeps: one row a batch, with the stage, the inputs and where it is."""
        return self.store.frame()

    def batch(self, name: str) -> Batch:
        """A batch of the store by "name vversion", or the newest version of a name."""
        return self.runner.batches.get(name)

    def release(self, name: str | Batch) -> None:
        """Remove a batch, or all versions of a name, from the store; its memory is free when no variable holds it."""
        self.runner.batches.forget(name.id if isinstance(name, Batch) else name)

    def lineage(self, batch: Batch | str) -> pd.DataFrame:
        """A batch, itself or by name as in `batch`, and all that it was made of, newest first."""
        return self.store.lineage((batch if isinstance(batch, Batch) else self.batch(batch)).id)

    @staticmethod
    def apply(function: Callable[..., Any], *batches: Batch, **kwargs: Any) -> Any:
        """Call a function of batches: in an algorithm's `define`, what it does becomes a stage of the graph."""
        return function(*batches, **kwargs)

    # --- iterations and checkpoints -----------------------------------------------------------------------------------

    def iterations(self, n: PositiveInt) -> Iterator[int]:
        """The numbers 1 to n, for a loop of iterations by hand: `for _ in lab.iterations(100): ppo.iterate()`. In a
        script that is resumed, without those that were made before."""
        return self._iterations.numbers(n)

    def passed_over(self, iterations: NonNegativeInt) -> int:
        """How many of that many iterations were made before the script was resumed; they are counted once."""
        return self._iterations.passed_over(iterations)

    def note_position(self) -> None:
        """Record the position of the algorithm, from which a later kernel goes on."""
        self.ownership.record()

    def save(self, path: str | Path, algorithm: Algorithm | None = None, *, models: bool = True) -> Checkpoint:
        """Write all that the run is to a new folder: of each role weights, moments of Adam, step count and schedule;
        the random states of their ranks; the positions of prompts, examples and the algorithm. `wb.restore(path)` goes
        on from it, under this placement or another, and a script with `--resume PATH`.

        algorithm: whose KL coefficient, multiplier, and iteration under way are kept; None: the one that took the last
        step, while a variable holds it. models: also write each trained role's model to
        `roles/<role>/model`, for transformers and vLLM.

        The folder is there when all of it is on the disk, or not at all. On several machines it is one that all of them
        see. Waits for the stages under way. Raises `BadInput` where the folder holds something or the disk has no room,
        `StageError` where a rank cannot write; what was saved before stays as it was.
        """
        return self.checkpoints.save(path, algorithm, models=models)

    def autosave(
        self, every: int | None = 1, *, minutes: float | None = None, keep: int = 2,
        folder: str | Path | None = None, models: bool = False,
    ) -> None:  # fmt: skip
        """Save after each `every` iterations, or when `minutes` have passed since the last time, whichever comes first;
        `lab.autosave(None)` ends it.

        It happens when an algorithm's iteration is over, and before prompts or examples of the next one are drawn.
        keep: how many of these are left on the disk; older ones are deleted once a new one is there. folder: where;
        default `checkpoints` in the run folder. models: as in `save`. What cannot be saved is warned of, and
        the run goes on.
        """
        self.checkpoints.autosave(every, minutes=minutes, keep=keep, folder=folder, models=models)

    def save_if_due(self, algorithm: Algorithm | None = None) -> None:
        """Between two iterations: save where `autosave` says so."""
        self.checkpoints.save_if_due(algorithm)

    def recover(self, path: str | Path | None = None) -> Checkpoint | None:
        """Start again what died, and bring every role back to the last checkpoint, so that all know the same: weights,
        optimizers, random states, prompts, examples, and the algorithm that this notebook holds. Handles stay valid:
        `lab.actor`, `lab`, the algorithm; the next iteration is the one that would have come after the checkpoint. The
        checkpoint; None: there was none, and the workbench is as it was opened.

        path: another checkpoint than the newest of `lab.save`, `lab.autosave` and the one that it was resumed from.
        Only pools that are no longer whole get new processes, and lose the batches that they kept. All do without a
        checkpoint, after an edit of code that only new processes take (see `reload`), and when this user's Ray head was
        gone, in whose place another one is started. Raises `BadInput`, with nothing touched, where the checkpoint does
        not fit.
        """
        return recover(self.runner, self.position, self.prompts, path, self._reloader.reload)

    # --- code ---------------------------------------------------------------------------------------------------------

    def reload(self, **roles: Any) -> ReloadReport:
        """Have edited code take effect on the living workers: weights, optimizers and batches stay.

        Functions and classes of every module of yours whose file has changed since this kernel or a host loaded it:
        workers, losses, reward functions. Functions and classes of the notebook that a role was opened with count as
        well, where their cell was run again. `lab.reload(reward=new_rule)` gives a role another function, `lab.reload(
        critic=MyCritic)` another worker class: its `__init__` is not called again.

        Functions and classes stay the objects that they are, and get the new code. Imports and new variables are taken
        too. An edit of any other line of a module is a `ReloadError`; `lab.save(path)`, then `lab.recover()` restarts
        the hosts with it. New operations can be called, `lab.reuse()` and branches know that the code is another.

        Waits for the stages that are under way. All processes take the edits, or none: a file with a syntax error is a
        `BadInput` that names file and line, code that raises while it is loaded, in whichever process, a
        `ReloadError`, whose `report` says where; the old code goes on. Returns a report with a row a process.
        """
        return self._reloader.reload(**roles)

    def autoreload(self, on: bool = True) -> None:
        """From now on (or, with False, no longer), reload before a stage that a cell calls, and before an algorithm's
        step or loop, where a file was edited or a cell with code of a role was run again; one line says so. A syntax
        error refuses the stage."""
        self._reloader.autoreload(on)

    def take_edits(self) -> None:
        """What `autoreload` does before a stage; nothing inside a loop, or inside `overlap`."""
        self._reloader.take_edits()

    # --- placement ----------------------------------------------------------------------------------------------------

    def move(self, placement: Placement) -> PlacementChange:
        """Change the placement while the models live: `lab.move(wb.Placement.split(4))`; what moved, as `lab.diff` says
        it before, and how long it took.

        A pool keeps its processes where the new placement has one of its name with as many devices; other pools get
        new processes beside the old ones. Weights, moments of Adam and step counts of the roles that move go from host
        to host, to each rank exactly what its process lacks; so do batches on hosts that end. Generation engines are
        built again, and synced before they generate. Counters and random draws go on: the next stage gives the numbers
        that it would have given without the move.

        Until all has arrived, and its sums of bits are right, the old placement stays as it is: an error ends what is
        new, says which step failed on which host, and the old placement goes on.

        Raises `BadInput`, with nothing touched, for a placement that this workbench could not have been opened with, or
        that has no room; on GPUs new pools need devices that are free beside those of the old ones; the inline backend
        has its one process only. A placement with a pool for "rollout" adds rollout workers, one without it drops them.
        """
        return move(self.runner, self._topology, placement)

    def add(self, role: str, model: Any = None, pool: str | None = None, devices: int | None = None) -> PlacementChange:
        """Add a role while the others live: `lab.add("cost", too_long)`; `lab.add("critic", "smollm2-135m", "scorers",
        devices=2)`; `lab.add("rollout", pool="engines", devices=1)`. What it changed, as `lab.diff` says it.

        model: as in `wb.open`; none for rollout workers, which have the actor's. pool: by default the only one there
        is. devices: of the pool, where there is none of that name yet. Otherwise as `move`.
        """
        return add(self.runner, self._topology, role, model, pool, devices)

    def drop(self, role: str) -> PlacementChange:
        """Close a role, and free what it holds, what it has learned among it: `lab.drop("cost")`. A pool that is left
        without a role ends; batches on its hosts move to others. Also of a role that was lost with
        its pool, where it was alone there: what the hosts kept is gone."""
        return drop(self.runner, self._topology, role)

    def resize(self, pool: str, devices: int) -> PlacementChange:
        """Give a pool more or fewer devices: `lab.resize("policy", 4)`; see `move`."""
        return self.move(self.placement.with_devices(pool, devices))

    def topology(self) -> pd.DataFrame:
        """Role x rank: its place in the role's layout (replica, pipeline stage, tensor rank), host, process, machine,
        device, how sequences run, tokens of a micro-batch (none before the role has run a pass), and bytes by use,
        asked of the live processes. `lab.memory()` draws it.
        """
        return self._topology.frame()

    def memory(self) -> DeviceMap:
        """A picture of what is on which device now: a box a device, a bar a role, asked of the live processes. A host
        that does not answer has an empty box, which says why."""
        return self._topology.memory()

    def read_memory(self, timeout_s: PositiveFloat = ANSWER_S) -> list[MemoryReading]:
        """What each host holds now, in the order of the placement; kept in `telemetry.memory()`. Hosts answer while
        they compute. One that is gone, or silent for `timeout_s` seconds, is a reading with an error."""
        return self._topology.read_memory(timeout_s)

    def estimate(self, placement: Placement | None = None) -> MemoryEstimate:
        """What a placement of this workbench's roles needs of each device's memory; None: the present one."""
        return self._topology.estimate(placement)

    def diff(self, placement: Placement, **models: Any) -> PlacementChange:
        """What a change to another placement would move: which roles, how many bytes between which processes, the
        memory that it needs on each device, and how long it should take. Nothing is touched.

        models: of roles that it has and the workbench lacks: `lab.diff(lab.placement.with_role("cost", "policy"),
        cost=too_long)` says what `lab.add` would do.
        Raises `BadInput` for a placement that this workbench could not be opened with. Whether there is room, and there
        are devices for new processes beside the old ones, is `.fits`; `.require_fit()` raises.
        """
        return self._topology.diff(placement, **models)

    def calibrate(self, algorithm: Algorithm | None = None, *, hardware: str | Hardware | None = None) -> Constants:
        """Fit the cost model to the calls of the last iteration, as they were timed on the slowest rank, together with
        those of earlier calibrations, such as under another placement: the more different they are, the better. Run
        two iterations before, as the first one warms up.

        algorithm: whose iteration it was; None: the one that took the last step. hardware: whose peak rates the terms
        are counted in; None: this machine's, measured; needed where hosts run on other machines. Raises `BadInput`
        where the iteration has not ended, or was made under an earlier placement.
        """
        return self._predictor.calibrate(algorithm, hardware=hardware)

    def predict(self, placement: Placement | None = None, algorithm: Algorithm | None = None) -> Prediction:
        """What an iteration would take under another placement; None: under the present one. After `calibrate`; what
        was measured under that placement is shown beside it. Nothing is touched.

        Whether there is room and devices for it is `lab.diff(placement)`. Raises `BadInput` for a placement that lacks
        a role, or before any `calibrate`.
        """
        return self._predictor.predict(placement, algorithm)

    def suggest(
        self, algorithm: Algorithm | None = None, *, devices: PositiveInt | None = None, top: PositiveInt = 3
    ) -> Plans:
        """The quickest placements of this workbench's models by the fitted cost model: see `wb.mapping.search`.

        devices: None: those that it has. Up to so many, plans are such as this workbench could be opened with, which is
        what `move` asks of them; whether there is room now, `diff` says. `.chance` and
        `.advice` say how sure the best is, and what one trial would decide. Raises `BadInput` before any `calibrate`,
        or where no such plan is left.
        """
        return self._predictor.suggest(algorithm, devices=devices, top=top)

    # --- what happened ------------------------------------------------------------------------------------------------

    def spans(self, run: NonNegativeInt | None = None) -> pd.DataFrame:
        """Every timed piece of work on every rank, one a row, seconds and bytes; of one run only, if given."""
        return self.telemetry.spans(run)

    def transfers(self, kind: TransferKind | None = None) -> pd.DataFrame:
        """Every movement of bytes from one host to another, one a row: of rows for stages ("batch"), of "weights" for
        generation, of what `lab.move` moves ("move"), or of all."""
        return self.history.transfers(kind)

    def traffic(self, kind: TransferKind | None = None, *, stage: str | None = None) -> Traffic:
        """Who sent how many bytes to whom: a matrix as a picture, `.matrix` and `.frame()` as tables.

        kind: as in `transfers`. stage: only what moved for stages of this name. Of "weights" it also says what their
        syncs would move at the least: what each rank lacks.
        """
        return self.history.traffic(kind, stage=stage)

    def sync_plans(self) -> pd.DataFrame:
        """What a sync of the actor's weights would move by each strategy, one a row: strategy, in_use, moved_bytes on
        all ranks, least_bytes that no strategy could do without, and the most of a rank: received_bytes,
        peak_parameter_bytes, kept_twice_bytes beside the generation weights. Without rows where ranks hold whole models
        and generate with them, or rollout workers generate.
        """
        return self.history.sync_plans()

    def syncs(self) -> pd.DataFrame:
        """The ledger of weights: one row a sync and one a generation, in order, with what is wrong with it.

        version, trained_version: of the engine's and the trainer's weights, in optimizer steps. strategy: by which
        slices moved between ranks. moved_bytes: between ranks, on all of them; taken_bytes: handed to the engines.
        checksum_sent, checksum_received: of what moved, in the memory of those who sent it and of those who have it;
        taken where `Generation.check_sync` says so.
        verdict: "ok"; "checksum differs"; "not synced", drawn with other weights than the trainer had; "synced twice",
        the engine had these weights; "failed". With culprit (weight, rank) and remedy.
        """
        return self.telemetry.syncs()

    def metrics(self, stage: str | None = None) -> pd.DataFrame:
        """One row a stage call, a column a metric; of one stage only, if named: `NotFound` for one that is none."""
        return self.history.metrics(stage)

    def track(self, tracker: str, project: str | None = None, **options: Any) -> None:
        """Send every metric from now on to a tracker too: `lab.track("wandb", project="arithmetic")`.

        tracker: "tensorboard", "wandb", "mlflow" or "trackio", also as "NAME=PROJECT". Steps are iterations, names are
        "stage/metric". Comparisons and checks are left out: after them all is as before. project, options: see the
        tracker's class in `workbench.telemetry.sinks`. One that fails later is given up with a warning.

        Raises `BadInput` where it does not start, `MissingDependency` where it is not installed.
        """
        self.history.track(tracker, project, **options)

    def devices(self) -> list[tuple[str, str]]:
        """(pool, device) of every host, as the placement has them; nobody is asked."""
        return [(info.pool, info.device) for info in self.hosts.infos]

    def timeline(self, iterations: PositiveInt | None = 1, *, fold: bool = True) -> Timeline:
        """A picture of the last iterations (None: all) by device: what ran where, when, and what was idle.

        fold: draw long stretches in which nothing was called as narrow breaks. `.summary` has the times of each device,
        `.sums(from_s, to_s)` those of each stage between two times.
        """
        return self.history.timeline(iterations, fold=fold)

    def opening(self) -> pd.DataFrame:
        """Where the seconds of opening went: a row for each piece of it on each rank, by start.

        kind and note say what it was. start_s: since `wb.open` was called. A row with a parent lies inside the one of
        that kind.
        """
        return self.history.opening()

    def trace(self, path: str | Path) -> Path:
        """Write everything that happened as a Chrome trace, for Perfetto."""
        return self.telemetry.chrome_trace(path)

    def logs(self, pool: str | None = None, rank: NonNegativeInt | None = None, lines: PositiveInt = 40) -> None:
        """Print the last lines that worker processes wrote."""
        self.history.logs(pool, rank, lines)

    def panel(self, *views: str, algorithm: Any = None) -> Panel:
        """The workbench as a live widget with a tab a view: `lab.panel()`, or those named: `lab.panel("timeline")`.

        It follows what cells do, and its buttons do what cells could. The same views are one panel however often it is
        asked for. algorithm: what its stepper steps; None: the one that took the last step. Where widgets cannot be
        shown, and in a saved notebook, it is a picture. Raises `BadInput` for a view that there is not,
        `MissingDependency` without the packages of the extra "notebook".
        """
        try:
            from workbench_widgets import panel
        except ImportError as error:
            raise MissingDependency.of(f"{error.name}", "a live panel needs it", "notebook") from error
        return panel(self, views, algorithm)

    def strip(self) -> Panel:
        """A line that stays in sight: connected, what runs and how far it is, tokens a second, the reward of the last
        iterations, memory, warnings. In JupyterLab it sticks to the top of the notebook, elsewhere it is in its cell.
        Raises `MissingDependency` as `panel` does."""
        return self.panel("strip")

    @stoppable("lab.export()", ("the script is written as a whole, or not at all", "the same call again writes it"))
    def export(self, output: str | Path, notebook: str | Path | None = None, **options: Any) -> Script:
        """Write this notebook as a script: `lab.export("script.py")`; `.told` says what its reader should know.

        notebook: its file; None: the one that this kernel belongs to, where the front end tells. Save it first: the
        file is what is read, beside the record of what was run; `BadInput` after wb.open(record=False). options: see
        `workbench.export.export_notebook`. `wb export NOTEBOOK --check` proves that the two agree.
        """
        from workbench.export import export_notebook

        recorded = _recorded(self)
        output = path_of(output, "output")
        if output.suffix != ".py":
            raise BadInput(f"output={str(output)!r}", "a script's name ends in .py", f"write {output.stem + '.py'!r}")
        return export_notebook(notebook or notebook_path(), output, **{"runs": recorded, **options})

    # --- branches, checks, evaluation ---------------------------------------------------------------------------------

    def compare(self, batch: Batch, arms: Arms) -> Comparison:
        """The same batch under several algorithms: `lab.compare(batch, {"ppo": wb.PPO(lab), "grpo": wb.GRPO(lab)})`.

        Each arm runs what lies downstream of the batch's columns, from the weights and optimizers as they are now;
        afterwards the roles, and the position of the prompts, are as before.
        """
        return compare(self, self.runner, batch, arms)

    def kept(self, *roles: str) -> AbstractContextManager[Callable[[], None]]:
        """Keep the state of roles (weights, optimizer, schedule, step count) on their hosts, and go back to it at the
        end: `with lab.kept("actor") as go_back:`; go_back() does so in between."""
        return self.runner.snapshots.kept(*roles)

    def check(self, *names: str, loss: Any = None, batch: Any = None) -> CheckReport:
        """Run checks on the live system, all of them or those named, on a small batch of their own: is the ratio 1
        before the first step, does the engine have the trainer's weights, does nothing outside the mask reach the
        gradient (`workbench.checks.CHECKS`). Afterwards the system is as before. `.raise_if_failed()` is for scripts.

        loss, batch: check a loss instead, for the actor's update, on rollouts that it is to learn from, before a step
        is taken with it: is its gradient that of its value, does anything leak through the mask or between rows, does
        it depend on micro-batches or ranks, what is its gradient at ratio 1, and where does it point beside PPO's and
        GRPO's (`workbench.checks.loss_checks.LOSS_CHECKS`). `.batch` of the report has what each token adds to the
        loss, `loss_contribution`, and to its gradient, `gradient_contribution`, as columns for the samples view.
        """
        from workbench.checks.checking import check

        return check(self, names, loss, batch)

    def mismatch(self, batch: Batch, precisions: Precisions | None = None) -> Mismatch:
        """How far apart the log-probabilities of these responses are under several precisions, from the actor's weights
        as they are now: as a trainer and as a generation engine compute in fp32, bf16 and fp16, with the output head in
        fp32, with an adapter beside the weights or merged into them. `.df` is one row a precision, `.tokens` and
        `.gaps` one row a token; in a notebook it is a picture. Before any training: which precision will do?

        precisions: `wb.Precision` by name, in place of `workbench.settings.precision.PRECISIONS`. Needs room for the
        actor's weights a second time.
        """
        from workbench.checks.mismatch import mismatch

        return mismatch(self, batch, precisions)

    def evaluate(
        self, data: Any, *, samples: int = 4, sampling: Sampling | None = None, n: int | None = None,
        reward: Callable[..., Any] | Mapping[str, Any] | None = None, threshold: float = 1.0, seed: int = 0,
        answer: Callable[[str], Any] | None = None, select: Any = None,
    ) -> pd.DataFrame:  # fmt: skip
        """How the policy does on other data; training sees nothing of it. One row a data set; `lab.metrics("evaluate")`
        has them all. `.rows` of what it returns is a frame with a row a response: prompt, text, reward, passed, tokens.
        `algo.run(100, evaluate=lambda: lab.evaluate(held_out), every=10)` does it on the way.

        data: whatever `prompts=` takes, or several by name; without `chat` they have the chat format of `lab.prompts`.
        n: the first n prompts of each; None: all.
        samples: responses a prompt. sampling: how they are drawn; None: `wb.Sampling()`, at temperature 1 and of at
        most 64 tokens, whatever training draws with: give the algorithm's, `sampling=ppo.sampling`, to measure what it
        trains. reward: in place of the reward role's own. seed: the same one draws the same responses from the same
        weights.
        answer: a function that gives the answer of a response's text, None where it has none: `majority@k`, the share
        of prompts of which the answer that most of k samples give has passed. select: "role", the reward role's own
        model, or a function as `reward`: `best_of@k`, the reward of the response that it scores highest among k,
        without those for which it failed: `selection_failed_fraction`.
        Columns: `reward_mean`, its standard error over prompts, `pass@k` (Chen et al. 2021, arXiv:2107.03374) where a
        reward of at least `threshold` has passed, `response_tokens_mean` (of the policy), median and 95th
        percentile, `truncated_fraction`, `failed_fraction`; `reward/NAME_mean` of each component, such as a
        format.
        """
        return evaluate(self, data, Asked(samples, sampling, reward, n, threshold, seed, answer, select))

    compare_evaluations = staticmethod(compare_evaluations)
    serve = serve

    def refresh_reference(self) -> None:
        """Give the reference the actor's weights, as iterative DPO and TR-DPO (arXiv:2404.09656) do: the KL to it is 0
        until the actor's next step. They go from host to host, to each rank what it holds of them; meanwhile the
        actor's ranks keep one copy of them together, in host memory."""
        refresh_reference(self.runner)


def _recorded(lab: Workbench) -> list[Path]:
    """The run folders of this process in which cells are recorded. `BadInput` after record=False."""
    if not lab.description.record:
        raise BadInput(
            f"{lab.name!r} was opened with record=False", "what its cells did was not recorded",
            "`wb export NOTEBOOK` writes the page as it stands",
        )  # fmt: skip
    runs = {lab.run_folder, *(other.run_folder for other in registry.opened.values())}
    return sorted((run for run in runs if (run / "events.jsonl").is_file()), key=lambda run: run.name)


def _groups_of_process() -> list[Groups]:
    """The groups of the inline workbenches of this process."""
    return [lab.runner.groups for lab in registry.opened.values() if lab.hosts.inline]
