"""Models with the head that a role needs: log-probabilities of tokens, or one value per token.

The backbone runs on sequences packed end to end, the head only on the given positions. A model that cannot run packs
(see `packing.use_packing`) gets padded sequences, and reports the reason. Shapes: S sequences, T tokens in all
sequences together, N positions, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.errors import BadInput
from workbench.models.file_weights import read_tensors
from workbench.models.loading import SAVED_HEADS, load_backbone
from workbench.models.logits import ChosenLogProbs, ScalarHead, TokenSets, compute_in_float32
from workbench.models.packing import Pack, run_packed, tried_once, use_packing
from workbench.models.resolve import resolve
from workbench.models.tensor_parallel import VocabularyParallelHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HeadInit = Literal["zero", "normal"]

# Rows of logits in memory at the same time: enough for full speed, with little memory (512 x 49,152 x 4 bytes = 100 MB
# per copy; a backward pass holds about four copies).
ROWS_PER_CALL = 512


class LogitsReader(Protocol):
    """Computes numbers from the distribution over the vocabulary at each position, if a log-probability is not enough.

    width: how many numbers it returns per position.
    """

    width: int

    def __call__(self, log_probs: Tensor, positions: slice) -> Tensor:
        """Return [n, width] from log softmax(logits / temperature) [n, V], fp32. positions: which n of the N."""


def pad_right(sequences: Sequence[Tensor], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (input_ids, attention_mask, position_ids), each int64 [B, T], of token ids padded on the right."""
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=sequences[0].device)
    input_ids = nn.utils.rnn.pad_sequence([s.long() for s in sequences], batch_first=True, padding_value=pad_id)
    attention_mask = (torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None]).long()
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return input_ids, attention_mask, position_ids


