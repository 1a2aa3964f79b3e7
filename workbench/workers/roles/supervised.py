"""How the actor learns from texts: supervised fine-tuning and a pretraining loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workbench.batches.columns import ColumnValues, Ragged
from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.messages.calls import Output
from workbench.messages.metrics import Mean
from workbench.messages.operation import row_stage, update_stage
from workbench.messages.shards import Shard
from workbench.models.control_tokens import encoded, escape
from workbench.models.tokenizers import is_text
from workbench.objectives.aggregation import Aggregation
from workbench.support.validation import PositiveInt
from workbench.workers.micro_batches import DeviceMetrics, MicroBatch
from workbench.workers.model_worker import TrainedWorker, check_update
from workbench.workers.passes import Term


def _as_responses(batch: Shard, documents: Ragged) -> Shard:
    """Turn documents into rows: the prompt is the first token, the response all other tokens."""
    rows = documents.rows()
    rest = Ragged.of([row[1:].tolist() for row in rows], torch.int64)
    first = Ragged.of([row[:1].tolist() for row in rows], torch.int64)
    mask = rest.like(torch.ones(len(rest.values), dtype=torch.bool))
    return replace(batch, columns={"prompt_ids": first, "response_ids": rest, "response_mask": mask})


def _text_term(texts: Shard, coefficient: float, metric: str) -> Term:
    """Return -log pi of a shard's response tokens, as a term of another update. metric: the name of its mean."""

    def loss(micro: MicroBatch, output: tuple[Tensor, None]) -> tuple[Tensor, DeviceMetrics]:
        loss_BR, mask_BR = -micro.to_BR(output[0]), micro.mask_BR(term.mask)
        return coefficient * loss_BR, {metric: micro.mean_over(mask_BR)(loss_BR)}

    term = Term(shard=texts, inputs=lambda micro: micro.scored(1.0), loss=loss)
    return term


class SupervisedWorker(TrainedWorker):
    """A trained causal language model that learns from data that it did not sample."""

    tokenizer: PreTrainedTokenizerBase

    @update_stage(reads=("prompt_ids", "response_ids", "response_mask"), optional=("valid",), check=check_update)
    def update_sft(
        self,
        batch: Shard,
        *,
        epochs: PositiveInt = 1,
        aggregation: Aggregation = "token-mean",
        max_response_tokens: PositiveInt | None = None,
    ) -> Output:
        """Supervised fine-tuning: the mean of -log pi over the response tokens, one optimizer step per minibatch and
        epoch. `compute_log_prob` reports the same number with the opposite sign, without an update.

        aggregation, max_response_tokens: as in `update_actor`.
        Source: InstructGPT, Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5.
        """

        def loss(micro: MicroBatch, output: tuple[Tensor, None]) -> tuple[Tensor, DeviceMetrics]:
            return -micro.to_BR(output[0]), {}

        term = Term(
            shard=batch,
            inputs=lambda micro: micro.scored(1.0),
            loss=loss,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )
        return self.steps(term, epochs=epochs)

    def demonstrated_rows(self, batch: Shard, coefficient: float) -> tuple[Shard, Term]:
        """Split a shard for an update: its rows without the `demonstrated` rows, and a term with the loss of
        `update_sft` over the `demonstrated` rows."""
        shown = batch.numbers("demonstrated").bool()
        others, demonstrated = (
            replace(batch, columns={**batch.columns, "valid": batch.valid & here}) for here in (~shown, shown)
        )
        return others, _text_term(demonstrated, coefficient, "sft_loss")

    def pretraining_term(self, batch: Shard, coefficient: float) -> Term:
        """Return the language-model loss on `pretrain_ids`, as a term of another update."""
        return _text_term(_as_responses(batch, batch.ragged("pretrain_ids")), coefficient, "pretrain_loss")

    @row_stage(reads=lambda arguments: (arguments["text"],), writes=("pretrain_ids", "pretrain_loss"))
    def compute_loss(self, batch: Shard, *, text: str = "text", max_tokens: PositiveInt = 512) -> Output:
        """The pretraining loss: the mean of -log pi of each token of a text given the tokens before it, in nats.

        text: the column of texts, one per row; a text need not be related to the row's prompt. max_tokens: longer texts
        are cut. A text begins like a document, with BOS (EOS if there is no BOS), and ends with EOS if it was not cut.
        Columns: `pretrain_ids`, the tokens from which `update_actor(pretrain_coefficient=...)` learns, and
        `pretrain_loss` [rows]. A loss from another process has no gradient: the update computes it again.
        Source: InstructGPT's PPO-ptx, Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 2.
        """
        ids = self._documents(batch.columns[text], text, max_tokens)
        texts = _as_responses(batch, ids)
        log_probs = self.token_values(texts, lambda micro: micro.scored(1.0))
        losses = torch.stack([-row.double().mean() for row in log_probs.rows()]).float()
        token_mean = Mean(total=-float(log_probs.values.double().sum()), count=len(log_probs.values))
        return Output(
            columns={"pretrain_ids": ids, "pretrain_loss": losses}, metrics={"pretrain_loss/mean": token_mean}
        )

    def _documents(self, texts: ColumnValues, name: str, max_tokens: int) -> Ragged:
        rows = texts if isinstance(texts, list) else [texts]
        wrong = [row for row in rows if not is_text(row)]
        # every rank raises, or none: a rank that went on would wait for the others
        if self.context.groups.data.all_reduce_max(torch.tensor([len(wrong)])).item():
            raise BadInput(
                f"column {name!r}" + (f" with {shown(wrong[0])}" if wrong else " with another value on another rank"),
                "compute_loss needs a text in each row",
                "name a column of strings with text=",
            )
        start = self.tokenizer.bos_token_id
        start = self.tokenizer.eos_token_id if start is None else start
        tokens = [
            [*encoded(self.tokenizer, escape(self.tokenizer, str(row))), self.tokenizer.eos_token_id] for row in rows
        ]
        return Ragged.of([[start, *row[:max_tokens]] for row in tokens], torch.int64)
