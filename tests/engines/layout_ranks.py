"""What the tests of 3D training run inside ranks of their own, and in one process to compare with."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.engines.training_ranks import (
    CPU,
    make_engine,
    negative_log_likelihood,
    sequences,
    settings,
    squared_values,
    tiny_model,
    train,
    weights,
)
from workbench.engines.communicator import Communicator, parallel_groups
from workbench.engines.training import ParallelGroups, TrainingEngine, make_training_engine
from workbench.errors import BadInput
from workbench.models.heads import PackedModule, TokenLogProbs, TokenValues
from workbench.placement import Layout
from workbench.telemetry import Recorder

SHAPE: dict[str, Any] = {
    "vocab_size": 97,  # two tensor ranks have 49 and 48 rows
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "use_cache": False,
    "pad_token_id": 3,  # whose embedding has no gradient
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tied llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "deep": (Qwen2ForCausalLM, Qwen2Config, {"num_hidden_layers": 4}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": False, "head_dim": 16}),
    "wide": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
}
CASES = ("tied llama", "qwen2", "qwen3", "critic")
RECOMPUTING = ("tied llama", "critic")


def module_of(case: str) -> PackedModule:
    if case == "critic":
        return TokenValues(model_of("qwen2").model, SHAPE["hidden_size"], init="normal", seed=3)
    return TokenLogProbs(model_of(case), micro_batch_tokens=1024)


def model_of(family: str) -> Any:
    kind, config, more = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config(**{**SHAPE, **more})).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # 0 and 1 otherwise, which hides what is left out or added twice
                torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.3)
    return model


def groups_of(layout: Layout) -> ParallelGroups:
    recorder = Recorder()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return parallel_groups(layout, Communicator(rank, size, recorder), recorder, "cpu")


def engine_of(
    case: str, groups: ParallelGroups, dtype: torch.dtype = torch.float32, kind: str = "torch", **changes: Any
) -> TrainingEngine:
    # Adam divides by |gradient| + eps: a small eps magnifies rounding
    given = settings(kind, eps=1e-3, activation_checkpointing=case in RECOMPUTING, **changes)
    return make_training_engine(module_of(case), given, groups, device=CPU, dtype=dtype)


def outcome(case: str, layout: Layout, kind: str = "torch") -> dict[str, Any]:
    """What a rank sees of the gradients, three steps, a forward pass, and going back to before the last two steps."""
    groups = groups_of(layout)
    engine = engine_of(case, groups, kind=kind)
    loss = squared_values if case == "critic" else negative_log_likelihood
    replica = groups.data.rank, groups.data.world_size
    mine = sequences(9)[replica[0] :: replica[1]]
    before = _held(engine)
    gradients = {name: g.clone() for name, g in engine.gradients([loss(mine[:1]), loss(mine[1:2]), loss(mine[2:])])}
    untouched = all(torch.equal(weight, before[name]) for name, weight in engine.local_weights())
    reports = train(engine, range(1), loss=loss, replica=replica)
    saved = engine.state_dict()
    reports += train(engine, range(1, 3), loss=loss, replica=replica)
    trained = _held(engine)
    engine.load_state_dict(saved)
    train(engine, range(1, 3), loss=loss, replica=replica)
    return {
        "counts": groups.is_leader,
        "gradients": gradients,
        "untouched": untouched,
        "reports": reports,
        "weights": weights(engine),
        "restored": all(torch.equal(weight, trained[name]) for name, weight in engine.local_weights()),
        "local": trained,
        "memory": engine.memory_bytes(),
        "moved_bytes": engine.moved_bytes,
        "output": _read(case, engine),
    }


def first_step(kind: str, layout: Layout | None, given: dict[str, Any]) -> dict[str, Any]:
    """Weights before and after one step, its gradient, bytes, the elements of each weight's first moment on this rank,
    and whether a saved state goes on alike. layout: None: data parallel over all ranks."""

    def made() -> TrainingEngine:
        if layout is None:
            return make_engine(kind, **given)
        module = TokenLogProbs(tiny_model(), micro_batch_tokens=1024)
        return make_training_engine(module, settings(kind, **given), groups_of(layout), device=CPU, dtype=torch.float32)

    engine, other = made(), made()
    alone = layout is not None or not dist.is_initialized()
    replica = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    batch = [negative_log_likelihood(sequences(0)[replica[0] :: replica[1]])]
    before = weights(engine)
    gradients = {name: g.clone() for name, g in engine.gradients(batch)}
    train(engine, range(1), cuts=(), replica=replica)
    held = engine.memory_bytes()  # before weights are gathered: ZeRO-3 drops those that it has kept whole
    found = {"before": before, "gradients": gradients, "after": weights(engine), "bytes": held}
    found["moments"] = {name: moment.numel() for name, moment in engine.held_state("exp_avg") if moment.numel()}
    other.load_state_dict(engine.state_dict())
    for one in (engine, other):
        train(one, range(1, 3), cuts=(), replica=replica)
    pairs = zip(weights(engine).values(), weights(other).values(), strict=True)
    return found | {"alike": all(torch.equal(*pair) for pair in pairs)}


def first_steps(kinds: tuple[str, ...], layout: Layout | None, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind: first_step(kind, layout, given) for kind in kinds}


def stepped_by_hand(weight: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """The first step of AdamW: decay of matrices, then m / (sqrt(v) + eps), whose corrections of bias cancel."""
    decayed = weight.double() * (1 - rate * 0.1 if weight.dim() > 1 else 1.0)
    g = gradient.double()
    return decayed - rate * g / (g.abs() + 1e-6)


def _held(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.local_weights()}


def _read(case: str, engine: TrainingEngine) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies, or values, as every rank has them afterwards."""
    batch = sequences(11, 3)
    input_ids, lengths = torch.cat(batch), tuple(map(len, batch))
    inputs: dict[str, Any] = {"input_ids": input_ids, "lengths": lengths}
    positions = torch.cat([torch.arange(n - 1) + end - n for n, end in zip(lengths, accumulate(lengths), strict=True)])
    with torch.no_grad():
        if case == "critic":
            return (engine.everywhere(engine.forward(**inputs, positions=positions)),)
        asked = {"targets": input_ids[positions + 1], "temperature": 0.7, "with_entropy": True}
        log_probs, entropies = engine.forward(**inputs, positions=positions, **asked)
        return engine.everywhere(log_probs), engine.everywhere(entropies)


