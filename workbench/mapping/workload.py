"""The work of one iteration: its calls, in order, the number and lengths of its rows, and the roles' models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from workbench.errors import BadInput
from workbench.errors.plain_text import shown
from workbench.models.dense_config import SIZES, DenseConfig, read_plan_config
from workbench.placement.role_model import RoleModel, head_of
from workbench.settings.roles import ROLLOUT, TRAINED_ROLES, check_role
from workbench.settings.training import Training
from workbench.support.validation import NonNegativeFloat, NonNegativeInt, Number, PositiveInt, Rule, one_of, settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Kind = Literal["generate", "infer", "train"]
STAGES = ("generation", "preparation", "training")
"""The three stages of an iteration (HybridFlow, section 6): a stage waits for all calls of the previous one."""

STAGE_OF: dict[Kind, str] = dict(zip(("generate", "infer", "train"), STAGES, strict=True))


@dataclass(frozen=True)
class Call:
    """One operation of a role. kind: the kind of work. inputs: the names of the calls whose rows it reads."""

    name: str
    role: str
    kind: Kind
    inputs: tuple[str, ...] = ()

    @property
    def stage(self) -> str:
        """The stage of `STAGES` that this call belongs to."""
        return STAGE_OF[self.kind]


_Line = tuple[str, str, Kind]


def _calls(*lines: _Line) -> tuple[Call, ...]:
    """Return calls that each read the results of all calls of earlier stages."""
    found: list[Call] = []
    for name, role, kind in lines:
        before = tuple(c.name for c in found if STAGES.index(c.stage) < STAGES.index(STAGE_OF[kind]))
        found.append(Call(name, role, kind, before))
    return tuple(found)


_GENERATE: _Line = ("generate_sequences", "actor", "generate")
_LOG_PROB: _Line = ("compute_log_prob", "actor", "infer")
_REFERENCE: _Line = ("compute_ref_log_prob", "reference", "infer")
_VALUES: _Line = ("compute_values", "critic", "infer")
_REWARD: _Line = ("compute_reward", "reward", "infer")
_CRITIC: _Line = ("update_critic", "critic", "train")
_ACTOR: _Line = ("update_actor", "actor", "train")

CALLS: dict[str, tuple[Call, ...]] = {
    "ppo": _calls(_GENERATE, _LOG_PROB, _REFERENCE, _VALUES, _REWARD, _CRITIC, _ACTOR),
    "grpo": _calls(_GENERATE, _LOG_PROB, _REFERENCE, _REWARD, _ACTOR),
    "remax": _calls(_GENERATE, ("generate_sequences_2", "actor", "generate"), _LOG_PROB, _REFERENCE, _REWARD,
                    ("compute_reward_2", "reward", "infer"), _ACTOR),
    "safe-rlhf": _calls(_GENERATE, _LOG_PROB, _REFERENCE, _VALUES, ("compute_cost_values", "cost_critic", "infer"),
                        _REWARD, ("compute_cost", "cost", "infer"), _CRITIC,
                        ("update_cost_critic", "cost_critic", "train"), _ACTOR),
}  # fmt: skip
"""The calls of an algorithm. Safe-RLHF omits the cost critic's calls if no cost critic model is given."""


