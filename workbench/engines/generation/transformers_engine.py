"""Generation with transformers alone: `model.generate` over the trainer's own module, or over a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    SequenceBiasLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workbench.engines.generation.base import GenerationEngine, Progress, Rollout
from workbench.engines.generation.endings import Ending, Endings, check_model_length, end_token_ids
from workbench.engines.generation.penalties import Penalties
from workbench.engines.generation.row_sampler import RowSampler
from workbench.engines.host_memory import HostMemory
from workbench.errors import SyncError
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "generation weights"


class TransformersEngine(GenerationEngine):
    """Decodes up to `settings.rows_at_once()` rows at a time with a dynamic key-value cache.

    model: in evaluation mode. With `owns_model=False` it is the trainer's live module, which has every new weight
    already: `update_weights` moves nothing, and the trainer's parameters must be on the device. With `owns_model=True`
    it is a copy, and weights are copied in. autocast_dtype: compute in this type under autocast, for a module whose
    parameters are fp32.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Generation,
        *,
        owns_model: bool,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        check_model_length(model.config, settings)
        self._model: Any = model
        self._tokenizer, self._settings = tokenizer, settings
        self._owns_model, self._autocast_dtype = owns_model, autocast_dtype
        self._end_ids = end_token_ids(model.generation_config, tokenizer)
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.weights_version = 0
        self._memory = HostMemory()

    @torch.no_grad()
    def _generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None,
        room: Sequence[int],
        ends: Endings,
        *,
        continued: bool,
    ) -> Rollout:
        by_length = sorted(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        responses: dict[int, tuple[list[int], list[float], Ending]] = {}
        together = self._settings.rows_at_once(on_gpu=self._model.device.type == "cuda")
        for start in range(0, len(by_length), together):
            rows = by_length[start : start + together]
            watch = _RowEnds(
                prompt_length=len(prompt_ids[rows[-1]]),
                room=[room[row] for row in rows],
                ends=ends,
                progress=progress,
                rows_before=start,
                tokens_before=sum(len(ids) for ids, _, _ in responses.values()),
                rows_in_all=len(prompt_ids),
            )
            made = self._decode([prompt_ids[row] for row in rows], sampling, [seeds[row] for row in rows], watch)
            responses.update(zip(rows, made, strict=True))
        in_order = [responses[row] for row in range(len(prompt_ids))]
        return Rollout(
            response_ids=[ids for ids, _, _ in in_order],
            log_probs=[log_probs for _, log_probs, _ in in_order],
            endings=[ending for _, _, ending in in_order],
        )

    def _decode(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], watch: _RowEnds
    ) -> list[tuple[list[int], list[float], Ending]]:
        """Response, log-probabilities and what ended it, for each row of one batch."""
        width = watch.prompt_length
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, ids in enumerate(prompts):
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        sampler = RowSampler(seeds, sampling.temperature)
        device = self._model.device
        # The checkpoint's own generation config (penalties, temperature, EOS) would fill in what is not given here.
        own_config, self._model.generation_config = self._model.generation_config, GenerationConfig()
        # Layers that recompute activations are in training mode, in which they drop the key-value cache.
        recomputing = [module for module in self._model.modules() if module.training]
        for module in recomputing:
            module.training = False
        try:
            with self._autocast():
                sequences = self._model.generate(
                    input_ids.to(device),
                    attention_mask=mask.to(device),
                    generation_config=GenerationConfig(
                        do_sample=False, use_cache=True, max_new_tokens=max(watch.room), pad_token_id=0
                    ),
                    logits_processor=LogitsProcessorList(
                        [*_processors(sampling, mask.to(device), watch.ends.token_ids), sampler]
                    ),
                    stopping_criteria=StoppingCriteriaList([watch]),
                    synced_gpus=False,  # ranks decode different prompts; none waits for another
                )
        finally:
            self._model.generation_config = own_config
            for module in recomputing:
                module.training = True
        tokens = sequences[:, width:].tolist()
        log_probs = torch.stack(sampler.log_probs, dim=1).tolist()
        return [
            (tokens[row][:length], log_probs[row][:length], watch.endings[row])
            for row, length in enumerate(watch.lengths)
        ]

    @torch.no_grad()
    def _log_probs(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        with self._autocast():
            logits = self._model(ids, use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0].cpu()

    @torch.no_grad()
    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """See the base class. Raises `SyncError` when names do not match the model's."""
        taken = 0
        self.weights_version = -1  # until every weight is there
        if self._owns_model:
            self._memory.give_back([WEIGHTS])
            # One entry a tensor: tied weights have several names, and need only one of them.
            mine = dict(self._model.named_parameters(remove_duplicate=False))
            missing = {id(parameter): name for name, parameter in mine.items()}
            for name, weight in named_weights:
                if name not in mine:
                    raise SyncError(
                        f"weight {name!r} is not in the generating model",
                        "trainer and engine hold the same architecture",
                        "build both from the same model folder",
                    )
                mine[name].copy_(weight)
                missing.pop(id(mine[name]), None)
                taken += mine[name].nbytes
            if missing:
                raise SyncError(
                    f"{len(missing)} weights did not arrive, {next(iter(missing.values()))!r} among them",
                    "a sync brings every weight of the model",
                    "pass all of the trainer's named_weights()",
                )
        self.weights_version = version
        return taken

    def readable_weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def memory_bytes(self) -> dict[str, int]:
        """The key-value cache lives only while a batch is decoded; a live module's weights are the trainer's."""
        here = self._owns_model and not self.lacks_weights
        own = sum(parameter.nbytes for parameter in self._model.parameters()) if here else 0
        return {"weights": own, "kv_cache": 0}

    @property
    def lacks_weights(self) -> bool:
        return WEIGHTS in self._memory

    def sleep(self) -> int:
        if not self._owns_model or self.lacks_weights:
            return 0
        self.weights_version = -1
        return self._memory.take({WEIGHTS: list(self._model.parameters())}, [WEIGHTS], keep=False)

    def close(self) -> None:
        self._model = None

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._model.device.type, dtype=self._autocast_dtype)


