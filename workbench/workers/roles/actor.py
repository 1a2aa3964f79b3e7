"""The actor: the policy that is trained, and the engine that samples from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.algorithms.aggregation import Aggregation
from workbench.algorithms.arguments import within
from workbench.algorithms.correction import Correction
from workbench.algorithms.kl import KLLoss, kl_estimate, kl_loss
from workbench.algorithms.losses import PolicyLoss, policy_loss
from workbench.algorithms.preference import dpo_loss
from workbench.dataflow.columns import Column, Ragged
from workbench.dataflow.seeds import sample_seed
from workbench.engines.generation import make_generation_engine
from workbench.engines.settings import Generation, Sampling, at_least, whole
from workbench.errors import BadInput, SyncError
from workbench.models import load_causal_lm, load_tokenizer
from workbench.models.heads import TokenLogProbs
from workbench.models.lora import add_lora, without_adapter
from workbench.models.spec import Model
from workbench.workers.calls import Max, Mean, Metrics, Output, Shard, merge_metrics
from workbench.workers.conversation import Conversation, converse
from workbench.workers.engine_weights import EngineWeights, compare_weights, probe_ids, trainer_log_probs
from workbench.workers.environment import Environments
from workbench.workers.inference import (
    LOG_PROB_TEMPERATURE,
    check_temperature,
    chosen,
    each_response_token,
    mean_of,
    old_log_prob_temperature,
    sampling_temperature,
)
from workbench.workers.micro_batches import MicroBatch
from workbench.workers.operation import ALL_TEXT, register
from workbench.workers.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, THREE_D_PROTO
from workbench.workers.roles.pairs import (
    PAIR_COLUMNS,
    REFERENCE_COLUMNS,
    accuracy_bounds,
    answer_log_probs,
    pair_metrics,
    pair_term,
    pair_values,
    reference_log_probs,
)
from workbench.workers.roles.reference import ReferencePolicy
from workbench.workers.roles.trained import Term, TrainedWorker, check_update
from workbench.workers.rollout_columns import rollout_metrics, several_turns, single_turn
from workbench.workers.rollout_weights import rollout_weights
from workbench.workers.saving import save_adapter
from workbench.workers.tensor_group import shared_by_group
from workbench.workers.worker import Context

# Largest mean gap, in nats, between engine and trainer on the same tokens right after a sync. A stale output head
# shows as several tenths; rounding in bfloat16 as a few hundredths.
SYNC_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
REWARDS = ("chosen_rewards", "rejected_rewards")


def _sampling(arguments: Mapping[str, Any]) -> Sampling:
    settings = {name: value for name, value in arguments.items() if name != "seed"}
    for name in ("stop", "stop_token_ids"):  # any sequence will do; Sampling refuses a bare string and a bare number
        settings[name] = settings[name] if isinstance(settings[name], str | int) else tuple(settings[name])
    return Sampling(**settings)


def _check_length(sampling: Sampling, generation: Generation | None) -> None:
    """Raise `BadInput` where no response could be as long as asked for: all would be cut before, without a word."""
    assert generation is not None
    if sampling.max_new_tokens >= generation.max_model_tokens:
        raise BadInput(
            f"max_new_tokens={sampling.max_new_tokens}",
            f"prompt and response share Generation.max_model_tokens={generation.max_model_tokens}",
            "ask for fewer new tokens, or open the workbench with a larger Generation.max_model_tokens",
        )


def _rollout_reads(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return ("prompt_ids", "prompt_uid", *(["prompt"] if arguments["environment"] else []))


def _rollout_writes(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ("response_ids", "response_mask", "rollout_log_prob", "finished", "ending")
    return (*columns, *(["turns", "environment_rewards"] if arguments["environment"] else []))


def _update_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ["prompt_ids", "response_ids", "response_mask", "old_log_prob", "advantages"]
    columns += ["ref_log_prob"] if arguments["kl_coefficient"] else []
    columns += ["pretrain_ids"] if arguments["pretrain_coefficient"] else []
    columns += ["rollout_log_prob"] if arguments["correction"] is not None else []
    return tuple(columns)


def _check_update(arguments: Mapping[str, Any]) -> None:
    check_update(arguments)
    check_temperature(arguments)
    within("clip", arguments["clip"], 0, 1)
    for name in ("kl_coefficient", "pretrain_coefficient"):
        at_least(name, arguments[name], 0)
    for name in ("clip_high", "dual_clip"):
        if arguments[name] is not None:
            at_least(name, arguments[name], 0 if name == "clip_high" else 1)
    if arguments["dual_clip"] is not None and arguments["loss"] != "ppo":
        raise BadInput(f"dual_clip with loss={arguments['loss']!r}", "a dual clip is one of PPO's", "leave it out")
    correction = arguments["correction"]
    if correction is not None and not isinstance(correction, Correction):
        raise BadInput(f"correction={correction!r:.60}", "must be a wb.Correction(...), or None")


def _rows_without_advantage(advantages: Ragged, mask: Ragged) -> frozenset[int]:
    """Rows whose valid tokens all have advantage 0, such as those of a group with equal rewards."""
    valid = mask.pad().bool()
    return frozenset(torch.where(valid, advantages.pad(), 0.0).eq(0).all(-1).nonzero()[:, 0].tolist())


def _check_dpo(arguments: Mapping[str, Any]) -> None:
    at_least("beta", arguments["beta"], 0, strictly=True)
    whole("epochs", arguments.get("epochs", 1), 1)
    within("label_smoothing", arguments.get("label_smoothing", 0.0), 0.0, 0.5)


def _as_responses(batch: Shard, documents: Ragged) -> Shard:
    """Documents as rows whose prompt is the first token and whose response is all that follows."""
    rows = documents.rows()
    rest = Ragged.of([row[1:].tolist() for row in rows], torch.int64)
    first = Ragged.of([row[:1].tolist() for row in rows], torch.int64)
    mask = rest.like(torch.ones(len(rest.values), dtype=torch.bool))
    return replace(batch, columns={"prompt_ids": first, "response_ids": rest, "response_mask": mask})


class ActorWorker(TrainedWorker, ReferencePolicy):
    """A causal language model with an optimizer and, in the same process, a generation engine.

    The engine takes the trainer's weights before the first rollout after an update; the number of optimizer steps
    taken is the weights version stamped on every rollout. With an adapter only that is trained: the engine gets the
    sum of model and adapter, and `compute_ref_log_prob` is that of the model alone.
    """

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.name and spec.generation and spec.training and spec.dtype
        model = load_causal_lm(spec.name, dtype=torch.float32, device=context.device)
        if spec.adapter is not None:
            add_lora(model, spec.adapter, spec.seed)
        self.tokenizer = load_tokenizer(spec.name)
        super().__init__(spec, context, TokenLogProbs(model, micro_batch_tokens=spec.training.micro_batch_tokens))
        self.generator = make_generation_engine(
            spec.name,
            spec.generation,
            tokenizer=self.tokenizer,
            trainer=None if self.training.engine == "deepspeed" and self.training.zero_stage == 3 else model,
            dtype=getattr(torch, spec.dtype),
            device=context.device,
            threads=context.host.threads,
        )

    def memory_bytes(self) -> dict[str, int]:
        generation = {f"generation {name}": n for name, n in self.generator.memory_bytes().items()}
        return {**self.engine.memory_bytes(), **generation}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.generator.weights_version = -1  # equal steps are not equal weights any more: the next call syncs

    def close(self) -> None:
        self.generator.close()

    def as_reference(self) -> AbstractContextManager[None]:
        if self.spec.adapter is None:
            raise BadInput(
                "an actor without an adapter as the reference",
                "without one, nothing keeps the policy as it was at first",
                "declare a reference in models=, or wb.Model(..., adapter=wb.LoRA()) as the actor",
            )
        return without_adapter(self.engine.module.model)  # type: ignore[arg-type]

    @register(
        THREE_D_ALL_MICRO_DP,
        reads=_rollout_reads,
        optional=lambda arguments: (ALL_TEXT,) if arguments["environment"] else (),
        writes=_rollout_writes,
        minibatched=True,
        samples=True,
        check=_sampling,
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
        timeout_s: float = 30.0,
        seed: int | None = None,
    ) -> Output:
        """Draw responses with the actor's newest weights (synced first if an update came in between).

        samples: responses a prompt; rows of one prompt stand side by side. temperature: 0 is greedy.
        stop: strings that end a response. seed: the same seed draws the same responses again; None draws anew.
        environment, max_turns: responses of several turns with tool output in between, see
        `workbench.workers.environment`. The other settings, and what they make of the log-probabilities: `Sampling`.
        Columns: `response_ids`, `response_mask` (False on what an environment wrote), `rollout_log_prob` (see
        `Sampling`; 0 outside the mask) [rows, response tokens]; `ending` [rows]: "eos", "stop" or "length" (cut), with
        an environment "done", "turns" (cut after max_turns) or "length"; `finished` [rows], False where it was cut.
        With an environment also `turns` [rows], and `environment_rewards` [rows, response tokens], each turn's on its
        last token: rename it to `rewards`, or let the reward function use it, see `compute_reward`.
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
            timeout_s=timeout_s,
        )
        _check_length(sampling, self.spec.generation)
        metrics = self._sync()
        prompts, seeds, mine = self._prompts_of_tensor_group(batch)
        with self.context.recorder.span("generate") as counted:
            if environment is None:
                rollout = self.generator.generate(prompts, sampling, seeds, self.context.progress)
                columns = single_turn(rollout, mine)
            else:
                columns = several_turns(self._converse(batch, sampling, prompts, seeds, mine)[mine])
            counted.tokens = int(columns["response_mask"].values.sum())  # type: ignore[union-attr]
        return Output(
            columns=columns,
            metrics=merge_metrics(metrics, rollout_metrics(columns)),
            meta={"temperature": temperature, "weights_version": self.generator.weights_version},
        )

    def _converse(
        self, batch: Shard, sampling: Sampling, prompts: list[list[int]], seeds: list[int], mine: slice
    ) -> list[Conversation]:
        """The conversations of all ranks that generate as one; each rank runs the environments of its own rows."""
        assert self.spec.generation is not None
        size, communicator = self.spec.generation.tensor_parallel_size, self.context.communicator
        texts = {name: column for name, column in batch.columns.items() if isinstance(column, list)}
        rows = [{name: column[i] for name, column in texts.items()} for i in range(len(batch))]
        environments = Environments(
            sampling,
            [{**row, "sample_seed": seed} for row, seed in zip(rows, seeds[mine], strict=True)],
            self.tokenizer,
            where=f"rank {self.context.host.rank} of pool {self.context.host.pool}",
            row_numbers=batch.rows.tolist(),
        )
        conversations = [Conversation(prompt_ids=ids, seed=seed) for ids, seed in zip(prompts, seeds, strict=True)]

        def any_rank(here: bool) -> bool:
            return here if size == 1 else bool(communicator.all_reduce_max(torch.tensor([int(here)])).item())

        with environments.running():
            converse(
                self.generator,
                conversations,
                sampling,
                environments,
                mine=mine,
                max_model_tokens=self.spec.generation.max_model_tokens,
                share=partial(shared_by_group, communicator, size),
                any_rank=any_rank,
                progress=self.context.progress,
            )
        return conversations

    def _prompts_of_tensor_group(self, batch: Shard) -> tuple[list[list[int]], list[int], slice]:
        """Prompts and seeds of the ranks that generate as one, in rank order, and which of the rows are this rank's.

        Rows are dealt to every rank, as for training, but the ranks of a tensor group must ask the same of vLLM.
        """
        assert self.spec.generation is not None
        size, communicator = self.spec.generation.tensor_parallel_size, self.context.communicator
        first = communicator.rank - communicator.rank % size

        def gathered(part: Tensor) -> list[Tensor]:
            return communicator.all_gather(part)[first : first + size] if size > 1 else [part]

        uids = batch.columns["prompt_uid"].tolist()  # type: ignore[union-attr]
        assert batch.sample is not None
        numbers = zip(uids, batch.sample.tolist(), strict=True)
        own_seeds = [sample_seed(batch.meta["seed"], uid, sample) for uid, sample in numbers]
        seeds = gathered(torch.tensor(own_seeds))
        own = batch.ragged("prompt_ids")
        prompts = Ragged(torch.cat(gathered(own.values)), torch.cat(gathered(own.lengths)))
        before = sum(map(len, seeds[: communicator.rank - first]))
        mine = slice(before, before + len(batch))
        return [row.tolist() for row in prompts.rows()], torch.cat(seeds).tolist(), mine

    @register(
        THREE_D_PROTO,
        reads=("prompt_ids", "response_ids"),
        optional=("rollout_log_prob", "response_mask"),
        writes=("old_log_prob",),
        minibatched=True,
        check=check_temperature,
    )
    def compute_log_prob(self, batch: Shard, *, temperature: float | None = None) -> Output:
        """Column `old_log_prob` [rows, response tokens]: the trainer's log softmax(logits / temperature).

        temperature: None takes the one that the responses were sampled with. It is kept in the batch's meta as
        `log_prob_temperature`, and `update_actor` takes its ratios at it; `compute_ref_log_prob` needs its own
        `temperature=` for a KL between the two at another temperature than the rollout's.
        """
        scale = sampling_temperature(batch, temperature)

        def forward(micro: MicroBatch) -> Tensor:
            return self.engine.forward(**micro.inputs, targets=micro.targets, temperature=scale)[0]

        column = each_response_token(batch, forward, self.training.micro_batch_tokens, self.context, padded=self.padded)
        metrics: Metrics = {"old_log_prob/mean": mean_of(column, batch)}
        if "rollout_log_prob" in batch.columns:
            gap = chosen(column.like((column.values - batch.ragged("rollout_log_prob").values).abs()), batch)
            metrics["rollout_gap/mean"] = Mean(total=float(gap.sum()), count=len(gap))
            metrics["rollout_gap/max"] = Max(value=float(gap.max()) if len(gap) else 0.0)
        return Output(columns={"old_log_prob": column}, metrics=metrics, meta={LOG_PROB_TEMPERATURE: scale})

    @register(
        THREE_D_PROTO,
        reads=_update_columns,
        optional=("rollout_log_prob",),
        minibatched=True,
        updates=True,
        check=_check_update,
    )
    def update_actor(
        self,
        batch: Shard,
        *,
        loss: PolicyLoss = "ppo",
        clip: float = 0.2,
        clip_high: float | None = None,
        dual_clip: float | None = None,
        epochs: int = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: int | None = None,
        entropy_coefficient: float = 0.0,
        kl_coefficient: float = 0.0,
        kl: KLLoss = "k3",
        correction: Correction | None = None,
        pretrain_coefficient: float = 0.0,
        temperature: float | None = None,
    ) -> Output:
        """A policy update, one optimizer step a minibatch and epoch.

        loss: "ppo" (clipped ratio of each token), "gspo" (of each sequence), "cispo" (clipped importance weight).
        clip, clip_high: the ratio against `old_log_prob` is clipped to [1 - clip, 1 + clip_high] (None: clip).
        dual_clip: bound of PPO's objective for negative advantages. aggregation: how token losses become one.
        entropy_coefficient: bonus. kl_coefficient, kl: penalty against `ref_log_prob` in the loss, and its form: see
        `workbench.algorithms.kl.kl_loss`.
        correction: weights the policy loss (not bonus and penalty) by `old_log_prob` against `rollout_log_prob`, for
        engines that sample from another distribution than the trainer's, or from older weights.
        pretrain_coefficient: weight of the language-model loss on the minibatch's `pretrain_ids`, see `compute_loss`:
        its gradient is part of the same optimizer step.
        temperature: None takes the one that `old_log_prob` was taken at, which is the rollout's unless
        `compute_log_prob` was given another.

        Without bonus and penalty a row whose advantages are all 0 has no gradient: it counts in the denominators, but
        no pass is spent on it (metric `skipped_rows/fraction`). Metrics of ratios and clips are those of the others.
        """
        scale = old_log_prob_temperature(batch, temperature)
        old, mask, advantages = (batch.ragged(n) for n in ("old_log_prob", "response_mask", "advantages"))
        high = clip if clip_high is None else clip_high
        weights = None if correction is None else rollout_weights(batch, correction, self.context)

        def token_loss(micro: MicroBatch) -> tuple[Tensor, Metrics]:
            log_probs_N, entropy_N = self.engine.forward(
                **micro.inputs, targets=micro.targets, temperature=scale, with_entropy=entropy_coefficient != 0
            )
            log_probs_BR, mask_BR = micro.to_BR(log_probs_N), micro.mask_BR(mask)
            old_BR = micro.column_BR(old)
            advantages_BR = micro.column_BR(advantages)
            loss_BR, stats = policy_loss(loss, log_probs_BR, old_BR, advantages_BR, mask_BR, clip, high, dual_clip)
            if weights is not None:
                loss_BR = loss_BR * micro.column_BR(weights.column)
            count = float(mask_BR.sum())

            def mean(x_BR: Tensor) -> Mean:
                return Mean(total=float((x_BR.detach() * mask_BR).sum()), count=count)

            deviation_BR = (stats.ratio_BT - 1).abs() * mask_BR
            metrics: Metrics = {
                "ratio/mean": mean(stats.ratio_BT),
                "ratio/max_deviation": Max(value=float(deviation_BR.max())),
                "clip_fraction": mean(stats.clipped_BT.float()),
                "approximate_kl": mean(kl_estimate(old_BR, log_probs_BR.detach(), "k3")),
            }
            if "rollout_log_prob" in batch.columns:
                rollout_BR = micro.column_BR(batch.ragged("rollout_log_prob"))
                # a selection, not a product: outside the mask the exponential may be infinite
                gap_BR = torch.where(mask_BR > 0, log_probs_BR.detach() - rollout_BR, 0.0)
                metrics["rollout_ratio/max_deviation"] = Max(value=float((gap_BR.exp() - 1).abs().max()))
            if entropy_coefficient:
                entropy_BR = micro.to_BR(entropy_N)
                loss_BR = loss_BR - entropy_coefficient * entropy_BR
                metrics["entropy"] = mean(entropy_BR)
            if kl_coefficient:
                kl_BR = kl_loss(log_probs_BR, old_BR, micro.column_BR(batch.ragged("ref_log_prob")), kl)
                loss_BR = loss_BR + kl_coefficient * kl_BR
                metrics["reference_kl"] = mean(kl_BR)
            return loss_BR, metrics

        # these two pull on every row, an advantage only where there is one
        skip = () if entropy_coefficient or kl_coefficient else _rows_without_advantage(advantages, mask)
        main = Term(
            shard=batch, loss=token_loss, aggregation=aggregation, max_response_tokens=max_response_tokens, skip=skip
        )
        terms = [main]
        if pretrain_coefficient:
            terms.append(self._pretraining(batch, pretrain_coefficient))
        output = self.update(*terms, epochs=epochs, rate_scales=weights.rate_scales if weights else ())
        skipped = {"skipped_rows/fraction": Mean(total=len(skip), count=len(batch))}
        return replace(output, metrics={**output.metrics, **skipped, **(weights.metrics if weights else {})})

    @register(
        THREE_D_PROTO,
        reads=("prompt_ids", "response_ids", "response_mask"),
        minibatched=True,
        updates=True,
        check=check_update,
    )
    def update_sft(
        self,
        batch: Shard,
        *,
        epochs: int = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: int | None = None,
    ) -> Output:
        """Supervised fine-tuning: the mean of -log pi over the response tokens, one optimizer step a minibatch and
        epoch. `compute_log_prob` gives the same number, turned round, without an update.

        aggregation, max_response_tokens: as in `update_actor`.
        Source: InstructGPT, Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5.
        """

        def loss(micro: MicroBatch) -> tuple[Tensor, Metrics]:
            log_probs_N, _ = self.engine.forward(**micro.inputs, targets=micro.targets, temperature=1.0)
            return -micro.to_BR(log_probs_N), {}

        term = Term(shard=batch, loss=loss, aggregation=aggregation, max_response_tokens=max_response_tokens)
        return self.update(term, epochs=epochs)

    @register(
        THREE_D_PROTO,
        reads=PAIR_COLUMNS,
        optional=REFERENCE_COLUMNS,
        writes=("chosen_log_prob", "rejected_log_prob"),
        minibatched=True,
        check=_check_dpo,
    )
    def compute_pair_log_prob(self, batch: Shard, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Output:
        """Columns `chosen_log_prob`, `rejected_log_prob` [rows]: log-probabilities of the whole answers of each pair,
        summed over their tokens, nats.

        Where the batch has the reference's, the metrics are those of `update_dpo` with the same arguments, and the
        bounds of the accuracy's 95 % interval: what held-out pairs say.
        """
        budget = self.training.micro_batch_tokens
        values = partial(answer_log_probs, self.engine)
        chosen, rejected = pair_values(batch, values, budget, self.context, padded=self.padded)
        metrics: Metrics = {}
        if set(REFERENCE_COLUMNS) <= set(batch.columns):
            loss, rewards = dpo_loss(chosen, rejected, *reference_log_probs(batch), beta, label_smoothing)
            metrics = pair_metrics(loss, *rewards, names=REWARDS) | accuracy_bounds(*rewards, self.context.communicator)
        return Output(columns={"chosen_log_prob": chosen, "rejected_log_prob": rejected}, metrics=metrics)

    @register(
        THREE_D_PROTO,
        reads=(*PAIR_COLUMNS, *REFERENCE_COLUMNS),
        minibatched=True,
        updates=True,
        check=_check_dpo,
    )
    def update_dpo(self, batch: Shard, *, beta: float = 0.1, label_smoothing: float = 0.0, epochs: int = 1) -> Output:
        """Direct preference optimization, one optimizer step a minibatch (of pairs) and epoch; see
        `workbench.algorithms.preference.dpo_loss`.

        Reads `chosen_ids` and `rejected_ids`, and what `lab.reference.compute_ref_pair_log_prob` wrote. In float32 the
        first loss is log 2; in bfloat16 the frozen reference rounds otherwise than the actor, by tenths of a nat.
        Metrics: `accuracy` (of the implicit rewards beta log pi/ref), `margin` between them, and their means.
        """
        ref_chosen, ref_rejected = reference_log_probs(batch)

        def loss(chosen_P: Tensor, rejected_P: Tensor, pairs: list[int]) -> tuple[Tensor, Metrics]:
            ref_chosen_P, ref_rejected_P = (ref[pairs].to(chosen_P.device) for ref in (ref_chosen, ref_rejected))
            loss_P, rewards = dpo_loss(chosen_P, rejected_P, ref_chosen_P, ref_rejected_P, beta, label_smoothing)
            return loss_P, pair_metrics(loss_P, *rewards, names=REWARDS)

        term = pair_term(batch, partial(answer_log_probs, self.engine), loss, self.context)
        return self.update(term, epochs=epochs)

    def _pretraining(self, batch: Shard, coefficient: float) -> Term:
        texts = _as_responses(batch, batch.ragged("pretrain_ids"))
        mask = texts.ragged("response_mask")

        def loss(micro: MicroBatch) -> tuple[Tensor, Metrics]:
            log_probs_N, _ = self.engine.forward(**micro.inputs, targets=micro.targets, temperature=1.0)
            loss_BR, mask_BR = -micro.to_BR(log_probs_N), micro.mask_BR(mask)
            total = float((loss_BR.detach() * mask_BR).sum())
            return coefficient * loss_BR, {"pretrain_loss": Mean(total=total, count=float(mask_BR.sum()))}

        return Term(shard=texts, loss=loss)

    @register(
        THREE_D_PROTO,
        reads=lambda arguments: (arguments["text"],),
        writes=("pretrain_ids", "pretrain_loss"),
        minibatched=True,
        check=lambda arguments: whole("max_tokens", arguments["max_tokens"], 1),
    )
    def compute_loss(self, batch: Shard, *, text: str = "text", max_tokens: int = 512) -> Output:
        """The pretraining loss: mean of -log pi of each token of a text given those before it, nats.

        text: the column of texts, one a row; they need have nothing to do with the row's prompt. max_tokens: longer
        texts are cut. A text begins as a document does, with BOS (EOS where there is none), and ends, if it was not
        cut, with EOS.
        Columns: `pretrain_ids`, the tokens that `update_actor(pretrain_coefficient=...)` learns from, and
        `pretrain_loss` [rows]. A loss that came from another process has no gradient: the update computes it anew.
        Source: InstructGPT's PPO-ptx, Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 2.
        """
        ids = self._documents(batch.columns[text], text, max_tokens)
        texts = _as_responses(batch, ids)

        def forward(micro: MicroBatch) -> Tensor:
            return self.engine.forward(**micro.inputs, targets=micro.targets, temperature=1.0)[0]

        log_probs = each_response_token(
            texts, forward, self.training.micro_batch_tokens, self.context, padded=self.padded
        )
        losses = torch.stack([-row.double().mean() for row in log_probs.rows()]).float()
        token_mean = Mean(total=-float(log_probs.values.double().sum()), count=len(log_probs.values))
        return Output(
            columns={"pretrain_ids": ids, "pretrain_loss": losses}, metrics={"pretrain_loss/mean": token_mean}
        )

    def _documents(self, texts: Column, name: str, max_tokens: int) -> Ragged:
        rows = texts if isinstance(texts, list) else [texts]
        wrong = [row for row in rows if not isinstance(row, str)]
        # every rank raises, or none: one that went on would wait for the others
        if self.context.communicator.all_reduce_max(torch.tensor([len(wrong)])).item():
            raise BadInput(
                f"column {name!r}" + (f" with {wrong[0]!r:.60}" if wrong else " with something else on another rank"),
                "compute_loss reads a text in each row",
                "name a column of strings with text=",
            )
        start = self.tokenizer.bos_token_id
        start = self.tokenizer.eos_token_id if start is None else start
        tokens = [[*self.tokenizer.encode(row, add_special_tokens=False), self.tokenizer.eos_token_id] for row in rows]
        return Ragged.of([[start, *row[:max_tokens]] for row in tokens], torch.int64)

    @register(ONE_TO_ALL)
    def sync_weights(self) -> dict[str, float]:
        """Give the generation engine the trainer's weights now, if it lacks them; the gap on the probe, in nats."""
        return {name: metric.value for name, metric in self._sync().items()}

    @register(ONE_TO_ALL)
    def save_adapter(self, path: str | Path) -> str:
        """Write the adapter alone, as peft does: `peft.PeftModel.from_pretrained(model, path)` loads it. The absolute
        path, once a rank. path: as in `save_model`, which writes model and adapter as one model.
        """
        if self.spec.adapter is None:
            raise BadInput("save_adapter of an actor without one", "there is nothing to save", "use save_model")
        return save_adapter(self.engine, path, self.context)

    @register(ONE_TO_ALL)
    def check_sync(self) -> float:
        """Mean gap, in nats, between the log-probabilities of engine and trainer on a fixed probe of tokens."""
        return self._probe_gap()

    def _sync(self) -> Metrics:
        if self.generator.weights_version == self.engine.steps:
            return {}
        assert self.spec.generation is not None and self.spec.dtype is not None
        with self.context.recorder.span("weight_sync") as counted:
            counted.bytes = self.generator.update_weights(self.engine.named_weights(), self.engine.steps)
            if not self.spec.generation.check_sync:
                return {}
            gap = self._probe_gap()
        # every rank raises, or none: one that went on would wait for the others. NaN is no number to compare with.
        known = torch.tensor([gap], dtype=torch.float64).nan_to_num(nan=torch.inf)
        worst = self.context.communicator.all_reduce_max(known).item()
        if worst > SYNC_TOLERANCE[self.spec.dtype]:
            self.generator.weights_version = -1  # not in sync: the next call tries again, and samples nothing till then
            raise SyncError(
                f"after the sync to weights version {self.engine.steps} engine and trainer differ by {worst:.3g} nats",
                f"at most {SYNC_TOLERANCE[self.spec.dtype]} is rounding in {self.spec.dtype}",
                "some weight did not arrive; Generation(check_sync=False) goes on all the same",
            )
        return {"sync_gap/mean": Mean(total=gap, count=1)}

    @register(ONE_TO_ALL)
    def compare_weights(self) -> EngineWeights:
        """The weights of the generation engine against the trainer's, after a sync if one is due."""
        self._sync()
        return compare_weights(self.engine, self.generator, self.context.device)

    def _probe_gap(self) -> float:
        ids = probe_ids(self.engine)
        trained = trainer_log_probs(self.engine, ids, self.context.device)
        return float((trained - self.generator.log_probs(ids.tolist()).cpu()).abs().mean())
