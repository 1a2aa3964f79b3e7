"""How a role computes: plain values, given in a notebook, sent to hosts, kept in a workbench's description."""

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
MASKED = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # settings whose effect a sampling mask tells, where they are off


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
    sync: "delta": a weight sync between processes sends what changed since the one before, exactly, for which either
        end keeps a copy of the weights; "whole": all; "auto": what took less time, of three syncs each way.
    max_model_tokens: longest prompt + response.
    kv_cache_gib: vLLM's key-value cache on a CPU host, GiB. On a GPU, gpu_memory_fraction is used instead: the share of
        its memory that weights and cache fill, kept between rollouts unless `wb.open(share_memory=True)` lends it out.
        None: the cache is what the placement leaves there, at most room for max_rows of max_model_tokens.
    max_rows: most sequences decoded at the same time by one engine. None: 512 for vLLM on a GPU, the most that its CUDA
        graphs cover by default; else 64.
    head_dtype: "float32": vLLM computes the logits in fp32, on a GPU with fp32 sums of products of the model's dtype;
        "same": in its dtype. The transformers engine computes them as `Training.head_dtype` says.
    check_sync: after each weight sync compare log-probabilities of engine and trainer, and checksums of slices as they
        were sent and as they arrived; `SyncError` when they differ.
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
            "step(response) or step(message) answers each turn of the policy with (observation, reward, done)",
            "def step(self, response): return observation, 0.0, True",
        )
    try:
        signature = inspect.signature(step)
        by_name = {name: None for name in ("raw_response", "response_ids", "message") if name in signature.parameters}
        text = () if [*signature.parameters][1:2] in ([name] for name in by_name) else ("response",)
        signature.bind("self", *text, **by_name)
    except TypeError as error:
        raise BadInput(
            f"step{inspect.signature(step)} of environment {environment.__name__}: {error}",
            "it is called with the text of a turn, or gets message=, raw_response=, response_ids= as it names them",
            "def step(self, response): return observation, 0.0, True",
        ) from None
    except ValueError:  # one that does not say what it takes
        pass
    return environment


AGENT_GIVES = ("row", "client", "base_url", "api_key")  # what the function of an agent may ask for
AN_AGENT = "async def agent(row, client), or def agent(row, base_url, api_key)"


def _check_agent(agent: Callable[..., Any]) -> Callable[..., Any]:
    """Raise `BadInput` for a function that asks for something else than an agent gets."""
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):  # one that does not say what it takes
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
            "client is an openai.OpenAI, or openai.AsyncOpenAI", "pip install openai, or ask for base_url and api_key",
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
    Rule("must be numbers by token id, or None; -inf bans a token", "write logit_bias={5: -1.0}"),
]
Stops = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    SEQUENCE,
    Rule("must be a sequence of non-empty strings", "a single one stands in a tuple too: stop=('END',)"),
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
    """How responses are drawn. Every field means the same on every generation engine.

    temperature: 0 is greedy; else 0.01 to 2. top_p, top_k, min_p: nucleus, top-k (0: off) and min-p truncation, the
        last to tokens at least min_p times as probable as the likeliest (0: off).
    keep_mask: keep for each token which tokens truncation left (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556,
        section 3.1), in columns `sampling_mask_ids` and `sampling_mask_sizes`, 4 bytes a token that was left and 4 a
        response token. The trainer's log-probabilities are then over the same tokens, and a `Correction` is right.
        vLLM gives them with top_k alone, or beside top_p and min_p.
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
        arguments that makes one, called once a sample. max_turns: most turns of the policy. max_calls: most tool calls;
        a turn with more than are left is not answered. max_seconds: by the clock, looked at between turns and while an
        environment answers. A conversation that a limit ends has its name as `ending`. concurrency,
        call_timeout_s: calls of environments under way at once on a rank, and the time limit of one. retries: how often
        a conversation whose environment failed begins again, from the same seed, with a new environment. most_failed:
        the share of rows whose environment may fail at last, see `generate_sequences`.
    most_open: conversations that are open at the same time on a rank; the others begin as these end. Each has at most
        one turn that its environment has not answered, so this bounds these, too. None: all.
    agent: a function, called once a sample, which asks for each turn itself, over HTTP: see `workbench.data.agent`.
        The other settings hold as with an environment. context: what the policy reads of a long conversation with an
        environment, see `Context`; None: all of it. max_turns: most answers that a sample gets; call_timeout_s: of
        the function's own time, in which it does not wait for an answer.

    `rollout_log_prob` is the log-probability of the sampled token under the distribution sampled from: logits, then
    bias, banned endings, penalties, temperature, min-p, top-k, top-p, in this order, renormalized. With none of them
    but temperature that is log softmax(logits / temperature), the trainer's definition; with others the gap between
    the two is theirs as well. With settings that leave tokens out, which are top_p, top_k, min_p, biases of -inf and
    min_new_tokens, a `Correction` is refused unless the mask is kept. Greedy
    responses carry log softmax(logits after bias and penalties).
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
    call_timeout_s: PositiveFloat = 30.0
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
                "it bounds what is read of a conversation with an environment; an agent chooses its contexts itself",
                "give environment=MyEnvironment too",
            )
        given = [name for name in ("max_calls", "max_seconds") if getattr(self, name) is not None]
        if self.agent is not None and given:
            raise BadInput(
                f"{' and '.join(given)} with agent=",
                "an agent makes its calls itself, and these limits are those of an environment",
                "let the function count them, or give call_timeout_s",
            )
        tool_s = getattr(self.environment, "timeout_s", None)  # of `wb.Tools`
        if isinstance(tool_s, int | float) and tool_s >= self.call_timeout_s:
            raise BadInput(
                f"call_timeout_s={self.call_timeout_s:g} with tools whose timeout_s is {tool_s:g}",
                "a turn waits for its tools, and past call_timeout_s its row fails, where the model could be told",
                f"write call_timeout_s={2 * tool_s:g}",
            )

    @property
    def keeps_mask(self) -> bool:
        """Whether there is a mask to keep: tokens are left out of what is sampled from."""
        return keeps_mask(vars(self))

    @property
    def several_turns(self) -> Callable[..., Any] | None:
        """The user's function that makes the responses conversations, if there is one."""
        return self.environment or self.agent

    @property
    def token_ids(self) -> list[int]:
        """All token ids that it names."""
        return [*self.stop_token_ids, *(self.logit_bias or ())]


