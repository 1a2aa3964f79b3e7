"""How a role computes: plain values, given in a notebook, sent to hosts, kept in a workbench's description."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from workbench.errors import BadInput
from workbench.settings.roles import CRITICS
from workbench.support.validation import (
    FINITE,
    SEQUENCE,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Rule,
    Whole,
    settings,
)

TrainingEngine = Literal["torch", "deepspeed"]
GenerationEngine = Literal["transformers", "vllm"]
SyncStrategy = Literal["hybridflow", "v", "full"]
DType = Literal["float32", "bfloat16"]
ShareMemory = bool | Literal["always"]
TRAINING_ENGINES, GENERATION_ENGINES = get_args(TrainingEngine), get_args(GenerationEngine)
SYNC_STRATEGIES, DTYPES = get_args(SyncStrategy), get_args(DType)
SHARE_MEMORY = (False, True, "always")

LEARNING_RATE, CRITIC_LEARNING_RATE = 1e-6, 1e-5  # a critic's head starts at zero, and has more to learn
Beta = Annotated[Number, Field(ge=0, lt=1)]


@settings()
class Training:
    """Settings of a trained role.

    engine: "deepspeed", which takes layouts (1, t, d), or "torch", which takes all (p, t, d) and needs nothing more.
    zero_stage: DeepSpeed's ZeRO stage, 0 to 3, with t > 1 to 2; ignored by the torch engine.
    learning_rate, betas, eps, weight_decay: AdamW's. learning_rate None: 1e-6, for a critic 1e-5.
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

    engine: TrainingEngine = "deepspeed"
    zero_stage: Annotated[Whole, Field(ge=0, le=3), Rule("must be one of 0, 1, 2, 3")] = 1
    learning_rate: Annotated[NonNegativeFloat, FINITE] | None = None
    betas: Annotated[tuple[Beta, Beta], SEQUENCE, Rule("must be two numbers in [0, 1)", "write (0.9, 0.95)")] = (
        0.9,
        0.95,
    )
    eps: Annotated[PositiveFloat, FINITE] = 1e-8
    weight_decay: Annotated[NonNegativeFloat, FINITE] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    total_steps: PositiveInt | None = None
    max_grad_norm: NonNegativeFloat = 1.0
    minibatches: PositiveInt = 1
    micro_batch_tokens: PositiveInt | None = None
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        if self.compile and self.engine == "deepspeed" and self.zero_stage == 3:
            raise BadInput(
                "Training(compile=True, zero_stage=3)",
                "stage 3 gathers weights in hooks of the modules that are compiled",
                "use zero_stage=2, or compile=False",
            )
        if self.schedule != "constant" and self.total_steps is None:
            raise BadInput(
                f"Training.schedule={self.schedule!r} without total_steps",
                "a schedule that ends needs its length in optimizer steps",
                "give total_steps=iterations x minibatches x epochs",
            )
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise BadInput(
                f"Training.warmup_steps={self.warmup_steps} with total_steps={self.total_steps}",
                "the warm-up is a part of all steps",
                f"use at most {self.total_steps}",
            )

    @property
    def peak_learning_rate(self) -> float:
        """The rate between warm-up and decay."""
        return LEARNING_RATE if self.learning_rate is None else self.learning_rate

    def of_role(self, role: str) -> Training:
        """With the role's default in place of a learning rate that was not given."""
        if self.learning_rate is not None:
            return self
        return replace(self, learning_rate=CRITIC_LEARNING_RATE if role in CRITICS else LEARNING_RATE)


@settings()
class Generation:
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

    engine: GenerationEngine = "vllm"
    tensor_parallel_size: PositiveInt = 1
    strategy: SyncStrategy = "hybridflow"
    max_model_tokens: Annotated[Whole, Field(ge=2)] = 1024
    kv_cache_gib: PositiveFloat = 1.0
    gpu_memory_fraction: Annotated[Number, Field(gt=0, lt=1)] | None = None
    max_rows: PositiveInt | None = None
    check_sync: bool = True

    def __post_init__(self) -> None:
        if self.engine == "transformers" and self.tensor_parallel_size > 1:
            raise BadInput(
                f"Generation.tensor_parallel_size={self.tensor_parallel_size} with engine='transformers'",
                "the transformers engine keeps a whole model on each rank",
                "use engine='vllm', or tensor_parallel_size=1",
            )

    def rows_at_once(self, *, on_gpu: bool) -> int:
        """`max_rows`, or its default."""
        return self.max_rows or (512 if on_gpu and self.engine == "vllm" else 64)


def _check_environment(environment: Callable[[], Any]) -> Callable[[], Any]:
    """Raise `BadInput` for a class whose `step` is not there or does not take a response."""
    if not isinstance(environment, type):
        return environment
    step = getattr(environment, "step", None)
    if not callable(step):
        raise BadInput(
            f"environment {environment.__name__} has no method step",
            "step(response) answers each turn of the policy with (observation, reward, done)",
            "def step(self, response): return observation, 0.0, True",
        )
    try:
        signature = inspect.signature(step)
        raw = {name: None for name in ("raw_response", "response_ids") if name in signature.parameters}
        signature.bind("self", "response", **raw)
    except TypeError as error:
        raise BadInput(
            f"step{inspect.signature(step)} of environment {environment.__name__}: {error}",
            "it is called with the text of a turn; raw_response= and response_ids= it gets where it takes them by name",
            "def step(self, response): return observation, 0.0, True",
        ) from None
    except ValueError:  # one that does not say what it takes
        pass
    return environment


