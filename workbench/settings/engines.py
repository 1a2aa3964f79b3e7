"""How a role computes: plain values, given in a notebook, sent to the hosts, part of a workbench's description."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workbench.errors import BadInput
from workbench.support.named_fields import NamedFields
from workbench.support.validation import at_least, between, one_of, true_or_false, whole

TRAINING_ENGINES = ("torch", "deepspeed")
GENERATION_ENGINES = ("transformers", "vllm")
SYNC_STRATEGIES = ("hybridflow", "v", "full")
DTYPES = ("float32", "bfloat16")
ShareMemory = bool | Literal["always"]
SHARE_MEMORY = (False, True, "always")


@dataclass(frozen=True, kw_only=True)
class Training(NamedFields):
    """Settings of a trained role.

    engine: "deepspeed", which takes layouts (1, t, d), or "torch", which takes all (p, t, d) and needs nothing more.
    zero_stage: DeepSpeed's ZeRO stage, 0 to 3, with t > 1 to 2; ignored by the torch engine.
    learning_rate, betas, eps, weight_decay: AdamW's.
    warmup_steps, total_steps, schedule: learning-rate schedule in optimizer steps; all but "constant" need total_steps.
    max_grad_norm: global norm to which gradients are clipped; 0 turns clipping off.
    minibatches: optimizer steps that one update takes from one batch (of one epoch).
    micro_batch_tokens: upper bound of the tokens in one forward pass, prompts and responses together; a single longer
        row goes alone. None: 2048 on a CPU; on a GPU as many as fit beside what the placement holds there, by a trial
        pass before the role's first (at most 32,768), and half as many after a step that runs out of memory all the
        same. `lab.topology()` says how many.
        Sequences are packed; where a model takes no packs, padding counts too: `lab.topology()` says.
        `compute_log_prob` and `update_actor` cut the same micro-batches, so that the first ratio is exactly 1
        (within rounding where an update skips rows without advantage).
    activation_checkpointing: recompute layer activations in the backward pass.
    compile: run the layers through torch.compile, which needs a C++ compiler and, the first time on a machine, a minute
        or more. Results differ within rounding.
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
    micro_batch_tokens: int | None = None
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        one_of("Training.engine", self.engine, TRAINING_ENGINES)
        one_of("Training.zero_stage", self.zero_stage, (0, 1, 2, 3))
        one_of("Training.schedule", self.schedule, ("constant", "linear", "cosine"))
        at_least("Training.learning_rate", self.learning_rate, 0)
        at_least("Training.eps", self.eps, 0, strictly=True)
        at_least("Training.weight_decay", self.weight_decay, 0)
        at_least("Training.max_grad_norm", self.max_grad_norm, 0)
        for name in ("learning_rate", "eps", "weight_decay"):
            if math.isinf(getattr(self, name)):
                raise BadInput(f"Training.{name}=inf", "must be a finite number")
        betas = self.betas if isinstance(self.betas, tuple | list) else ()
        numbers_ = [b for b in betas if isinstance(b, numbers.Real) and not isinstance(b, bool) and 0 <= b < 1]
        if not len(betas) == len(numbers_) == 2:
            raise BadInput(f"Training.betas={self.betas!r:.60}", "must be two numbers in [0, 1)", "write (0.9, 0.95)")
        true_or_false("Training.activation_checkpointing", self.activation_checkpointing)
        true_or_false("Training.compile", self.compile)
        if self.compile and self.engine == "deepspeed" and self.zero_stage == 3:
            raise BadInput(
                "Training(compile=True, zero_stage=3)",
                "stage 3 gathers weights in hooks of the modules that are compiled",
                "use zero_stage=2, or compile=False",
            )
        whole("Training.minibatches", self.minibatches, 1)
        if self.micro_batch_tokens is not None:
            whole("Training.micro_batch_tokens", self.micro_batch_tokens, 1)
        whole("Training.warmup_steps", self.warmup_steps, 0)
        if self.total_steps is not None:
            whole("Training.total_steps", self.total_steps, 1)
        if self.schedule != "constant" and self.total_steps is None:
            raise BadInput(
                f"Training.schedule={self.schedule!r} without total_steps",
                "a schedule that ends needs its length in optimizer steps",
                "give total_steps=iterations x minibatches x epochs",
            )