def outcomes(tried: list[tuple[Layout, str]], kinds: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Of each layout and case; kinds: the engine of each, where it is not torch's."""
    found = []
    for (layout, case), kind in zip(tried, kinds or ("torch",) * len(tried), strict=True):
        found.append(more(layout, kind) if case == "more" else outcome(case, layout, kind))
    return found


def more(layout: Layout, kind: str) -> dict[str, Any]:
    """bf16, micro-batches, a loss that raises, a skipped step, a frozen model, and a model that cannot be cut."""
    groups = groups_of(layout)
    found: dict[str, Any] = {}
    low = engine_of("qwen3", groups, torch.bfloat16, kind, schedule="constant", warmup_steps=0)
    found["bf16 losses"] = [train(low, range(1), replica=(0, 1))[0]["loss"] for _ in range(8)]
    batch = [negative_log_likelihood(sequences(1))]
    squares = sum(float(gradient.double().square().sum()) for _, gradient in low.gradients(batch))
    found["bf16 norms"] = squares**0.5, low.step(batch).grad_norm
    found["bf16 exported"] = {weight.dtype for weight in weights(low).values()}
    norms, ends = [], []
    for cuts in ((), (1, 2, 3, 4, 5, 6), (4,)):
        engine = engine_of("tied llama", groups, kind=kind)
        norms.append(train(engine, range(1), cuts=cuts, replica=(0, 1))[0]["grad_norm"])
        ends.append(weights(engine))
    found |= {"norms": norms, "ends": ends}
    engine = engine_of("qwen2", groups, kind=kind)
    start = weights(engine)
    skipped = train(engine, range(1), scale=float("nan"), replica=(0, 1))[0]["skipped"]
    found["skipped"] = skipped and all(torch.equal(weight, start[name]) for name, weight in weights(engine).items())
    frozen = make_training_engine(module_of("tied llama"), None, groups, device=CPU, dtype=torch.float32)
    own = weights(engine_of("tied llama", groups))
    found["frozen"] = [bool(torch.equal(weight, own[name])) for name, weight in frozen.named_weights()]
    found["with gradients"] = _refusal(lambda: low.forward(**batch[0].inputs))
    found["odd model"] = _refusal(lambda: _odd_model(groups, kind))
    return found


def _odd_model(groups: ParallelGroups, kind: str) -> None:
    """A model that does something to what comes before its first layer, and to the output of a linear layer's."""
    module = module_of("qwen2")
    backbone: Any = module.get_backbone()
    backbone.register_forward_pre_hook(_scaled, with_kwargs=True)
    if kind != "torch":
        backbone.layers[0].mlp.down_proj.register_forward_hook(lambda _, args, output: output.tanh())
    make_training_engine(module, settings(kind), groups, device=CPU, dtype=torch.float32)


def _scaled(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if "inputs_embeds" in kwargs:
        kwargs = {**kwargs, "inputs_embeds": 2 * kwargs["inputs_embeds"]}
    return args, kwargs


def _refusal(action: Any) -> str:
    try:
        action()
    except BadInput as error:
        return str(error)
    return ""
