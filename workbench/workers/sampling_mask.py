"""The sampling mask of a shard: for each response token the set of tokens that could be drawn in its place.

An engine that samples with top-p, top-k or min-p returns log-probabilities over the remaining tokens. A trainer that
computes its log-probabilities over the same tokens has the same distribution: DeepSeek-V3.2's "Keep Sampling Mask"
(https://arxiv.org/abs/2512.02556, section 3.1). The tokens must come from the engine: a trainer's logits differ by
rounding, and would keep other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.batches.columns import ColumnValues, Ragged, nbytes
from workbench.errors import BadInput
from workbench.messages.metrics import Max, Mean, Metrics
from workbench.messages.shards import Shard
from workbench.models.loading import Limits
from workbench.models.logits import TokenSets
from workbench.models.spec import Model
from workbench.settings.engines import check_untruncated
from workbench.workers.worker import Context

MASK_COLUMNS = ("sampling_mask_ids", "sampling_mask_sizes")
# The batch's meta key that says whether `old_log_prob` is over the tokens of the sampling mask.
OVER_MASK = "log_prob_over_sampling_mask"
# The batch's meta key of the settings that limited sampling to some tokens, see `truncation`.
TRUNCATION = "truncation"


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """sizes: for each response token, how many tokens could be drawn; 0: all. ids: of a row's tokens, end to end."""

    ids: Ragged
    sizes: Ragged

    @classmethod
    def of(cls, batch: Shard, spec: Model, context: Context) -> SamplingMask | None:
        """Return a shard's mask, or None if it has none. Every rank calls it; if a rank's columns are wrong, every rank
        raises `BadInput`."""
        if not set(MASK_COLUMNS) <= batch.columns.keys():
            return None
        mask = cls(*(batch.ragged(name) for name in MASK_COLUMNS))
        assert spec.name is not None
        wrong = torch.tensor([float(mask._is_wrong(batch.ragged("response_ids"), Limits.of(spec.name).vocabulary))])
        if context.groups.data.all_reduce_max(wrong).item():
            raise BadInput(
                f"columns {', '.join(MASK_COLUMNS)}",
                "each set must have as many token ids as its size says, from the model's vocabulary, with the "
                "response's own token among them",
                "use the columns that generate_sequences(keep_mask=True) wrote, with its responses",
            )
        return mask

    def _is_wrong(self, responses: Ragged, vocabulary: int | None) -> bool:
        sizes, ids = self.sizes.values.long(), self.ids.values
        if len(sizes) != len(responses.values) or int(sizes.sum()) != len(ids):
            return True
        row = torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes.lengths)
        of_rows = torch.zeros(len(self.sizes), dtype=torch.int64).index_add_(0, row, sizes)
        if not torch.equal(of_rows, self.ids.lengths):
            return True
        token = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        has = torch.zeros(len(sizes), dtype=torch.bool)
        has[token[ids == responses.values[token]]] = True
        within = not len(ids) or vocabulary is None or int(ids.max()) < vocabulary
        return not (within and bool((has | (sizes == 0)).all()))

    def __call__(self, index: Sequence[int]) -> TokenSets:
        """Return the sets of some rows' response tokens, end to end."""
        return TokenSets(self.ids.take(index).values, self.sizes.take(index).values)


def mask_columns(sets: Sequence[Sequence[Sequence[int]]]) -> dict[str, ColumnValues]:
    """Return the columns, from the token ids of each token of each row; no ids: all tokens could be drawn."""
    flat = [torch.tensor([token for ids in row for token in ids], dtype=torch.int32) for row in sets]
    sizes = [[len(ids) for ids in row] for row in sets]
    return dict(zip(MASK_COLUMNS, (Ragged.of(flat, torch.int32), Ragged.of(sizes, torch.int32)), strict=True))


def mask_metrics(ids: Ragged, sizes: Ragged) -> Metrics:
    """Return the size of the sets that are not all tokens, and the bytes of a response's sets."""
    cut = sizes.values[sizes.values > 0]
    return {
        "sampling_mask_tokens/mean": Mean(total=float(cut.sum()), count=len(cut)),
        "sampling_mask_tokens/max": Max(value=float(cut.max()) if len(cut) else 0.0),
        "sampling_mask_bytes/mean": Mean(total=nbytes(ids) + nbytes(sizes), count=len(sizes)),
    }


def check_correctable(what: str, batch: Shard) -> None:
    """Raise `BadInput` if `rollout_log_prob` is over some tokens, and `old_log_prob` over all. what: the user of both,
    for the message."""
    if not batch.meta.get(OVER_MASK):
        check_untruncated(what, batch.meta.get(TRUNCATION, {}))


def check_same_tokens(batch: Shard, mask: SamplingMask | None) -> None:
    """Raise `BadInput` if `old_log_prob` is over other tokens than the update's own log-probabilities will be."""
    over_mask = batch.meta.get(OVER_MASK, mask is not None)
    if over_mask != (mask is not None):
        columns, has = ", ".join(MASK_COLUMNS), "was" if over_mask else "was not"
        raise BadInput(
            f"a batch with{'' if mask else 'out'} columns {columns}, whose old_log_prob {has} computed with them",
            "both log-probabilities of a ratio must be over the same tokens",
            "call compute_log_prob on this batch again",
        )