@dataclass(frozen=True, kw_only=True)
class Generation(NamedFields):
    """Settings of the generation engine of the actor: on its own ranks, or on rollout workers (see `Placement`).

    engine: "vllm" or "transformers" (needs nothing more than transformers).
    tensor_parallel_size: ranks that hold one copy of vLLM's model between them: consecutive ranks of the pool that
        generates, whose size it must divide. Where that is the actor's it must also divide t of the actor's layout
        (p, t, d) with p*t > 1. The transformers engine knows only 1.
    strategy: how an actor cut over p*t > 1 ranks, or sharded by ZeRO-3, gets its weights to the engine: "hybridflow",
        each rank receives what it lacks; "v", the whole model over the ranks of a training replica; "full", over all
        ranks (ZeRO-3: "v" too).
    max_model_tokens: longest prompt + response.
    kv_cache_gib: vLLM's key-value cache on a CPU host, GiB. On a GPU, gpu_memory_fraction is used instead: the share of
        its memory that weights and cache fill, kept between rollouts unless `wb.open(share_memory=True)` lends it out.
        None: the cache is what the placement leaves there, at most room for max_rows of max_model_tokens.
    max_rows: most sequences decoded at the same time by one engine. None: 512 for vLLM on a GPU, the most that its CUDA
        graphs cover by default; else 64.
    check_sync: after each weight sync compare log-probabilities of engine and trainer, and checksums of slices as they
        were sent and as they arrived; `SyncError` when they differ.
    """

    engine: Literal["vllm", "transformers"] = "vllm"
    tensor_parallel_size: int = 1
    strategy: Literal["hybridflow", "v", "full"] = "hybridflow"
    max_model_tokens: int = 1024
    kv_cache_gib: float = 1.0
    gpu_memory_fraction: float | None = None
    max_rows: int | None = None
    check_sync: bool = True

    def __post_init__(self) -> None:
        one_of("Generation.engine", self.engine, GENERATION_ENGINES)
        whole("Generation.tensor_parallel_size", self.tensor_parallel_size, 1)
        one_of("Generation.strategy", self.strategy, SYNC_STRATEGIES)
        if self.engine == "transformers" and self.tensor_parallel_size > 1:
            raise BadInput(
                f"Generation.tensor_parallel_size={self.tensor_parallel_size} with engine='transformers'",
                "the transformers engine keeps a whole model on each rank",
                "use engine='vllm', or tensor_parallel_size=1",
            )
        whole("Generation.max_model_tokens", self.max_model_tokens, 2)
        at_least("Generation.kv_cache_gib", self.kv_cache_gib, 0, strictly=True)
        if self.max_rows is not None:
            whole("Generation.max_rows", self.max_rows, 1)
        if self.gpu_memory_fraction is not None:
            at_least("Generation.gpu_memory_fraction", self.gpu_memory_fraction, 0, strictly=True)
            if not self.gpu_memory_fraction < 1:
                raise BadInput(f"Generation.gpu_memory_fraction={self.gpu_memory_fraction}", "must lie between 0 and 1")
        true_or_false("Generation.check_sync", self.check_sync)

    def rows_at_once(self, *, on_gpu: bool) -> int:
        """`max_rows`, or its default."""
        return self.max_rows or (512 if on_gpu and self.engine == "vllm" else 64)


