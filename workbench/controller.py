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

Its parts: `stages` carries out calls, `held_batches` keeps rows on the hosts, `views` and `whereabouts` look.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from workbench import registry
from workbench.checkpoint.checkpoints import Checkpoints
from workbench.dataflow.batch import Batch
from workbench.dataflow.branch import Comparison, compare, kept
from workbench.dataflow.metric_values import MetricValues
from workbench.dataflow.references import ShardCounts
from workbench.dataflow.run import Run
from workbench.dataflow.sources import Source
from workbench.dataflow.store import Store, Weights
from workbench.dataflow.unfinished import UnfinishedUpdates
from workbench.dataflow.weight_sync import RolloutCaller, refresh_reference
from workbench.description import Description
from workbench.engines.settings import Sampling
from workbench.errors import BadInput
from workbench.evaluation import evaluate
from workbench.example_stream import ExampleStream
from workbench.handover import Handover
from workbench.models import load_tokenizer
from workbench.models.spec import Model
from workbench.moving import add, drop, move
from workbench.named_fields import meant
from workbench.placement import ROLLOUT, Layout, Placement, Pool
from workbench.predicting import Predicting
from workbench.prompt_stream import PromptStream
from workbench.recovering import Recovering
from workbench.stages import Stages
from workbench.starting import Wait, join_pools, load_roles, record_opening
from workbench.telemetry.store import TelemetryStore
from workbench.vocabulary import Vocabulary
from workbench.workers.backends import Backend, InlineBackend, Pending, RayBackend
from workbench.workers.cluster import stop_idle_head
from workbench.workers.group import GroupOperation, WorkerGroup
from workbench.workers.roles import ROLE_WORKERS
from workbench.workers.sources import loaded

if TYPE_CHECKING:
    import pandas as pd

    from workbench.algorithms.loop import Algorithm
    from workbench.checks import CheckReport
    from workbench.placement.change import PlacementChange


MEMORY_S = 0.5  # how long the start of an iteration waits for what hosts say of their memory


class Workbench(Stages, Checkpoints, Recovering, Predicting):
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
        self.weights: dict[str, Weights] = {}
        self._updates_left = UnfinishedUpdates()
        self._handover: Handover | None = None  # on Ray, once it is recorded
        self.first_states = {}
        self.snapshots: dict[str, dict[str, Any]] = {}  # of `kept` that are open
        self.looks = False  # at a workbench that another kernel drives
        self.store = Store(run_folder / "batches", psutil.virtual_memory().total // 10)
        self._broken: dict[str, str] = {}
        self._described: dict[str, Pending] = {}
        self._late: dict[str, list[tuple[str, Pending]]] = {}
        self._heirs: dict[str, str] = {}
        self._pools_ended: dict[str, int] = {}  # `HostInfo.again` of the last one of each name
        self._keeping = 0  # how many `kept` are open
        self._closed = False
        self.attached = False  # taken up, where another process had opened it
        self.stays = False  # when it is closed
        self._before_close: list[Callable[[], object]] = []
        self._run_number, self._batch_number, self.iteration = 0, 0, 0
        self._draws: dict[int, int] = {}
        self.last_metrics: dict[str, MetricValues] = {}
        self.groups: dict[str, WorkerGroup] = {}
        self._shipped = {}
        loaded.note()
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
        description, wanted = self.description, self._wanted
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
            kind = model.worker or ROLE_WORKERS[role]
            self.groups[role] = WorkerGroup(role, *self._standing(worker_role), model, kind, self, worker_role)
            setattr(self, role, self.groups[role])
            if model.trained or (role in ("reference", ROLLOUT) and worker_role == role):
                # an actor of another kind may load weights of its own
                others = role == ROLLOUT and description.models["actor"].worker is not None
                self.weights[role] = Weights(steps=0, state="as the model has them" if others else "")
            if role == ROLLOUT:
                RolloutCaller(self)
        for part in [part for part in self._shipped if part[0] not in description.models]:
            del self._shipped[part]
        self._note_notebook_code(())

    @property
    def _wanted(self) -> dict[str, tuple[Model, str]]:
        """For each role its model, and whose workers carry out its operations."""
        description = self.description
        wanted = {role: (model, role) for role, model in description.models.items()}
        if description.actor_is_reference:
            wanted["reference"] = replace(description.models["actor"], adapter=None, worker=None), "actor"
        return wanted

    def _remake_groups(self) -> None:
        """Give the groups the operations that their workers have by now."""
        for role, (model, _) in self._wanted.items():
            self.groups[role].become(model, model.worker or ROLE_WORKERS[role])
        self._numeric.become(self._numeric.spec, ROLE_WORKERS["numeric"])
        self.compute_advantages = self._numeric.operations["compute_advantages"]
        if ROLLOUT in self.groups:
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
            names = [info.name for info in self._infos]
            registry.rewrite(self.description, {name: self._backend.processes[name] for name in names})

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

    def _start(self, note: Callable[[str], None], began_s: float, wait_s: float) -> None:
        """Start hosts, join each pool's process group, load the models. note: called with what is waited for. began_s:
        when the opening began, unix time. wait_s: how long to wait for devices that others hold."""
        description, checked_s = self.description, time.time()
        self._backend = (
            InlineBackend()
            if description.backend == "inline"
            else RayBackend(description.id, description.address, driver=self._id, note=note, wait_s=wait_s)
        )
        waits = [Wait("check", began_s, checked_s, "this process")]
        waits += [Wait("start", checked_s, time.time(), "Ray")] if description.backend == "ray" else []
        self._backend.start(self._infos)
        join_pools(self._backend, self._infos, note)
        load_roles(self._backend, self._infos, description, note)
        record_opening(self._backend, self._infos, self.telemetry, waits)

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
        if self._closed:
            return
        for act in self._before_close:
            with suppress(Exception):  # what looks at a workbench keeps none from closing
                act()
        self.telemetry.sinks.close()
        self._closed = True
        if registry.opened.get(self.name) is self:
            del registry.opened[self.name]
        self.scheduler.close()
        if not self._drives():
            print(f"left {self.name}, which another kernel drives")
            return
        self._backend.close()
        if self.description.backend == "ray":
            registry.forget(self.description.id)
            stop_idle_head()

    def before_close(self, act: Callable[[], object]) -> None:
        """Have `act` called when the workbench closes, while its hosts still answer."""
        self._before_close.append(act)

    def __enter__(self) -> Workbench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.telemetry.sinks.close(failed=error is not None)
        self.close()

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
        without a role ends; batches on its hosts move to others. Also of a role that was lost with
        its pool, where it was alone there: what the hosts kept is gone."""
        return drop(self, role)

    def resize(self, pool: str, devices: int) -> PlacementChange:
        """Give a pool more or fewer devices: `lab.resize("policy", 4)`; see `move`."""
        return self.move(self.placement.with_devices(pool, devices))

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
        self.saved_algorithm = None
        self.last_metrics = {}
        self.telemetry.append_event("iteration", iteration=self.iteration)
        with suppress(Exception):  # a curve with a point less
            self.read_memory(MEMORY_S)


def _name(model: Model) -> str | Path:
    assert model.name is not None
    return model.name
