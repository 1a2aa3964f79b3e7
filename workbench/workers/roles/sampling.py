"""What every worker with a generation engine does: draw responses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.batches.schema import STATUS
from workbench.data.environment import Environments
from workbench.engines.generation import GenerationEngine, make_generation_engine
from workbench.errors import SyncError
from workbench.messages.metrics import Mean, Metrics, merge_metrics
from workbench.messages.operation import ALL_TEXT, register
from workbench.messages.protocols import THREE_D_ALL_MICRO_DP
from workbench.messages.replies import Output
from workbench.messages.shards import Shard
from workbench.models.lora import LoRA
from workbench.settings.engines import Sampling, check_room, truncation
from workbench.support.calls.pickling import name_of
from workbench.support.seeds import sample_seed
from workbench.support.validation import whole
from workbench.telemetry.syncs import OpenSync, SyncEvent
from workbench.workers.conversation import Conversation, converse
from workbench.workers.engine_weights import TrainerWeights, differing_weights
from workbench.workers.failures import Status, failed_rows
from workbench.workers.inference import TRUNCATION
from workbench.workers.rollout_columns import rollout_metrics, several_turns, single_turn
from workbench.workers.tensor_group import shared_by_group
from workbench.workers.worker import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Largest mean gap, in nats, between engine and trainer on the probe right after a sync, by dtype and device.
# `benchmarks/sync_gap.py` prints what they are taken from. CPU, SmolLM2-135M and tiny models, before and after updates:
# float32 at most 6e-6 (135M, 30 layers) and 8e-7 (tiny), bfloat16 0.048 and 0.017; in both a layer left out, two layers
# swapped or one with another's keys make 0.31 and more of the 135M model. GPU (H100, SmolLM2-135M and 1.4B parameters):
# bfloat16 0.02 on sampled tokens; float32 0.004 on random tokens while its attention was in TF32 (`_exact_products` of
# the vLLM engine), which is kept as what may pass. Weights that lag behind by a few small steps move the probe less
# than bfloat16 rounds: these are found by their bits, where the engine's can be read, as on a GPU.
SYNC_TOLERANCE = {
    ("float32", "cpu"): 2e-4,
    ("bfloat16", "cpu"): 0.1,
    ("float32", "cuda"): 1e-2,
    ("bfloat16", "cuda"): 0.1,
}
# Rounding grows where the trainer finds the probe less likely than this (0.1 on random tokens, of 15 nats each, of the
# 135M model in bfloat16), and so does what may pass.
LIKELY_NATS = 5.0
# Of an adapter that is added to weights: half a last place is lost of each sum, which matters less the larger it is.
LEAST_OF_ADAPTER = 0.9


def sync_tolerance(dtype: str, device: torch.device, log_probs: Tensor) -> float:
    """Largest mean gap in nats that is rounding, on tokens with these log-probabilities by the trainer."""
    return SYNC_TOLERANCE[dtype, device.type] * max(1.0, -float(log_probs.mean()) / LIKELY_NATS)


def metrics_of_adapter(arrived: float | None) -> Metrics:
    """The share of an adapter's change that a sync of summed weights has kept, see `arriving`; a warning where much of
    it was rounded away, so that rollouts are not those of the policy that is trained."""
    if arrived is None:
        return {}
    if arrived < LEAST_OF_ADAPTER:
        warnings.warn(
            f"{arrived:.1%} of the adapter's change arrived in the generation engine: the rest is less than the last "
            "place of the bfloat16 weights that it is added to. wb.Generation(engine='vllm') on the actor's own ranks "
            "holds the adapter beside the model; or use wb.Model(..., dtype='float32') for the actor",
            RuntimeWarning,
            stacklevel=2,
        )
    return {"sync/adapter_arrived": Mean(total=arrived, count=1)}


def _sampling(arguments: Mapping[str, Any]) -> Sampling:
    settings = {name: value for name, value in arguments.items() if name != "seed"}
    for name in ("stop", "stop_token_ids"):  # any sequence will do; Sampling refuses a bare string and a bare number
        settings[name] = settings[name] if isinstance(settings[name], str | int) else tuple(settings[name])
    if arguments["seed"] is not None:
        whole("seed", arguments["seed"], 0)
    return Sampling(**settings)


def _rollout_reads(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return ("prompt_ids", "prompt_uid", *(["prompt"] if arguments["environment"] else []))


def _rollout_writes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ("response_ids", "response_mask", "rollout_log_prob", "finished", "ending")
    return (*columns, *(["turns", "environment_rewards", *STATUS] if arguments["environment"] else []))


class SyncMetrics:
    """The metrics of the newest weight sync. The first generation after it reports them; so does the same generation
    when it is run again, because it was interrupted or its kernel had died: no metric is lost."""

    def __init__(self) -> None:
        self._metrics, self._taken = Metrics(), False
        self._seed: tuple[int, ...] = ()

    def note(self, metrics: Metrics) -> Metrics:
        """A sync has ended."""
        self._metrics, self._taken = metrics, False
        return metrics

    def take(self, seed: Sequence[int] = ()) -> Metrics:
        """What is to be reported. seed: of the generation that reports it; without one, nobody does so again."""
        if self._taken and not (seed and tuple(seed) == self._seed):
            return Metrics()
        self._taken, self._seed = True, tuple(seed)
        return self._metrics


class SamplingWorker(Worker):
    """A worker with a generation engine, whose weights are those of an actor: its own, or one in another pool."""

    generator: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    sync_metrics: SyncMetrics
    _moved = False  # moved or restored since the last sync: the engine has the weights of the model's files

    def start_engine(
        self, *, trainer: PreTrainedModel | None = None, sleeps: bool = False, lora: LoRA | None = None
    ) -> None:
        """Make the generation engine; trainer, sleeps, lora: see `make_generation_engine`."""
        spec, context = self.spec, self.context
        assert spec.name and spec.generation and spec.dtype
        self.sync_metrics = SyncMetrics()
        self.generator = make_generation_engine(
            spec.name,
            spec.generation,
            tokenizer=self.tokenizer,
            trainer=trainer,
            dtype=getattr(torch, spec.dtype),
            device=context.device,
            threads=context.host.threads,
            sleeps=sleeps,
            cache_bytes=context.cache_bytes,
            lora=lora,
        )
        if self._moved:
            self.generator.weights_version = -1

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._moved = True
        if self.spec.generation is not None and not self.context.waits:
            self.generator.weights_version = -1  # the next call syncs

    def memory_bytes(self) -> dict[str, int]:
        held = super().memory_bytes()
        if self.spec.generation is not None:
            held |= {f"generation {name}": n for name, n in self.generator.memory_bytes().items()}
        return held

    def close(self) -> None:
        if self.spec.generation is not None:
            self.generator.close()

    def before_rollouts(self) -> None:
        """Sync the engine's weights if they are outdated. Every rank calls it."""
        raise NotImplementedError

    def trained(self) -> tuple[int, int]:
        """Of the trainer's weights, as far as known here: their optimizer steps, and how often they were put back to an
        earlier state."""
        raise NotImplementedError

    def ledger(self, event: SyncEvent, version: int) -> AbstractContextManager[OpenSync]:
        """A line in the ledger of weights. version: of the engine's weights, after a sync."""
        steps, restored = self.trained()
        return self.context.recorder.sync(event, version=version, trained_version=steps, restored=restored)

    @register(
        THREE_D_ALL_MICRO_DP,
        reads=_rollout_reads,
        optional=lambda arguments: (*STATUS, "counted", *((ALL_TEXT,) if arguments["environment"] else ())),
        writes=_rollout_writes,
        minibatched=True,
        samples=True,
        generates=True,
        check=_sampling,
        check_model=lambda arguments, model: check_room(arguments, model.generation),
    )
    def generate_sequences(
        self,
        batch: Shard,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        max_new_tokens: int = 64,
        min_new_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        environment: Callable[[], Any] | None = None,
        max_turns: int = 8,
        concurrency: int = 8,
        call_timeout_s: float = 30.0,
        retries: int = 0,
        most_failed: float = 0.2,
        seed: int | None = None,
    ) -> Output:
        """Draw responses with the actor's newest weights (synced first if an update came in between).

        With rollout workers in a pool of their own they draw them: `lab.actor.generate_sequences` brings them up to the
        actor's weights first, `lab.rollout.generate_sequences` takes the weights that they have. The batch's meta says
        which in `weights_version`, optimizer steps of the actor.

        samples: responses a prompt; rows of one prompt stand side by side. temperature: 0 is greedy.
        stop: strings that end a response. seed: the same seed draws the same responses again; None draws anew.
        environment, max_turns: responses of several turns with tool output in between, see
        `workbench.data.environment`. The other settings, and what they make of the log-probabilities: `Sampling`.
        Columns: `response_ids`, `response_mask` (False on what an environment wrote), `rollout_log_prob` (see
        `Sampling`; 0 outside the mask) [rows, response tokens]; `ending` [rows]: "eos", "stop" or "length" (cut), with
        an environment "done", "turns" (cut after max_turns) or "length"; `finished` [rows], False where it was cut.
        With an environment also `turns` [rows], and `environment_rewards` [rows, response tokens], each turn's on its
        last token: rename it to `rewards`, or let the reward function use it, see `compute_reward`.

        A row whose environment fails, after `retries` with new environments, has "failed" as its ending; it is not
        `valid`, `failure` says why, and `batch.failed()` lists it. The others go on. Where more than `most_failed` of
        the rows fail, the stage raises `RolloutError`, whose `.batch` has the others.
        """
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
            ignore_eos=ignore_eos,
            environment=environment,
            max_turns=max_turns,
            concurrency=concurrency,
            call_timeout_s=call_timeout_s,
            retries=retries,
            most_failed=most_failed,
        )
        self.before_rollouts()
        prompts, seeds, mine = self._prompts_of_tensor_group(batch)
        drawn_with = self.generator.weights_version
        with (
            self.ledger("generation", drawn_with) as noted,
            self.context.stopping.only(self._in_step(environment is not None)),
            self.context.recorder.span("generate") as counted,
        ):
            noted.trained_version = batch.meta.get("trained_version", noted.trained_version)
            if environment is None:
                rollout = self.generator.generate(prompts, sampling, seeds, self._progress)
                columns = single_turn(rollout, mine)
            else:
                conversations = self._converse(batch, sampling, prompts, seeds, mine)[mine]
                columns = several_turns(conversations)
            if self._counts_rows():
                counted.tokens = int(columns["response_mask"].values.sum())  # type: ignore[union-attr]
        metrics, failed = rollout_metrics(columns), None
        status = Status(replace(batch, columns={}))
        if environment is not None:
            errors = {i: c.failure for i, c in enumerate(conversations) if c.failure is not None}
            for row, error in errors.items():
                status.note("generate_sequences", row, {name_of(environment): error.what})
            told, failed = failed_rows(errors, batch.rows.tolist(), most_failed)
            metrics |= told
        if environment is not None or set(STATUS) & batch.columns.keys():
            columns |= status.columns()  # what failed for earlier responses is not known of these
        if "counted" in batch.columns:
            columns["counted"] = torch.ones(len(batch), dtype=torch.bool)
        return Output(
            columns=columns,
            metrics=merge_metrics(dict(self.sync_metrics.take(batch.meta["seed"])), metrics),
            meta={
                "temperature": temperature,
                TRUNCATION: truncation(vars(sampling)),
                "weights_version": self.generator.weights_version,
            },
            failed=failed,
        )

    def _converse(
        self, batch: Shard, sampling: Sampling, prompts: list[list[int]], seeds: list[int], mine: slice
    ) -> list[Conversation]:
        """The conversations of all ranks of a tensor group; each rank runs the environments of its own rows, or of a
        share of the rows that they all have."""
        size, communicator = self._tensor_ranks, self.context.communicator
        here = slice(0, len(batch))
        if self.context.groups.model_parallel:
            start, stop = (len(batch) * (communicator.rank % size + n) // size for n in (0, 1))
            here = slice(start, stop)
        own = slice(mine.start + here.start, mine.start + here.stop)
        texts = {n: column for n, column in batch.columns.items() if isinstance(column, list) and n not in STATUS}
        rows = [{name: column[i] for name, column in texts.items()} for i in range(len(batch))]
        environments = Environments(
            sampling,
            [{**row, "sample_seed": seed} for row, seed in zip(rows[here], seeds[own], strict=True)],
            self.tokenizer,
            calls=self.context.calls,
            where=f"rank {self.context.host.rank} of pool {self.context.host.pool}",
            row_numbers=batch.rows[here].tolist(),
        )
        conversations = [Conversation(prompt_ids=ids, seed=seed) for ids, seed in zip(prompts, seeds, strict=True)]

        def any_rank(here: bool) -> bool:
            if size == 1:
                return here
            found = bool(communicator.all_reduce_max(torch.tensor([int(here)])).item())
            self.context.stopping.point()
            return found

        assert self.spec.generation is not None
        with environments.running():
            converse(
                self.generator,
                conversations,
                sampling,
                environments,
                mine=own,
                max_model_tokens=self.spec.generation.max_model_tokens,
                share=partial(shared_by_group, communicator, size),
                any_rank=any_rank,
                progress=self._progress if size == 1 else self.context.progress,
            )
        return conversations

    def _prompts_of_tensor_group(self, batch: Shard) -> tuple[list[list[int]], list[int], slice]:
        """Prompts and seeds of the ranks of a tensor group, in rank order, and which of the rows are this rank's.

        The ranks of a tensor group must ask the same of vLLM. In a layout with p*t > 1 they have the same rows; else
        rows are dealt to every rank, as for training.
        """
        communicator = self.context.communicator
        size = 1 if self.context.groups.model_parallel else self._tensor_ranks
        assert batch.sample is not None
        numbers = zip(batch.numbers("prompt_uid").tolist(), batch.sample.tolist(), strict=True)
        seeds = [sample_seed(batch.meta["seed"], uid, sample) for uid, sample in numbers]
        own = zip([communicator.rank] * len(batch), batch.ragged("prompt_ids").rows(), seeds, strict=True)
        rows = shared_by_group(communicator, size, lambda: [(rank, ids.tolist(), seed) for rank, ids, seed in own])
        before = sum(rank < communicator.rank for rank, _, _ in rows)
        return [ids for _, ids, _ in rows], [seed for _, _, seed in rows], slice(before, before + len(batch))

    def _progress(self, done: int, total: int, tokens: int) -> None:
        """Called between tokens, where the stage can be stopped."""
        self.context.progress(done, total, tokens)
        self.context.stopping.point()

    def _in_step(self, conversing: bool) -> tuple[int, ...]:
        """The ranks that pass stopping points in step with this one: its tensor group; or the whole pool where tensor
        groups converse with environments turn by turn."""
        size, rank = self._tensor_ranks, self.context.communicator.rank
        if conversing and size > 1:
            return tuple(range(self.context.communicator.world_size))
        return tuple(range(rank - rank % size, rank - rank % size + size))

    @property
    def _tensor_ranks(self) -> int:
        assert self.spec.generation is not None
        return self.spec.generation.tensor_parallel_size

    def _counts_rows(self) -> bool:
        """Whether this rank's responses count: where a tensor group has the same rows, those of its first rank do."""
        return not self.context.groups.model_parallel or self.context.communicator.rank % self._tensor_ranks == 0

    def require_small(
        self, gap: float, version: int, trainer: TrainerWeights, differ: Sequence[str] | None = None
    ) -> Metrics:
        """The gap on the probe right after a sync to `version` as a metric; `SyncError`, on every rank, where it is
        more than rounding on one of them, or weights differ. Every rank calls it.

        differ: weights of the engine that are known not to be the trainer's; None: look for them if the gap is large.
        """
        assert self.spec.dtype is not None
        # every rank raises, or none: one that went on would wait for the others. NaN is no number to compare with.
        known = torch.tensor([gap, len(differ or ())], dtype=torch.float64).nan_to_num(nan=torch.inf)
        worst, most = self.context.communicator.all_reduce_max(known).tolist()
        limit = sync_tolerance(self.spec.dtype, self.context.device, trainer.log_probs)
        if worst > limit or most:
            self.generator.weights_version = -1  # not in sync: the next call tries again, and samples nothing till then
            raise SyncError(
                f"after the sync to weights version {version} engine and trainer differ by {worst:.3g} nats",
                f"at most {limit:.2g} is rounding in {self.spec.dtype} on {self.context.device.type}, and none in bits",
                f"{self._what_differs(trainer, differ)}; Generation(check_sync=False) goes on all the same",
            )
        return {"sync_gap/mean": Mean(total=gap, count=1)}

    def _what_differs(self, trainer: TrainerWeights, differ: Sequence[str] | None) -> str:
        """Which weights of the engine are not the trainer's, on any rank; every rank calls it."""
        communicator = self.context.communicator
        if differ is None and self.context.host.offloads:
            return "the trainer's weights have left the device, and were not compared with the engine's"

        def mine() -> list[str]:
            return list(differing_weights(trainer, self.generator)[1] if differ is None else differ)

        found = list(dict.fromkeys(shared_by_group(communicator, communicator.world_size, mine)))
        if not found:
            return "all weights that can be read in the engine are the trainer's: another is not"
        return f"{', '.join(found[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''} did not arrive"