@dataclass(frozen=True, kw_only=True)
class Sampling(NamedFields):
    """How responses are drawn. Every field means the same on every generation engine.

    temperature: 0 is greedy; else 0.01 to 2. top_p, top_k, min_p: nucleus, top-k (0: off) and min-p truncation, the
        last to tokens at least min_p times as probable as the likeliest (0: off).
    repetition_penalty: logits of tokens in prompt or response are divided by it where positive, else multiplied
        (Keskar et al. 2019, https://arxiv.org/abs/1909.05858); 1: off.
    presence_penalty, frequency_penalty: taken from the logit of a token that the response has; once, and once for each
        time that it has it. In an environment: that the current turn has. 0: off; -2 to 2.
    logit_bias: token id -> what is added to its logit; -inf bans the token.
    max_new_tokens: longest response, tokens; in an environment that of all turns and observations together.
    min_new_tokens: so many tokens (of each turn) come before what ends it: among them, ending tokens have probability
        0, and stop strings are not looked for.
    stop, stop_token_ids: strings and tokens at which a response (a turn) ends. ignore_eos: the end-of-sequence token
        ends nothing: responses of forced length, for benchmarks. Whatever ended a response is its last part: EOS, stop
        token, and the tokens up to the one that completed the stop string.
    environment: makes the responses conversations, see `workbench.data.environment`: a class, or a function without
        arguments that makes one, called once a sample. max_turns: most turns of the policy. concurrency,
        call_timeout_s: calls of environments under way at once on a rank, and the time limit of one.

    `rollout_log_prob` is the log-probability of the sampled token under the distribution sampled from: logits, then
    bias, banned endings, penalties, temperature, min-p, top-k, top-p, in this order, renormalized. With none of them
    but temperature that is log softmax(logits / temperature), the trainer's definition; with others the gap between
    the two is theirs as well. Greedy responses carry log softmax(logits after bias and penalties).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    environment: Callable[[], Any] | None = None
    max_turns: int = 8
    concurrency: int = 8
    call_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        at_least("temperature", self.temperature, 0)
        if self.temperature and not 0.01 <= self.temperature <= 2:
            raise BadInput(
                f"temperature={self.temperature}", "must be 0 (greedy) or lie in [0.01, 2]: vLLM samples at no other"
            )
        whole("top_k", self.top_k, 0)
        between("top_p", self.top_p, 0, 1, open_below=True)
        between("min_p", self.min_p, 0, 1)
        at_least("repetition_penalty", self.repetition_penalty, 0, strictly=True)
        for name in ("presence_penalty", "frequency_penalty"):
            between(name, getattr(self, name), -2, 2)
        _check_bias(self.logit_bias)
        true_or_false("ignore_eos", self.ignore_eos)
        whole("max_new_tokens", self.max_new_tokens, 1)
        whole("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise BadInput(
                f"min_new_tokens={self.min_new_tokens}", f"must be at most max_new_tokens={self.max_new_tokens}"
            )
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise BadInput(f"stop={self.stop!r}", "must be a sequence of non-empty strings", "write stop=('\\n',)")
        if isinstance(self.stop_token_ids, int) or not all(isinstance(i, int) for i in self.stop_token_ids):
            raise BadInput(
                f"stop_token_ids={self.stop_token_ids!r}",
                "must be a sequence of token ids",
                "write stop_token_ids=(2,)",
            )
        if self.environment is not None and not callable(self.environment):
            raise BadInput(
                f"environment={self.environment!r:.60}",
                "must make an environment when called: a class with step(response), or a function that returns one",
                "give the class, not an instance: each sample has an environment of its own",
            )
        if isinstance(self.environment, type):
            _check_environment(self.environment)
        whole("max_turns", self.max_turns, 1)
        whole("concurrency", self.concurrency, 1)
        at_least("call_timeout_s", self.call_timeout_s, 0, strictly=True)

    @property
    def token_ids(self) -> list[int]:
        """All token ids that it names."""
        return [*self.stop_token_ids, *(self.logit_bias or ())]


def check_room(sampling: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` where no response could be as long as asked for: all would be cut before, without a word.

    sampling: fields of `Sampling`.
    """
    new = sampling["max_new_tokens"]
    if generation is not None and new >= generation.max_model_tokens:
        raise BadInput(
            f"max_new_tokens={new}",
            f"prompt and response share Generation.max_model_tokens={generation.max_model_tokens}",
            "ask for fewer new tokens, or open the workbench with a larger Generation.max_model_tokens",
        )


def _check_bias(bias: object) -> None:
    rule = "must be numbers by token id, or None; -inf bans a token"
    remedy = "write logit_bias={5: -1.0}"
    if bias is not None and not isinstance(bias, Mapping):
        raise BadInput(f"logit_bias={bias!r:.60}", rule, remedy)
    for token, value in (bias or {}).items():
        number = isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value and value < math.inf
        if not isinstance(token, numbers.Integral) or not number:
            raise BadInput(f"logit_bias={{{token!r:.60}: {value!r:.60}}}", rule, remedy)


def _check_environment(environment: type) -> None:
    """Raise `BadInput` for a class whose `step` is not there or does not take a response."""
    step = getattr(environment, "step", None)
    if not callable(step):
        raise BadInput(
            f"environment {environment.__name__} has no method step",
            "step(response) answers each turn of the policy with (observation, reward, done)",
            "def step(self, response): return observation, 0.0, True",
        )
    try:
        inspect.signature(step).bind("self", "response")
    except TypeError as error:
        raise BadInput(
            f"step{inspect.signature(step)} of environment {environment.__name__}: {error}",
            "it is called with the text of one turn and nothing else",
            "def step(self, response): return observation, 0.0, True",
        ) from None
    except ValueError:  # one that does not say what it takes
        return
