"""Generation with transformers alone: with the trainer's own module, or with a copy.

`model.generate` decodes a batch from its beginning to the end of its longest row. Here a row leaves when it has ended,
and other rows take its place, as in vLLM. Tokens are drawn from the distribution that `Sampling` describes, each row
from its own random stream. transformers' own repetition penalty also counts the padding to the left of a prompt, so
that a response would depend on the other rows of its batch; it has no penalties for presence and frequency.

Shapes: B rows, T positions, V vocabulary, K tokens a block, N blocks; keys and values are [B, heads, T, width].
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workbench.engines.generation.base import (
    Decoding,
    Endings,
    GenerationEngine,
    Response,
    check_model,
    end_token_ids,
)
from workbench.engines.host_memory import HostMemory
from workbench.errors import SyncError
from workbench.models.lora import adapter_names
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


BLOCK = 256  # about sqrt(V): a row then draws N + K random numbers per token instead of V
SMALLEST = 1e-300  # keeps noise of exactly 0 from dividing 0 by 0


class Distribution:
    """Turns a model's logits into the logits from which a token is drawn. end_ids: tokens that end a response."""

    def __init__(self, sampling: Sampling, end_ids: Collection[int]) -> None:
        self._sampling, self._end_ids, self._bias = sampling, sorted(end_ids), sampling.logit_bias or {}
        self._penalizes = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (
            1, 0, 0,
        )  # fmt: skip
        warpers: list[LogitsProcessor] = []
        if sampling.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.temperature and sampling.min_p:
            warpers.append(MinPLogitsWarper(float(sampling.min_p)))
        if sampling.temperature and sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature and sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        self._warpers: list[Any] = warpers

    def of(self, logits_BV: Tensor, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Tensor:
        """Return fp32 logits [B, V]. prompts, responses: each row's token ids so far."""
        scores_BV = logits_BV.to(torch.float32, copy=True)
        for token, bias in self._bias.items():
            scores_BV[:, token] += bias
        early = [row for row, ids in enumerate(responses) if len(ids) < self._sampling.min_new_tokens]
        if early and self._end_ids:
            scores_BV[torch.tensor(early)[:, None], torch.tensor(self._end_ids)] = -torch.inf
        if self._penalizes:
            scores_BV = self._penalized(scores_BV, prompts, responses)
        for warper in self._warpers:
            scores_BV = warper(None, scores_BV)
        return scores_BV

    def _penalized(
        self, scores_BV: Tensor, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> Tensor:
        """Apply repetition, frequency and presence penalties, see `Sampling`."""
        prompt_BV, counts_BV = (_counted(rows, scores_BV) for rows in (prompts, responses))
        repetition = self._sampling.repetition_penalty
        penalized_BV = torch.where(scores_BV > 0, scores_BV / repetition, scores_BV * repetition)
        out_BV = torch.where((prompt_BV + counts_BV) > 0, penalized_BV, scores_BV)
        out_BV = out_BV - self._sampling.frequency_penalty * counts_BV
        return out_BV - self._sampling.presence_penalty * (counts_BV > 0)


def _counted(rows: Iterable[Sequence[int]], like_BV: Tensor) -> Tensor:
    """Count how often each token is in each row, [B, V]."""
    places = [(row, token) for row, ids in enumerate(rows) for token in ids]
    at = torch.tensor(places, dtype=torch.long, device=like_BV.device).reshape(-1, 2).unbind(1)
    return torch.zeros_like(like_BV).index_put_(at, like_BV.new_ones(()), accumulate=True)


def exponential_noise(seeds: Sequence[int], steps: Sequence[int], count: int) -> Tensor:
    """Return Exp(1) numbers, fp64 [B, count]; row b depends on (seeds[b], steps[b]) alone, by a counter-based
    generator."""
    rows = [
        np.random.Generator(np.random.Philox(key=(step << 64) | (int(seed) % 2**64))).standard_exponential(count)
        for seed, step in zip(seeds, steps, strict=True)
    ]
    return torch.from_numpy(np.stack(rows)).clamp_min_(SMALLEST)


def draw(probs_BV: Tensor, seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Draw one token per row from the distributions `probs_BV`, exactly: token ids [B]. steps: tokens drawn by each.

    The index of the largest p_i / e_i with e_i ~ Exp(1) has distribution p (the exponential race, also known as the
    Gumbel-max trick). It is run twice, over the blocks of a row by their mass and then inside the winning block. Unlike
    in an inverse of the cumulative distribution, a rounding error of the probabilities changes a choice only with about
    that error's probability, so that a row draws alike in any batch.
    """
    B, V = probs_BV.shape
    if V % BLOCK:
        probs_BV = F.pad(probs_BV, (0, BLOCK - V % BLOCK))
    probs_BNK = probs_BV.view(B, -1, BLOCK)
    N = probs_BNK.shape[1]
    noise = exponential_noise(seeds, steps, N + BLOCK).to(probs_BV.device)
    block_B = (probs_BNK.sum(-1) / noise[:, :N]).argmax(-1)
    inside_BK = probs_BNK[torch.arange(B, device=probs_BV.device), block_B]
    return block_B * BLOCK + (inside_BK / noise[:, N:]).argmax(-1)


JOIN = 8  # rows wait until an eighth of the batch is free: each forward pass of prompts delays all other rows


@dataclass
class _Row:
    response: Response
    prompt_ids: Sequence[int]
    seed: int
    room: int
    ends: Endings

    @property
    def read(self) -> list[int]:
        """The tokens that the model reads before it draws the next one."""
        return [*self.prompt_ids, *self.response.ids]


class TransformersDecoding(Decoding):
    """See the base class. autocast: makes the context in which the model computes."""

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        ends: Endings,
        settings: Generation,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(settings, int(model.config.get_text_config().vocab_size), ends)
        self._model, self._autocast = model, autocast
        self._most = settings.rows_at_once(on_gpu=model.device.type == "cuda")
        self._distribution = Distribution(sampling, ends.token_ids)
        self._greedy, self._keeps_sets = sampling.temperature == 0, sampling.keeps_mask
        takes = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._waiting: list[tuple[int, int, _Row]] = []  # a heap: shortest prompts first, of equal ones the first added
        self._added = 0
        self._rows: list[_Row] = []  # of the batch
        self._cache: Any = DynamicCache()  # of all their tokens but the newest, to the right of padding
        self._mask_BT = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # 0 on padding

    @property
    def open(self) -> int:  # type: ignore[override]
        return len(self._rows) + len(self._waiting)

    def _add(self, response: Response, prompt_ids: Sequence[int], seed: int, room: int, ends: Endings) -> None:
        new = _Row(response, prompt_ids, seed, len(response.ids) + room, ends)
        heapq.heappush(self._waiting, (len(new.read), self._added, new))
        self._added += 1

    @torch.no_grad()
    def step(self) -> list[Response]:
        logits = [self._next()] if self._rows else []
        free = self._most - len(self._rows)
        if self._waiting and free >= min(len(self._waiting), max(1, self._most // JOIN)):
            count = min(free, len(self._waiting))  # they are padded to the longest joining row
            logits.append(self._join([heapq.heappop(self._waiting)[2] for _ in range(count)]))
        if logits:
            self._draw(torch.cat(logits))
        return self._leave()

    def _next(self) -> Tensor:
        """Return the logits after the newest token of each row, [B, V]."""
        newest = torch.tensor([[row.response.ids[-1]] for row in self._rows], device=self._mask_BT.device)
        self._mask_BT = F.pad(self._mask_BT, (0, 1), value=1)
        return self._forward(newest, self._mask_BT, self._cache)

    def _join(self, rows: list[_Row]) -> Tensor:
        """Take rows into the batch; return the logits after their prompts, [B, V]."""
        read, device = [row.read for row in rows], self._mask_BT.device
        width = max(len(one) for one in read)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, one in enumerate(read):
            ids[i, width - len(one) :] = torch.tensor(one)
            mask[i, width - len(one) :] = 1
        mask = mask.to(device)
        cache: Any = DynamicCache()
        logits = self._forward(ids.to(device), mask, cache)
        if not self._rows:
            self._mask_BT, self._cache = mask, cache
        else:
            self._mask_BT = _stacked(self._mask_BT, mask, last=1)
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.keys, mine.values = (
                    _stacked(a, b, last=2) for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values))
                )
        self._rows += rows
        return logits

    def _forward(self, ids_BT: Tensor, mask_BT: Tensor, cache: Any) -> Tensor:
        position_ids = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        with self._autocast():
            out = self._model(
                input_ids=ids_BT, attention_mask=mask_BT, position_ids=position_ids, past_key_values=cache,
                use_cache=True, **self._options,
            )  # fmt: skip
        return out.logits[:, -1]

    def _draw(self, logits_BV: Tensor) -> None:
        """Draw the next token of each row, with its log-probability."""
        rows, responses = self._rows, [row.response for row in self._rows]
        made = [response.ids for response in responses]
        scores_BV = self._distribution.of(logits_BV, [row.prompt_ids for row in rows], made)
        probs_BV = scores_BV.softmax(dim=-1)
        if self._greedy:
            tokens_B = probs_BV.argmax(-1)
        else:
            tokens_B = draw(probs_BV, [row.seed for row in rows], [len(ids) for ids in made])
        log_probs_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].log()
        for response, token, log_prob in zip(responses, tokens_B.tolist(), log_probs_B.tolist(), strict=True):
            response.ids.append(token)
            response.log_probs.append(log_prob)
        if self._keeps_sets:  # an empty set means all tokens
            kept = torch.isfinite(scores_BV).cpu()
            kept &= ~kept.all(-1, keepdim=True)
            for response, ids in zip(responses, kept.nonzero()[:, 1].split(kept.sum(-1).tolist()), strict=True):
                response.sets.append(ids.tolist())
        self.tokens += len(rows)

    def _leave(self) -> list[Response]:
        """Remove the rows that have ended from the batch, and the padding that only they required."""
        ended, stay = list[Response](), list[int]()
        for i, row in enumerate(self._rows):
            ids = row.response.ids
            ending = row.ends.of(ids[-row.ends.tail :], len(ids))
            if ending is None and len(ids) < row.room:
                stay.append(i)
            else:
                ended.append(replace(row.response, ending=ending or "length"))
        if ended and not stay:
            self._rows, self._cache = [], DynamicCache()
        elif ended:
            keep = torch.tensor(stay, device=self._mask_BT.device)
            self._rows = [self._rows[i] for i in stay]
            self._mask_BT = self._mask_BT[keep]
            padding = int(self._mask_BT.argmax(1).min())
            self._mask_BT = self._mask_BT[:, padding:]
            for layer in self._cache.layers:
                layer.keys, layer.values = (old[keep][:, :, padding:] for old in (layer.keys, layer.values))
        return ended


def _stacked(a: Tensor, b: Tensor, *, last: int) -> Tensor:
    """Join two batches; the one with fewer positions is padded at its beginning. last: axes from positions on."""
    width = max(a.shape[-last], b.shape[-last])
    return torch.cat([F.pad(x, (*(0, 0) * (last - 1), width - x.shape[-last], 0)) for x in (a, b)])


WEIGHTS = "generation weights"


class TransformersEngine(GenerationEngine):
    """Decodes up to `settings.rows_at_once()` rows at a time, see `TransformersDecoding`.

    model: in evaluation mode. With `owns_model=False` it is the trainer's live module, which has every new weight
    already: `update_weights` moves nothing, and the trainer's parameters must be on the device. With `owns_model=True`
    it is a copy, and weights are copied in; with `takes_adapter=True` only those of its adapter, while the model stays
    unchanged. autocast_dtype: compute in this dtype under autocast, for a module with fp32 parameters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Generation,
        *,
        owns_model: bool,
        takes_adapter: bool = False,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        check_model(model.config, settings)
        self._model: Any = model
        self._tokenizer, self._settings = tokenizer, settings
        self._owns_model, self.takes_adapter, self._autocast_dtype = owns_model, takes_adapter, autocast_dtype
        self._end_ids = end_token_ids(model.generation_config, tokenizer)
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.weights_version = 0
        self._memory = HostMemory()

    @contextmanager
    def _decoding(self, sampling: Sampling, ends: Endings, keep_cache: bool) -> Iterator[Decoding]:
        # Layers that recompute activations are in training mode, in which they drop the key-value cache.
        recomputing = [module for module in self._model.modules() if module.training]
        for module in recomputing:
            module.training = False
        try:
            yield TransformersDecoding(self._model, sampling, ends, self._settings, self._autocast)
        finally:
            for module in recomputing:
                module.training = True

    @torch.no_grad()
    def _log_probs(self, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        with self._autocast():
            logits = self._model(ids, use_cache=False).logits[0, :-1]
        return logits.float().log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0].cpu()

    @torch.no_grad()
    def update_weights(
        self, named_weights: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False
    ) -> int:
        """See the base class. Raises `SyncError` if weights of the model do not come."""
        taken = 0
        self.weights_version = -1  # until every weight has arrived
        if self._owns_model:
            self._memory.load([WEIGHTS])
            # One entry per tensor: tied weights have several names, and need only one of them.
            mine = dict(self.readable_weights())
            missing = {id(parameter): name for name, parameter in mine.items()}
            for name, weight in named_weights:
                mine[name].copy_(weight)
                missing.pop(id(mine[name]), None)
                taken += mine[name].nbytes
            if missing and not partial:
                raise SyncError(
                    f"{len(missing)} weights did not arrive, {next(iter(missing.values()))!r} among them",
                    "a sync must send every weight of the model",
                    "pass all of the trainer's named_weights()",
                )
        self.weights_version = version
        return taken

    def readable_weights(self) -> Mapping[str, Tensor]:
        if self.takes_adapter:
            module = nn.ModuleDict({"model": self._model})
            return {name: module.get_parameter(own) for own, name in adapter_names(module).items()}
        return dict(self._model.named_parameters(remove_duplicate=False))

    def live_weights(self) -> dict[str, Tensor]:
        alone = self._owns_model and not self.takes_adapter and not self.lacks_weights
        return dict(self._model.named_parameters(remove_duplicate=False)) if alone else {}

    def memory_bytes(self) -> dict[str, int]:
        """Return bytes. The key-value cache exists only during decoding; a live module's weights are the trainer's."""
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
        # keep the model beside an adapter: no sync brings it again
        return self._memory.offload({WEIGHTS: list(self._model.parameters())}, [WEIGHTS], keep=self.takes_adapter)

    def close(self) -> None:
        self._model = None

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._model.device.type, dtype=self._autocast_dtype)
