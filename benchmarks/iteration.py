"""Times one GRPO-like iteration (generate, log-prob, update) here and in TRL: same model, prompts and lengths.

    python benchmarks/iteration.py [--peers FOLDER] [--model smollm2-135m] [--dtype float32] [--iterations 4]

TRL lives in a folder of its own and is never imported by the product; `make peers` fills it. Each side runs alone,
in a process of its own with all cores, one after the other, TRL with memory as torch allocates it by default; the first
iteration warms up and is not counted. Both draw `prompts` x `samples` responses at temperature 1, and take one AdamW
step on a GRPO loss without KL. On a CPU those are 4 x 4 of at most 64 tokens by SmolLM2-135M, and TRL generates with
transformers; on a GPU 64 x 8 of exactly 512 tokens by a model of 1.39 billion parameters, and TRL generates with vLLM
in the same process. Where lengths differ, tokens are counted. Prints a line a side, and the ratio of samples a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATE = 1e-6
PEERS = str(ROOT / ".peers")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What both sides do. forced: every response has exactly `tokens` tokens. memory: share of a GPU for vLLM, on both
    sides (None: TRL takes its own default, this project what the placement leaves). micro_rows: TRL's rows a pass."""

    model: str
    prompts: int
    samples: int
    tokens: int
    dtype: str
    forced: bool = False
    memory: float | None = None
    micro_rows: int = 16
    iterations: int = 4

    @property
    def rows(self) -> int:
        """Responses an iteration."""
        return self.prompts * self.samples


CPU = Case(model="smollm2-135m", prompts=4, samples=4, tokens=64, dtype="float32")
GPU = Case(
    model="qwen2-1.4b", prompts=64, samples=8, tokens=512, dtype="bfloat16",
    forced=True, memory=0.25, micro_rows=8, iterations=2,
)  # fmt: skip


def digits(response: str) -> float:
    """The reward of both sides: the share of digits, so that groups differ."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def ours(case: Case) -> dict[str, Any]:
    """Seconds and response tokens of each iteration with the workbench: inline, training and vLLM in one process."""
    import torch

    import workbench as wb
    from benchmarks.models import folder

    def reward(prompt: str, response: str, **row: Any) -> float:
        return digits(response)

    on_gpu = torch.cuda.is_available()
    lab = wb.open(
        "iteration-benchmark",
        models={"actor": str(folder(case.model)), "reward": reward},
        prompts="arithmetic",
        training=wb.Training(engine="deepspeed" if on_gpu else "torch", learning_rate=LEARNING_RATE),
        generation=wb.Generation(
            engine="vllm", max_model_tokens=case.tokens + 192, kv_cache_gib=0.25, gpu_memory_fraction=case.memory
        ),
        dtype=case.dtype,
        backend="inline",
        runs=tempfile.mkdtemp(),
    )
    sampling = wb.Sampling(max_new_tokens=case.tokens, ignore_eos=case.forced)
    algorithm = wb.GRPO(lab, prompts=case.prompts, samples=case.samples, sampling=sampling)
    seconds, tokens = [], []
    for _ in range(case.iterations + 1):
        begun = time.perf_counter()
        metrics = algorithm.iterate()
        seconds.append(time.perf_counter() - begun)
        tokens.append(metrics["generate_sequences/response_tokens/mean"] * case.rows)
    stages = lab.spans().query("kind == 'compute'").groupby("stage")["duration_s"].median()
    lab.close()
    return {"seconds": seconds[1:], "tokens": tokens[1:], "stages": stages.round(2).to_dict()}


def trl(case: Case, peers: str) -> dict[str, Any]:
    """The same of TRL's GRPOTrainer."""
    sys.path.insert(0, peers)
    import pyarrow
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import datasets
    from benchmarks.models import folder
    from workbench.data.sources import read_rows

    datasets.disable_caching()  # type: ignore[attr-defined]
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in read_rows("arithmetic")]

    # a fingerprint of our own: the library's cannot be computed with every release of pyarrow
    dataset = datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint="arithmetic")  # type: ignore[attr-defined]

    def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [digits(completion[0]["content"]) for completion in completions]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begun)

    clock, on_gpu = Clock(), torch.cuda.is_available()
    with_vllm: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate"} if on_gpu else {}
    if on_gpu and case.memory is not None:
        with_vllm["vllm_gpu_memory_utilization"] = case.memory
    longer = {"ignore_eos": True} if on_gpu else {"min_new_tokens": case.tokens}
    trainer = GRPOTrainer(
        model=str(folder(case.model)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=not on_gpu,
            bf16=case.dtype == "bfloat16",
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            per_device_train_batch_size=min(case.micro_rows, case.rows),
            gradient_accumulation_steps=max(1, case.rows // case.micro_rows),
            num_generations=case.samples,
            max_completion_length=case.tokens,
            generation_kwargs=longer if case.forced else None,
            **with_vllm,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            max_steps=case.iterations + 1,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=dataset,
        callbacks=[clock],
    )
    trainer.train()
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    return {"seconds": clock.seconds[1:], "tokens": [n * case.rows for n in lengths[1:]], "stages": {}}


def alone(side: str, case: Case, peers: str = PEERS) -> dict[str, Any]:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--peers", peers, "--case", json.dumps(asdict(case))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    if importlib.util.find_spec("flashinfer") is None:  # by default vLLM's own sampler asks for it on a GPU
        environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if side == "trl":  # which `import workbench` would set
        environment["THP_MEM_ALLOC_ENABLE"] = "0"
    # not from the project's folder: its datasets/ would stand before the library of that name
    done = subprocess.run(command, cwd=tempfile.mkdtemp(), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def told(side: str, case: Case, result: dict[str, Any]) -> str:
    """A line of what one side did."""
    seconds = statistics.median(result["seconds"])
    return (
        f"{side:10} {seconds:6.2f} s an iteration (median of {len(result['seconds'])}, "
        f"{min(result['seconds']):.2f} to {max(result['seconds']):.2f}), {case.rows / seconds:.2f} samples/s, "
        f"{statistics.mean(result['tokens']):.0f} response tokens an iteration, "
        f"{sum(result['tokens']) / sum(result['seconds']):.0f} tokens/s {result['stages'] or ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=PEERS, help="folder with TRL (default: .peers)")
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--side", choices=("workbench", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        case = Case(**json.loads(arguments.case))
        print(json.dumps(ours(case) if arguments.side == "workbench" else trl(case, arguments.peers)))
        return
    if not (Path(arguments.peers) / "trl").exists():
        sys.exit(f"no TRL in {arguments.peers}: run `make peers`")
    import torch

    given = {name: vars(arguments)[name] for name in ("model", "dtype", "iterations")}
    changes = {name: value for name, value in given.items() if value is not None}
    case = Case(**{**asdict(GPU if torch.cuda.is_available() else CPU), **changes})
    seconds = {}
    for side in ("workbench", "trl"):
        result = alone(side, case, arguments.peers)
        seconds[side] = statistics.median(result["seconds"])
        print(told(side, case, result), flush=True)
    print(f"ratio workbench / trl, samples per second ({case.dtype}): {seconds['trl'] / seconds['workbench']:.2f}")


if __name__ == "__main__":
    main()
