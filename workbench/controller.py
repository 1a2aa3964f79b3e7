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

A stage: check arguments and columns -> deal out rows (protocol) -> send each rank its row numbers -> ranks pull,
compute, keep -> the controller hears shapes, metrics, spans and errors, and makes the batch's next version.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from workbench import registry
from workbench.dataflow.batch import Batch
from workbench.dataflow.branch import Comparison, compare, kept
from workbench.dataflow.location import Location, ShardId
from workbench.dataflow.planning import calls_on_batch, calls_without_batch
from workbench.dataflow.references import Column, ShardCounts
from workbench.dataflow.run import MetricValues, Run
from workbench.dataflow.scheduler import Scheduler
from workbench.dataflow.sources import Source
from workbench.dataflow.store import Origin, Store, Weights
from workbench.dataflow.weight_sync import RolloutCaller, refresh_reference
from workbench.description import Description
from workbench.engines.settings import Sampling
from workbench.errors import BadInput, StageInterrupted
from workbench.evaluation import evaluate
from workbench.example_stream import ExampleStream
from workbench.held_batches import HeldBatches
from workbench.models import load_tokenizer
from workbench.models.spec import Model
from workbench.moving import add, drop, move
from workbench.named_fields import meant
from workbench.placement import ROLLOUT, Layout, Placement, Pool
from workbench.prompt_stream import PromptStream
from workbench.starting import join_pools, load_roles
from workbench.telemetry.store import TelemetryStore
from workbench.vocabulary import Vocabulary
from workbench.workers.backends import Backend, InlineBackend, RayBackend
from workbench.workers.calls import Call, Metrics, agreed_columns, merge_metrics, reported
from workbench.workers.cluster import stop_idle_head
from workbench.workers.group import GroupOperation, WorkerGroup
from workbench.workers.operation import Operation
from workbench.workers.roles import ROLE_WORKERS

if TYPE_CHECKING:
    import pandas as pd

    from workbench.algorithms.loop import Algorithm
    from workbench.checks import CheckReport
    from workbench.placement.change import PlacementChange


