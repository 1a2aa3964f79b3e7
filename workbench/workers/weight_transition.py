"""The transition of a weight sync: from the slices in which an actor is trained to those of its generation engine.

The actor is trained in a layout (p, t, d) with p*t > 1, or sharded by ZeRO-3, and generates on the same ranks in groups
of t_g (HybridFlow's 3D-HybridEngine, arXiv:2409.19256, section 5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from workbench.engines.communicator import Communicator
from workbench.engines.generation import GenerationEngine
from workbench.engines.training import TrainingEngine
from workbench.errors import SyncError
from workbench.messages.metrics import Mean, Metrics
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.placement.memory import VOCABULARY_MULTIPLE
from workbench.resharding.engine import Arrival, ReshardingEngine, convert_shard
from workbench.resharding.patches import PatchingExchange
from workbench.resharding.plan import WeightShard
from workbench.resharding.strategies import Transition, ZeroSync, plan_sync
from workbench.resharding.weights import model_weights
from workbench.settings.engines import Generation, SyncMode
from workbench.telemetry.syncs import OpenSync
from workbench.workers.worker import Context

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Slices = Literal["layout", "zero"]


def trained_slices(spec: Model, layout: Layout) -> Slices | None:
    """Return how a trained actor's ranks hold its weights: "layout": slices of a layout with p*t > 1; "zero": ZeRO-3's
    flat shards; None: whole. An adapter under ZeRO-3 counts as whole: only it moves, and is gathered first."""
    if layout.p * layout.t > 1:
        return "layout"
    zero = spec.training is not None and spec.training.cuts_weights
    return "zero" if zero and layout.size > 1 and spec.adapter is None else None


def plan_of(
    config: PreTrainedConfig,
    layout: Layout,
    generation: Generation,
    dtype: str,
    strategy: str | None = None,
    slices: Slices = "layout",
) -> Transition | ZeroSync:
    """Return the plan of a sync with a strategy (None: the settings' strategy). dtype: the engine's.

    For ZeRO-3's shards "v" means "full": no replica is smaller than all ranks.
    """
    t_g, multiple = generation.tensor_parallel_size, VOCABULARY_MULTIPLE[generation.engine]
    chosen = strategy or generation.strategy
    if slices == "zero":
        weights = model_weights(config, dtype=dtype, unknown="whole")
        whole = chosen != "hybridflow"
        return ZeroSync(weights, layout.size, t_g, whole=whole, vocabulary_multiple=multiple)
    weights = model_weights(config, dtype=dtype)
    return plan_sync(weights, layout.generating(t_g), chosen, vocabulary_multiple=multiple)


# Syncs of each kind that `Generation(sync="auto")` times before it keeps to one kind.
TRIALS = 3


class PatchDecision:
    """Decides whether the next sync sends patches. mode: "delta": always; "whole": never; "auto": the faster kind after
    `TRIALS` syncs of each. Patches are tried first; the first of these syncs is whole."""

    def __init__(self, mode: SyncMode) -> None:
        self._mode, self._took_s = mode, {True: list[float](), False: list[float]()}

    @property
    def patches(self) -> bool:
        patched, whole = self._took_s[True], self._took_s[False]
        if self._mode != "auto" or len(patched) < TRIALS:
            return self._mode != "whole"
        return len(whole) >= TRIALS and median(patched) < median(whole)

    def note(self, seconds: float, *, patches: bool) -> None:
        """Note the seconds of a sync that was planned to go by patches, or whole."""
        self._took_s[patches].append(seconds)


def not_as_sent(version: int, said: Sequence[str]) -> SyncError:
    """Make the error for weights whose checksums differ from those with which they were sent. said: which weights, on
    which ranks."""
    return SyncError(
        f"weights version {version} did not arrive as it was sent: {'; '.join(said[:3])}"
        + (f"; {len(said) - 3} more" if len(said) > 3 else ""),
        "received weights must have the checksums with which they were sent",
        "sync again; lab.syncs() lists all differing weights",
    )


class WeightTransitions:
    """The syncs of an actor whose ranks hold slices of it, by any strategy. slices: see `trained_slices`; None: there
    are no transitions.

    Nothing must be undone after a rollout: trained slices stay in place, and what was gathered of a layer is dropped
    when the engine has taken it. The engine's own copy and its key-value cache stay until the next sync, or until its
    `sleep` if roles share memory; cached prefixes are dropped with the weights with which they were computed.
    """

    def __init__(self, trainer: TrainingEngine, generator: GenerationEngine, spec: Model, context: Context) -> None:
        self._trainer, self._generator, self._spec, self._context = trainer, generator, spec, context
        self.slices = trained_slices(spec, context.layout)
        self._made: dict[str, WeightTransition] = {}
        assert spec.generation is not None
        self._decision, self._failed = PatchDecision(spec.generation.sync), False

    def forget(self) -> None:
        """Send all weights whole the next time, for example after a restored state."""
        for transition in self._made.values():
            transition.exchange.forget()

    @property
    def kept_bytes(self) -> int:
        return sum(transition.exchange.kept_bytes for transition in self._made.values())

    def sync(self, strategy: str, noted: OpenSync, has_room: Callable[[int], bool]) -> Metrics:
        """Give the engine the trainer's weights; return metrics of the bytes moved on all ranks. noted: this rank's
        line of the ledger. has_room: whether so many bytes may be kept here, for patches.

        Raises `SyncError`, on all ranks, if a weight differs from what was sent.
        """
        assert self.slices and self._spec.generation and self._spec.dtype
        communicator = self._context.communicator
        if strategy not in self._made:
            module: Any = self._trainer.module
            config, layout = module.get_backbone().config, self._context.layout
            plan = plan_of(config, layout, self._spec.generation, self._spec.dtype, strategy, self.slices)
            self._made[strategy] = WeightTransition(plan, communicator, checksums=self._spec.generation.check_sync)
        transition = self._made[strategy]
        exchange = transition.exchange
        received, whole, handed = exchange.received_bytes, exchange.whole_bytes, transition.handed_bytes
        patches, most = self._decision.patches, transition.most_kept_bytes
        full = patches and most > 0 and not exchange.kept_bytes and not has_room(most)
        failed, full = communicator.all_reduce_max(torch.tensor([self._failed, full], dtype=torch.int64)).tolist()
        if failed:
            self.forget()  # after a failed transition, ranks have kept different weights
        self._failed, began = True, time.perf_counter()
        exchange.begin(keeps=patches and not full)
        weights = transition.weights(dict(self._trainer.local_weights()), getattr(torch, self._spec.dtype))
        self._generator.update_weights(weights, self._trainer.steps)
        noted.strategy, arrival = strategy, Arrival()
        if self._spec.generation.check_sync:
            arrival = transition.engine.arrival()
            noted.sent, noted.received = arrival.sent, arrival.received
        noted.moved_bytes, noted.whole_bytes = exchange.received_bytes - received, exchange.whole_bytes - whole
        noted.taken_bytes = transition.handed_bytes - handed
        noted.differ = tuple(f"{name} from rank {rank}" for name, rank in arrival.differ)
        everywhere = communicator.all_reduce(torch.tensor([noted.moved_bytes, len(noted.differ)])).tolist()
        self._failed = bool(everywhere[1])
        took_s = communicator.all_reduce_max(torch.tensor([time.perf_counter() - began], dtype=torch.float64))
        self._decision.note(took_s.item(), patches=patches and not full)
        if everywhere[1]:
            self._generator.weights_version = -1
            raise self._not_as_sent(transition, arrival)
        return {
            "sync/received_bytes": Mean(total=everywhere[0], count=1),
            "sync/kept_twice_bytes": Mean(total=transition.kept_twice_bytes, count=1),
        }

    def _not_as_sent(self, transition: WeightTransition, arrival: Arrival) -> SyncError:
        """Make the same error on every rank: which weights, on which ranks."""
        names = [weight.name for weight in transition.plan.weights]
        mine = torch.tensor([[names.index(name), source] for name, source in arrival.differ], dtype=torch.int64)
        found = enumerate(self._context.communicator.all_gather(mine.view(-1, 2)))
        pairs = [(f"{names[n]} on rank {rank}", source) for rank, rows in found for n, source in rows.tolist()]
        return not_as_sent(self._trainer.steps, [f"{where}, from rank {source}" for where, source in pairs])


class WeightTransition:
    """One rank's part of a transition; it can be used repeatedly. Weights are cast to the engine's dtype before they
    move, which halves the bytes of fp32 weights for an engine in bfloat16.

    handed_bytes: bytes of generation shards given to the engine so far. By the plan: kept_twice_bytes, which all ranks
    together keep beside their generation shards; most_kept_bytes, which this rank keeps for patches.
    """

    def __init__(self, plan: Transition | ZeroSync, communicator: Communicator, *, checksums: bool = False) -> None:
        self.plan, self.handed_bytes = plan, 0
        self.exchange = PatchingExchange(communicator)
        self._rank, self.engine = communicator.rank, ReshardingEngine(plan, self.exchange, checksums=checksums)
        self._by_name = {weight.name: weight for weight in plan.weights}
        figures = plan.figures()
        self.kept_twice_bytes = int(figures.kept_twice.sum())
        self.most_kept_bytes = int(figures.received[self._rank] + figures.sent[self._rank])

    @torch.no_grad()
    def weights(self, trained: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's generation weights, for `GenerationEngine.update_weights`: each in its whole shape, with
        this rank's slices written. A layer moves when it is requested; every rank iterates to the end.

        trained: this rank's slices (`plan.trained`), by transformers' names; they do not change.
        """
        plan, rank, held = self.plan, self._rank, {}
        for name, tensor in trained.items():
            weight = self._by_name[name]
            mine, source = plan.trained.shard(weight, rank), plan.source.shard(weight, rank)
            assert mine is not None and source is not None
            held[name] = convert_shard(tensor, mine, source).to(dtype)
        for layer in self.engine.layers(held):
            for name, tensor in layer.items():
                self.handed_bytes += tensor.nbytes
                weight = self._by_name[name]
                rows, columns = weight.matrix
                mine = plan.destination.shard(weight, rank)
                assert mine is not None
                yield name, convert_shard(tensor, mine, WeightShard(((0, rows, 0, columns),), weight.shape))