def _processors(sampling: Sampling, prompt_mask_BT: Tensor, end_ids: frozenset[int]) -> LogitsProcessorList:
    """Processors that turn logits into the distribution of `Sampling`, in vLLM's order."""
    processors, width = LogitsProcessorList(), prompt_mask_BT.shape[1]
    if sampling.logit_bias:
        biases: Any = [[[token], float(bias)] for token, bias in sampling.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if sampling.min_new_tokens and end_ids:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                width, sampling.min_new_tokens, sorted(end_ids), device=str(prompt_mask_BT.device)
            )
        )
    if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0):
        processors.append(Penalties(sampling, prompt_mask_BT))
    if sampling.temperature == 0:
        return processors
    if sampling.temperature != 1:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(float(sampling.min_p)))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


class _RowEnds(StoppingCriteria):
    """Finds where each row ends, stops the batch when all have, and reports progress between steps."""

    def __init__(
        self,
        *,
        prompt_length: int,
        room: Sequence[int],
        ends: Endings,
        progress: Progress | None,
        rows_before: int,
        tokens_before: int,
        rows_in_all: int,
    ) -> None:
        self.prompt_length, self.room = prompt_length, list(room)
        self.lengths = [0] * len(room)
        self.endings: list[Ending] = ["length"] * len(room)
        self._open = [True] * len(room)
        self.ends, self._progress = ends, progress
        self._rows_before, self._tokens_before, self._rows_in_all = rows_before, tokens_before, rows_in_all

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        length = input_ids.shape[1] - self.prompt_length
        for row, newest in enumerate(input_ids[:, -min(length, self.ends.tail) :].tolist()):
            if self._open[row]:
                self.lengths[row] = length
                ending = self.ends.of(newest, length)
                self.endings[row] = ending or "length"
                self._open[row] = ending is None and length < self.room[row]
        if self._progress is not None:
            done = self._rows_before + self._open.count(False)
            self._progress(done, self._rows_in_all, self._tokens_before + sum(self.lengths))
        return cast(torch.BoolTensor, ~torch.tensor(self._open, device=input_ids.device))