class Workbench(HeldBatches):
    """Live handles to the worker groups of one RLHF system. Made by `wb.open` and `wb.attach`.

    lab.actor, lab.critic, ...: worker groups; lab.rollout: those who generate for the actor, where the placement names
    them. lab.prompts: where prompts come from. lab.topology(), lab.timeline(), lab.spans(), lab.transfers(),
    lab.syncs(), lab.metrics(), lab.logs(): what is where and what happened. lab.close(): free all.
    """

    _backend: Backend

    def __init__(self, description: Description, run_folder: Path) -> None:
        self.description, self.run_folder = description, run_folder
        self.name, self.placement, self.seed = description.name, description.placement, description.seed
        self._infos = description.hosts(run_folder)
        self._id = secrets.token_hex(4)  # of this controller: two never give a shard the same name
        self._counts = ShardCounts()
        lead_name = _name(description.models[description.lead])
        self._tokenizer = load_tokenizer(lead_name)
        self.vocabulary = Vocabulary(lead_name, self._tokenizer)
        self._overlapping, self._overlapped = 0, list[Run]()
        self._reusing = self.looping = False
        self._stage_name = ""
        self.weights: dict[str, Weights] = {}
        self.store = Store(run_folder / "batches", psutil.virtual_memory().total // 10)
        self._broken: dict[str, str] = {}
        self._heirs: dict[str, str] = {}
        self._pools_ended: dict[str, int] = {}
        self._keeping = 0  # how many `kept` are open
        self._closed = False
        self._run_number, self._batch_number, self.iteration = 0, 0, 0
        self._draws: dict[int, int] = {}
        self.last_metrics: dict[str, MetricValues] = {}
        self.groups: dict[str, WorkerGroup] = {}
        self._make_groups()
        self.lead = self.groups[description.lead]  # whose tokenizer makes the tokens, and to whom tables are put
        numeric = ROLE_WORKERS["numeric"]
        self._numeric = WorkerGroup("numeric", *self._standing("numeric"), self.lead.spec, numeric, self)
        self.compute_advantages: GroupOperation = self._numeric.operations["compute_advantages"]
        self.prompts = PromptStream(self, description.prompts)
        self.telemetry = TelemetryStore(run_folder)

    def _make_groups(self) -> None:
        """A group, and where weights may change what is known of them, for each role that lacks one; none for roles
        that are no longer there. The handles of the others stay."""
        description = self.description
        wanted = {role: (model, role) for role, model in description.models.items()}
        if description.actor_is_reference:
            wanted["reference"] = replace(description.models["actor"], adapter=None, worker=None), "actor"
        for role, group in list(self.groups.items()):
            if role not in wanted or group.worker_role != wanted[role][1]:
                del self.groups[role], self.__dict__[role]
                self.weights.pop(role, None)
                group.dropped = True
                if role == ROLLOUT:
                    self.actor.take_back()
        for role, (model, worker_role) in wanted.items():
            if role in self.groups:
                self.groups[role].spec = model
                continue
            worker_class = model.worker or ROLE_WORKERS[role]
            self.groups[role] = WorkerGroup(role, *self._standing(worker_role), model, worker_class, self, worker_role)
            setattr(self, role, self.groups[role])
            if model.trained or (role in ("reference", ROLLOUT) and worker_role == role):
                # an actor of another kind may load weights of its own
                others = role == ROLLOUT and description.models["actor"].worker is not None
                self.weights[role] = Weights(steps=0, state="as the model has them" if others else "")
            if role == ROLLOUT:
                RolloutCaller(self)

    def _standing(self, role: str) -> tuple[Pool, tuple[str, ...], Layout]:
        """Pool, hosts and layout of a role's workers."""
        pool = self.placement.pool_of(self.description.lead if role == "numeric" else role)
        hosts = tuple(info.name for info in self._infos if info.pool == pool.name)
        # the numbers of advantages are reductions over the whole batch: no model that could be cut
        return pool, hosts, Layout(d=pool.devices) if role == "numeric" else self.description.layout_of(role)

    def _stand(self, description: Description) -> None:
        """Go on as another description says: the handles of the roles that stay lead to where they are now."""
        self.description, self.placement = description, description.placement
        self._infos = description.hosts(self.run_folder)
        self._make_groups()
        for group in (*self.groups.values(), self._numeric):
            group.place(*self._standing(group.worker_role))

    def _record_hosts(self) -> None:
        """Let kernels to come find the hosts that there are now."""
        self._save_state()
        if isinstance(self._backend, RayBackend):
            registry.rewrite(self.description, self._backend.processes)

    def __getattr__(self, name: str) -> WorkerGroup:
        if name == ROLLOUT:
            rule = "the actor generates. Name 'rollout' in a pool, or lab.add('rollout', pool=...)"
            raise AttributeError(f"this workbench has no rollout workers: {rule}")
        roles = self.__dict__.get("groups", {})
        if name in ROLE_WORKERS:
            remedy = f"Declare it in models=, or lab.add({name!r}, ...)"
            raise AttributeError(f"this workbench has no {name}; it has {', '.join(roles)}. {remedy}")
        near = meant(name, [*roles, *(known for known in dir(self) if not known.startswith("_"))], str)
        raise AttributeError(f"a Workbench has no attribute {name!r}" + (f": {near}" if near else ""))

    # --- opening and leaving ----------------------------------------------------------------------------------------

    def _start(self, note: Callable[[str], None]) -> None:
        """Start hosts, join each pool's process group, load the models. note: called with what is waited for."""
        description = self.description
        self._backend = (
            InlineBackend()
            if description.backend == "inline"
            else RayBackend(description.id, description.address, note=note)
        )
        self._backend.start(self._infos)
        join_pools(self._backend, self._infos, note)
        load_roles(self._backend, self._infos, description, note)

    def close(self) -> None:
        """End the hosts, wait until they have ended, and free what they hold; the run folder stays. Closing twice, or
        after another kernel took the workbench's name, is fine: only what this opening started is ended."""
        if self._closed:
            return
        self._closed = True
        if registry.opened.get(self.name) is self:
            del registry.opened[self.name]
        self.scheduler.close()
        self._backend.close()
        if self.description.backend == "ray":
            registry.forget(self.description.id)
            stop_idle_head()

    def __enter__(self) -> Workbench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @functools.cached_property
    def scheduler(self) -> Scheduler:
        return Scheduler(self._backend)

    # --- placement --------------------------------------------------------------------------------------------------

    def move(self, placement: Placement) -> PlacementChange:
        """Change the placement while the models live: `lab.move(wb.Placement.split(4))`; what moved, as `lab.diff` says
        it before, and how long it took.

        A pool keeps its processes where the new placement has one of its name with as many devices; other pools get
        new processes beside the old ones. Weights, moments of Adam and step counts of the roles that move go from host
        to host, to each rank exactly what its process lacks; so do batches on hosts that end. Generation engines are
        made anew, and synced before they generate. What was counted or drawn goes on: the next stage gives the numbers
        that it would have given without the move.

        Until all has arrived, and its sums of bits are right, the old placement stays as it is: an error ends what is
        new, says which step failed on which host, and the old placement goes on.

        Raises `BadInput`, with nothing touched, for a placement that this workbench could not have been opened with, or
        that has no room; on GPUs new pools need devices that are free beside those of the old ones; the inline backend
        has its one process only. A placement with a pool for "rollout" adds rollout workers, one without it drops them.
        """
        return move(self, placement)

    def add(self, role: str, model: Any = None, pool: str | None = None, devices: int | None = None) -> PlacementChange:
        """Add a role while the others live: `lab.add("cost", too_long)`; `lab.add("critic", "smollm2-135m", "scorers",
        devices=2)`; `lab.add("rollout", pool="engines", devices=1)`. What it changed, as `lab.diff` says it.

        model: as in `wb.open`; none for rollout workers, which have the actor's. pool: by default the only one there
        is. devices: of the pool, where there is none of that name yet. Otherwise as `move`.
        """
        return add(self, role, model, pool, devices)

    def drop(self, role: str) -> PlacementChange:
        """Close a role, and free what it holds, what it has learned among it: `lab.drop("cost")`. A pool that is left
        without a role ends; batches on its hosts move to others."""
        return drop(self, role)

    def resize(self, pool: str, devices: int) -> PlacementChange:
        """Give a pool more or fewer devices: `lab.resize("policy", 4)`; see `move`."""
        return self.move(self.placement.with_devices(pool, devices))

    # --- one stage --------------------------------------------------------------------------------------------------

    def call(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on all ranks of its group.

        Returns the batch's next version, an update's metrics, or what each rank returned. Inside `overlap()`, returns
        at once: a batch that waits when it is read, or the `Run`.
        """
        return self.carry_out(self._run(group, operation, args, kwargs))

    def carry_out(self, run: Run) -> Any:
        """Run what was prepared, as `call` says."""
        self.store.trim(lambda batch, path: batch.save(path))
        if self._overlapping:
            self.send(run)
            return run if run.batch is None else run.batch
        with run.progress() as bar:
            return run.start(self.scheduler, bar)

    def submit(self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Run an operation in the background (on the inline backend: now)."""
        run = self._run(group, operation, args, kwargs)
        self._submit(run)
        return run

    def prepare(
        self, group: WorkerGroup, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        *, first: Callable[[], Sequence[Run]] = tuple, then: Callable[[], None] | None = None,
    ) -> Run:  # fmt: skip
        """The run of a call, checked and not yet sent.

        first: called once it is checked, gives runs that come before it. then: called when it has succeeded, before who
        waits for it hears of it.
        """
        return self._run(group, group.operations[operation].operation, args, dict(kwargs or {}), first, then)

    def send(self, run: Run) -> None:
        """Run what was prepared in the background; inside `overlap()` it is waited for at the end."""
        if self._overlapping:
            self._overlapped.append(run)
        self._submit(run)

    @property
    def overlapping(self) -> bool:
        """Whether calls return at once, see `overlap`."""
        return self._overlapping > 0

    def open_runs(self) -> Sequence[Run]:
        """What was called and has not ended, in call order."""
        runs = (*self.scheduler.open_runs(), *self._overlapped)
        return [run for run in dict.fromkeys(runs) if not run.done]

    def _submit(self, run: Run) -> None:
        try:
            self.scheduler.submit(run)
        except KeyboardInterrupt:  # inline; the run says what was interrupted
            run.result()

    @contextlib.contextmanager
    def overlap(self) -> Iterator[None]:
        """Inside, a stage's call returns at once, and it runs when its inputs are there and its pool is free.

        So stages of different pools run at the same time, with the same lines as one by one. Waits at the end.
        """
        self._overlapping += 1
        try:
            yield
        except BaseException:
            for run in self._overlapped:
                run.cancel()
            self._overlapped.clear()
            raise
        finally:
            self._overlapping -= 1
        self.wait()

    @contextlib.contextmanager
    def reuse(self) -> Iterator[None]:
        """Inside, a stage whose code, arguments, input columns and weights are those of an earlier one is answered from
        the store, and says so. Updates never are; generation only where a seed is given. Variables that a function
        reads from the notebook are not part of its code."""
        self._reusing, before = True, self._reusing
        try:
            yield
        finally:
            self._reusing = before

    def wait(self) -> None:
        """Wait for every stage of `overlap()`; raises the error of the first one that failed."""
        runs, self._overlapped = self._overlapped, []
        errors = []
        for run in runs:
            try:
                run.result()
            except StageInterrupted:
                for other in runs:
                    other.cancel()
                raise
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # --- branches and the store -------------------------------------------------------------------------------------

    def compare(self, batch: Batch, arms: Mapping[str, Algorithm]) -> Comparison:
        """The same batch under several algorithms: `lab.compare(batch, {"ppo": wb.PPO(lab), "grpo": wb.GRPO(lab)})`.

        Each arm runs what lies downstream of the batch's columns, from the weights and optimizers as they are now;
        afterwards the roles, and where the prompts stand, are as before.
        """
        if not isinstance(arms, Mapping):
            raise BadInput(f"arms={arms!r:.60}", "algorithms by name", 'lab.compare(batch, {"ppo": wb.PPO(lab)})')
        if not isinstance(batch, Batch):
            raise BadInput(f"compare({type(batch).__name__})", "its first argument is a batch", "lab.prompts.next(n)")
        return compare(self, batch, arms)

    def kept(self, *roles: str) -> AbstractContextManager[Callable[[], None]]:
        """Keep the state of roles (weights, optimizer, schedule, step count) on their hosts, and go back to it at the
        end: `with lab.kept("actor") as go_back:`; go_back() does so in between."""
        return kept(self, roles)

    def check(self, *names: str) -> CheckReport:
        """Run checks on the live system, all of them or those named, on a small batch of their own: is the ratio 1
        before the first step, does the engine have the trainer's weights, does nothing outside the mask reach the
        gradient (`workbench.checks.CHECKS`). Afterwards the system is as before. `.raise_if_failed()` is for scripts.
        """
        from workbench.checks.checking import check

        return check(self, names)

    def evaluate(
        self,
        data: Any,
        *,
        samples: int = 4,
        sampling: Sampling | None = None,
        reward: Callable[..., Any] | None = None,
        n: int | None = None,
        threshold: float = 1.0,
        seed: int = 0,
    ) -> pd.DataFrame:
        """How the policy does on other data; training sees nothing of it. One row a data set; `lab.metrics("evaluate")`
        has them all. `algo.run(100, evaluate=lambda: lab.evaluate(held_out), every=10)` does it on the way.

        data: whatever `prompts=` takes, or several by name. n: the first n prompts of each; None: all.
        samples: responses a prompt. sampling: how they are drawn; None: `wb.Sampling()`, at temperature 1 and of at
        most 64 tokens, whatever training draws with: give the algorithm's, `sampling=ppo.sampling`, to measure what it
        trains. reward: in place of the reward role's own. seed: the same one draws the same responses from the same
        weights.
        Columns: `reward_mean`, its standard error over prompts, `pass@k` (Chen et al. 2021, arXiv:2107.03374) where a
        reward of at least `threshold` has passed, `response_tokens_mean` (of the policy), `truncated_fraction`.
        """
        return evaluate(
            self, data, samples=samples, sampling=sampling, reward=reward, n=n, threshold=threshold, seed=seed
        )

    def refresh_reference(self) -> None:
        """Give the reference the actor's weights, as iterative DPO and TR-DPO (arXiv:2404.09656) do: the KL to it is 0
        until the actor's next step. They go from host to host, to each rank what it holds of them; meanwhile the
        actor's ranks keep one copy of them together, in host memory."""
        refresh_reference(self)

    def batches(self) -> pd.DataFrame:
        """What stages made and the store keeps: one row a batch, with the stage, the inputs and where it is."""
        return self.store.frame()

    def batch(self, name: str) -> Batch:
        """A batch of the store by "name vversion", or the newest version of a name."""
        return self.store.get(name, self.load)

    def release(self, name: str | Batch) -> None:
        """Let the store forget a batch, or all versions of a name; its memory is free when nothing else holds it."""
        self.store.release(name.id if isinstance(name, Batch) else name)
        self._release()

    def lineage(self, batch: Batch | str) -> pd.DataFrame:
        """A batch, itself or by name as in `batch`, and all that it was made of, newest first."""
        return self.store.lineage((batch if isinstance(batch, Batch) else self.batch(batch)).id)

    @staticmethod
    def apply(function: Callable[..., Any], *batches: Batch, **kwargs: Any) -> Any:
        """Call a function of batches: in an algorithm's `define`, what it does becomes a stage of the graph."""
        return function(*batches, **kwargs)

    def report(self, stage: str, metrics: Mapping[str, float]) -> None:
        """Record what a function that is a stage has to tell, beside the metrics of the operations."""
        if not isinstance(metrics, Mapping):
            raise BadInput(f"metrics={metrics!r:.60}", "numbers by name", f"lab.report({stage!r}, {{'loss': 0.5}})")
        for name, value in metrics.items():
            if not isinstance(value, numbers.Real):
                raise BadInput(f"metric {name!r} is {value!r:.60}", "a metric is a number", "float(value)")
        values = MetricValues({name: float(value) for name, value in metrics.items()})
        self.telemetry.append_metrics(stage, self._run_number, self.iteration, values)
        self.last_metrics[stage] = values

    def _run(
        self, group: WorkerGroup, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any],
        first: Callable[[], Sequence[Run]] = tuple, then: Callable[[], None] | None = None,
    ) -> Run:  # fmt: skip
        """The run of a call, checked as far as it can be before its inputs are there; see `prepare`."""
        self._check_alive(group)
        where = f"{group.role}.{operation.name}"
        batch, args = self._batch_argument(where, operation, args, kwargs)
        arguments, samples = group.operations[operation.name].arguments(args, kwargs)
        if operation.samples:
            kwargs.pop("samples", None)
        code = group.operations[operation.name].code(arguments, samples)
        operation = operation.given(arguments)
        if batch is not None:
            batch.need(operation.needed(arguments), where)
            group.operations[operation.name].check_columns(arguments, batch.names)
        before = first()

        # a role's stages come after its updates, and are not run when one of these failed
        updates = [r for r in (*self.scheduler.open_runs(), *self._overlapped) if r.updates and r.group is group]
        reads = operation.needed(arguments) if operation.takes_batch else ()
        awaited = [] if batch is None else batch.makers(operation.awaited(reads, batch))
        metrics, reported_as = self.last_metrics, self._stage_name or operation.name

        def plan() -> list[Call]:
            self._check_alive(group)
            self._release()
            common = {
                "run": run.number, "key": f"{self._id}-{run.number}", "stage": operation.name,
                "method": operation.name, "role": group.worker_role, "kwargs": kwargs, "submitted_s": run.submitted_s,
            }  # fmt: skip
            if batch is None:
                return calls_without_batch(group, operation, common, args)
            travels = operation.travelling(reads, batch)
            _, meta = batch.part(travels)
            seeded = {**meta, "seed": self._stage_seed(operation, meta, arguments)}
            if group.role == ROLLOUT:  # who samples with the weights as they are: here is known which there are
                seeded["trained_version"] = self.weights["actor"].steps
            return calls_on_batch(group, operation, common, args, batch, samples, travels, seeded, self._heirs)

        def finish(run: Run) -> Any:
            result = self._result(operation, batch, run)
            self._report(run, reported_as, metrics)
            if then is not None:
                then()
            return result

        run = Run(
            number=self._next_run(),
            stage=operation.name,
            group=group,
            inputs=list(dict.fromkeys([*before, *updates, *awaited])),
            plan=plan,
            finish=finish,
            clean=self._clean_up,
        )
        run.updates, run.writes = operation.updates, operation.written(arguments)
        run.code, run.by_loop = code, self.looping
        if batch is not None and operation.protocol.joins and run.writes:
            run.batch = batch.after(run, run.writes, samples)
            drawn_anew = operation.samples and arguments.get("seed") is None
            if self._reusing and not (batch.pending or updates or drawn_anew):
                self._reuse(run, batch.copies(samples), operation.travelling(reads, batch), reported_as)
        return run

    def _reuse(self, run: Run, batch: Batch, travels: tuple[str, ...], reported_as: str) -> None:
        """Answer a run from the store, where the same code has read the same columns with the same weights."""
        state = self.weights[run.group.role].state if run.group.role in self.weights else ""
        for name in reversed(list(self.store)):
            origin, found = self.store.origin(name), self.store.kept(name)
            if origin is None or found is None:
                continue
            same = (origin.stage, origin.code, origin.weights_state) == (run.name, run.code, state)
            if not same or set(origin.travelled) != set(travels) or origin.meta_in != dict(batch.meta):
                continue
            made = {c: column for c, column in found.columns.items() if column.made_with == run.code}
            read = (found.columns[c].location.same(batch.columns[c].location) for c in travels if c not in made)
            if set(run.writes) <= set(made) and all(read):
                assert run.batch is not None
                run.made, run.meta = made, origin.meta_out
                print(f"{run.name}: from the store, as run {origin.run} made it")
                run.metrics = MetricValues(origin.metrics)
                self._report(run, reported_as, self.last_metrics)
                run.settle(run.batch)
                self.store.add(run.batch, origin, (), by_loop=run.by_loop)
                return

    def _clean_up(self, run: Run) -> None:
        """After a run that came to nothing."""
        self._record(run)
        role = run.group.role
        if run.updates and role in self.weights:  # how far it came is not known: no other state is this one
            self.weights[role] = Weights(steps=self.weights[role].steps, state=secrets.token_hex(4))
        if run.stuck:
            self._broken[run.group.pool.name] = f"run {run.number}, {run.name}"
        self._drop(run.group.hosts, run.calls[0].key)

    def _record(self, run: Run) -> None:
        replies, run.unrecorded = run.unrecorded, []
        for reply in replies:
            self.telemetry.append_spans(reply.spans)
            self.telemetry.append_transfers(reply.transfers)
            self.telemetry.append_syncs(reply.syncs)

    def _batch_argument(
        self, where: str, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Batch | None, tuple[Any, ...]]:
        if not operation.takes_batch:
            return None, args
        batch, rest = (kwargs.pop("batch"), args) if "batch" in kwargs else (args[0] if args else None, args[1:])
        if isinstance(batch, Run):
            if batch.batch is None:
                raise BadInput(f"{where}({batch!r})", "that run makes no batch", "give it a batch")
            batch = batch.batch
        if not isinstance(batch, Batch):
            raise BadInput(
                f"{where}({type(batch).__name__})", "its first argument is a batch", "start with lab.prompts.next(n)"
            )
        if batch._source is not self:
            raise BadInput(f"{batch!r}", f"comes from another workbench than {self.name!r}", "use this one's batches")
        return batch, rest

    def _stage_seed(
        self, operation: Operation, meta: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> tuple[int, ...]:
        iteration = int(meta.get("iteration", 0))
        if not operation.samples:
            return (self.seed, iteration)
        if arguments.get("seed") is not None:
            return (int(arguments["seed"]), iteration)
        draw = self._draws[iteration] = self._draws.get(iteration, -1) + 1
        self._save_state()
        return (self.seed, iteration, draw)

    @contextlib.contextmanager
    def reported_as(self, stage: str) -> Iterator[None]:
        """Inside, calls report their metrics under a stage's own name: an algorithm may have two of one operation."""
        self._stage_name, before = stage, self._stage_name
        try:
            yield
        finally:
            self._stage_name = before

    def _report(self, run: Run, stage: str, last_metrics: dict[str, MetricValues]) -> None:
        if run.metrics:
            iteration = int(run.calls[0].meta.get("iteration", self.iteration)) if run.calls else self.iteration
            self.telemetry.append_metrics(stage, run.number, iteration, run.metrics)
            last_metrics[stage] = run.metrics

    def _result(self, operation: Operation, batch: Batch | None, run: Run) -> Any:
        calls, replies, group = run.calls, run.replies, run.group
        self._record(run)
        ranks = operation.protocol.collect(group.layout)
        metrics: Metrics = {}
        for rank in ranks:
            merge_metrics(metrics, replies[rank].metrics)
        run.metrics = values = MetricValues(reported(metrics))
        if operation.updates and group.role in self.weights:
            steps = int(values.get("optimizer_steps", self.weights[group.role].steps + 1))
            self.weights[group.role] = Weights(steps=steps, state=secrets.token_hex(4))
            self._save_state()
        if not operation.protocol.joins:
            return [replies[rank].value for rank in ranks]
        collected = [replies[rank] for rank in ranks]
        summaries = agreed_columns(collected, run.writes, run.name)
        if not summaries:
            return values
        assert batch is not None
        parts = [(ShardId(group.hosts[rank], calls[rank].key), calls[rank].rows) for rank in ranks]
        location = Location.of_parts([(shard, rows) for shard, rows in parts if rows is not None])
        self._counts.hold(location)
        run.meta = replies[ranks[0]].meta
        run.made = {
            name: Column(
                dtype=summary.dtype,
                row_shape=summary.row_shape,
                nbytes=summary.nbytes,
                owner=group.role,
                location=location,
                made_with=run.code,
            )
            for name, summary in summaries.items()
        }
        made = batch.with_columns(run.made, run.meta) if run.batch is None else run.batch
        self.store.add(made, self._origin(run, calls[0]), run.made.values(), by_loop=run.by_loop)
        return made

    def _origin(self, run: Run, call: Call) -> Origin:
        weights = self.weights.get(run.group.role)
        return Origin(
            stage=run.name,
            run=run.number,
            inputs=(call.batch,),
            arguments={name: f"{value!r:.80}" for name, value in call.kwargs.items()},
            weights_version=weights.steps if weights else None,
            weights_state=weights.state if weights else "",
            seed=tuple(call.meta["seed"]),
            travelled=tuple(dict.fromkeys(name for names, _ in call.pulls for name in names)),
            meta_in={name: value for name, value in call.meta.items() if name not in ("seed", "trained_version")},
            meta_out=run.meta,
            code=run.code,
            metrics=run.metrics,
        )

    def _next_run(self) -> int:
        self._run_number += 1
        self._save_state()
        return self._run_number

    def _save_state(self) -> None:
        if self.description.backend == "ray":
            registry.save_state(
                self.description.id,
                {
                    "run": self._run_number,
                    "batch": self._batch_number,
                    "iteration": self.iteration,
                    "drawn": self.prompts.drawn,
                    "prompts": self.prompts.state,
                    "weights": {role: asdict(weights) for role, weights in self.weights.items()},
                    "draws": self._draws.get(self.iteration, -1),
                },
            )

    def _restore_state(self) -> None:
        """Go on from the counters that the kernel before this one kept."""
        state = registry.load_state(self.description.id)
        if not state:
            return
        self._run_number, self._batch_number = state["run"], state["batch"]
        self.iteration, self.prompts.drawn = state["iteration"], state["drawn"]
        # what that kernel had called may have gone on without it: no weights are known to be those of then, and rollout
        # workers are sent the actor's anew
        for role, weights in state["weights"].items():
            self.weights[role] = Weights(steps=weights["steps"], state=secrets.token_hex(4))
        self._draws[self.iteration] = state["draws"]
        if self.prompts.source and state["prompts"]:
            self.prompts.source.load_state_dict(state["prompts"])

    # --- batches ----------------------------------------------------------------------------------------------------

    def demonstrations(self, source: Source, **options: Any) -> ExampleStream:
        """Prompts with the responses to learn: `lab.demonstrations("sft.jsonl", held_out=100).next(64)` is a batch for
        `update_sft`. Rows and options: see `Examples`; seed: default the workbench's."""
        return ExampleStream(self, source, "demonstrations", **options)

    def pairs(self, source: Source, **options: Any) -> ExampleStream:
        """Prompts with a chosen and a rejected answer, for `update_reward`, `update_cost` and `update_dpo`:
        `lab.pairs("pairs.jsonl", held_out=200, max_tokens=512).next(64)`. Rows and options: see `Examples`."""
        return ExampleStream(self, source, "pairs", **options)

    def begin_iteration(self) -> None:
        """Count the next iteration: what a batch that starts one does."""
        self._check_alive(self.lead)
        self.iteration += 1
        self.last_metrics = {}
        self.telemetry.append_event("iteration", iteration=self.iteration)


def _name(model: Model) -> str | Path:
    assert model.name is not None
    return model.name
