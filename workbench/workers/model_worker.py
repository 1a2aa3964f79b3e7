"""Base classes of workers that hold a model: moving and writing its weights, and, for all trained roles, the operations
that save weights, compute checksums, and measure gradients without a step."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from workbench.engines.training import TrainingEngine, make_training_engine
from workbench.errors import BadInput, StageError, WriteFailed
from workbench.errors.plain_text import said
from workbench.messages.operation import register
from workbench.messages.protocols import ONE_TO_ALL, VALUES_OF_RANKS
from workbench.messages.shards import Shard
from workbench.models.heads import PackedModule, TokenLogProbs, TokenValues
from workbench.models.loading import SHARD_GB, level_outside, write_model
from workbench.models.packing import compile_layers
from workbench.models.spec import Model
from workbench.settings.training import Training
from workbench.support.files import new_or_empty, path_of
from workbench.support.validation import PositiveFloat
from workbench.workers.gradients import GradientProbe, GradientReport
from workbench.workers.passes import PassWorker, TokenBudget
from workbench.workers.worker import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")


class ModelWorker(PassWorker):
    """Base class of roles that have a model in an engine; `engine` is None where a function stands in for the model."""

    def hold(self, module: PackedModule, *, trained: bool) -> None:
        """Put a model into an engine of its own, with an optimizer if the model is trained."""
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

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self.engine is not None:
                self.engine.close()

    def describe(self) -> dict[str, Any]:
        if self.engine is None:
            return super().describe()
        return {**super().describe(), "sequences": self._sequences, "micro_batch_tokens": self.budget.known}

    def state(self) -> dict[str, Any]:
        """Return the states of a trained engine and of the process's random generators; empty if nothing is trained."""
        if self.engine is None or self.engine.settings is None:
            return {}
        return {"engine": self.engine.state_dict(), "random": random_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.engine is not None and state:
            self.engine.load_state_dict(state["engine"])
            set_random_state(state["random"])

    def take_notes(self) -> tuple[str, ...]:
        if self.engine is not None:
            self._notes, self.budget.notes = [*self.budget.notes, *self._notes], []
        return super().take_notes()

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

    def write_weights(self, path: str | Path, card: str, shard_gb: float) -> str:
        """Write the engine's weights to a folder, see the operation `save_model`; return the folder's absolute path.

        Raises `BadInput` on all ranks if the folder is not empty, and `WriteFailed` if writing fails.
        """
        assert self.engine is not None and self.spec.name is not None
        module, name = self.engine.module, self.spec.name

        def write(folder: Path, weights: dict[str, Tensor]) -> None:
            scalar = isinstance(module, TokenValues)
            if isinstance(module, TokenValues):
                bias = weights["score.bias"]
                weights["score.bias"] = (bias.float() - module.shift).to(bias.dtype)
            weights |= {name: tensor.cpu() for name, tensor in module.untrained().items()}
            write_model(folder, weights, name, scalar_head=scalar, card=card, shard_gb=shard_gb)
            if scalar and float(weights["score.bias"]):
                print(f"{folder.parent.name}/{folder.name}: {level_outside(float(weights['score.bias']))}")

        return self.write_together(path, self.engine.named_weights(), write)

    def write_together(
        self, path: str | Path, tensors: Iterator[tuple[str, Tensor]], write: Callable[[Path, dict[str, Tensor]], None]
    ) -> str:
        """Call `write(folder, tensors)` on the first rank, with copies of the tensors on its CPU; return the folder's
        absolute path. Raises the errors of `write_weights`."""
        folder, first = Path(self.context.folder, path_of(path, "path")), self.context.communicator.rank == 0
        folder = Path(self._on_first_rank(lambda: str(new_or_empty(folder)), folder))
        copies = {}
        for name, tensor in tensors:  # every rank reads all of them, as weights are gathered
            if first:
                copies[name] = tensor.cpu().clone()
        self._on_first_rank(lambda: write(folder, copies), folder)
        return str(folder)

    def _on_first_rank(self, action: Callable[[], Result], folder: Path) -> Result:
        """Call `action()` on the first rank while the others wait; if it raises, all ranks raise the same error."""
        communicator = self.context.communicator
        first = communicator.rank == 0
        try:
            (result,) = communicator.shared_by_group(communicator.world_size, lambda: [action()] if first else [])
        except BadInput:
            raise
        except WriteFailed as error:
            what = f"nothing was saved to {str(folder)!r}: {error.value}"
            raise WriteFailed(what, error.rule, error.remedy) from error
        except Exception as error:
            raise StageError(
                f"nothing was saved to {str(folder)!r}",
                f"{type(error).__name__}: {said(error)}",
                "give a folder that rank 0 can write to, with room for the model",
            ) from error
        return cast(Result, result)

    @register(ONE_TO_ALL)
    def weight_digests(self, *, frozen: bool = False) -> dict[str, str]:
        """Return a short text for each weight, equal on ranks, or at times, at which the weight's bits are equal.

        frozen: only weights that require no gradient, such as the model under an adapter.
        """
        if self.engine is None:
            return {}
        names = self.engine.module.weight_names()
        parameters = self.engine.module.named_parameters()
        trained = {names.get(name, name) for name, parameter in parameters if parameter.requires_grad}
        # every rank goes through all weights: one that is sharded is gathered by all
        return {name: digest(w) for name, w in self.engine.stored_weights() if not (frozen and name in trained)}

    @register(ONE_TO_ALL)
    def training_modules(self) -> list[str]:
        """Return the names of modules in training mode, in which dropout acts; there should be none.

        Layers that recompute activations are left out: their own mode switches recomputation on, and their children,
        dropout among them, have modes of their own.
        """
        if self.engine is None:
            return []
        from transformers.modeling_layers import GradientCheckpointingLayer

        modules = self.engine.module.named_modules()
        return [name for name, m in modules if m.training and not isinstance(m, GradientCheckpointingLayer)]


def log_probs_of(model: PreTrainedModel, spec: Model) -> TokenLogProbs:
    """Wrap a causal language model in the module that computes its log-probabilities with the spec's settings."""
    assert spec.training is not None
    return TokenLogProbs(
        model, micro_batch_tokens=spec.training.micro_batch_tokens, float32_head=spec.training.head_dtype == "float32"
    )


def digest(tensor: Tensor) -> str:
    """Return a short text that identifies a tensor's bits."""
    bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(bits.numpy().data, digest_size=8).hexdigest()


def random_state() -> dict[str, Tensor]:
    """Return the states of this process's global random generators: Python's, numpy's and torch's."""
    _, python, python_gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002 (users call these functions)
    _, numpy, position, has_gauss, numpy_gauss = legacy
    gauss = [torch.nan if python_gauss is None else python_gauss, numpy_gauss]
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": torch.tensor(python),
        "numpy": torch.tensor([*numpy.tolist(), position, has_gauss]),
        "gauss": torch.tensor(gauss, dtype=torch.float64),
        "cpu": torch.get_rng_state(),
        **{f"cuda:{n}": state for n, state in enumerate(gpus)},
    }


