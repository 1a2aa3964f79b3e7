"""How a role computes: plain values, given in a notebook, sent to the hosts, part of a workbench's description."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Literal

from workbench.errors import BadInput

TRAINING_ENGINES = ("torch", "deepspeed")
GENERATION_ENGINES = ("transformers", "vllm")
DTYPES = ("float32", "bfloat16")


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `BadInput` unless `value` is one of `choices`."""
    if value not in choices:
        raise BadInput(f"{name}={value!r}", f"must be one of {', '.join(map(repr, choices))}")


def at_least(name: str, value: float, least: float, *, strictly: bool = False) -> None:
    """Raise `BadInput` unless `value` is at least (or, `strictly`, more than) `least`."""
    if not isinstance(value, numbers.Real):
        raise BadInput(f"{name}={value!r}", "must be a number")
    if not (value > least if strictly else value >= least):
        raise BadInput(f"{name}={value!r}", f"must be {'more than' if strictly else 'at least'} {least}")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a trained role.

    engine: "deepspeed" or "torch" (needs nothing more than torch).
    zero_stage: DeepSpeed's ZeRO stage, 0 to 3; ignored by the torch engine.
    learning_rate, betas, eps, weight_decay: AdamW's.
    warmup_steps, total_steps, schedule: learning-rate schedule in optimizer steps; all but "constant" need total_steps.
    max_grad_norm: global norm to which gradients are clipped; 0 turns clipping off.
    minibatches: optimizer steps that one update takes from one batch (of one epoch).
    micro_batch_tokens: upper bound of the tokens in one forward pass, prompts and responses together; a single longer
        row goes alone. Sequences are packed; where a model takes no packs, padding counts too: `lab.topology()` says.
        `compute_log_prob` and `update_actor` cut the same micro-batches, so that the first ratio is exactly 1
        (within rounding where an update skips rows without advantage).
    activation_checkpointing: recompute layer activations in the backward pass.
    """

    engine: Literal["deepspeed", "torch"] = "deepspeed"
    zero_stage: int = 1
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    max_grad_norm: float = 1.0
    minibatches: int = 1
    micro_batch_tokens: int = 2048
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        one_of("Training.engine", self.engine, TRAINING_ENGINES)
        one_of("Training.zero_stage", self.zero_stage, (0, 1, 2, 3))
        one_of("Training.schedule", self.schedule, ("constant", "linear", "cosine"))
        at_least("Training.learning_rate", self.learning_rate, 0)
        at_least("Training.max_grad_norm", self.max_grad_norm, 0)
        at_least("Training.minibatches", self.minibatches, 1)
        at_least("Training.micro_batch_tokens", self.micro_batch_tokens, 1)
        if self.schedule != "constant" and self.total_steps is None:
            raise BadInput(
                f"Training.schedule={self.schedule!r} without total_steps",
                "a schedule that ends needs its length in optimizer steps",
                "give total_steps=iterations x minibatches x epochs",
            )


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Settings of the generation engine of the actor.

    engine: "vllm" or "transformers" (needs nothing more than transformers).
    tensor_parallel_size: ranks that hold one copy of vLLM's model between them: consecutive ranks of the actor's pool,
        whose size it must divide. The transformers engine knows only 1.
    max_model_tokens: longest prompt + response.
    kv_cache_gib: vLLM's key-value cache on a CPU host, GiB. On a GPU, gpu_memory_fraction is used instead.
    max_rows: most sequences decoded at the same time by one engine.
    check_sync: after each weight sync compare log-probabilities of engine and trainer; `SyncError` when they differ.
    """

    engine: Literal["vllm", "transformers"] = "vllm"
    tensor_parallel_size: int = 1
    max_model_tokens: int = 1024
    kv_cache_gib: float = 1.0
    gpu_memory_fraction: float = 0.4
    max_rows: int = 64
    check_sync: bool = True

    def __post_init__(self) -> None:
        one_of("Generation.engine", self.engine, GENERATION_ENGINES)
        at_least("Generation.tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.engine == "transformers" and self.tensor_parallel_size > 1:
            raise BadInput(
                f"Generation.tensor_parallel_size={self.tensor_parallel_size} with engine='transformers'",
                "the transformers engine keeps a whole model on each rank",
                "use engine='vllm', or tensor_parallel_size=1",
            )
        at_least("Generation.max_model_tokens", self.max_model_tokens, 2)
        at_least("Generation.kv_cache_gib", self.kv_cache_gib, 0, strictly=True)
        at_least("Generation.max_rows", self.max_rows, 1)
        if not 0 < self.gpu_memory_fraction < 1:
            raise BadInput(f"Generation.gpu_memory_fraction={self.gpu_memory_fraction}", "must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn.

    temperature: 0 is greedy. top_p, top_k: nucleus and top-k truncation (top_k=0: off).
    max_new_tokens: longest response, tokens. stop: strings at which a response ends (kept in the response).

    `rollout_log_prob` is the log-probability of the sampled token under the distribution sampled from: after
    temperature, top-k and top-p. With top_p=1 and top_k=0 that is log softmax(logits / temperature), the trainer's
    definition. Greedy responses carry log softmax(logits).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least("temperature", self.temperature, 0)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        at_least("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p={self.top_p}", "must lie in (0, 1]")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise BadInput(f"stop={self.stop!r}", "must be a sequence of non-empty strings", "write stop=('\\n',)")
