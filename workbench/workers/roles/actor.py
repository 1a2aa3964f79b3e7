"""The actor: the policy that is trained on its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.batches.schema import COUNTING
from workbench.engines.training import Pass
from workbench.errors import BadInput
from workbench.messages.calls import Output
from workbench.messages.metrics import Max, Mean, Metrics
from workbench.messages.operation import register, row_stage, update_stage
from workbench.messages.protocols import ONE_TO_ALL
from workbench.messages.shards import Shard
from workbench.models.loading import load_causal_lm
from workbench.models.lora import add_lora, without_adapter, write_adapter
from workbench.models.spec import Model
from workbench.objectives.aggregation import Aggregation
from workbench.objectives.correction import Correction
from workbench.objectives.kl import KLLoss
from workbench.objectives.losses import CovarianceLoss, KLCov, PolicyLoss, policy_loss
from workbench.support.calls.pickling import name_of
from workbench.support.validation import FINITE, NonNegativeFloat, Number, PositiveFloat, PositiveInt, ZeroToOne
from workbench.workers.micro_batches import MicroBatch, Scatter, each_minibatch
from workbench.workers.model_worker import check_update
from workbench.workers.passes import (
    LOG_PROB_TEMPERATURE,
    Term,
    chosen,
    mean_of,
    old_log_prob_temperature,
    sampling_temperature,
)
from workbench.workers.policy_tokens import (
    HELD_BACK,
    PolicyTokens,
    covariance_function,
    held_back_tokens,
    rollout_weights,
)
from workbench.workers.roles.distillation import DistilledWorker
from workbench.workers.roles.hybrid import HybridWorker
from workbench.workers.roles.preferences import PreferenceWorker
from workbench.workers.roles.reference import ReferencePolicy
from workbench.workers.roles.supervised import SupervisedWorker
from workbench.workers.sampling_mask import MASK_COLUMNS, OVER_MASK, SamplingMask, check_correctable, check_same_tokens
from workbench.workers.user_loss import (
    OF_MODEL,
    ParameterNames,
    TokenFunction,
    UserFunction,
    check_asked,
    check_function,
    notes_on_state,
    own_state,
    stand_ins,
)
from workbench.workers.worker import Context

GRADIENTS = ("log_prob", "entropy")  # per-token numbers, with a gradient, that a loss may ask for
WITH_GRADIENT = (*GRADIENTS, *OF_MODEL)
GIVEN = (*WITH_GRADIENT, "mask")  # names that a loss may ask for beside columns
# the update's own metrics, see `checked_loss`; on_policy=True, a correction and further terms report some of them
OWN_METRICS = (
    "entropy", "approximate_kl", "kl_loss", "pretrain_loss", "sft_loss", "ratio/", "rollout_ratio/", "rollout_gap/",
    "old_log_prob/", "correction/",
)  # fmt: skip
A_LOSS = "def loss(log_prob, old_log_prob, advantages, mask), which returns the loss of each token [rows, tokens]"


def token_function(
    loss: PolicyLoss | CovarianceLoss | UserFunction,
    clip: float | None,
    clip_high: float | None,
    dual_clip: float | None,
) -> UserFunction:
    """Return a named loss as a function of the form that users write; a user's function is returned unchanged."""
    if callable(loss):
        return loss
    if isinstance(loss, CovarianceLoss):
        return covariance_function(loss, clip, clip_high)

    def named(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        loss_BR, stats = policy_loss(loss, log_prob, old_log_prob, advantages, mask, clip, clip_high, dual_clip)
        return loss_BR, {"ratio": stats.ratio_BT, "clip_fraction": stats.clipped_BT.float()}

    return named


def _asked(arguments: Mapping[str, Any]) -> ParameterNames:
    return ParameterNames.of(token_function(*(arguments[name] for name in ("loss", "clip", "clip_high", "dual_clip"))))


def _update_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    columns = ["prompt_ids", "response_ids", "response_mask"]
    columns += [name for name in _asked(arguments).needed if name not in (*GIVEN, HELD_BACK)]
    columns += ["old_log_prob", "ref_log_prob"] if arguments["kl_coefficient"] else []
    columns += ["pretrain_ids"] if arguments["pretrain_coefficient"] else []
    columns += ["demonstrated"] if arguments["sft_coefficient"] else []
    columns += ["old_log_prob", "rollout_log_prob"] if arguments["correction"] is not None else []
    return tuple(name for name in dict.fromkeys(columns) if name != "old_log_prob" or not arguments["on_policy"])


def _optional_columns(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that a loss asks for with a default, and those from which metrics are computed."""
    columns = [name for name in _asked(arguments).optional if name not in GIVEN]
    columns += ["rollout_log_prob", *MASK_COLUMNS, *COUNTING, *([] if arguments["on_policy"] else ["old_log_prob"])]
    return tuple(dict.fromkeys(columns))


def _check_update(arguments: Mapping[str, Any]) -> None:
    check_update(arguments)
    if callable(loss := arguments["loss"]):
        clips = {name: arguments[name] for name in ("clip", "clip_high", "dual_clip")}
        check_function("loss", loss, A_LOSS, one_of=WITH_GRADIENT, **clips)
    given = {name: arguments[name] for name in ("clip", "clip_high") if arguments[name] is not None}
    if given and (loss == "sapo" or isinstance(loss, KLCov)):
        why = "SAPO has no clip: its gate is smooth" if loss == "sapo" else "KL-Cov has no clip"
        raise BadInput(f"{given} with loss={loss!r}", why, "leave it out")
    if arguments["dual_clip"] is not None and arguments["loss"] != "ppo":
        raise BadInput(f"dual_clip with loss={arguments['loss']!r}", "only 'ppo' has a dual clip", "leave it out")
    correction, covariance = arguments["correction"], isinstance(loss, CovarianceLoss)
    if arguments["on_policy"] and (correction is not None or arguments["epochs"] > 1 or covariance):
        which = "a correction" if correction is not None else f"epochs={arguments['epochs']}"
        which = f"loss={loss!r}" if covariance else which
        raise BadInput(f"on_policy=True with {which}", *_NEEDS_OLD)


_NEEDS_OLD = (
    "that needs the log-probabilities from before the update",
    "call compute_log_prob first, and leave out on_policy; an algorithm does so with its field: algo.epochs = 2",
)


def _check_model(arguments: Mapping[str, Any], model: Model) -> None:
    minibatches = 1 if model.training is None else model.training.minibatches
    if arguments["on_policy"] and minibatches > 1:
        raise BadInput(f"on_policy=True with Training(minibatches={minibatches})", *_NEEDS_OLD)


def _rows_without_advantage(advantages: Ragged, mask: Ragged) -> frozenset[int]:
    """Return the rows whose valid tokens all have advantage 0, such as the rows of a group with equal rewards."""
    valid = mask.pad().bool()
    return frozenset(torch.where(valid, advantages.pad(), 0.0).eq(0).all(-1).nonzero()[:, 0].tolist())


class ActorWorker(HybridWorker, SupervisedWorker, PreferenceWorker, DistilledWorker, ReferencePolicy):
    """A causal language model with an optimizer and, in the same process, a generation engine. If the placement has a
    pool for the role `rollout`, that pool's workers have the engine instead.

    With an adapter only the adapter is trained, and `compute_ref_log_prob` uses the model without it. An engine with
    weights of its own receives the adapter and holds it beside the model, which it reads from the files.
    """

    def __init__(self, spec: Model, context: Context) -> None:
        assert spec.name is not None
        device, longest = context.loading_device(spec.training), context.max_model_tokens
        model = load_causal_lm(spec.name, dtype=torch.float32, device=device, longest=longest)
        if spec.adapter is not None:
            add_lora(model, spec.adapter, spec.seed)
        super().__init__(spec, context, model)

    def as_reference(self) -> AbstractContextManager[None]:
        if self.spec.adapter is None:
            raise BadInput(
                "an actor without an adapter as the reference",
                "without an adapter, the initial policy is not kept",
                "declare a reference in models=, or wb.Model(..., adapter=wb.LoRA()) as the actor",
            )
        return without_adapter(self.engine.module.model)  # type: ignore[arg-type]

    @row_stage(
        reads=("prompt_ids", "response_ids"),
        optional=("rollout_log_prob", "response_mask", "demonstrated", *MASK_COLUMNS, *COUNTING),
        writes=("old_log_prob",),
    )
    def compute_log_prob(self, batch: Shard, *, temperature: PositiveFloat | None = None) -> Output:
        """Column `old_log_prob` [rows, response tokens]: the trainer's log softmax(logits / temperature). For rollouts
        with a sampling mask (`keep_mask`), it and the entropy are over the tokens that could be drawn.

        temperature: None uses the temperature with which the responses were sampled. The batch's meta keeps it as
        `log_prob_temperature`, and `update_actor` computes its ratios at it. For a KL at another temperature than the
        rollout's, `compute_ref_log_prob` needs its own `temperature=`.
        Metrics `rollout_gap/...`: |old_log_prob - rollout_log_prob|. `old_log_prob` is of the model alone,
        `rollout_log_prob` of the sampled distribution: after top-p without its mask, penalties and the like (see
        `Sampling`), their effect is part of the gap. Metrics are over the rows that are `valid`.
        """
        scale, mask = sampling_temperature(batch, temperature), SamplingMask.of(batch, self.spec, self.context)
        log_probs, entropies = Scatter(batch.ragged("response_ids")), Scatter(batch.ragged("response_ids"))
        for micro, (log_probs_N, entropies_N) in self.passes(batch, lambda micro: micro.scored(scale, True, mask)):
            log_probs.put(micro, log_probs_N)
            entropies.put(micro, entropies_N)
        column = log_probs.column()
        metrics: Metrics = {"old_log_prob/mean": mean_of(column, batch), "entropy": mean_of(entropies.column(), batch)}
        if "rollout_log_prob" in batch.columns:
            sampled = batch
            if "demonstrated" in batch.columns:  # demonstrated rows were not sampled
                valid = batch.valid & ~batch.numbers("demonstrated").bool()
                sampled = replace(batch, columns={**batch.columns, "valid": valid})
            gap = chosen(column.like((column.values - batch.ragged("rollout_log_prob").values).abs()), sampled)
            metrics["rollout_gap/mean"] = Mean(total=float(gap.sum()), count=len(gap))
            metrics["rollout_gap/max"] = Max(value=float(gap.max()) if len(gap) else 0.0)
        meta: dict[str, Any] = {LOG_PROB_TEMPERATURE: scale}
        if mask is not None or OVER_MASK in batch.meta:
            meta[OVER_MASK] = mask is not None
        return Output(columns={"old_log_prob": column}, metrics=metrics, meta=meta)

    @row_stage(
        reads=("prompt_ids", "response_ids", "response_mask"),
        optional=(*MASK_COLUMNS, *COUNTING),
        writes=("gradient_norm",),
    )
    def compute_gradient_norm(self, batch: Shard, *, temperature: PositiveFloat | None = None) -> Output:
        """Column `gradient_norm` [rows]: |grad log pi(response | prompt)|, the norm over all trained weights of the
        gradient of the response's log-probability, the sum over the tokens of `response_mask`.

        `compute_advantages(estimator="off_policy_baseline")` takes it (VCPO). No step is taken. Each response costs a
        forward and a backward pass of its own. With Training(engine="deepspeed") replicas take turns, so that n
        replicas take n times as long. Rows that are not `valid` get 0 and cost nothing.
        temperature: None uses the temperature of `old_log_prob`, or without one the rollout's. If the batch has a
        sampling mask, probabilities are over its tokens. Metric `gradient_norm/mean`.
        """
        scale, mask = old_log_prob_temperature(batch, temperature), SamplingMask.of(batch, self.spec, self.context)
        context, valid_mask, norms = self.context, batch.valid_mask, torch.zeros(len(batch))

        def log_prob(micro: MicroBatch, output: tuple[Tensor, ...]) -> Tensor:
            return torch.where(micro.mask_BR(valid_mask) > 0, micro.to_BR(output[0]), 0.0).sum()

        # a budget of one token puts each row into a micro-batch of its own
        minibatches = each_minibatch(batch, 1, context.groups.data, context.device, skip=batch.invalid_rows)
        micros, done_tokens = list(chain(*minibatches)), 0
        for done, micro in enumerate(micros):
            context.advance(done, len(micros), done_tokens)
            inputs, loss = micro.scored(scale, sets=mask), partial(log_prob, micro)
            one = Pass(inputs=inputs, loss=loss, tokens=micro.tokens * context.groups.is_leader)
            (norm,) = self.engine.gradient_norms([one])
            if micro.weight:
                norms[micro.index] = norm
            done_tokens += micro.tokens
        valid = batch.valid
        mean = Mean(total=float(norms[valid].double().sum()), count=int(valid.sum()))
        return Output(columns={"gradient_norm": norms}, metrics={"gradient_norm/mean": mean})

    @update_stage(
        reads=_update_columns,
        optional=_optional_columns,
        check=_check_update,
        check_model=_check_model,
        check_columns=partial(check_asked, "loss", GIVEN),
    )
    def update_actor(
        self,
        batch: Shard,
        *,
        loss: PolicyLoss | CovarianceLoss | Callable[..., Any] = "ppo",
        clip: ZeroToOne | None = None,
        clip_high: Annotated[Number, Field(ge=0)] | None = None,
        dual_clip: Annotated[Number, Field(ge=1)] | None = None,
        epochs: PositiveInt = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: PositiveInt | None = None,
        entropy_coefficient: Annotated[Number, FINITE] = 0.0,
        kl_coefficient: NonNegativeFloat = 0.0,
        kl: KLLoss = "k3",
        correction: Correction | None = None,
        pretrain_coefficient: NonNegativeFloat = 0.0,
        sft_coefficient: NonNegativeFloat = 0.0,
        temperature: PositiveFloat | None = None,
        on_policy: bool = False,
    ) -> Output:
        """Update the policy with one optimizer step per minibatch and epoch.

        loss: "ppo" (clipped ratio of each token), "gspo" (of each sequence), "cispo" (clipped importance weight),
        "sapo" (a smooth gate in place of the clip), `KLCov()` or `ClipCov()` (which hold back tokens, chosen by
        `old_log_prob`), or a function. A function returns the loss of each token [rows, tokens], or (loss, metrics),
        with metrics [rows, tokens] or [rows]. It is called for each micro-batch, with the arguments that its parameters
        name: `log_prob` and `entropy` (with gradient), `mask` (bool), `hidden_states` [rows, tokens, hidden] that
        predict the tokens, `logits`, whose `map` calls a function with the logits of a few tokens at a time
        (`workbench.workers.user_loss.Logits`), and columns of the batch: per token [rows, tokens], 0 outside the mask,
        or [rows]. A parameter with a default keeps it if the batch has no such column. With a function no row is
        skipped. `lab.check(loss=, batch=)` looks for mistakes in it before a step.
        clip, clip_high: the ratio against `old_log_prob` is clipped to [1 - clip, 1 + clip_high]; clip alone holds for
        both sides; without either: 0.2 for "ppo", 3e-4 and 4e-4 for "gspo", 1 and 2 for "cispo".
        epochs: passes over the same minibatches. dual_clip: bound of PPO's objective for negative advantages.
        aggregation: how token losses become one number: "token-mean", "sequence-mean-token-mean",
            "sequence-mean-token-sum", or "fixed-length", the sum divided by rows times max_response_tokens; see
            `workbench.objectives.aggregation`. max_response_tokens: only for "fixed-length".
        entropy_coefficient: entropy bonus. kl_coefficient, kl: penalty against `ref_log_prob` in the loss, and its
        form: see `workbench.objectives.kl.kl_loss`.
        correction: weights the policy loss (not bonus and penalty) by `old_log_prob` against `rollout_log_prob`, for
        engines that sample from another distribution than the trainer's, or from older weights. Rollouts with top_p,
        top_k or min_p need their sampling mask for it (`keep_mask`); log-probabilities and entropies are then over the
        tokens that could be drawn.
        pretrain_coefficient: weight of the language-model loss on the minibatch's `pretrain_ids`, see `compute_loss`:
        its gradient is part of the same optimizer step. sft_coefficient: rows that are `demonstrated` have the loss of
        `update_sft` with this weight, over their own tokens, and no part in the policy loss (HPT).
        temperature: None uses the temperature of `old_log_prob`, which is the rollout's unless `compute_log_prob` was
        given another.
        on_policy: one optimizer step, whose own forward pass computes what `compute_log_prob` would: `old_log_prob` is
        not read, the ratio is 1, and a forward pass is saved. The gradient is the same, to the last bit if no row is
        skipped. The update then reports the metrics of `compute_log_prob` (`entropy`, `old_log_prob/mean`,
        `rollout_gap/...`) for the rows that are not skipped.

        Without bonus and penalty a row whose advantages are all 0 has no gradient: it counts in the denominators, but
        no pass is spent on it (metric `skipped_rows/fraction`). Metrics of ratios and clips are over the other rows. A
        minibatch of such rows alone is still a step, in which AdamW moves by its momentum. `skipped/fraction` is
        another metric: optimizer steps that were not taken because the gradient norm was not finite.

        A row that is not `valid` counts neither in the loss nor in a denominator.
        """
        terms: list[Term] = []
        if pretrain_coefficient:
            terms.append(self.pretraining_term(batch, pretrain_coefficient))
        if sft_coefficient:
            batch, term = self.demonstrated_rows(batch, sft_coefficient)
            terms.append(term)
        scale = old_log_prob_temperature(batch, temperature)
        sampling_mask = SamplingMask.of(batch, self.spec, self.context)
        if "old_log_prob" in batch.columns and not on_policy:
            check_same_tokens(batch, sampling_mask)
        function = TokenFunction(
            function=token_function(loss, clip, clip_high, dual_clip),
            columns=batch.columns,
            mask=batch.valid_mask,
            own=OWN_METRICS,
            around_call=self.context.groups.data.all_or_none if callable(loss) else nullcontext,
        )
        before = own_state(loss)
        if callable(loss):
            if "rollout_log_prob" in function.asked and sampling_mask is None:
                check_correctable(f"loss={name_of(loss)}, which takes 'rollout_log_prob',", batch)
            model = partial(stand_ins, module=self.engine.module)
            with self.context.communicator.all_or_none():
                function.rehearse(GRADIENTS, of_model=model)
        held_back = None
        if isinstance(loss, CovarianceLoss):
            held_back = held_back_tokens(batch, loss, self.context.groups.data)
        weights: Ragged | None = None
        weight_metrics: Metrics = {}
        rate_scales: tuple[float, ...] = ()
        if correction is not None:
            weights, weight_metrics, rate_scales = rollout_weights(batch, correction, self.context)
        of_tokens = PolicyTokens(
            batch=batch,
            function=function,
            temperature=scale,
            sets=sampling_mask,
            on_policy=on_policy,
            entropy_coefficient=entropy_coefficient,
            kl_coefficient=kl_coefficient,
            kl=kl,
            weights=weights,
            held_back=held_back,
        )
        # bonus and penalty have a gradient in every row, other built-in losses only in rows with an advantage; a user's
        # function may have a gradient in any row
        every_row = bool(entropy_coefficient or kl_coefficient or callable(loss) or isinstance(loss, KLCov))
        skip = () if every_row else _rows_without_advantage(batch.ragged("advantages"), batch.valid_mask)
        main = Term(
            shard=batch,
            inputs=of_tokens.inputs,
            loss=of_tokens,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
            skip=skip,
        )
        output = self.steps(main, *terms, epochs=epochs, rate_scales=rate_scales)
        invalid = batch.invalid_rows
        skipped = {"skipped_rows/fraction": Mean(total=len({*skip} - invalid), count=len(batch) - len(invalid))}
        norm, notes = output.metrics.get("grad_norm"), (*output.notes, *notes_on_state("loss", loss, before))
        if weights is not None and len(invalid | {*skip}) < len(batch) and isinstance(norm, Mean) and norm.value == 0:
            what = f"the gradient of each step was 0: maybe {correction} gives each token with an advantage weight 0"
            notes = (*notes, f"{what}. Only momentum and weight decay change weights")
        return replace(output, metrics={**output.metrics, **skipped, **weight_metrics}, notes=notes)

    @register(ONE_TO_ALL)
    def save_adapter(self, path: str | Path) -> str:
        """Write the adapter alone in peft's format: `peft.PeftModel.from_pretrained(model, path)` loads it. Each rank
        returns the absolute path. path: as in `save_model`, which writes model and adapter as one model."""
        if self.spec.adapter is None:
            raise BadInput("save_adapter of an actor without one", "there is nothing to save", "use save_model")
        model: Any = self.engine.module.model
        return self.write_together(path, self.engine.named_adapter(), lambda to, held: write_adapter(to, held, model))
