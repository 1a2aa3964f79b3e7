"""Times scoring and updates of an actor: tokens a second and the share of the device's peak, beside plain transformers.

    python benchmarks/training.py [--model smollm2-135m] [--prompts 4] [--samples 4] [--prompt-tokens 45]
        [--response-tokens 64] [--dtype bfloat16] [--engine torch] [--micro-batch-tokens 2048] [--compile]

Responses are random tokens of full length. Stages are called as an algorithm calls them, in an inline workbench. Plain
transformers runs the same rows padded, forward, backward and fused AdamW under autocast, as many in a pass as fit the
same micro-batch. Sides take turns in one process; medians. The peak is a large matrix product's in the same dtype.

FLOPs are those of matrix products, 2 a weight and token forward, twice that backward, the head's at responses alone,
and of attention; recomputed logits are not counted. `computed`: of the tokens that go through the model, where samples
share their prompt. `of rows`: as if each row went through by itself, which is what the plain side does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import workbench as wb
from benchmarks.models import folder
from workbench.batches.columns import Ragged, Table
from workbench.models.loading import load_causal_lm, load_config

H100_BF16 = 990e12
"""The bf16 peak that an H100's data sheet names, FLOP/s; a product reaches 800e12."""


def measure(
    model: str,
    *,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    response_tokens: int,
    dtype: str = "bfloat16",
    engine: str = "torch",
    micro_batch_tokens: int = 2048,
    compiled: bool = False,
    plain: bool = True,
    repeats: int = 3,
) -> dict[str, Any]:
    """Median seconds of each stage, FLOPs, and the peak in FLOP/s.

    Keys: "peak"; "stages": {"compute_log_prob" | "update_actor" | "plain step": {"seconds", "rows_tokens_s",
    "trained_tokens_s", "computed", "of_rows"}}, the last two as FLOP/s.
    """
    rows = prompts * samples
    whole = flops(model, prompt_tokens, response_tokens, rows, prompts=rows)
    shared = flops(model, prompt_tokens, response_tokens, rows, prompts=prompts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = product_rate(device, getattr(torch, dtype))
    training = wb.Training(engine=engine, micro_batch_tokens=micro_batch_tokens, compile=compiled)  # type: ignore[arg-type]
    lab = wb.open(
        "training-speed", models={"actor": str(folder(model))}, prompts="arithmetic", training=training, dtype=dtype,
        generation=wb.Generation(engine="transformers", max_model_tokens=max(256, prompt_tokens + response_tokens)),
        backend="inline", runs=tempfile.mkdtemp(),
    )  # fmt: skip
    try:
        table = rollouts(prompts, samples, prompt_tokens, response_tokens)
        batch = lab.put(table, meta={"temperature": 1.0})
        ways: dict[str, Callable[[], object]] = {
            "compute_log_prob": lambda: lab.actor.compute_log_prob(batch).fetch(["old_log_prob"]),
            "update_actor": lambda: lab.actor.update_actor(batch, on_policy=True),
        }
        if plain:
            ways["plain step"] = plain_step(model, table, micro_batch_tokens, dtype, device)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats + 1):  # the first warms up
            for name, way in ways.items():
                seconds[name].append(timed(way, device))
    finally:
        lab.close()
    stages = {}
    for name, taken in seconds.items():
        median, passes = statistics.median(taken[1:]), 1 if name == "compute_log_prob" else 3
        stages[name] = {
            "seconds": median,
            "rows_tokens_s": rows * (prompt_tokens + response_tokens) / median,
            "trained_tokens_s": rows * response_tokens / median,
            "computed": passes * (whole if name == "plain step" else shared) / median,
            "of_rows": passes * whole / median,
        }
    return {"peak": peak, "stages": stages}


