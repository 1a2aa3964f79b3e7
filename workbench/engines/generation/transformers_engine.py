"""Generation with transformers alone: over the trainer's own module, or over a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.engines.generation.base import Decoding, GenerationEngine
from workbench.engines.generation.endings import Endings, check_model_length, end_token_ids
from workbench.engines.generation.transformers_rows import TransformersDecoding
from workbench.engines.host_memory import HostMemory
from workbench.errors import BadInput, SyncError
from workbench.settings.engines import Generation, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = "generation weights"


class TransformersEngine(GenerationEngine):
    """Decodes up to `settings.rows_at_once()` rows at a time, see `TransformersDecoding`.

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
        if getattr(model, "_is_stateful", False):
            raise BadInput(
                f"a model of type {model.config.model_type} with Generation(engine='transformers')",
                "rows join and leave a batch with their keys and values, and its layers keep a state instead",
                "use Generation(engine='vllm')",
            )
        self._model: Any = model
        self._tokenizer, self._settings = tokenizer, settings
        self._owns_model, self._autocast_dtype = owns_model, autocast_dtype
        self._end_ids = end_token_ids(model.generation_config, tokenizer)
        self._vocab_size = int(model.config.get_text_config().vocab_size)
        self.weights_version = 0
        self._memory = HostMemory()

    @contextmanager
    def _decoding(self, sampling: Sampling, ends: Endings) -> Iterator[Decoding]:
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
