"""The base class of all workers with a generation engine: it draws responses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from workbench.batches.columns import Table
from workbench.batches.schema import CONTEXT_STARTS, STATUS
from workbench.data.agent import Agents
from workbench.data.environment import Environments
from workbench.display.html import bytes_text
from workbench.engines.generation import GenerationEngine, make_generation_engine
from workbench.messages.calls import Output
from workbench.messages.metrics import merge_metrics
from workbench.messages.operation import ALL_TEXT, register
from workbench.messages.protocols import THREE_D_ALL_MICRO_DP
from workbench.messages.shards import Shard
from workbench.models.lora import LoRA
from workbench.models.spec import Model
from workbench.placement import Pool
from workbench.settings.context import GivenContext
from workbench.settings.engines import Agent, Environment, Sampling, check_mask, check_room, keeps_mask, truncation
from workbench.support.calls.pickling import name_of
from workbench.support.machine import available_bytes, own_gpu_free_bytes
from workbench.support.seeds import sample_seed
from workbench.support.validation import NonNegativeInt, PositiveInt
from workbench.telemetry.syncs import OpenSync, SyncEvent
from workbench.workers.agents.recording import Recording
from workbench.workers.agents.server import AgentServer
from workbench.workers.agents.serving import Serving
from workbench.workers.conversation import Compaction, Conversation, Lockstep, Turns
from workbench.workers.engine_weights import SyncMetrics
from workbench.workers.hints import RowFailures, failed_rows
from workbench.workers.kept_conversations import KeptConversations, key_of
from workbench.workers.partial_rollouts import COLUMNS as PART_COLUMNS
from workbench.workers.partial_rollouts import READS as READS_TO_RESUME
from workbench.workers.partial_rollouts import PartialResponses, check_cache, check_parts, in_parts
from workbench.workers.rollout_columns import (
    COMPONENTS,
    TURN_COLUMNS,
    never_answered,
    rollout_metrics,
    several_turns,
    single_turn,
)
from workbench.workers.sampling_mask import MASK_COLUMNS, TRUNCATION, mask_columns
from workbench.workers.worker import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def _sampling(arguments: Mapping[str, Any]) -> Sampling:
    others = ("seed", "pause_after", "resume", "cache")  # not part of `Sampling`: settings of one call
    settings = {name: value for name, value in arguments.items() if name not in others}
    for name in ("stop", "stop_token_ids"):  # any sequence will do; Sampling refuses a bare string or number
        settings[name] = settings[name] if isinstance(settings[name], str | int) else tuple(settings[name])
    return Sampling(**settings)


def _rollout_writes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ["response_ids", "response_mask", "rollout_log_prob", "finished", "ending"]
    columns += MASK_COLUMNS if keeps_mask(arguments) else []
    columns += ["prompt_ids", *TURN_COLUMNS, *STATUS] if _of_several_turns(arguments) else []
    columns += PART_COLUMNS if in_parts(arguments) else []
    columns += [CONTEXT_STARTS] if arguments["agent"] or arguments["context"] else []
    return (*columns, *([COMPONENTS] if arguments["agent"] else []))


def _of_several_turns(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["environment"] or arguments["agent"])


def _rollout_reads(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ["prompt_ids", "prompt_uid", *(["prompt"] if _of_several_turns(arguments) else [])]
    return (*columns, *(READS_TO_RESUME if arguments["resume"] else ()))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    _sampling(arguments)
    check_parts(arguments)


def _check_generation(arguments: Mapping[str, Any], model: Model) -> None:
    check_cache(arguments, model.generation)
    check_room(arguments, model.generation)
    check_mask(arguments, model.generation)


class SamplingWorker(Worker):
    """A worker with a generation engine that uses the weights of an actor, in the same process or in another pool."""

    generator: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    sync_metrics: SyncMetrics
    _has_file_weights = False  # moved or restored since the last sync: the engine has the weights of the model's files
    _said = False  # whether a note said that patches have no room

    def start_engine(
        self, *, trainer: PreTrainedModel | None = None, sleeps: bool = False, lora: LoRA | None = None
    ) -> None:
        """Make the generation engine. trainer, sleeps, lora: see `make_generation_engine`."""
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
            float32_head=spec.training is not None and spec.training.head_dtype == "float32",
        )
        if self._has_file_weights:
            self.generator.weights_version = -1

    @functools.cached_property
    def kept(self) -> KeptConversations:
        """The conversations of a stage that was interrupted."""
        return KeptConversations()

    def extra_state(self) -> dict[str, Any]:
        if self.spec.generation is not None and not self._has_file_weights:
            self.kept.drop_other_weights(self._weights_id)
        return {**super().extra_state(), "conversations": self.kept.state}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._has_file_weights = True
        self.kept.load(state.get("conversations", {}))
        if self.spec.generation is not None and not self.context.replaces_live:
            self.generator.weights_version = -1  # the next call syncs

    @property
    def _weights_id(self) -> list[int]:
        """Numbers that identify the weights with which this worker generates."""
        return [self.generator.weights_version, *self.trained()]

    def has_room(self, nbytes: int) -> bool:
        """Return whether the device has room to keep `nbytes` for patches; never on a GPU in which roles take turns.
        The first time there is no room, note that for the user."""
        if self.context.device.type == "cuda":
            free = 0 if self.context.host.offloads else own_gpu_free_bytes()
        else:
            free = available_bytes()
        if free < nbytes and not self._said:
            self._notes.append(f"each sync sends whole weights: patches need {bytes_text(nbytes)} of free memory")
            self._said = True
        return free >= nbytes

    def memory_bytes(self) -> dict[str, int]:
        held = super().memory_bytes()
        if self.spec.generation is not None:
            held |= {f"generation {name}": n for name, n in self.generator.memory_bytes().items()}
        return held

    def close(self) -> None:
        if hasattr(self, "generator"):  # it begins with `start_engine`
            self.generator.close()

    def before_rollouts(self) -> None:
        """Sync the engine's weights if they are outdated. Every rank calls it."""
        raise NotImplementedError

    def trained(self) -> tuple[int, int]:
        """Return the trainer's optimizer steps and the number of times its weights were restored, as far as this worker
        knows them."""
        raise NotImplementedError

    def ledger(self, event: SyncEvent, version: int) -> AbstractContextManager[OpenSync]:
        """Record an event in the ledger of weights. version: the engine's weights version, after a sync."""
        steps, restored = self.trained()
        return self.context.recorder.sync(event, version=version, trained_version=steps, restored=restored)

    @register(
        THREE_D_ALL_MICRO_DP,
        reads=_rollout_reads,
        optional=lambda arguments: (*STATUS, "counted", *((ALL_TEXT,) if _of_several_turns(arguments) else ())),
        writes=_rollout_writes,
        minibatched=True,
        samples=True,
        generates=True,
        check=_check_arguments,
        check_model=_check_generation,
    )
    def generate_sequences(
        self,
        batch: Shard,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        keep_mask: bool = False,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        max_new_tokens: int = 64,
        min_new_tokens: int = 0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        environment: Environment | None = None,
        agent: Agent | None = None,
        context: GivenContext | None = None,
        max_turns: int = 8,
        max_calls: int | None = None,
        max_seconds: float | None = None,
        most_open: int | None = None,
        concurrency: int = 8,
        call_timeout_s: float = 30.0,
        retries: int = 0,
        most_failed: float = 0.2,
        pause_after: PositiveInt | None = None,
        resume: bool = False,
        cache: Literal["recomputed", "kept"] = "recomputed",
        seed: NonNegativeInt | None = None,
    ) -> Output:
        """Draw responses with the actor's newest weights (synced first if an update came in between).

        If rollout workers in a pool of their own draw them, `lab.actor.generate_sequences` brings these workers up to
        the actor's weights first, and `lab.rollout.generate_sequences` uses the weights that they have.
        `weights_version` in the batch's meta says which weights, in optimizer steps of the actor.

        samples: responses per prompt; rows of one prompt stand side by side. temperature: 0 is greedy.
        stop: strings that end a response. seed: the same seed draws the same responses again; None draws new ones.
        pause_after: a response pauses, with the ending "paused", after this call has added so many tokens to it.
        resume: continue the paused rows of a batch with the newest weights, and leave its other rows unchanged. cache:
        "recomputed" computes the key-value cache with these weights; "kept" uses the cache of the older weights if vLLM
        still has it, so that earlier tokens are read through older weights. See `workbench.workers.partial_rollouts`.
        environment, max_turns: responses of several turns with tool output in between, see
        `workbench.data.environment`. agent: your own harness that asks for each turn over HTTP, see
        `workbench.data.agent`. context: what the policy reads of a long conversation, see `wb.Context`. The other
        settings, and their effect on the log-probabilities: `Sampling`.
        Columns: `response_ids`, `response_mask` (False on what an environment wrote), `rollout_log_prob` (see
        `Sampling`; 0 outside the mask) [rows, response tokens]; `ending` [rows]: "eos", "stop" or "length" (cut), with
        an environment "done", or the limit that cut it, see `Sampling`; `finished` [rows], False where it was cut. With
        an environment also `prompt_ids`, which are new where `reset` returned messages, `turns` [rows], and
        `environment_rewards` [rows, response tokens], each turn's reward on its last token: rename the column to
        `rewards`, or let the reward function use it, see `compute_reward`; `turn_starts` and `turn_ends` [rows, turns],
        the response tokens of each turn of the policy, as in a slice, and `turn_rewards` [rows, turns]; `batch.turns()`
        is a frame of the turns. With an agent the same columns; `prompt_ids` are its first request, its reward is on
        the last token, and `environment_components` [rows] has its returned components by name. With an agent or a
        context `context_starts` [rows, response tokens] is 1 where each context after the first begins. With keep_mask
        and top_p, top_k or min_p also `sampling_mask_sizes` [rows, response tokens], how many tokens could be drawn (0:
        all), and `sampling_mask_ids`, which ones. With pause_after or resume also `token_versions` [rows, response
        tokens], the weights version that drew each token, and `sample_seed` [rows].

        A row whose environment fails, after `retries` with new environments, has "failed" as its ending; it is not
        `valid`, `failure` says why, and `batch.failed()` lists it. The other rows continue. If more than `most_failed`
        of the rows fail, the stage raises `RolloutError`, whose `.batch` has the other rows.
        """
        sampling = _sampling({name: given for name, given in locals().items() if name not in ("self", "batch")})
        self.before_rollouts()
        self.kept.drop_other_weights(self._weights_id)
        prompts, seeds, mine = self._prompts_of_tensor_group(batch)
        drawn_with = self.generator.weights_version
        with (
            self.ledger("generation", drawn_with) as noted,
            self.context.stopping.in_step_with(self._in_step(sampling.several_turns is not None)),
            self.context.recorder.span("generate") as counted,
        ):
            noted.trained_version = batch.meta.get("trained_version", noted.trained_version)
            conversations = list[Conversation]()
            if agent is not None:
                conversations = self._serve(batch, sampling, prompts, seeds, mine)
                columns = several_turns(conversations, keeps_mask=sampling.keeps_mask, contexts=True)
                columns |= {COMPONENTS: [c.components for c in conversations]}
            elif environment is not None:
                conversations = self._converse(batch, sampling, prompts, seeds, mine)[mine]
                columns = several_turns(conversations, keeps_mask=sampling.keeps_mask, contexts=context is not None)
            elif pause_after or resume:
                begun = PartialResponses.of(batch, seeds[mine], resume)
                columns = self._go_on(begun, prompts, mine, sampling, pause_after, cache == "kept")
            else:
                rollout = self.generator.generate(prompts, sampling, seeds, self.context.advance)
                columns = single_turn(rollout.response_ids[mine], rollout.log_probs[mine], rollout.endings[mine])
                columns |= {} if rollout.sets is None else mask_columns(rollout.sets[mine])
            # if the ranks of a tensor group have the same rows, only the first rank's tokens are counted
            if not self.context.groups.model_parallel or self.context.communicator.rank % self._tensor_ranks == 0:
                had = len(batch.ragged("rollout_log_prob").values) if resume else 0
                counted.tokens = int(columns["response_mask"].values.sum()) - had  # type: ignore[union-attr]
        metrics, failed, synced = rollout_metrics(columns), None, self.sync_metrics.take(batch.meta["seed"])
        if pause_after or resume:
            metrics |= begun.metrics(columns)
        notes = never_answered(conversations, sampling, self.context.host.rank) if environment is not None else ()
        status = RowFailures(batch if resume else replace(batch, columns={}))
        if (function := sampling.several_turns) is not None:
            errors = {i: c.failure for i, c in enumerate(conversations) if c.failure is not None}
            for row, error in errors.items():
                status.note("generate_sequences", row, {name_of(function): error})
            told, failed = failed_rows(errors, batch.rows.tolist(), most_failed)
            metrics |= told
        if function is not None or set(STATUS) & batch.columns.keys():
            columns |= status.columns()  # failures of earlier responses say nothing about these
        if "counted" in batch.columns:
            columns["counted"] = torch.ones(len(batch), dtype=torch.bool)
        return Output(
            columns=columns,
            metrics=merge_metrics(dict(synced), metrics),
            meta={
                "temperature": temperature,
                TRUNCATION: truncation(vars(sampling)),
                "weights_version": self.generator.weights_version,
            },
            failed=failed,
            notes=notes,
        )

    def _converse(
        self, batch: Shard, sampling: Sampling, prompts: list[list[int]], seeds: list[int], mine: slice
    ) -> list[Conversation]:
        """Run the conversations of all ranks of a tensor group. Each rank runs the environments of its own rows, or of
        a share of the rows that all these ranks have. Conversations that ended before an interrupt are not repeated."""
        assert self.spec.generation is not None
        own, rows, given = self._rows_here(batch, seeds, mine)
        room = self.spec.generation.max_model_tokens
        pool: Pool | None = batch.meta.get("environments")
        processes = 1 if pool is None else pool.share(self.context.host.rank, self.context.host.world_size)
        given["calls"] = self.context.calls.processes(processes)
        environments = Environments(sampling, rows, self.tokenizer, max_model_tokens=room, **given)
        new = [Conversation(prompt_ids=ids, seed=seed) for ids, seed in zip(prompts, seeds, strict=True)]
        key = key_of(sampling, rows, self._weights_id)
        # ranks of a tensor group have the same conversations: all ranks resume them, or none does
        keys = self.context.communicator.shared_by_group(self._tensor_ranks, lambda: [key])
        key = b"".join(keys) if all(keys) else b""
        with self.kept.resuming(key, self._weights_id, new) as conversations, environments.running():
            compaction = Compaction(sampling.context, self.tokenizer) if sampling.context else None
            turns = Turns(conversations, sampling, environments, mine=own, max_model_tokens=room, compaction=compaction)
            turns.take_all(self.generator, Lockstep(self.context, self._tensor_ranks))
        return conversations

    def _go_on(
        self,
        begun: PartialResponses,
        prompts: list[list[int]],
        mine: slice,
        sampling: Sampling,
        pause_after: int | None,
        keep_cache: bool,
    ) -> Table:
        """Return the columns of this rank's responses after one more part. prompts: the tensor group's prompts."""
        assert self.spec.generation is not None
        size = 1 if self.context.groups.model_parallel else self._tensor_ranks
        rows = self.context.communicator.shared_by_group(size, lambda: [*zip(begun.open, begun.seeds, strict=True)])
        rollout = self.generator.generate(
            prompts, sampling, [seed for _, seed in rows], self.context.advance,
            begun=[ids for ids, _ in rows], pause_after=pause_after, keep_cache=keep_cache,
        )  # fmt: skip
        room = self.spec.generation.max_model_tokens
        most = [min(sampling.max_new_tokens, room - len(ids)) for ids in prompts[mine]]
        return begun.columns(rollout, mine, self.generator.weights_version, most)

    def _serve(
        self, batch: Shard, sampling: Sampling, prompts: list[list[int]], seeds: list[int], mine: slice
    ) -> list[Conversation]:
        """Serve this rank's rows to agents, and return the conversations. If all ranks of a tensor group have the same
        rows, each rank serves a share of them, and the ranks exchange the results."""
        assert self.spec.generation is not None
        own, rows, given = self._rows_here(batch, seeds, mine)
        agents, size = Agents(sampling, rows, **given), self._tensor_ranks
        room = self.spec.generation.max_model_tokens
        recordings = [
            Recording(sampling, self.tokenizer, ids, seed, room, keeps=getattr(sampling.agent, "records", True))
            for ids, seed in zip(prompts[own], seeds[own], strict=True)
        ]
        server = AgentServer(sampling)
        rank = self.context.communicator.rank % size
        with server.running(), agents.running():
            serving = Serving(recordings, agents, server, first=rank, of=size, most_open=sampling.most_open)
            serving.serve(self.generator, sampling, Lockstep(self.context, size))
        if self.context.groups.model_parallel:
            return self.context.communicator.shared_by_group(size, lambda: serving.rows)
        return serving.rows

    def _rows_here(
        self, batch: Shard, seeds: list[int], mine: slice
    ) -> tuple[slice, list[dict[str, Any]], dict[str, Any]]:
        """Return the rows whose functions run here, all of the shard's or a share of a tensor group's: their place
        among the group's rows, their text cells and seeds as functions get them, and further arguments of the calls."""
        size, host = self._tensor_ranks if self.context.groups.model_parallel else 1, self.context.host
        start, stop = (len(batch) * (self.context.communicator.rank % size + n) // size for n in (0, 1))
        texts = {n: column for n, column in batch.columns.items() if isinstance(column, list) and n not in STATUS}
        rows = [
            {**{name: column[i] for name, column in texts.items()}, "sample_seed": seeds[mine.start + i]}
            for i in range(start, stop)
        ]
        where, numbers = f"rank {host.rank} of pool {host.pool}", batch.rows[start:stop].tolist()
        own = slice(mine.start + start, mine.start + stop)
        return own, rows, {"calls": self.context.calls, "where": where, "row_numbers": numbers}

    def _prompts_of_tensor_group(self, batch: Shard) -> tuple[list[list[int]], list[int], slice]:
        """Return the prompts and seeds of a tensor group's ranks, in rank order, and the slice of this rank's rows.

        The ranks of a tensor group must ask vLLM for the same rows. In a layout with p*t > 1 they have the same rows;
        otherwise each rank has rows of its own, as in training.
        """
        communicator = self.context.communicator
        size = 1 if self.context.groups.model_parallel else self._tensor_ranks
        assert batch.sample is not None
        numbers = zip(batch.numbers("prompt_uid").tolist(), batch.sample.tolist(), strict=True)
        seeds = [sample_seed(batch.meta["seed"], uid, sample) for uid, sample in numbers]
        own = [(ids.tolist(), seed) for ids, seed in zip(batch.ragged("prompt_ids").rows(), seeds, strict=True)]
        of_ranks = communicator.shared_by_group(size, lambda: [own])
        start, rows = sum(map(len, of_ranks[: communicator.rank % size])), list(chain(*of_ranks))
        return [ids for ids, _ in rows], [seed for _, seed in rows], slice(start, start + len(batch))

    def _in_step(self, conversing: bool) -> tuple[int, ...]:
        """Return the ranks that pass stopping points in step with this one: its tensor group, or the whole pool if
        tensor groups converse with environments."""
        size, rank = self._tensor_ranks, self.context.communicator.rank
        if conversing and size > 1:
            return tuple(range(self.context.communicator.world_size))
        return tuple(range(rank - rank % size, rank - rank % size + size))

    @property
    def _tensor_ranks(self) -> int:
        assert self.spec.generation is not None
        return self.spec.generation.tensor_parallel_size
