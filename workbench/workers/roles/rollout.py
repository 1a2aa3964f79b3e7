"""Rollout workers: the actor's generation engine in a pool of its own, with weights from the actor's hosts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from workbench.errors import BadInput, SyncError
from workbench.messages.metrics import Mean, Metrics
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL
from workbench.models import load_tokenizer
from workbench.models.loading import load_config
from workbench.models.spec import Model
from workbench.placement import Layout
from workbench.placement.memory import VOCABULARY_MULTIPLE
from workbench.resharding.plan import Reshard
from workbench.settings.engines import SyncStrategy
from workbench.workers.engine_weights import (
    EngineWeights,
    TrainerWeights,
    compare_weights,
    differing_weights,
    probe_gap,
    require_small,
)
from workbench.workers.roles.sampling import SamplingWorker
from workbench.workers.weight_exchange import Contents, Published, plan_of_taking, uncut_weights, weights_of
from workbench.workers.weight_intake import WeightIntake
from workbench.workers.weight_transition import not_as_sent
from workbench.workers.worker import Context

# operations called on the actor that rollout workers carry out, if there are any
DELEGATED = ("generate_sequences", "sync_weights", "check_sync", "compare_weights")


def rollout_layout(spec: Model, ranks: int) -> Layout:
    """Return the layout of weights on a rollout pool's ranks: whole, or cut over each tensor group of the engine."""
    assert spec.generation is not None
    size = spec.generation.tensor_parallel_size
    return Layout(t=size, d=ranks // size)


def plan_of_rollout(spec: Model, publisher: Layout, taker: Layout) -> Reshard:
    """Plan a sync from an actor in one layout to rollout workers in another; the actor's ranks come first."""
    assert spec.name and spec.generation and spec.dtype
    multiple = VOCABULARY_MULTIPLE[spec.generation.engine]
    weights = weights_of(load_config(spec.name), spec.dtype, publisher, taker)
    return plan_of_taking(weights, publisher, taker, vocabulary_multiple=multiple)


class RolloutWorker(SamplingWorker):
    """A generation engine without a trainer. It starts with the actor's first weights; `receive_weights` changes them.

    Each rank receives the slices that it generates with, each element once, a layer at a time. From an actor with an
    adapter each rank receives only the adapter, whole: the engine reads the model from the files.
    """

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.name and spec.generation and spec.dtype
        super().__init__(spec, context)
        self.tokenizer = load_tokenizer(spec.name)
        self._trained = (0, 0)
        # the key of the weights that this worker has, if the actor keeps them to send patches; and a copy of them, for
        # an engine that holds weights in another form
        self._has, self._kept = "", dict[str, Tensor]()
        self._intakes: dict[tuple[Layout, Layout], WeightIntake] = {}
        if not context.replaces_live:
            self.begin()

    @property
    def layout(self) -> Layout:
        return rollout_layout(self.spec, self.context.layout.size)

    def begin(self) -> None:
        self.start_engine(lora=self.spec.adapter)

    def trained(self) -> tuple[int, int]:
        return self._trained

    def before_rollouts(self) -> None:
        if self.generator.weights_version < 0:
            raise SyncError(
                "the rollout workers have no complete set of weights",
                "the last sync failed, or they were moved after it",
                "lab.actor.sync_weights()",
            )

    def memory_bytes(self) -> dict[str, int]:
        kept = sum(tensor.nbytes for tensor in self._kept.values())
        return {**super().memory_bytes(), **({"sync_copy": kept} if kept else {})}

    @register(ONE_TO_ALL)
    def receive_weights(self, published: Published) -> tuple[bool, float]:
        """Take the weights that the actor has published, as part of `sync_weights`. Returns whether the actor keeps
        these weights for patches, and the seconds taken, publishing included. After an error no rank has weights to
        generate with until the next call succeeds, for which the actor sends all weights."""
        assert self.spec.generation is not None
        communicator, found, adapter = self.context.communicator, list[Contents](), dict[str, Tensor]()
        has, self._has, began = self._has, "", time.perf_counter()

        def take() -> list[int]:
            found.append(self.context.exchange.contents(published))
            self._trained = noted.trained_version, noted.restored = found[0].version, found[0].restored
            noted.version = noted.trained_version
            intake = self._intake(published, found[0], self.layout)
            before, whole = intake.received_bytes, intake.whole_bytes
            live = self.generator.live_weights() if found[0].keeps else {}
            into = live or (self._copy() if found[0].keeps else None)
            since = has if into and has == found[0].since and not self._has_file_weights and version >= 0 else ""
            weights: Iterable[tuple[str, Tensor]] = intake.weights(published, self.context.device, into, since=since)
            if into is not self._kept:
                self._kept = {}
            if self.spec.adapter is not None:
                adapter.update(weights)
                weights = adapter.items()
            if live:
                noted.taken_bytes = sum(weight.nbytes for _, weight in weights)
                weights = ()
            taken = self.generator.update_weights(weights, found[0].version, partial=bool(since or live))
            noted.taken_bytes += taken
            noted.moved_bytes, noted.whole_bytes = intake.received_bytes - before, intake.whole_bytes - whole
            noted.strategy = "patches" if since else ""
            if self.spec.generation is not None and self.spec.generation.check_sync:
                noted.sent, noted.received = intake.arrival.sent, intake.arrival.received
                differ = [f"{name} from rank {rank} of the actor" for name, rank in intake.arrival.differ]
                noted.differ, here = tuple(differ), self.context.host.rank
                if differ:
                    raise not_as_sent(noted.version, [f"{what}, on rank {here}" for what in differ])
            return [noted.moved_bytes]

        version = self.generator.weights_version
        span = self.context.recorder.span
        with self.ledger("sync", version) as noted:
            noted.lacked = self._has_file_weights
            try:
                with span("weight_sync") as counted:
                    received = communicator.shared_by_group(communicator.world_size, take)
                    counted.bytes = received[communicator.rank]
                metrics: Metrics = {"sync/received_bytes": Mean(total=sum(received), count=1)}
                if self.spec.generation.check_sync:
                    trained, differ = self._trainer_weights(published, found[0]), None
                    with span("weight_sync", note="compared on a probe"):
                        if adapter:  # the probe may not see a small step
                            arrived = replace(trained, named_weights=lambda: iter(adapter.items()))
                            _, differ = differing_weights(arrived, self.generator)
                            noted.differ = differ
                        gap = probe_gap(trained, self.generator)
                    now, dtype = found[0].version, str(self.spec.dtype)
                    metrics |= require_small(gap, now, trained, differ, self.generator, dtype, self.context)
            except BaseException:
                self.generator.weights_version = -1
                raise
        self.sync_metrics.note(metrics)
        self._has_file_weights = False
        if found[0].keeps:
            self._has = published.key
        return found[0].keeps, found[0].took_s + time.perf_counter() - began

    def _copy(self) -> dict[str, Tensor] | None:
        """Return the tensors in host memory that keep received weights, for an engine that holds weights in another
        form; None on a GPU, or without room."""
        on_cpu = self.context.device.type == "cpu"
        room = on_cpu and (self._kept or self.has_room(self.generator.memory_bytes()["weights"]))
        return self._kept if room else None

    @register(ONE_TO_ALL)
    def sync_weights(self, *, strategy: SyncStrategy | None = None) -> dict[str, float]:
        """Give the rollout workers the actor's weights now, if they lack them; return the sync's metrics, by rank.

        The metrics: `sync_gap/mean`, the gap on the probe in nats, and `sync/received_bytes`, over all ranks together.
        strategy: only for an actor that generates on its own ranks.
        """
        if strategy is not None:
            raise BadInput(
                f"sync_weights(strategy={strategy!r}) with rollout workers",
                "a strategy is a way to gather slices on the actor's ranks; rollout workers get just what they need",
                "call sync_weights(), or leave the role rollout out of the placement",
            )
        self.before_rollouts()
        return {name: metric.value for name, metric in self.sync_metrics.take().items()}

    @register(ONE_TO_ALL)
    def check_sync(self, *, published: Published | None = None) -> float:
        """Return the mean gap, in nats, between the log-probabilities of engine and trainer on a fixed probe of tokens,
        with the current weights of both. published: filled in by the controller."""
        assert published is not None
        return probe_gap(self._trainer_weights(published), self.generator)

    @register(ONE_TO_ALL)
    def compare_weights(self, *, published: Published | None = None) -> EngineWeights:
        """Compare the weights of the generation engine with the trainer's, after a sync if one is due. published:
        filled in by the controller."""
        assert published is not None
        self._has = ""  # the engine is given other weights, then these again
        return compare_weights(self._trainer_weights(published), self.generator)

    def _trainer_weights(self, published: Published, contents: Contents | None = None) -> TrainerWeights:
        known = contents or self.context.exchange.contents(published)
        whole = Layout(d=self.context.layout.size)

        def named_weights() -> Iterator[tuple[str, Tensor]]:
            return self._intake(published, known, whole).weights(published, self.context.device)

        return TrainerWeights(
            named_weights=named_weights,
            probe_ids=known.probe_ids,
            log_probs=known.log_probs,
            aliases=known.aliases,
            vocabulary=known.vocabulary,
            log_probs_without=known.log_probs_without,
        )

    def _intake(self, published: Published, contents: Contents, mine: Layout) -> WeightIntake:
        """Return this rank's intake of an actor's weights, to hold in the layout `mine`; an adapter is taken whole."""
        publisher = published.layout
        if (publisher, mine) not in self._intakes:
            assert self.spec.generation and self.spec.dtype
            if self.spec.adapter is None:
                plan = plan_of_rollout(self.spec, publisher, mine)
            else:
                weights = uncut_weights(contents.shapes, self.spec.dtype)
                plan = plan_of_taking(weights, publisher, Layout(d=mine.size))
            self._intakes[publisher, mine] = WeightIntake(
                plan, self.context.host.rank, self.context.exchange, checksums=self.spec.generation.check_sync
            )
        return self._intakes[publisher, mine]
