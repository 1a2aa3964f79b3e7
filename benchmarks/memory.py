"""Compares the memory estimate with what engines hold and with the peak of a pass, role by role.

    python benchmarks/memory.py [--device cpu] [--size small] [--tokens 2048]

One role a line, in a process of its own: bytes that last between updates, and those that one pass of `--tokens` tokens
needs beside them, gradients among them; estimated, measured, and the ratio. On a CPU tensors are counted, on a GPU
torch's allocator says. `against_estimate(lab)` does the same for a workbench that has made an iteration on a GPU.
Exit code 1 where an estimate is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from workbench.engines.communicator import Communicator, parallel_groups
from workbench.engines.training import Pass, make_training_engine
from workbench.models.heads import PackedModule, TokenLogProbs, TokenValues
from workbench.models.lora import LoRA, add_lora
from workbench.placement import Layout
from workbench.placement.memory import rank_memory
from workbench.placement.role_model import RoleModel, head_of
from workbench.settings.training import Training
from workbench.telemetry import Recorder

if TYPE_CHECKING:
    import pandas as pd

    import workbench as wb

# hidden size, layers, heads, heads of keys and values, MLP, vocabulary; embeddings are tied
SIZES = {
    "tiny": (128, 2, 4, 2, 352, 2048),
    "small": (384, 6, 6, 2, 1024, 8192),
    "135m": (576, 30, 9, 3, 1536, 49152),
    "1.4b": (1536, 28, 12, 2, 8960, 49152),
}
ENGINES = ("torch", "zero0", "zero1", "zero2", "zero3")
DTYPES = ("float32", "bfloat16")
ROW_TOKENS = 512
ALLOWED = 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A role to measure. engine: one of ENGINES, or "frozen"."""

    role: str
    engine: str
    dtype: str
    adapter: bool = False
    recomputed: bool = False
    size: str = "small"
    tokens: int = 2048
    device: str = "cpu"

    def __str__(self) -> str:
        more = " adapter" * self.adapter + " recomputed" * self.recomputed
        return f"{self.role} {self.engine} {self.dtype}{more}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Bytes that last, and that a pass needs beside them."""

    case: str
    lasting: int
    lasting_estimated: int
    passing: int
    passing_estimated: int

    @property
    def within(self) -> bool:
        """Whether lasting bytes, and what is held at the peak, are estimated to within 10 %."""
        peak, estimated = self.lasting + self.passing, self.lasting_estimated + self.passing_estimated
        pairs = [(self.lasting_estimated, self.lasting), (estimated, peak)]
        return all(abs(told / held - 1) <= ALLOWED for told, held in pairs)


def cases(size: str, tokens: int, device: str) -> Iterator[Case]:
    """Trained roles under all engines, roles that are only run, adapters, recomputed activations."""
    more: dict[str, Any] = {"size": size, "tokens": tokens, "device": device}
    for dtype in DTYPES:
        for engine in ENGINES:
            yield Case(role="actor", engine=engine, dtype=dtype, **more)
        yield Case(role="critic", engine="torch", dtype=dtype, **more)
        yield Case(role="critic", engine="zero1", dtype=dtype, **more)
        for role in ("reference", "reward"):
            yield Case(role=role, engine="frozen", dtype=dtype, **more)
        yield Case(role="actor", engine="zero1", dtype=dtype, adapter=True, **more)
        for engine in ("torch", "zero1"):
            yield Case(role="actor", engine=engine, dtype=dtype, recomputed=True, **more)


def role_model(case: Case) -> RoleModel:
    """What the estimate is made of."""
    from transformers import Qwen2Config

    hidden, layers, heads, key_heads, inner, vocabulary = SIZES[case.size]
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=True, use_cache=False,
        max_position_embeddings=max(2048, ROW_TOKENS),
    )  # fmt: skip
    stage = int(case.engine[-1]) if case.engine.startswith("zero") else 1
    training = Training(
        engine="deepspeed" if case.engine.startswith("zero") else "torch", zero_stage=stage,
        micro_batch_tokens=case.tokens, activation_checkpointing=case.recomputed,
    )  # fmt: skip
    return RoleModel(
        config=config, head=head_of(case.role), dtype=case.dtype, training=training,
        trained=case.engine != "frozen", adapter=LoRA(rank=8) if case.adapter else None,
    )  # fmt: skip


def measured(case: Case) -> Row:
    """One case, in this process."""
    from transformers import Qwen2ForCausalLM

    from workbench.support.machine import cores

    torch.set_num_threads(cores())
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if case.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    role, device, recorder = role_model(case), torch.device(case.device), Recorder()
    with device:  # initialised there
        model = Qwen2ForCausalLM(role.config).eval()
    if role.adapter is not None:
        add_lora(model, role.adapter, 0)
    module: Any = TokenLogProbs(model, micro_batch_tokens=case.tokens) if role.head == "lm" else (
        TokenValues(model.model, role.config.hidden_size)
    )  # fmt: skip
    groups = parallel_groups(Layout(), Communicator(0, 1, recorder), recorder, device.type)
    engine = make_training_engine(
        module, role.training if role.trained else None, groups, device=device, dtype=getattr(torch, case.dtype)
    )
    one, peak_of = a_pass(module, case.tokens, device), peak_on_gpu if device.type == "cuda" else peak_on_cpu
    if role.trained:
        engine.step([one])

        def work() -> None:
            engine.step([one, one])  # with the gradients of the first while the second runs
    else:

        def work() -> None:
            with torch.no_grad():
                engine.forward(**one.inputs)

    lasting = sum(engine.memory_bytes().values())
    estimate = rank_memory(role, Layout(), 0, cache_bytes=0 if case.device == "cuda" else None)
    return Row(
        case=str(case), lasting=lasting, lasting_estimated=estimate.lasting, passing=peak_of(work),
        passing_estimated=estimate.passing,
    )  # fmt: skip