def _is_greedy_or_sampled(temperature: float) -> float:
    if temperature and not 0.01 <= temperature <= 2:
        raise ValueError
    return temperature


Temperature = Annotated[
    NonNegativeFloat,
    AfterValidator(_is_greedy_or_sampled),
    Rule("must be 0 (greedy), or a number in [0.01, 2]: the engines sample at no other temperature"),
]
Penalty = Annotated[Number, Field(ge=-2, le=2), Rule("must be a number in [-2, 2]")]
Bias = Annotated[
    Mapping[Whole, Annotated[Number, Field(lt=math.inf)]],
    Rule("must be numbers by token id, or None; -inf bans a token", "write logit_bias={5: -1.0}"),
]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    SEQUENCE,
    Rule("must be a sequence of non-empty strings", "write stop=('\\n',)"),
]
StopTokens = Annotated[
    tuple[Whole, ...], SEQUENCE, Rule("must be a sequence of token ids", "write stop_token_ids=(2,)")
]
Environment = Annotated[
    Callable[[], Any],
    AfterValidator(_check_environment),
    Rule(
        "must make an environment when called: a class with step(response), or a function that returns one",
        "give the class, not an instance: each sample has an environment of its own",
    ),
]


@settings(called="")
class Sampling:
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
        call_timeout_s: calls of environments under way at once on a rank, and the time limit of one. retries: how often
        a conversation whose environment failed begins again, from the same seed, with a new environment. most_failed:
        the share of rows whose environment may fail at last, see `generate_sequences`.

    `rollout_log_prob` is the log-probability of the sampled token under the distribution sampled from: logits, then
    bias, banned endings, penalties, temperature, min-p, top-k, top-p, in this order, renormalized. With none of them
    but temperature that is log softmax(logits / temperature), the trainer's definition; with others the gap between
    the two is theirs as well, and with top_p, top_k and min_p a `Correction` is refused. Greedy responses carry
    log softmax(logits after bias and penalties).
    """

    temperature: Temperature = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1), Rule("must be a number in (0, 1]")] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Annotated[Number, Field(ge=0, le=1), Rule("must be a number in [0, 1]")] = 0.0
    repetition_penalty: PositiveFloat = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Bias | None = None
    max_new_tokens: PositiveInt = 64
    min_new_tokens: NonNegativeInt = 0
    stop: Stops = ()
    stop_token_ids: StopTokens = ()
    ignore_eos: bool = False
    environment: Environment | None = None
    max_turns: PositiveInt = 8
    concurrency: PositiveInt = 8
    call_timeout_s: PositiveFloat = 30.0
    retries: NonNegativeInt = 0
    most_failed: Annotated[Number, Field(ge=0, le=1), Rule("must be a share of the rows, in [0, 1]")] = 0.2

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise BadInput(
                f"min_new_tokens={self.min_new_tokens}", f"must be at most max_new_tokens={self.max_new_tokens}"
            )

    @property
    def token_ids(self) -> list[int]:
        """All token ids that it names."""
        return [*self.stop_token_ids, *(self.logit_bias or ())]


def truncation(sampling: Mapping[str, Any]) -> dict[str, float]:
    """Those of the settings by which the engine samples from some tokens only, with their values. sampling: fields of
    `Sampling`."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} if sampling.get("temperature", 1.0) else {}
    return {name: sampling[name] for name, value in off.items() if name in sampling and sampling[name] != value}


def check_untruncated(what: str, truncated: Mapping[str, float]) -> None:
    """Raise `BadInput` where a correction would read rollouts of a truncated distribution. what: names the correction.
    truncated: see `truncation`.
    """
    if truncated:
        given = ", ".join(f"{name}={value}" for name, value in truncated.items())
        off = ", ".join(f"{name}={1.0 if name == 'top_p' else 0}" for name in truncated)
        raise BadInput(
            f"{what} on rollouts that were sampled with {given}",
            "rollout_log_prob is over the tokens that were left, old_log_prob over all tokens: their ratio is the "
            "probability of the tokens that were left, not a difference between engine and trainer",
            f"sample with {off}, or leave the correction out",
        )


def check_room(sampling: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` where no response can be as long as asked for: all would be cut silently.

    sampling: fields of `Sampling`.
    """
    new = sampling["max_new_tokens"]
    if generation is not None and new >= generation.max_model_tokens:
        raise BadInput(
            f"max_new_tokens={new}",
            f"prompt and response share Generation.max_model_tokens={generation.max_model_tokens}",
            "ask for fewer new tokens, or open the workbench with a larger Generation.max_model_tokens",
        )