def random_kept(enabled: bool = True) -> AbstractContextManager[None]:
    """Restore torch's random generators at the end of the block; those of GPUs only if this process uses them, because
    reading them would start CUDA."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(gpus, enabled)


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Restore what `random_state` returned; GPU generators only if this process has as many GPUs as the state."""
    python_gauss, numpy_gauss = state["gauss"].tolist()
    *numpy, position, has_gauss = state["numpy"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(python_gauss) else python_gauss))
    legacy: Any = ("MT19937", numpy, position, has_gauss, numpy_gauss)
    np.random.set_state(legacy)  # noqa: NPY002
    torch.set_rng_state(state["cpu"])
    gpus = [tensor for name, tensor in state.items() if name.startswith("cuda")]
    if gpus and len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)


# --- trained roles ----------------------------------------------------------------------------------------------------


def check_update(arguments: Mapping[str, Any]) -> None:
    if arguments["aggregation"] == "fixed-length" and arguments["max_response_tokens"] is None:
        raise BadInput("aggregation='fixed-length'", "it divides by max_response_tokens", "give max_response_tokens")


class TrainedWorker(ModelWorker):
    engine: TrainingEngine

    def __init__(self, spec: Model, context: Context, module: PackedModule) -> None:
        super().__init__(spec, context)
        self.hold(module, trained=True)

    @register(ONE_TO_ALL)
    def weights_checksum(self) -> float:
        """Return the sum of the absolute values of all weights in fp64: equal on ranks that hold the same weights."""
        return float(sum(tensor.double().abs().sum().item() for _, tensor in self.engine.named_weights()))

    @register(ONE_TO_ALL)
    def save_model(self, path: str | Path, *, card: str = "", shard_gb: PositiveFloat = SHARD_GB) -> str:
        """Write the current weights, configuration and tokenizer as transformers does: `wb.Model(path)` and vLLM load
        them. Each rank returns the absolute path.

        path: an empty or new folder on the machine of the role's first rank; a relative path starts where the workbench
        was opened. Weights are written in the role's dtype; those of a value or score head as "score".
        card: a model card in Markdown, such as `wb.model_card(lab)`, which describes the run; it becomes README.md.
        shard_gb: largest size of a safetensors file, in 1e9 bytes; more weights go into several files with an index.
        """
        return self.write_weights(path, card, shard_gb)

    @register(VALUES_OF_RANKS, reads=lambda arguments: arguments["columns"], minibatched=True)
    def measure_gradient(
        self,
        batch: Shard,
        *,
        update: str,
        columns: tuple[str, ...],
        arguments: Mapping[str, Any],
        micro_batch_tokens: int | None = None,
    ) -> GradientReport:
        """Measure, on each rank, the gradient that one of this role's updates would pass to its optimizer, without a
        step.

        update, arguments: the operation and its arguments. columns: the batch's columns that the update reads.
        micro_batch_tokens: replaces the setting's value.
        """
        engine, budget = self.engine, self.budget
        counts = self.context.groups.is_leader
        probe = GradientProbe(engine, counts)
        self.engine = cast(TrainingEngine, probe)
        if micro_batch_tokens is not None:
            module = engine.module
            self.budget = TokenBudget(micro_batch_tokens, self.context, engine, module, trained=True)
        try:
            output = getattr(self, update)(batch, **arguments)
        finally:
            self.engine, self.budget = engine, budget
            engine.module.micro_batch_tokens = budget.tokens
        metrics = {name: metric.value for name, metric in output.metrics.items()}
        return GradientReport(counts=counts, metrics=metrics, minibatches=tuple(probe.minibatches))