class PackedModule(nn.Module):
    """A module that a role trains or runs on packed sequences: `read(hidden_states(...), ...)`; the two calls may run
    on different ranks.

    padded_because: why the model gets padded sequences; None: it runs packs. micro_batch_tokens: the largest number of
    tokens that `forward` gets on any rank.
    """

    padded_because: str | None
    micro_batch_tokens: int = 2048

    def get_backbone(self) -> PreTrainedModel:
        """Return the layers below the head."""
        raise NotImplementedError

    def hidden_states(
        self, input_ids: Tensor, lengths: Sequence[int], after: Sequence[int] = (), received: Tensor | None = None
    ) -> Tensor:
        """Return the backbone's last hidden states [T, hidden] of packed token ids [T] with these `lengths`.

        after: which sequences continue which, see `Pack.of`; empty if the model runs padded. received: hidden states
        [T, hidden] in place of embeddings, if the backbone's first layers are on other ranks.
        """
        if self.padded_because is None:
            return run_packed(self.get_backbone(), input_ids, Pack.of(lengths, input_ids.device, after), received)
        assert received is None and not after
        ids, attention_mask, position_ids = pad_right(input_ids.split(list(lengths)), 0)
        output = self.get_backbone()(
            input_ids=ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        return cast(Tensor, output.last_hidden_state[attention_mask.bool()])

    def forward(
        self, input_ids: Tensor, lengths: Sequence[int], *read: Any, after: Sequence[int] = (), **asked: Any
    ) -> Any:
        """Return the result of `read` for packed token ids [T], S sequences of these `lengths`. See `hidden_states`."""
        return self.read(self.hidden_states(input_ids, lengths, after), *read, **asked)

    def read(self, hidden: Tensor, positions: Tensor, **asked: Any) -> Any:
        """Return the head's outputs at `positions` [N] of the hidden states [T, hidden]."""
        raise NotImplementedError

    def unread(self, positions: Tensor, **asked: Any) -> Any:
        """Return zeros in the shape of the result of `read`, for ranks without the head."""
        raise NotImplementedError

    def weight_names(self) -> dict[str, str]:
        """Return own parameter name -> transformers' name; tied weights once, without an adapter's weights."""
        raise NotImplementedError

    def untrained(self) -> dict[str, Tensor]:
        """Return by transformers' names the tensors of a checkpoint that are no parameters, such as router biases."""
        backbone = self.get_backbone()
        parameters = dict(backbone.named_parameters(remove_duplicate=False))
        kept = ((name, tensor) for name, tensor in backbone.state_dict().items() if name not in parameters)
        return {f"{backbone.base_model_prefix}.{name}": tensor for name, tensor in kept}

    def describe(self) -> str:
        """Return how sequences run: "packed", or "padded: " and the reason."""
        return "packed" if self.padded_because is None else f"padded: {self.padded_because}"


def rows_of(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states [T, hidden] at positions [N]. Positions may repeat; their gradients are summed, on a GPU
    in a fixed order, because the ranks of a tensor group need the same bits."""
    return hidden[positions] if hidden.is_cuda else hidden.index_select(0, positions)


class TokenLogProbs(PackedModule):
    """log softmax(logits / temperature) at given tokens, from a causal language model.

    The head runs in ceil(N / 512) calls, with the logits of one call in memory, also in the backward pass, which
    recomputes them. It cuts rows, not the vocabulary with a running log-sum-exp: so each log-probability is the result
    of one product and one softmax, and the head is called as a whole module. If the head's weight is sharded over ranks
    (ZeRO stage 3), each call gathers it, so every rank must make the same number of calls:
    ceil(micro_batch_tokens / 512), for any N. A larger T needs more memory.

    float32_head: compute logits in fp32, see `compute_in_float32`.
    aliases: for each weight all names that the model has for it; a tied head has two. vocabulary: the weights with one
    row per token. Both cover the whole model, by transformers' names.

    Raises `BadInput` for a model whose logits are not head(hidden state), such as one with soft-capped logits.
    """

    def __init__(
        self, model: PreTrainedModel, *, micro_batch_tokens: int | None = None, float32_head: bool = False
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.aliases, self.vocabulary = _aliases(model), _vocabulary(model)
        self.micro_batch_tokens = micro_batch_tokens or self.micro_batch_tokens
        _require_plain_head(model)
        if float32_head:
            compute_in_float32(model)
        self.padded_because = use_packing(model)

    def get_backbone(self) -> PreTrainedModel:
        return self.model.base_model

    def read(  # type: ignore[override]
        self,
        hidden: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        reader: LogitsReader | None = None,
        with_hidden: bool = False,
        sets: TokenSets | None = None,
    ) -> Any:
        """Return (log-probabilities, entropies or None), each fp32 [N], in nats; with a reader, its result [N, width].
        with_hidden: also return the hidden states [N, hidden] at the positions, and `each_logits` for them.

        targets: [N]; the hidden state at `positions[n]` predicts `targets[n]`, the next token. sets: for each position,
        the tokens with a probability above 0; None: all tokens. Values with and without grad are bitwise equal.
        """
        if temperature <= 0:
            raise BadInput(
                f"temperature={temperature}", "a log-probability needs one above 0", "score greedy responses with 1.0"
            )
        hidden = rows_of(hidden, positions)
        if reader is not None:
            return self.each_logits(
                hidden, lambda logits, places: reader(torch.log_softmax(logits, dim=-1), places), temperature
            )
        calls = self._calls(len(hidden))
        parts: list[Any] = [
            _recomputed(self._score, *part, temperature, with_entropy)
            for part in zip(
                hidden.tensor_split(calls),
                targets.tensor_split(calls),
                [None] * calls if sets is None else sets.tensor_split(calls),
                strict=True,
            )
        ]
        entropy = torch.cat([part[1] for part in parts]) if with_entropy else None
        scored = torch.cat([part[0] for part in parts]), entropy
        if not with_hidden:
            return scored
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return *scored, hidden, partial(self.each_logits, temperature=temperature, autocast=autocast, sets=sets)

    def each_logits(
        self,
        hidden: Tensor,
        function: Callable[[Tensor, slice], Tensor],
        temperature: float = 1.0,
        autocast: torch.dtype | None = None,
        sets: TokenSets | None = None,
        numbers: Tensor | None = None,
    ) -> Tensor:
        """Return the concatenated results of function(logits / temperature [n, V] in fp32, slice of these n among the
        N) for consecutive parts of the hidden states [N, hidden]. The function is called again in the backward pass.

        autocast: the dtype in which the head computes. sets: the tokens with a probability above 0, see `read`; other
        logits become `IMPOSSIBLE`. numbers [N]: the index of each hidden state's set in `sets`; None: in order. As in
        `read`, ranks must make the same number of calls if the head's weight is sharded.
        """
        calls = self._calls(len(hidden))
        cuts = hidden.tensor_split(calls)
        if sets is not None and numbers is not None:
            sets = sets.take(numbers.cpu())
        of_cuts = [None] * calls if sets is None else sets.tensor_split(calls)
        ends = list(itertools.accumulate(map(len, cuts)))
        places = [slice(end - len(cut), end) for cut, end in zip(cuts, ends, strict=True)]
        read = partial(self._read, function=function, temperature=temperature, autocast=autocast)
        return torch.cat([_recomputed(read, *part) for part in zip(cuts, places, of_cuts, strict=True)])

    def _calls(self, positions: int) -> int:
        sharded = any(hasattr(weight, "ds_id") for weight in self.model.get_output_embeddings().parameters())
        return max(1, -(-(self.micro_batch_tokens if sharded else positions) // ROWS_PER_CALL))

    def unread(
        self, positions: Tensor, with_entropy: bool = False, reader: LogitsReader | None = None, **asked: Any
    ) -> tuple[Tensor, Tensor | None] | Tensor:
        if reader is not None:
            return torch.zeros((len(positions), reader.width), device=positions.device)
        zeros = torch.zeros(len(positions), device=positions.device)
        return zeros, zeros.clone() if with_entropy else None

    def _score(
        self, hidden: Tensor, targets: Tensor, sets: TokenSets | None, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        head: Any = self.model.get_output_embeddings()
        if isinstance(head, VocabularyParallelHead):
            return head(hidden, targets, temperature, with_entropy, sets)
        # Called as a module, because hooks that gather a sharded weight, and adapters, only act on module calls.
        return cast(Any, ChosenLogProbs.apply(head(hidden), targets, temperature, with_entropy, sets))

    def _read(
        self,
        hidden: Tensor,
        places: slice,
        sets: TokenSets | None,
        function: Callable[[Tensor, slice], Tensor],
        temperature: float,
        autocast: torch.dtype | None,
    ) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        with torch.autocast(hidden.device.type, autocast) if autocast else nullcontext():
            logits = head.whole_logits(hidden) if isinstance(head, VocabularyParallelHead) else head(hidden)
        scaled = logits.float() / temperature
        return function(scaled if sets is None else sets.masked(scaled), places)

    def weight_names(self) -> dict[str, str]:
        names = (name for name, _ in self.named_parameters() if ".lora_" not in name)
        return {name: name.removeprefix("model.").replace(".base_layer.", ".") for name in names}


def _recomputed(function: Any, *args: Any) -> Any:
    """Call a function that is called again in the backward pass, so that no logits [N, V] stay in memory."""
    if torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


class TokenValues(PackedModule):
    """One scalar per token: a critic's value, a reward or cost model's score.

    shift: subtracted from every value, not trained; saved as part of the head's bias. init: "zero" (a critic starts at
    0 everywhere) or "normal", with standard deviation 1/sqrt(hidden_size + 1), drawn only from `seed`
    (Stiennon et al. 2020, arXiv:2009.01325, appendix B.1).
    """

    shift: float = 0.0

    def __init__(self, backbone: PreTrainedModel, hidden_size: int, *, init: HeadInit = "zero", seed: int = 0) -> None:
        super().__init__()
        self.backbone = backbone.eval()
        self.padded_because = use_packing(backbone)
        like = next(backbone.parameters())
        self.score = ScalarHead(hidden_size, 1, device=like.device)
        if init == "normal":
            drawn = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                self.score.weight.copy_(drawn / (hidden_size + 1) ** 0.5)

    def get_backbone(self) -> PreTrainedModel:
        return self.backbone

    def read(self, hidden: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """Return the values at `positions`, fp32 [N]."""
        return cast(Tensor, self.score(rows_of(hidden, positions))).squeeze(-1) - self.shift

    def unread(self, positions: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros(len(positions), device=positions.device)

    def weight_names(self) -> dict[str, str]:
        """See the base class; the names are those of a sequence classification model."""
        prefix = f"{self.backbone.base_model_prefix}."
        names = (name for name, _ in self.named_parameters())
        return {n: prefix + n.removeprefix("backbone.") if n.startswith("backbone.") else n for n in names}


def load_token_values(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    init: HeadInit = "zero",
    longest: int = 0,
) -> TokenValues:
    """Load a `TokenValues` from a model name or folder, with its saved scalar head, else one from `init` and `seed`.
    longest: see `load_config`.

    Raises `ModelUnavailable` if there is no such model, `BadInput` if its head gives more than one score.
    """
    folder = resolve(path)
    backbone = load_backbone(folder, dtype=dtype, device=device, longest=longest)
    module = TokenValues(backbone, backbone.config.get_text_config().hidden_size, init=init, seed=seed)
    saved = saved_head(folder)
    if saved is not None:
        weight, bias = saved
        if weight.shape != module.score.weight.shape:
            raise BadInput(
                f"the head in {folder} has shape {list(weight.shape)}",
                f"a scalar head has shape {list(module.score.weight.shape)}",
                "use a reward model with num_labels=1",
            )
        with torch.no_grad():
            module.score.weight.copy_(weight)
            if bias is not None:
                module.score.bias.copy_(bias.reshape(1))
    return module


def saved_head(folder: Path) -> tuple[Tensor, Tensor | None] | None:
    """Return (weight, bias or None) of the scalar head in a folder of weights; None without a scalar head."""
    found = read_tensors(folder, {f"{head}.{kind}" for head in SAVED_HEADS for kind in ("weight", "bias")})
    head = next((head for head in SAVED_HEADS if f"{head}.weight" in found), None)
    return None if head is None else (found[f"{head}.weight"], found.get(f"{head}.bias"))


def _aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}


def _vocabulary(model: PreTrainedModel) -> frozenset[str]:
    layers: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    mine = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in mine)


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its head's, also for hidden states so large that a cap on the logits shows."""
    tokens, head, outputs = torch.arange(2, device=model.device)[None], model.get_output_embeddings(), list[Tensor]()

    def same(logits: Tensor, plain: Tensor) -> bool:
        return torch.allclose(logits, plain, rtol=1e-3, atol=1e-3 * max(1.0, float(plain.abs().max())))

    def enlarge(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0] * (1e3 / given[0].abs().max()),)

    plain = head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    if not same(model(input_ids=tokens, use_cache=False).logits, plain):
        return False
    with (
        head.register_forward_pre_hook(enlarge),
        head.register_forward_hook(lambda module, given, output: outputs.append(output)),
    ):
        logits = model(input_ids=tokens, use_cache=False).logits
    return not outputs or same(logits, outputs[-1])


def _require_plain_head(model: PreTrainedModel) -> None:
    """Raise `BadInput` for families that scale or cap logits after the head: only the head is computed here."""
    if not tried_once("plain head", model, _has_plain_head):
        raise BadInput(
            f"{type(model).__name__}",
            "its logits must be its output head applied to its last hidden state, without scaling or capping",
            "use a model family such as Llama, Qwen or Mistral",
        )