def a_pass(module: PackedModule, tokens: int, device: torch.device) -> Pass:
    """A pass over packed rows of ROW_TOKENS tokens, read at all positions that have a next token."""
    rows = [ROW_TOKENS] * (tokens // ROW_TOKENS)
    vocabulary = module.get_backbone().config.get_text_config().vocab_size
    ids = torch.arange(sum(rows), device=device) % vocabulary
    positions = torch.arange(sum(rows), device=device).view(-1, ROW_TOKENS)[:, :-1].flatten()
    inputs: dict[str, Any] = {"input_ids": ids, "lengths": tuple(rows), "positions": positions}
    if isinstance(module, TokenLogProbs):
        trained = any(parameter.requires_grad for parameter in module.parameters())
        inputs |= {"targets": ids[positions + 1], "with_entropy": trained}  # as updates report it

    def loss(output: Any) -> torch.Tensor:
        values: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return -values.mean()

    return Pass(inputs=inputs, loss=loss)


def peak_on_cpu(work: Callable[[], None]) -> int:
    """Bytes that were allocated at the most beside those before, by the events of torch's CPU allocator."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    held = most = 0
    found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(found, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def peak_on_gpu(work: Callable[[], None]) -> int:
    """The same by CUDA's allocator."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def against_estimate(lab: wb.Workbench) -> pd.DataFrame:
    """A row a role of a workbench on GPUs that has made an iteration: what it holds between stages, and the peak of its
    device's allocator in its stages, each estimated, measured, and their ratio."""
    import pandas as pd

    estimate, live, spans = lab.estimate(), lab.topology(), lab.spans()
    turns, rows = estimate.take_turns, list[dict[str, Any]]()
    for tenant in estimate.tenants:
        here = live[(live["role"] == tenant.role) & (live["rank"] == tenant.rank)].iloc[0]
        uses = [name for name in live.columns if name.endswith("_bytes") and not name.startswith("host_")]
        # what waits in host memory is the role's too; vLLM sleeps or not, and torch counts its memory either way
        held = int(here[[use for use in uses if not (turns and use.startswith("generation"))]].sum())
        memory = tenant.memory
        lasting = memory.lasting - memory.generating * turns
        if turns:
            around = lasting + sum(other.memory.generating for other in estimate.on(tenant.device))
        else:
            around = estimate.lasting(tenant.device)
        mine = spans[(spans["role"] == tenant.role) & (spans["rank"] == tenant.rank) & (spans["kind"] == "compute")]
        peak, estimated = int(mine["peak_memory_bytes"].max()), around + memory.passing
        rows.append({
            "role": tenant.role, "rank": tenant.rank,
            "lasting_estimated_bytes": lasting, "lasting_bytes": held, "lasting_ratio": lasting / max(held, 1),
            "peak_estimated_bytes": estimated, "peak_bytes": peak, "peak_ratio": estimated / max(peak, 1),
        })  # fmt: skip
    return pd.DataFrame(rows)


def table(size: str, tokens: int, device: str) -> list[Row]:
    """All cases, each in a process of its own: one process cannot forget what it allocated."""
    found = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in pool.map(measured, cases(size, tokens, device)):
            found.append(row)
            print(_line(row), flush=True)
    return found


def _line(row: Row) -> str:
    ratio = {name: told / max(held, 1) for name, told, held in (
        ("lasting", row.lasting_estimated, row.lasting), ("pass", row.passing_estimated, row.passing),
        ("peak", row.lasting_estimated + row.passing_estimated, row.lasting + row.passing),
    )}  # fmt: skip
    numbers = "  ".join(f"{asdict(row)[name] / 1e6:9,.1f}" for name in (
        "lasting", "lasting_estimated", "passing", "passing_estimated"
    ))  # fmt: skip
    ratios = "  ".join(f"{value:5.2f}" for value in ratio.values())
    return f"{row.case:40} {numbers}  {ratios}  {'' if row.within else 'off'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    print(f"{'MB':40} {'lasting':>9}  {'estimated':>9}  {'pass':>9}  {'estimated':>9}  last.   pass   peak")
    rows = table(asked.size, asked.tokens, asked.device)
    off = [row.case for row in rows if not row.within]
    print(f"{len(rows) - len(off)} of {len(rows)} within {ALLOWED:.0%}" + (f"; off: {', '.join(off)}" if off else ""))
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
