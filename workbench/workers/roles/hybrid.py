"""The actor as trainer and generation engine on the same ranks, or as the publisher of weights for rollout workers."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import BadInput
from workbench.messages.metrics import Metrics
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL
from workbench.models import load_tokenizer
from workbench.models.lora import without_adapter
from workbench.models.spec import Model
from workbench.settings.engines import SyncStrategy
from workbench.telemetry.syncs import OpenSync
from workbench.workers.changed_weights import WatchedWeights
from workbench.workers.engine_weights import (
    EngineWeights,
    TrainerWeights,
    compare_weights,
    differing_weights,
    probe_gap,
    probe_ids,
    require_small,
    trainer_log_probs,
)
from workbench.workers.model_worker import TrainedWorker, log_probs_of
from workbench.workers.roles.sampling import SamplingWorker
from workbench.workers.weight_exchange import Contents, take_snapshot, uncut_weights, weights_of
from workbench.workers.weight_transition import WeightTransitions
from workbench.workers.worker import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HybridWorker(TrainedWorker, SamplingWorker):
    """A trained causal language model with a generation engine in the same process.

    The engine takes the trainer's weights before the first rollout after an update; the number of optimizer steps is
    the weights version of every rollout. Without `spec.generation` there is no engine: rollout workers generate, see
    `workbench.workers.roles.rollout`.
    """

    _watched: WatchedWeights | None = None

    def __init__(self, spec: Model, context: Context, model: PreTrainedModel) -> None:
        assert spec.name and spec.training and spec.dtype
        self.tokenizer = load_tokenizer(spec.name)
        super().__init__(spec, context, log_probs_of(model, spec))
        self._restored = 0
        # the weights that rollout workers last got, if they get patches: their key, and this rank's part
        self._kept: tuple[str, dict[str, Tensor]] = "", {}
        if not context.replaces_live:
            self.begin()

    def begin(self) -> None:
        spec, context = self.spec, self.context
        if spec.generation is None:
            return
        module: Any = self.engine.module
        # whether the engine samples from weights of its own, not from the trainer's
        self._own_weights = spec.generation.engine != "transformers" or not self._whole_weights()
        self._leave_to_generator()  # vLLM starts only if there is room for all the memory that it will use
        self.start_engine(
            trainer=module.model if self._whole_weights() else None,
            sleeps=context.host.offloads and context.device.type == "cuda",
            lora=spec.adapter,
        )
        self.transitions = WeightTransitions(self.engine, self.generator, spec, context)

    def change(self, spec: Model) -> None:
        if self.spec.generation is not None:
            self.generator.close()
            del self.generator, self.transitions
            gc.collect()
        super().change(spec)
        self._has_file_weights, self._kept = True, ("", {})
        self.begin()

    def trained(self) -> tuple[int, int]:
        return self.engine.steps, self._restored

    def _whole_weights(self) -> bool:
        """Return whether the trained module holds whole weights on this rank."""
        assert self.spec.training is not None
        return not self.spec.training.cuts_weights and not self.context.groups.model_parallel

    def offload(self) -> None:
        if self.spec.generation is not None:
            self.generator.sleep()
        super().offload()

    def load(self, *, generates: bool = False) -> None:
        """Load what an operation needs; trainer and engine take turns. The engine sleeps unless the operation
        generates; if it generates, gradients and optimizer are offloaded, and, if the engine has weights of its own,
        the parameters are loaded only when a sync is due."""
        if self.spec.generation is None:
            self.engine.load("parameters")
            return
        if not generates:
            self.generator.sleep()
        else:
            self.engine.offload("gradients", "optimizer")
        if not (generates and self._own_weights):
            self.engine.load("parameters")

    def _leave_to_generator(self) -> None:
        """Offload the trainer after the sync, to free the device for the engine."""
        if self.context.host.offloads and self._own_weights:
            self.engine.offload()

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._restored += 1
        self._forget()
        if self.spec.generation is not None:
            self.generator.weights_version = -1  # the next call syncs: equal steps no longer mean equal weights

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "watched": self._watched is not None}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._forget(watches=bool(state.get("watched")))

    def _forget(self, *, watches: bool = False) -> None:
        """After weights changed other than by updates, forget what was sent and what `lab.changed` compares with."""
        self._kept = "", {}
        if hasattr(self, "transitions"):  # there is an engine, and it has begun
            self.transitions.forget()
        if self._watched is not None or watches:
            self._watch()

    @register(ONE_TO_ALL)
    def watch_weights(self) -> int:
        """Note what updates changed since the last sync or call, for `lab.changed`. The first call copies the weights,
        for later calls to compare with, and returns the copy's bytes on this rank; later calls return 0."""
        self._note_changes()
        return 0 if self._watched is not None else self._watch()

    def _watch(self) -> int:
        self._watched = None  # two copies need twice the memory
        self._watched = WatchedWeights(self.engine, self.spec, self.context)
        return self._watched.nbytes

    def _note_changes(self) -> None:
        if self._watched is not None and self._watched.since != self.engine.steps:
            with self.ledger("change", self._watched.since) as noted:
                noted.changed = self._watched.changes()

    def before_rollouts(self) -> None:
        self._sync()
        self._leave_to_generator()

    @register(ONE_TO_ALL, generates=True)
    def sync_weights(self, *, strategy: SyncStrategy | None = None) -> dict[str, float]:
        """Give the generation engine the trainer's weights now, if it lacks them; return the sync's metrics, by rank.

        strategy: a value of `Generation.strategy` for this sync, which is then always done; only for an actor whose
        ranks hold slices: its layout has p*t > 1, or ZeRO-3 shards it. The metrics: `sync_gap/mean`, the gap on the
        probe in nats; if slices moved also `sync/received_bytes` and `sync/kept_twice_bytes`, the bytes that ranks kept
        beside their generation weights, both over all ranks together.
        """
        if strategy is not None and self.transitions.slices is None:
            raise BadInput(
                f"sync_weights(strategy={strategy!r}) in the layout {self.context.layout}",
                "a strategy is a way to gather slices of the model: with p*t = 1 and without ZeRO-3 there are none",
                "call sync_weights(), or give the actor a layout with p*t > 1 or Training(zero_stage=3)",
            )
        metrics = self._sync(strategy)
        self.sync_metrics.take()
        return {name: metric.value for name, metric in metrics.items()}

    @register(ONE_TO_ALL, generates=True)
    def check_sync(self) -> float:
        """Return the mean gap, in nats, between the log-probabilities of engine and trainer on a fixed probe of tokens;
        a sleeping engine is synced first."""
        if self.generator.lacks_weights:
            self._sync()
        self.engine.load("parameters")
        return probe_gap(self._trainer_weights(), self.generator)

    def _sync(self, strategy: str | None = None) -> Metrics:
        if strategy is None and self.generator.weights_version == self.engine.steps:
            return {}
        self.engine.load("parameters")
        self._note_changes()
        with self.ledger("sync", self.engine.steps) as noted:
            noted.lacked = self._has_file_weights or self.generator.lacks_weights
            try:
                metrics = self._give_weights(strategy, noted)
            except BaseException:  # the engine may have the weights, but they were not checked
                self.generator.weights_version = -1
                raise
            self._has_file_weights = False
            return self.sync_metrics.note(metrics)

    def _give_weights(self, strategy: str | None, noted: OpenSync) -> Metrics:
        assert self.spec.generation is not None
        metrics: Metrics = {}
        with self.context.recorder.span("weight_sync") as counted:
            if self.transitions.slices is not None:
                metrics = self.transitions.sync(strategy or self.spec.generation.strategy, noted, self.has_room)
            else:
                noted.taken_bytes = self.generator.update_weights(self._weights(), self.engine.steps)
            counted.bytes = noted.taken_bytes
        if not self.spec.generation.check_sync:
            return metrics
        with self.context.recorder.span("weight_sync", note="compared on a probe"):
            trained, differ = self._trainer_weights(), None
            # for a model in slices a comparison would move all weights once more
            if self.generator.takes_adapter or (self._own_weights and self._whole_weights()):
                _, differ = differing_weights(trained, self.generator)
                noted.differ = differ
            self._leave_to_generator()  # before the engine's key-value cache comes back
            gap = probe_gap(trained, self.generator)
        dtype, version = str(self.spec.dtype), self.engine.steps
        return {**require_small(gap, version, trained, differ, self.generator, dtype, self.context), **metrics}

    @register(ONE_TO_ALL, generates=True)
    def compare_weights(self) -> EngineWeights:
        """Compare the weights of the generation engine with the trainer's, after a sync if one is due."""
        self._sync()
        self.engine.load("parameters")
        trained = self._trainer_weights()
        if self.generator.takes_adapter:
            trained = replace(trained, log_probs_without=self._log_probs_without(trained.probe_ids))
        return compare_weights(trained, self.generator)

    def _log_probs_without(self, ids: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of the probe without the adapter."""
        module: Any = self.engine.module
        with without_adapter(module.model):
            return trainer_log_probs(self.engine, ids, self.context.device)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return whole weights for an engine, which casts them as it copies. An engine that takes adapters gets the
        adapter's weights; for other engines the adapter is added to the model's weights first."""
        if self.generator.takes_adapter:
            return self.engine.scaled_adapter()
        return self.engine.stored_weights() if self.spec.adapter is None else self.engine.named_weights()

    def _probe_ids(self) -> Tensor:
        module: Any = self.engine.module
        return probe_ids(self.tokenizer, int(module.model.config.get_text_config().vocab_size))

    def _trainer_weights(self) -> TrainerWeights:
        module: Any = self.engine.module
        ids = self._probe_ids()
        return TrainerWeights(
            named_weights=self._weights,
            probe_ids=ids,
            log_probs=trainer_log_probs(self.engine, ids, self.context.device),
            aliases=module.aliases,
            vocabulary=module.vocabulary,
            live=frozenset(parameter.data_ptr() for parameter in module.parameters()),
        )

    @register(ONE_TO_ALL)
    def publish_weights(
        self, key: str, *, weights: bool = True, probe: bool = True, merged: bool = False, keep: bool | None = None
    ) -> None:
        """Keep a copy of the current weights, in the role's dtype, for workers of other roles. Together the ranks keep
        one copy, in host memory, until it is released; training goes on.

        key: the copy's name. weights, probe: whether to publish the weights, and the trainer's log-probabilities of the
        probe. merged: publish an actor's adapter added to its model; False: the adapter alone, as the engine has the
        model. keep: True: compare the copy with the kept one, and keep it instead; False: forget the kept copy; None:
        leave it. `lab.actor.sync_weights`, `lab.refresh_reference` and the like publish and release copies.
        """
        assert self.spec.dtype is not None
        module: Any = self.engine.module
        layout, empty, dtype = self.context.layout, torch.zeros(0), getattr(torch, self.spec.dtype)
        held: Iterable[tuple[str, Tensor]] = ()
        alone = self.spec.adapter is not None and not merged
        if weights:
            self._note_changes()
        if alone:  # small: every rank holds the whole adapter for a moment
            held = [(n, w.to(dtype, copy=True)) for n, w in (self.engine.scaled_adapter() if weights else ())]
            model = uncut_weights({name: weight.shape for name, weight in held}, self.spec.dtype)
        else:
            model = weights_of(module.get_backbone().config, self.spec.dtype, layout)
            if weights:
                slices = self.context.groups.model_parallel
                held = self.engine.local_weights() if slices else self.engine.named_weights()
        since, kept = self._kept if keep else ("", {})
        if keep and not since:
            keep = self.has_room(model.nbytes // layout.size)
        if keep is not None:
            self._kept = "", {}  # until the new copy is complete
        ids = self._probe_ids() if probe else empty
        contents = Contents(
            version=self.engine.steps,
            restored=self._restored,
            shapes={weight.name: weight.shape for weight in model} if weights else {},
            probe_ids=ids,
            log_probs=trainer_log_probs(self.engine, ids, self.context.device) if probe else empty,
            aliases=module.aliases,
            vocabulary=module.vocabulary,
            log_probs_without=self._log_probs_without(ids) if probe and alone else None,
            keeps=bool(keep) and not alone,
            since=since,
        )
        rank, began = self.context.communicator.rank, time.perf_counter()
        snapshot = take_snapshot(held, model, layout, rank, dtype, contents, kept if contents.keeps else None)
        if contents.keeps:
            self._kept = key, kept
        contents = replace(contents, took_s=time.perf_counter() - began)
        self.context.exchange.publish(key, replace(snapshot, contents=contents))

    def memory_bytes(self) -> dict[str, int]:
        kept = sum(tensor.nbytes for tensor in self._kept[1].values())
        kept += self.transitions.kept_bytes if hasattr(self, "transitions") else 0
        return {**super().memory_bytes(), **({"sync_copy": kept} if kept else {})}
