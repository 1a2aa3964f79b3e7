"""A worker that holds a model: what can be asked of its weights and its mode, whatever its role."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.engines.training import TrainingEngine, make_training_engine
from workbench.engines.training.base import transformers_names
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL
from workbench.messages.replies import Output
from workbench.models.compiling import compile_layers
from workbench.models.heads import PackedModule, TokenLogProbs
from workbench.models.spec import Model
from workbench.settings.engines import Training
from workbench.workers.token_budget import TokenBudget
from workbench.workers.update import Term, Update
from workbench.workers.worker import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelWorker(Worker):
    """Base of the roles that have a model in an engine; `engine` is None where a function stands in for it.

    budget: of tokens of its micro-batches.
    """

    engine: TrainingEngine | None = None
    budget: TokenBudget

    def hold(self, module: PackedModule, *, trained: bool) -> None:
        """Put a model into an engine of its own, with an optimizer where it is trained."""
        spec, context = self.spec, self.context
        assert spec.training is not None and spec.dtype is not None
        self._sequences = module.describe()
        if spec.training.compile:
            compile_layers(module)
        settings, dtype = spec.training if trained else None, getattr(torch, spec.dtype)
        self.engine = make_training_engine(module, settings, context.groups, device=context.device, dtype=dtype)
        self.budget = TokenBudget(spec.training.micro_batch_tokens, context, self.engine, module, trained=trained)

    def retrain(self, training: Training) -> None:
        super().retrain(training)
        if self.engine is not None:
            self.engine.retrain(training)

    def describe(self) -> dict[str, Any]:
        if self.engine is None:
            return super().describe()
        return {**super().describe(), "sequences": self._sequences, "micro_batch_tokens": self.budget.known}

    def update(self, *terms: Term, epochs: int, rate_scales: Sequence[float] = ()) -> Output:
        """One optimizer step a minibatch and epoch, on the sum of the terms, see `Update`."""
        assert self.engine is not None
        update = Update(
            engine=self.engine,
            budget=self.budget,
            context=self.context,
            terms=terms,
            epochs=epochs,
            rate_scales=rate_scales,
        )
        return update.run()

    def trained_state(self) -> dict[str, Any]:
        """The state of a trained engine, and of the process's random generators."""
        assert self.engine is not None
        return {"engine": self.engine.state_dict(), "random": random_state()}

    def load_trained_state(self, state: dict[str, Any]) -> None:
        assert self.engine is not None
        self.engine.load_state_dict(state["engine"])
        set_random_state(state["random"])

    def take_notes(self) -> tuple[str, ...]:
        if self.engine is None:
            return ()
        notes, self.budget.notes = tuple(self.budget.notes), []
        return notes

    @property
    def uses_device(self) -> bool:
        return self.engine is not None

    def memory_bytes(self) -> dict[str, int]:
        others = super().memory_bytes()
        if self.engine is None:
            return others
        offloaded = {"offloaded": self.engine.offloaded_bytes} if self.context.host.share_memory else {}
        return {**self.engine.memory_bytes(), **offloaded, **others}

    def offload(self) -> None:
        if self.engine is not None:
            self.engine.offload()

    def load(self, *, generates: bool = False) -> None:
        if self.engine is not None:
            self.engine.load("parameters")  # gradients and optimizer come with the first step

    @register(ONE_TO_ALL)
    def weight_digests(self, *, frozen: bool = False) -> dict[str, str]:
        """For each weight a short text that is equal on ranks, and at times, at which it has the same bits.

        frozen: of those alone that require no gradient, such as the model under an adapter.
        """
        if self.engine is None:
            return {}
        names = transformers_names(self.engine.module)
        parameters = self.engine.module.named_parameters()
        trained = {names.get(name, name) for name, parameter in parameters if parameter.requires_grad}
        # every rank goes through all weights: one that is sharded is gathered by all
        weights = ((name, digest(w)) for name, w in self.engine.stored_weights() if not (frozen and name in trained))
        return dict(weights)

    @register(ONE_TO_ALL)
    def training_modules(self) -> list[str]:
        """The modules in training mode, in which dropout acts; there should be none.

        Left out are layers that recompute activations: the mode of such a layer itself turns that on, and its children,
        dropout among them, have modes of their own.
        """
        if self.engine is None:
            return []
        from transformers.modeling_layers import GradientCheckpointingLayer

        modules = self.engine.module.named_modules()
        return [name for name, m in modules if m.training and not isinstance(m, GradientCheckpointingLayer)]


def log_probs_of(model: PreTrainedModel, spec: Model) -> TokenLogProbs:
    """The module of a role that is this causal language model, as its settings say."""
    assert spec.training is not None
    return TokenLogProbs(
        model,
        micro_batch_tokens=spec.training.micro_batch_tokens,
        float32_head=spec.training.head_dtype == "float32",
    )


def digest(tensor: Tensor) -> str:
    """A short text of a tensor's bits."""
    bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(bits.numpy().data, digest_size=8).hexdigest()


def random_state() -> dict[str, Tensor]:
    """The states of the global random generators of this process: those of Python, numpy and torch."""
    _, python, python_gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002 (which users call)
    _, numpy, position, has_gauss, numpy_gauss = legacy
    gauss = [torch.nan if python_gauss is None else python_gauss, numpy_gauss]
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": torch.tensor(python),
        "numpy": torch.tensor([*numpy.tolist(), position, has_gauss]),
        "gauss": torch.tensor(gauss, dtype=torch.float64),
        "cpu": torch.get_rng_state(),
        **{f"cuda:{n}": state for n, state in enumerate(gpus)},
    }


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Go back to what `random_state` gave; the generators of GPUs where this process has as many."""
    python_gauss, numpy_gauss = state["gauss"].tolist()
    *numpy, position, has_gauss = state["numpy"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(python_gauss) else python_gauss))
    legacy: Any = ("MT19937", numpy, position, has_gauss, numpy_gauss)
    np.random.set_state(legacy)  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    gpus = [tensor for name, tensor in state.items() if name.startswith("cuda")]
    if gpus and len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)
