"""What the training-engine tests run inside ranks of their own: one small training under any engine and world size."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.engines.communicator import Communicator, ParallelGroups, parallel_groups
from workbench.engines.training import Pass, TrainingEngine
from workbench.engines.training.deepspeed_engine import DeepSpeedEngine
from workbench.engines.training.torch_engine import TorchEngine
from workbench.models.heads import TokenLogProbs, TokenValues
from workbench.placement import Layout
from workbench.settings.training import Training
from workbench.telemetry import Recorder

CPU = torch.device("cpu")
ENGINES = ("torch", "zero0", "zero1", "zero2", "zero3")
# Parameters of tests: DeepSpeed's stages 1 and 2 are one optimizer, and 0 cuts nothing.
KINDS = [
    kind if kind in ("torch", "zero1", "zero3") else pytest.param(kind, marks=pytest.mark.thorough) for kind in ENGINES
]
DENOMINATOR = 60.0
TEMPERATURE = 0.7
# What DeepSpeed imports for ZeRO, torch's compiler with it. It looks for GPUs, which a fork could not use afterwards.
DEEPSPEED = ("deepspeed.runtime.zero.muon.original_muon",)
# What ranks with workers, and files of tests whose functions they run, import besides.
WORKERS = (
    "workbench.workers.roles.actor", "workbench.workers.roles.critic", "workbench.workers.role_state",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3", "tests.cases",
    "workbench.launch.opening", "pandas",
)  # fmt: skip


def everyone() -> Communicator:
    """Of the default process group; without one, of this process alone."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return Communicator(rank, ranks, Recorder())


def replicas() -> ParallelGroups:
    """Of `everyone`, each with the whole model."""
    return parallel_groups(Layout(d=everyone().world_size), everyone(), Recorder(), "cpu")


def tiny_model(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            attention_bias=True,
            use_cache=False,
        )
        return LlamaForCausalLM(config).eval()


def sequences(step: int, count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(4, 16, (count,), generator=generator).tolist()
    return [torch.randint(1, 97, (length,), generator=generator) for length in lengths]


def settings(kind: str, **changes: Any) -> Training:
    stage = 0 if kind == "torch" else int(kind[-1])
    given: dict[str, Any] = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "zero_stage": stage}
    # Adam divides by |gradient| + eps: a smaller eps magnifies rounding where a gradient is next to 0.
    given |= {"eps": 1e-6, "engine": "torch" if kind == "torch" else "deepspeed"}
    return Training(**(given | {"schedule": "cosine", "warmup_steps": 2, "total_steps": 10} | changes))


def make_engine(
    kind: str, dtype: torch.dtype = torch.float32, *, module: Any = None, tied: bool = True, **changes: Any
) -> TrainingEngine:
    engine = TorchEngine if kind == "torch" else DeepSpeedEngine
    module = TokenLogProbs(tiny_model(tied=tied), micro_batch_tokens=1024) if module is None else module
    return engine(module, settings(kind, **changes), replicas(), device=CPU, dtype=dtype)


def negative_log_likelihood(batch: list[Tensor]) -> Pass:
    input_ids, lengths = torch.cat(batch), tuple(map(len, batch))
    positions = torch.cat([torch.arange(n - 1) + end - n for n, end in zip(lengths, accumulate(lengths), strict=True)])
    inputs = {"input_ids": input_ids, "lengths": lengths, "positions": positions, "targets": input_ids[positions + 1]}
    return Pass(inputs=inputs | {"temperature": TEMPERATURE}, loss=lambda output: -output[0].sum() / DENOMINATOR)


def squared_values(batch: list[Tensor]) -> Pass:
    input_ids = torch.cat(batch)
    inputs = {"input_ids": input_ids, "lengths": tuple(map(len, batch)), "positions": torch.arange(len(input_ids))}
    return Pass(inputs=inputs, loss=lambda values: (values - input_ids / 97).square().sum() / DENOMINATOR)


def loss_now(engine: TrainingEngine, micro: Pass) -> Tensor:
    return micro.loss(engine.forward(**micro.inputs))


Loss = Callable[[list[Tensor]], Pass]


def train(
    engine: TrainingEngine,
    steps: range,
    *,
    loss: Loss = negative_log_likelihood,
    cuts: tuple[int, ...] | None = None,
    scale: float = 1.0,
    replica: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Optimizer steps on this rank's share of each global batch, in micro-batches of uneven size.

    replica: this rank's, and how many there are; None: each rank is one.
    """
    alone = not dist.is_initialized()
    rank, world_size = replica or ((0, 1) if alone else (dist.get_rank(), dist.get_world_size()))
    reports = []
    for step in steps:
        mine = sequences(step)[rank::world_size]
        bounds = [0, *((1, 4) if world_size == 1 else (1,)), len(mine)] if cuts is None else [0, *cuts, len(mine)]
        losses: list[float] = []

        def noted(micro: Pass, losses: list[float] = losses) -> Pass:
            def scaled(output: Any) -> Tensor:
                value = micro.loss(output) * scale
                losses.append(float(value.detach()))
                return value

            return dataclasses.replace(micro, loss=scaled)

        report = engine.step([noted(loss(mine[start:end])) for start, end in itertools.pairwise(bounds)])
        reports.append(dataclasses.asdict(report) | {"loss": sum(losses)})
    return reports


def weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def asked(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """The values of these parameters, tuples where they are several, in those tests of the file that run: what a
    fixture of the file has to compute."""
    found = []
    for item in request.session.items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == request.path and params.keys() >= set(names):
            values = tuple(params[name] for name in names)
            found.append(values if len(names) > 1 else values[0])
    return list(dict.fromkeys(found))


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns on each rank of a gloo world of new processes."""
    # every rank is forked from one process that has imported all this: seconds less for each
    more = () if torch.cuda.is_available() else (*DEEPSPEED, *WORKERS)
    multiprocessing.set_forkserver_preload([__name__, *more])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, (function, world_size, folder, arguments), world_size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank: int, function: Callable[..., Any], world_size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # ZeRO 3 collects garbage in each step: not among what was imported
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    dist.barrier()


def value_module() -> TokenValues:
    backbone = tiny_model(seed=5).model
    return TokenValues(backbone, 32, init="normal", seed=3)
