"""Rows decoded by a model of transformers: its forward pass and key-value cache, in a batch that rows join and leave.

`model.generate` decodes a batch from its beginning to the end of its longest row. Here a row leaves when it has ended,
and others take its place, as in vLLM.

Shapes: B rows, T positions, V vocabulary; keys and values are [B, heads, T, width].
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from workbench.engines.generation.base import Decoding, Response
from workbench.engines.generation.distribution import Distribution, draw
from workbench.engines.generation.endings import Endings
from workbench.settings.engines import Generation, Sampling

JOIN = 8  # rows wait until an eighth of the batch is free: each forward pass of prompts holds up all others


@dataclass
class _Row:
    row: int
    prompt_ids: Sequence[int]
    seed: int
    room: int
    ends: Endings
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sets: list[Sequence[int]] = field(default_factory=list)


class TransformersDecoding(Decoding):
    """See the base class. autocast: what the model computes under."""

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
        self._takes_positions = "position_ids" in takes
        self._waiting: list[tuple[int, int, _Row]] = []  # a heap: the shortest prompt first, of equals the first
        self._added = 0
        self._rows: list[_Row] = []  # of the batch
        self._cache: Any = DynamicCache()  # of their tokens but the newest, to the right of padding
        self._mask_BT = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # 0 on padding

    @property
    def open(self) -> int:  # type: ignore[override]
        return len(self._rows) + len(self._waiting)

    def _add(self, row: int, prompt_ids: Sequence[int], seed: int, room: int, ends: Endings) -> None:
        heapq.heappush(self._waiting, (len(prompt_ids), self._added, _Row(row, prompt_ids, seed, room, ends)))
        self._added += 1

    @torch.no_grad()
    def step(self) -> list[Response]:
        logits = [self._next()] if self._rows else []
        free = self._most - len(self._rows)
        if self._waiting and free >= min(len(self._waiting), max(1, self._most // JOIN)):
            count = min(free, len(self._waiting))  # they are padded to the longest of those that join
            logits.append(self._join([heapq.heappop(self._waiting)[2] for _ in range(count)]))
        if logits:
            self._draw(torch.cat(logits))
        return self._leave()

    def _next(self) -> Tensor:
        """The logits after the newest token of each row, [B, V]."""
        newest = torch.tensor([[row.ids[-1]] for row in self._rows], device=self._mask_BT.device)
        self._mask_BT = F.pad(self._mask_BT, (0, 1), value=1)
        return self._forward(newest, self._mask_BT, self._cache)

    def _join(self, rows: list[_Row]) -> Tensor:
        """Take rows into the batch; the logits after their prompts, [B, V]."""
        width, device = max(len(row.prompt_ids) for row in rows), self._mask_BT.device
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[i, width - len(row.prompt_ids) :] = 1
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
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = (mask_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        with self._autocast():
            out = self._model(
                input_ids=ids_BT, attention_mask=mask_BT, past_key_values=cache, use_cache=True, **options
            )
        logits_BV: Tensor = out.logits[:, -1]
        return logits_BV

    def _draw(self, logits_BV: Tensor) -> None:
        """The next token of each row, with its log-probability."""
        rows = self._rows
        scores_BV = self._distribution.of(logits_BV, [row.prompt_ids for row in rows], [row.ids for row in rows])
        probs_BV = scores_BV.softmax(dim=-1)
        if self._greedy:
            tokens_B = probs_BV.argmax(-1)
        else:
            tokens_B = draw(probs_BV, [row.seed for row in rows], [len(row.ids) for row in rows])
        log_probs_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].log()
        for row, token, log_prob in zip(rows, tokens_B.tolist(), log_probs_B.tolist(), strict=True):
            row.ids.append(token)
            row.log_probs.append(log_prob)
        if self._keeps_sets:  # none where all tokens could be drawn
            kept = torch.isfinite(scores_BV).cpu()
            kept &= ~kept.all(-1, keepdim=True)
            for row, ids in zip(rows, kept.nonzero()[:, 1].split(kept.sum(-1).tolist()), strict=True):
                row.sets.append(ids.tolist())
        self.tokens += len(rows)

    def _leave(self) -> list[Response]:
        """Take the rows that have ended out of the batch, and the padding that only they needed the others to have."""
        ended, stay = list[Response](), list[int]()
        for i, row in enumerate(self._rows):
            ending = row.ends.of(row.ids[-row.ends.tail :], len(row.ids))
            if ending is None and len(row.ids) < row.room:
                stay.append(i)
                continue
            ended.append(
                Response(
                    row=row.row, ids=row.ids, log_probs=row.log_probs, ending=ending or "length", sets=row.sets
                )
            )  # fmt: skip
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
    """Two batches as one, that of fewer positions padded at its beginning. last: axes from that of positions on."""
    width = max(a.shape[-last], b.shape[-last])
    return torch.cat([F.pad(x, (*(0, 0) * (last - 1), width - x.shape[-last], 0)) for x in (a, b)])