def flops(model: str, prompt_tokens: int, response_tokens: int, rows: int, *, prompts: int) -> float:
    """Of one forward pass over `rows` responses, each of which goes on from one of so many prompts."""
    config = load_config(folder(model)).get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * head_size * (heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    tokens = prompts * prompt_tokens + rows * response_tokens
    # each pair of a token and one that it sees: a product with its key, one with its value
    pairs = prompts * prompt_tokens**2 / 2 + rows * response_tokens * (prompt_tokens + response_tokens / 2)
    body = config.num_hidden_layers * (2 * layer * tokens + 4 * heads * head_size * pairs)
    return body + 2 * hidden * config.vocab_size * rows * response_tokens


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    n = 8192 if device.type == "cuda" else 3072
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / statistics.median([timed(lambda: a @ b, device) for _ in range(6)][1:])


def timed(way: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done it."""
    begun = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def rollouts(prompts: int, samples: int, prompt_tokens: int, response_tokens: int) -> Table:
    """What an update reads: random tokens, and advantages that differ."""
    draws, rows = torch.Generator().manual_seed(0), prompts * samples

    def column(values: Tensor) -> Ragged:
        return Ragged(values, torch.full((rows,), len(values) // rows))

    tokens = rows * response_tokens
    asked = torch.randint(8, 256, (prompts, prompt_tokens), generator=draws).repeat_interleave(samples, 0)
    return {
        "prompt_ids": column(asked.flatten()),
        "response_ids": column(torch.randint(8, 256, (tokens,), generator=draws)),
        "response_mask": column(torch.ones(tokens, dtype=torch.bool)),
        "advantages": column(torch.randn(tokens, generator=draws)),
    }


def plain_step(
    model: str, table: Table, micro_batch_tokens: int, dtype: str, device: torch.device
) -> Callable[[], object]:
    """Forward, backward and AdamW on whole rows of equal length, fp32 weights under autocast."""
    causal = load_causal_lm(folder(model), dtype=torch.float32, device=device)
    optimizer = torch.optim.AdamW(causal.parameters(), lr=1e-6, fused=True)
    columns = [table[name] for name in ("prompt_ids", "response_ids")]
    parts = [torch.stack(column.rows()).to(device) for column in columns if isinstance(column, Ragged)]
    ids, first = torch.cat(parts, 1), parts[0].shape[1]

    def step() -> None:
        for rows in ids.split(max(1, micro_batch_tokens // ids.shape[1])):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
                logits = causal(input_ids=rows, use_cache=False).logits[:, first - 1 : -1]
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), rows[:, first:].flatten(), reduction="sum"
            )
            (loss / parts[1].numel()).backward()
        torch.nn.utils.clip_grad_norm_(causal.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def table_of(found: dict[str, Any], named_peak: float | None = None) -> str:
    """What `measure` found, as lines. named_peak: the data sheet's, FLOP/s; None: shares are of the measured one."""
    peak = named_peak or found["peak"]
    lines = [f"a large product reaches {found['peak'] / 1e12:.2f} TFLOP/s; shares are of {peak / 1e12:.2f}"]
    lines.append(f"{'':18}{'seconds':>9}{'rows tok/s':>12}{'trained tok/s':>15}{'computed':>10}{'of rows':>9}")
    for name, told in found["stages"].items():
        lines.append(
            f"{name:18}{told['seconds']:9.3f}{told['rows_tokens_s']:12.0f}{told['trained_tokens_s']:15.0f}"
            f"{told['computed'] / peak:10.1%}{told['of_rows'] / peak:9.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="qwen2-1.4b, or any name that wb.open takes")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=45)
    parser.add_argument("--response-tokens", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--engine", choices=("torch", "deepspeed"), default="torch")
    parser.add_argument("--compile", action="store_true", dest="compiled")
    parser.add_argument("--repeats", type=int, default=3)
    given = vars(parser.parse_args())
    found = measure(given.pop("model"), **given)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    hopper = ("H100" in name or "H200" in name) and given["dtype"] == "bfloat16"
    print(table_of(found, H100_BF16 if hopper else None))


if __name__ == "__main__":
    main()