@settings()
class Workload:
    """One iteration of an algorithm.

    algorithm: a name of `CALLS`, or any name if `calls` are given. prompt_tokens: per row. response_tokens: per row, or
    a sample of lengths: their mean decides the time of passes, the longest ends generation. rows: responses per
    iteration (prompts x samples). updates: optimizer steps per epoch over the rows. epochs: over the rows. dtype: of
    the matrix products. training: the training engine, its micro-batches, and whether activations are recomputed.
    engine: "cluster": roles of the torch engine have the memory and speed of cluster systems (Megatron's distributed
    optimizer, ZeRO-1): bfloat16 weights, fp32 gradients, optimizer states sharded over the replicas; activations are
    recomputed only if they do not fit. "workbench": as in `training`, with this workbench's engines. ahead: staleness;
    the iterations that rollout workers, on their own devices, generate ahead, so that generation and training run at
    the same time. take_turns: whether only one role at a time is on a device, and the others' states are in host memory
    (`wb.open(share_memory=True)`). between_s: seconds of an iteration in which no call runs: the controller, functions
    and arithmetic without a model. sync_share: the share of a weight sync's bytes that is sent if patches replace whole
    weights.
    """

    algorithm: str = "ppo"
    prompt_tokens: PositiveInt = 1024
    response_tokens: PositiveInt | Annotated[Sequence[PositiveInt], Field(min_length=1)] = 1024
    rows: PositiveInt = 1024
    updates: PositiveInt = 8
    epochs: PositiveInt = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    training: Training = field(
        default_factory=lambda: Training(engine="torch", micro_batch_tokens=4096, activation_checkpointing=True)
    )
    calls: tuple[Call, ...] = ()
    engine: Literal["cluster", "workbench"] = "cluster"
    ahead: NonNegativeInt = 0
    take_turns: bool = False
    between_s: NonNegativeFloat = 0.0
    sync_share: Annotated[Number, Field(ge=0, le=1), Rule("a share, 0 to 1", "write 0.01 for 1 %")] = 1.0

    def __post_init__(self) -> None:
        if self.rows < self.updates:
            raise BadInput(f"Workload(rows={self.rows}, updates={self.updates})", "each update needs at least one row",
                           "use more rows, or fewer updates")  # fmt: skip
        names = [call.name for call in self.calls]
        for call in self.calls:
            one_of(f"Call {call.name!r}: kind", call.kind, tuple(STAGE_OF))
            for name in call.inputs:
                one_of(f"Call {call.name!r}: inputs", name, tuple(names))
        if not self.calls:
            one_of("Workload.algorithm", self.algorithm, tuple(CALLS))
            object.__setattr__(self, "calls", CALLS[self.algorithm])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of responses: one length, or the sample."""
        given = self.response_tokens
        return tuple(given) if isinstance(given, Iterable) else (given,)

    @property
    def longest_row(self) -> int:
        return self.prompt_tokens + max(self.lengths)

    @cached_property
    def mean_response(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @cached_property
    def row_tokens(self) -> float:
        return self.prompt_tokens + self.mean_response

    @cached_property
    def mean_context(self) -> float:
        """The mean number of tokens that a token attends to: half its row; long rows have more tokens in this mean."""
        rows = [self.prompt_tokens + length for length in self.lengths]
        return sum(row * row for row in rows) / (2 * sum(rows))

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of the global batch, the unit of throughput (HybridFlow, section 8.1)."""
        return self.rows * self.row_tokens

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have calls, in the order of their first call."""
        return tuple(dict.fromkeys(call.role for call in self.calls))

    def of(self, role: str) -> tuple[Call, ...]:
        """The calls of a role."""
        return tuple(call for call in self.calls if call.role == role)

    def without(self, names: Iterable[str]) -> Workload:
        """Return the workload without some calls; calls that read their rows lose these inputs."""
        gone = set(names)
        if unknown := gone - {call.name for call in self.calls}:
            raise BadInput(f"call {sorted(unknown)[0]!r}", f"the calls are {', '.join(c.name for c in self.calls)}")
        calls = [replace(c, inputs=tuple(i for i in c.inputs if i not in gone)) for c in self.calls]
        return replace(self, calls=tuple(call for call in calls if call.name not in gone))

    def with_rollout(self, ahead: int = 0) -> Workload:
        """Return the workload with generation by rollout workers, separate from the actor."""
        calls = [replace(c, role=ROLLOUT) if c.kind == "generate" else c for c in self.calls]
        return replace(self, calls=tuple(calls), ahead=ahead)

    def with_roles(self, roles: Iterable[str]) -> Workload:
        """Return the workload with the calls of these roles only."""
        kept = set(roles)
        return self.without(call.name for call in self.calls if call.role not in kept)

    def with_models(self, models: Mapping[str, Any]) -> Workload:
        """Return the workload without calls of functions (model None), and of the cost critic if it has no model."""
        for role in models:
            check_role(role)
        without = {"cost_critic"} - {*models} | {role for role, model in models.items() if model is None}
        return self.with_roles(set(self.roles) - without)

    @classmethod
    def of_algorithm(cls, algorithm: Any, *, response_tokens: int | Sequence[int], prompt_tokens: int) -> Workload:
        """Return the workload of an algorithm on a workbench, from its graph, its rows and the workbench's settings.
        Arithmetic without a model, and calls of functions, cost nothing here."""
        lab, graph, calls = algorithm.lab, algorithm.graph(), []
        kinds: Mapping[str, Kind] = {"generate_sequences": "generate"}
        models = lab.description.role_models()
        modelled = {role for role, model in models.items() if model is not None}
        read, sources = graph.edges(), dict[str, tuple[str, ...]]()
        for stage in graph.stages:
            inputs = tuple(dict.fromkeys(name for i in sorted(read[stage.name]) for name in sources.get(i, ())))
            kind = kinds.get(stage.operation, "train" if stage.updates else "infer")
            role = "actor" if stage.role == ROLLOUT else stage.role  # rollout workers generate for the actor
            if role in modelled:
                calls.append(Call(stage.name, role, kind, inputs))
                inputs = (stage.name,)  # a stage that is not placed passes on the calls that it reads
            sources[stage.name] = inputs
        lead = models[lab.description.lead]
        rows = getattr(algorithm, "prompts", 1) * getattr(algorithm, "samples", 1)
        return cls(algorithm=type(algorithm).__name__, prompt_tokens=prompt_tokens, response_tokens=response_tokens,
                   rows=rows, updates=lead.training.minibatches, epochs=getattr(algorithm, "epochs", 1),
                   dtype=lead.dtype, training=lead.training, calls=tuple(calls), engine="workbench",
                   take_turns=lab.description.takes_turns)  # fmt: skip


def config_of(model: str | Path | PreTrainedConfig | DenseConfig) -> PreTrainedConfig | DenseConfig:
    """Return the config of a size preset, of a model's name or folder, or the given one. Raises `ModelUnavailable`."""
    if isinstance(model, str | Path):
        return read_plan_config(model)
    if not hasattr(model, "get_text_config"):
        raise BadInput(f"model {shown(model)}", "must be a size, a name or a config", f"use one of {', '.join(SIZES)}")
    return model


def role_models(models: Mapping[str, Any], workload: Workload) -> dict[str, RoleModel]:
    """Return the models to place. models: by role, a preset, a name, a folder, a config, or a `RoleModel`; a role whose
    model is None is a function and is left out."""
    found = {}
    if ROLLOUT in workload.roles and ROLLOUT not in models:
        models = {**models, ROLLOUT: models.get("actor")}
    for role, model in models.items():
        if model is None:
            continue
        if not isinstance(model, RoleModel):
            config = deepcopy(config_of(model))  # its bytes are cached, and a user may change a config
            model = RoleModel(config=config, head=head_of(role), dtype=workload.dtype, training=workload.training,
                              trained=role in TRAINED_ROLES)  # fmt: skip
        found[role] = model
    if ROLLOUT in found:
        found[ROLLOUT] = replace(found[ROLLOUT], trained=False, samples_only=True)
    if lost := [role for role in workload.roles if role not in found]:
        raise BadInput(
            f"no model for {', '.join(lost)}",
            f"{workload.algorithm} has calls of {', '.join(workload.roles)}",
            f"give one of {', '.join(SIZES)}, a folder or a config for {lost[0]}; None, if it is a function",
        )
    return found