def truncation(sampling: Mapping[str, Any]) -> dict[str, float]:
    """Those of the settings by which the engine samples from some tokens only, with their values; of `logit_bias`, how
    many tokens it bans. sampling: fields of `Sampling`."""
    off = MASKED if sampling.get("temperature", 1.0) else {}
    left = {name: sampling[name] for name, value in off.items() if name in sampling and sampling[name] != value}
    banned = sum(bias == -math.inf for bias in (sampling.get("logit_bias") or {}).values())
    return left | ({"logit_bias": banned} if banned else {}) | (
        {"min_new_tokens": sampling["min_new_tokens"]} if sampling.get("min_new_tokens") else {}
    )  # fmt: skip


def keeps_mask(sampling: Mapping[str, Any]) -> bool:
    """Whether there is a mask to keep: top_p, top_k or min_p leave tokens out. sampling: fields of `Sampling`."""
    return bool(sampling.get("keep_mask") and truncation(sampling).keys() & MASKED.keys())


def check_untruncated(what: str, truncated: Mapping[str, float]) -> None:
    """Raise `BadInput` where a correction would read rollouts of a truncated distribution. what: names the correction.
    truncated: see `truncation`.
    """
    if truncated:
        said = {"logit_bias": "a logit_bias of -inf for {:g} token(s)"}
        given = ", ".join(said.get(name, name + "={:g}").format(value) for name, value in truncated.items())
        off = [f"{name}={MASKED.get(name, 0)}" for name in truncated if name != "logit_bias"]
        off += ["finite biases"] if "logit_bias" in truncated else []
        mask = ", or with keep_mask=True before compute_log_prob" if truncated.keys() & MASKED.keys() else ""
        raise BadInput(
            f"{what} on rollouts that were sampled with {given}",
            "rollout_log_prob is over the tokens that were left, old_log_prob over all tokens: their ratio is the "
            "probability of the tokens that were left, not a difference between engine and trainer",
            f"sample with {', '.join(off)}{mask}, or leave it out",
        )


def check_mask(sampling: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` where the engine cannot give the mask that is to be kept. sampling: fields of `Sampling`."""
    if keeps_mask(sampling) and not sampling["top_k"] and generation is not None and generation.engine == "vllm":
        given = ", ".join(f"{name}={sampling[name]}" for name in truncation(sampling) if name in MASKED)
        raise BadInput(
            f"keep_mask=True with {given} and no top_k, on engine='vllm'",
            "vLLM names the tokens that were left where a top_k bounds their number",
            "add a top_k that is seldom reached, such as top_k=256, or use Generation(engine='transformers')",
        )


def check_room(sampling: Mapping[str, Any], generation: Generation | None) -> None:
    """Raise `BadInput` where no response can be as long as asked for: all would be cut silently.

    sampling: fields of `Sampling`.
    """
    new, context = sampling["max_new_tokens"], sampling.get("context")
    if generation is not None and context is not None and context.max_tokens > generation.max_model_tokens:
        raise BadInput(
            f"Context(max_tokens={context.max_tokens})",
            f"the model reads Generation.max_model_tokens={generation.max_model_tokens}",
            "lower it, or open the workbench with a larger Generation.max_model_tokens",
        )
    if generation is not None and context is None and new >= generation.max_model_tokens:
        raise BadInput(
            f"max_new_tokens={new}",
            f"prompt and response share Generation.max_model_tokens={generation.max_model_tokens}",
            "ask for fewer new tokens, or open the workbench with a larger Generation.max_model_tokens",
        )
