"""Times one GRPO-like iteration (generate, log-prob, update) here and in TRL: same model, prompts and lengths.

    python benchmarks/iteration.py --peers FOLDER [--dtype float32] [--iterations 4]

TRL lives in a folder of its own and is never imported by the product; `make peers` fills it. Each side runs alone,
in a process of its own with all cores, one after the other; the first iteration warms up and is not counted. Both draw
4 prompts x 4 samples of at most 64 tokens at temperature 1, and take one AdamW step on a GRPO loss without KL. Lengths
differ by what was sampled, so tokens are counted. Prints a line a side, and the ratio of samples per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL, PROMPTS, SAMPLES, TOKENS, LEARNING_RATE = "smollm2-135m", 4, 4, 64, 1e-6


def digits(response: str) -> float:
    """The reward of both sides: the share of digits, so that groups differ."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def ours(dtype: str, iterations: int) -> dict[str, Any]:
    """Seconds and response tokens of each iteration with the workbench: inline, torch and vLLM in one process."""
    import workbench as wb

    def reward(prompt: str, response: str, **row: Any) -> float:
        return digits(response)

    lab = wb.open(
        "grpo-against-trl",
        models={"actor": MODEL, "reward": reward},
        prompts="arithmetic",
        training=wb.Training(engine="torch", learning_rate=LEARNING_RATE),
        generation=wb.Generation(engine="vllm", max_model_tokens=256, kv_cache_gib=0.25),
        dtype=dtype,
        backend="inline",
        runs=tempfile.mkdtemp(),
    )
    algorithm = wb.GRPO(lab, prompts=PROMPTS, samples=SAMPLES, sampling=wb.Sampling(max_new_tokens=TOKENS))
    seconds, tokens = [], []
    for _ in range(iterations + 1):
        begun = time.perf_counter()
        metrics = algorithm.iterate()
        seconds.append(time.perf_counter() - begun)
        tokens.append(metrics["generate_sequences/response_tokens/mean"] * PROMPTS * SAMPLES)
    stages = lab.spans().query("kind == 'compute'").groupby("stage")["duration_s"].median()
    lab.close()
    return {"seconds": seconds[1:], "tokens": tokens[1:], "stages": stages.round(2).to_dict()}


def trl(dtype: str, iterations: int, peers: str) -> dict[str, Any]:
    """The same of TRL's GRPOTrainer."""
    sys.path.insert(0, peers)
    import pyarrow
    import torch
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    import datasets
    from workbench.data.sources import read_rows
    from workbench.models import resolve

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

    clock = Clock()
    trainer = GRPOTrainer(
        model=str(resolve(MODEL)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=not torch.cuda.is_available(),
            bf16=dtype == "bfloat16",
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            max_steps=iterations + 1,
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
    return {"seconds": clock.seconds[1:], "tokens": [n * PROMPTS * SAMPLES for n in lengths[1:]], "stages": {}}


def alone(side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--dtype", arguments.dtype, "--peers", arguments.peers]
    command += ["--iterations", str(arguments.iterations)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    # not from the project's folder: its datasets/ would stand before the library of that name
    done = subprocess.run(command, cwd=tempfile.mkdtemp(), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=str(ROOT / ".peers"), help="folder with TRL (default: .peers)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--side", choices=("workbench", "trl"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        measure = ours(arguments.dtype, arguments.iterations) if arguments.side == "workbench" else None
        print(json.dumps(measure or trl(arguments.dtype, arguments.iterations, arguments.peers)))
        return
    if not (Path(arguments.peers) / "trl").exists():
        sys.exit(f"no TRL in {arguments.peers}: run `make peers`")
    rates = {}
    for side in ("workbench", "trl"):
        result = alone(side, arguments)
        seconds = sorted(result["seconds"])[len(result["seconds"]) // 2]
        rates[side] = PROMPTS * SAMPLES / seconds
        print(
            f"{side:10} {seconds:6.2f} s an iteration (median of {len(result['seconds'])}, "
            f"{min(result['seconds']):.2f} to {max(result['seconds']):.2f}), {rates[side]:.2f} samples/s, "
            f"{sum(result['tokens']) / len(result['tokens']):.0f} response tokens an iteration, "
            f"{sum(result['tokens']) / sum(result['seconds']):.0f} tokens/s {result['stages'] or ''}"
        )
    print(f"ratio workbench / trl, samples per second ({arguments.dtype}): {rates['workbench'] / rates['trl']:.2f}")


if __name__ == "__main__":
    main()
