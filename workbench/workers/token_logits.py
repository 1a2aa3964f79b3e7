"""What a loss of a user's own may read of the model beside log-probabilities: logits, a part at a time.

    def loss(log_prob, advantages, mask, logits):
        entropy = logits.map(lambda x: torch.distributions.Categorical(logits=x).entropy())
        return -log_prob * advantages - 0.01 * entropy

Suffixes: B rows of a micro-batch, R response tokens of the longest, n tokens of one part, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from workbench.batches.columns import Ragged
from workbench.errors import BadInput
from workbench.models.heads import PackedModule
from workbench.support.calls.pickling import name_of
from workbench.workers.micro_batches import MicroBatch
from workbench.workers.user_loss import kind_of

OF_MODEL = ("logits", "hidden_states")  # what a loss may ask for, with a gradient

# For each part of chosen tokens, by their numbers in reading order: a function of logits [n, V] and the part's place.
OfTokens = Callable[[Tensor, Callable[[Tensor, slice], Tensor]], Tensor]
REHEARSED_TOKENS = 8


class Logits:
    """The logits of a micro-batch's response tokens, divided by the temperature, in float32 and with a gradient.

    Where the batch has a sampling mask, those of tokens that could not be drawn are -1e9: probabilities and entropies
    are over the same tokens as `log_prob`.

    inside_BR: where there are tokens inside the mask. of_tokens: calls a function for parts of the tokens with these
    numbers (of B x R).
    """

    def __init__(self, inside_BR: Tensor, of_tokens: OfTokens) -> None:
        self._inside_BR, self._of_tokens = inside_BR, of_tokens

    def map(self, function: Callable[..., Tensor], *others: Tensor, where: Tensor | None = None) -> Tensor:
        """What `function(logits, *others)` gives for each token: [rows, tokens] or [rows, tokens, ...], 0 where it was
        not called.

        It is called for at most 512 tokens at a time, with logits [n, V] and the same tokens of `others`, each given as
        [rows, tokens, ...], and returns [n] or [n, ...]. In the backward pass it is called again, so that no more
        logits are in memory at once; so it must return the same for the same, and change nothing. where: bool
        [rows, tokens], the positions to read; None: those inside the mask. Positions outside the mask are never read.

        With ZeRO stage 3 or tensor parallel ranks a loss must call `map` equally often for each micro-batch.
        """
        chosen_BR = self._chosen(where)
        for other in others:
            if not isinstance(other, Tensor) or other.shape[:2] != chosen_BR.shape:
                raise BadInput(
                    f"logits.map with {kind_of(other)}",
                    f"what goes with the logits is [rows, tokens, ...], here {list(chosen_BR.shape)}",
                    "write a number, or what has another shape, into the function itself",
                )
        # a micro-batch without a chosen token reads one all the same: every rank calls the head equally often
        read_BR = chosen_BR if bool(chosen_BR.any()) else _first(chosen_BR)
        rows = [other[read_BR] for other in others]

        def of_part(logits: Tensor, place: slice) -> Tensor:
            found = function(logits, *(other[place] for other in rows))
            if not isinstance(found, Tensor) or found.shape[:1] != logits.shape[:1]:
                raise BadInput(
                    f"{name_of(function)} returned {kind_of(found)} for logits of shape {list(logits.shape)}",
                    f"it returns a number, or some, for each of the {len(logits)} tokens",
                    "reduce over the last dimension alone: dim=-1",
                )
            return found

        found = self._of_tokens(read_BR.flatten().nonzero()[:, 0], of_part)
        out = found.new_zeros((*chosen_BR.shape, *found.shape[1:])).index_put(read_BR.nonzero(as_tuple=True), found)
        return torch.where(chosen_BR.view(*chosen_BR.shape, *(1 for _ in found.shape[1:])), out, 0)

    def _chosen(self, where: Tensor | None) -> Tensor:
        if where is None:
            return self._inside_BR
        if not isinstance(where, Tensor) or where.shape != self._inside_BR.shape or where.dtype != torch.bool:
            raise BadInput(
                f"logits.map(where={kind_of(where)})",
                f"it is a bool tensor of shape {list(self._inside_BR.shape)} [rows, tokens]",
            )
        return where & self._inside_BR


def of_model(
    micro: MicroBatch, mask: Ragged, asked: Collection[str], hidden_N: Tensor, each_logits: Callable[..., Tensor]
) -> dict[str, Any]:
    """What a loss asks for of OF_MODEL. hidden_N, each_logits: as `TokenLogProbs.forward` gives them for a micro-batch,
    N response tokens."""
    number_BR = micro.to_BR(torch.arange(len(hidden_N), device=hidden_N.device)).flatten()

    def of_tokens(numbers: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        chosen = number_BR[numbers]
        return each_logits(hidden_N[chosen], function, numbers=chosen)

    found: dict[str, Any] = {"logits": Logits(micro.column_BR(mask).bool(), of_tokens)}
    return found | ({"hidden_states": micro.to_BR(hidden_N.float())} if "hidden_states" in asked else {})


def stand_ins(inside_BR: Tensor, module: PackedModule) -> dict[str, Any]:
    """Zeros in place of OF_MODEL, for a call before any pass; the function of `map` sees a few tokens alone."""
    config = module.get_backbone().config.get_text_config()

    def of_tokens(numbers: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        few = min(REHEARSED_TOKENS, len(numbers))
        found = function(torch.zeros(few, config.vocab_size, requires_grad=True), slice(0, few))
        return torch.cat([found, found.new_zeros((len(numbers) - few, *found.shape[1:]))])

    hidden = torch.zeros(*inside_BR.shape, config.hidden_size, requires_grad=True)
    return {"logits": Logits(inside_BR, of_tokens), "hidden_states": hidden}


def _first(chosen_BR: Tensor) -> Tensor:
    """The first position alone."""
    first_BR = torch.zeros_like(chosen_BR)
    first_BR.view(-1)[:1] = True
    return first_BR
