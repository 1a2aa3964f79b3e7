"""Settings of generation and sampling: plain values, given in a notebook, sent to hosts, kept in the description."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from workbench.errors import BadInput, MissingDependency
from workbench.settings.context import GivenContext
from workbench.settings.training import HeadDType
from workbench.support.validation import (
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

GenerationEngine = Literal["transformers", "vllm"]
SyncStrategy = Literal["hybridflow", "v", "full"]
SyncMode = Literal["auto", "delta", "whole"]
DType = Literal["float32", "bfloat16", "float16"]
ShareMemory = bool | Literal["always"]
SYNC_STRATEGIES = get_args(SyncStrategy)
SHARE_MEMORY = (False, True, "always")
MASKED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # settings that a sampling mask can describe, with their off values


@settings()
class Generation:
    """Settings of the actor's generation engine, on the actor's ranks or on rollout workers (see `Placement`).

    engine: "vllm" or "transformers" (needs no other package).
    tensor_parallel_size: the number of ranks that share one copy of vLLM's model: consecutive ranks of the generating
        pool, whose size it must divide. If the actor's pool generates, it must also divide t of an actor's layout
        (p, t, d) with p*t > 1. The transformers engine supports only 1.
    strategy: how an actor that is split over p*t > 1 ranks, or sharded by ZeRO-3, sends its weights to the engine:
        "hybridflow": each rank receives only what it lacks; "v": gather the whole model over the ranks of a training
        replica; "full": over all ranks (with ZeRO-3, so does "v").
    sync: "delta": a weight sync between processes sends the exact changes since the last sync, for which both ends keep
        a copy of the weights; "whole": all weights; "auto": the faster way, after three syncs each.
    max_model_tokens: longest prompt + response. Of a model with "longrope" positions (Phi-3, Phi-4-mini), all roles
        take the long factors if it is more than the model's original positions, else the short ones.
    kv_cache_gib: vLLM's key-value cache on a CPU host, GiB. On a GPU, gpu_memory_fraction is used instead: the share of
        its memory for weights and cache, kept between rollouts unless `wb.open(share_memory=True)` lends it to others.
        None: the cache takes what the placement leaves, at most the bytes of max_rows rows of max_model_tokens tokens.
    max_rows: the most sequences that one engine decodes at the same time. None: 512 for vLLM on a GPU, the most that
        its CUDA graphs cover by default; else 64.
    head_dtype: "float32": vLLM computes the logits in fp32; on a GPU, products in the model's dtype are summed in fp32.
        "same": in the model's dtype. For the transformers engine, see `Training.head_dtype`.
    check_sync: after each weight sync, compare log-probabilities of engine and trainer, and checksums of slices at
        sender and receiver; `SyncError` if they differ.
    """

    engine: GenerationEngine = "vllm"
    tensor_parallel_size: PositiveInt = 1
    strategy: SyncStrategy = "hybridflow"
    sync: SyncMode = "auto"
    max_model_tokens: Annotated[Whole, Field(ge=2)] = 1024
    kv_cache_gib: PositiveFloat = 1.0
    gpu_memory_fraction: Annotated[Number, Field(gt=0, lt=1)] | None = None
    max_rows: PositiveInt | None = None
    head_dtype: HeadDType = "same"
    check_sync: bool = True

    def __post_init__(self) -> None:
        if self.engine == "transformers" and self.head_dtype != "same":
            raise BadInput(
                f"Generation.head_dtype={self.head_dtype!r} with engine='transformers'",
                "the transformers engine computes logits as the trainer does",
                f"write Training(head_dtype={self.head_dtype!r}), which holds for both",
            )
        if self.engine == "transformers" and self.tensor_parallel_size > 1:
            raise BadInput(
                f"Generation.tensor_parallel_size={self.tensor_parallel_size} with engine='transformers'",
                "the transformers engine keeps a whole model on each rank",
                "use engine='vllm', or tensor_parallel_size=1",
            )

    def rows_at_once(self, *, on_gpu: bool) -> int:
        """Return `max_rows`, or its default."""
        return self.max_rows or (512 if on_gpu and self.engine == "vllm" else 64)


def _check_environment(environment: Callable[[], Any]) -> Callable[[], Any]:
    """Raise `BadInput` for a class without a `step` that takes a response."""
    if not isinstance(environment, type):
        return environment
    step = getattr(environment, "step", None)
    if not callable(step):
        raise BadInput(
            f"environment {environment.__name__} has no method step",
            "step(response) or step(message) answers each turn of the policy with (observation, reward, done)",
            "def step(self, response): return observation, 0.0, True",
        )
    try:
        signature = inspect.signature(step)
        names = ("response", "raw_response", "response_ids", "message")
        by_name = {name: None for name in names if name in signature.parameters}
        text = () if [*signature.parameters][1:2] in ([name] for name in by_name) else ("response",)
        signature.bind("self", *text, **by_name)
    except TypeError as error:
        raise BadInput(
            f"step{inspect.signature(step)} of environment {environment.__name__}: {error}",
            "it is called with the text of a turn, or with those of message=, raw_response=, response_ids= that it has",
            "def step(self, response): return observation, 0.0, True",
        ) from None
    except ValueError:  # `step` has no signature
        pass
    return environment


AGENT_GIVES = ("row", "client", "base_url", "api_key")  # the arguments that an agent's function can have
AN_AGENT = "async def agent(row, client), or def agent(row, base_url, api_key)"


def _check_agent(agent: Callable[..., Any]) -> Callable[..., Any]:
    """Raise `BadInput` for a function with arguments that an agent does not get."""
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):  # the function has no signature
        return agent
    named = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    given = {name: None for name in AGENT_GIVES if name in named or len(named) < len(signature.parameters)}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise BadInput(
            f"agent={getattr(agent, '__name__', agent)!s:.40}{signature}: {error}",
            f"an agent gets {', '.join(AGENT_GIVES)}, by name", f"write {AN_AGENT}",
        ) from None  # fmt: skip
    if "client" in named and importlib.util.find_spec("openai") is None:
        raise MissingDependency(
            f"agent={getattr(agent, '__name__', agent)!s:.40}{signature} without openai",
            "client is an openai.OpenAI, or openai.AsyncOpenAI", "pip install openai, or take base_url and api_key",
        )  # fmt: skip
    return agent


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
    Rule("must map token ids to numbers, or be None; -inf bans a token", "write logit_bias={5: -1.0}"),
]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    SEQUENCE,
    Rule("must be a sequence of non-empty strings", "write a single one as a tuple too: stop=('END',)"),
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

Agent = Annotated[
    Callable[..., Any], AfterValidator(_check_agent), Rule("must be the function of an agent", f"write {AN_AGENT}")
]


@settings(called="")
class Sampling:
    """How responses are sampled. Every field means the same on every generation engine.

    temperature: 0 is greedy; else 0.01 to 2. top_p, top_k, min_p: nucleus, top-k (0: off) and min-p truncation; min-p
        keeps tokens at least min_p times as probable as the likeliest token (0: off).
    keep_mask: for each response token, keep the ids of tokens that truncation left (DeepSeek-V3.2,
        https://arxiv.org/abs/2512.02556, section 3.1), in columns `sampling_mask_ids` and `sampling_mask_sizes`: 4
        bytes per kept id, and 4 per response token. The trainer's log-probabilities are then over the same tokens, so
        that a `Correction` is valid. vLLM provides the mask only if top_k is set, alone or with top_p and min_p.
    repetition_penalty: positive logits of tokens in prompt or response are divided by it, negative ones multiplied
        (Keskar et al. 2019, https://arxiv.org/abs/1909.05858); 1: off.
    presence_penalty, frequency_penalty: subtracted from the logit of a token in the response: once, or once for each
        occurrence. In an environment only the current turn counts. 0: off; -2 to 2.
    logit_bias: token id -> number to add to the logit; -inf bans the token.
    max_new_tokens: the longest response, in tokens; in an environment, all turns and observations together.
    min_new_tokens: the least tokens of a response (of each turn) before its end: until then, ending tokens have
        probability 0, and stop strings are ignored.
    stop, stop_token_ids: strings and tokens that end a response (a turn). Stop strings are searched in the text with
        special tokens, unlike by vLLM's own default: "<|im_end|>" is found, and so is "end" in it. ignore_eos: the
        end-of-sequence token does not end a response: for benchmarks with a fixed length. A response includes what
        ended it: EOS, the stop token, or the tokens up to the one that completed the stop string.
    environment: turns responses into conversations, see `workbench.data.environment`: a class, or a function without
        arguments that makes an environment, called once per sample. max_turns: the most turns of the policy. max_calls:
        the most tool calls; a turn with more calls than are left gets no answer. max_seconds: of wall time, checked
        between turns and while an environment answers. A conversation that a limit ends has the limit's name as
        `ending`. concurrency, call_timeout_s: how many calls of environments run at once on a rank, and the time limit
        of one call. retries: how often a conversation restarts after its environment failed, from the same seed, with a
        new environment. most_failed: the allowed share of rows that fail after all retries, see `generate_sequences`.
    most_open: how many conversations are open at the same time on a rank; others begin when one ends. Each has at most
        one turn without an answer, so this also limits such turns. None: all.
    agent: a function, called once per sample, that requests each turn itself, over HTTP: see `workbench.data.agent`.
        Other settings apply as with an environment. context: what the policy reads of a long conversation with an
        environment, see `Context`; None: all of it. max_turns: the most answers per sample. call_timeout_s: limits the
        function's own time, in which it does not wait for an answer.

    `rollout_log_prob` is the sampled token's log-probability in the sampled distribution: logits, then bias, banned
    endings, penalties, temperature, min-p, top-k, top-p, in this order, renormalized. With temperature alone, this is
    log softmax(logits / temperature), the trainer's definition; other settings add to the gap between engine and
    trainer. With settings that exclude tokens (top_p, top_k, min_p, biases of -inf, min_new_tokens), a `Correction` is
    refused unless the mask is kept. Greedy responses have log softmax(logits after bias and penalties).
    """

    temperature: Temperature = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1), Rule("must be a number in (0, 1]")] = 1.0
    top_k: NonNegativeInt = 0
    min_p: Annotated[Number, Field(ge=0, le=1), Rule("must be a number in [0, 1]")] = 0.0
    keep_mask: bool = False
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
    agent: Agent | None = None
    context: GivenContext | None = None
    max_turns: PositiveInt = 8
    max_calls: NonNegativeInt | None = None
    max_seconds: PositiveFloat | None = None
    most_open: PositiveInt | None = None
    concurrency: PositiveInt = 8
    call_timeout_s: Annotated[Number, Field(gt=0)] = 30.0
    retries: NonNegativeInt = 0
    most_failed: Annotated[Number, Field(ge=0, le=1), Rule("must be a share of the rows, in [0, 1]")] = 0.2

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise BadInput(
                f"min_new_tokens={self.min_new_tokens}", f"must be at most max_new_tokens={self.max_new_tokens}"
            )
        if self.environment is not None and self.agent is not None:
            raise BadInput(
                "environment= and agent= together",
                "an environment answers each turn of the policy, an agent asks for each turn itself",
                "give one of them",
            )
        if self.context is not None and self.environment is None:
            raise BadInput(
                "context= without environment=",
                "it limits the context in a conversation with an environment; an agent chooses its own contexts",
                "give environment=MyEnvironment too",
            )
        given = [name for name in ("max_calls", "max_seconds") if getattr(self, name) is not None]
        if self.agent is not None and given:
            raise BadInput(
                f"{' and '.join(given)} with agent=",
                "these limits are those of an environment; an agent makes its own calls",
                "apply the limits in the agent, or give call_timeout_s",
            )
        tool_s = getattr(self.environment, "timeout_s", None)  # of `wb.Tools`
        if isinstance(tool_s, int | float) and tool_s >= self.call_timeout_s:
            raise BadInput(
                f"call_timeout_s={self.call_timeout_s:g} with tools whose timeout_s is {tool_s:g}",
                "a turn waits for its tools, and call_timeout_s would end its row before a tool times out",
                f"write call_timeout_s={2 * tool_s:g}",
            )

    @property
    def keeps_mask(self) -> bool:
        """Whether a sampling mask is kept: `keep_mask` is set, and top_p, top_k or min_p exclude tokens."""
        return keeps_mask(vars(self))

    @property
    def several_turns(self) -> Callable[..., Any] | None:
        """The user's environment or agent, if there is one: it turns responses into conversations."""
        return self.environment or self.agent

    @property
    def token_ids(self) -> list[int]:
        """All token ids in `stop_token_ids` and `logit_bias`."""
        return [*self.stop_token_ids, *(self.logit_bias or ())]


def truncation(sampling: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings that exclude tokens from sampling, with their values; for `logit_bias`, the number of banned
    tokens. sampling: fields of `Sampling`."""
    off = MASKED if sampling.get("temperature", 1.0) else {}
    left = {name: sampling[name] for name, value in off.items() if name in sampling and sampling[name] != value}
    banned = sum(bias == -math.inf for bias in (sampling.get("logit_bias") or {}).values())
    return left | ({"logit_bias": banned} if banned else {}) | (
        {"min_new_tokens": sampling["min_new_tokens"]} if sampling.get("min_new_tokens") else {}
    )  # fmt: skip


def keeps_mask(sampling: Mapping[str, Any]) -> bool:
    """Whether a mask is kept: keep_mask is on; top_p, top_k or min_p exclude tokens. sampling: fields of `Sampling`."""
    return bool(sampling.get("keep_mask") and truncation(sampling).keys() & MASKED.keys())


def check_untruncated(what: str, truncated: Mapping[str, float]) -> None:
    """Raise `BadInput` if a correction would read rollouts from a truncated distribution. what: names the correction.
    truncated: the result of `truncation`.
    """
    if truncated:
        said = {"logit_bias": "a logit_bias of -inf for {:g} token(s)"}
        given = ", ".join(said.get(name, name + "={:g}").format(value) for name, value in truncated.items())
        off = [f"{name}={MASKED.get(name, 0)}" for name in truncated if name != "logit_bias"]
        off += ["finite biases"] if "logit_bias" in truncated else []
        mask = ", or with keep_mask=True before compute_log_prob" if truncated.keys() & MASKED.keys() else ""
        raise BadInput(
            f"{what} on rollouts that were sampled with {given}",
            "rollout_log_prob is over the tokens that were kept, old_log_prob over all tokens: their ratio is the "
            "probability of the kept tokens, not a difference between engine and trainer",
            f"sample with {', '.join(off)}{mask}, or leave it out",
        )


def check_mask(sampling: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` if a mask is to be kept, but the engine cannot provide it. sampling: fields of `Sampling`."""
    if keeps_mask(sampling) and not sampling["top_k"] and generation is not None and generation.engine == "vllm":
        given = ", ".join(f"{name}={sampling[name]}" for name in truncation(sampling) if name in MASKED)
        raise BadInput(
            f"keep_mask=True with {given} and no top_k, on engine='vllm'",
            "vLLM reports the kept tokens only if a top_k limits their number",
            "add a top_k that is seldom reached, such as top_k=256, or use Generation(engine='transformers')",
        )


def check_room(sampling: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` if no response can reach the requested length, because all would be truncated silently.

    sampling: fields of `Sampling`.
    """
    new, context = sampling["max_new_tokens"], sampling.get("context")
    if generation is not None and context is not None and context.max_tokens > generation.max_model_tokens:
        raise BadInput(
            f"Context(max_tokens={context.max_tokens})",
            f"the model reads at most Generation.max_model_tokens={generation.max_model_tokens}",
            "lower it, or open the workbench with a larger Generation.max_model_tokens",
        )
    if generation is not None and context is None and new >= generation.max_model_tokens:
        raise BadInput(
            f"max_new_tokens={new}",
            f"prompt and response share Generation.max_model_tokens={generation.max_model_tokens}",
            "ask for fewer new tokens, or open the workbench with a larger Generation.max_model_tokens",
        )
