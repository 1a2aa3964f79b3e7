"""How far engine and trainer differ after a weight sync, and what a sync costs: what the tolerances are taken from.

    python benchmarks/sync_gap.py [--models smollm2-135m] [--dtypes float32 bfloat16] [--steps 4] [--device cuda]

After each of some iterations of GRPO (and before the first) it syncs, and compares log-probabilities on three probes:
that of `check_sync`, random tokens, and a response that was just drawn. Then it syncs weights with something wrong, one
thing after another, and says which of them the tolerance finds. At last the seconds of a sync, of the probe, and of a
plain copy of as many bytes on the same device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import workbench as wb
from workbench.workers.engine_weights import (
    TrainerWeights,
    differing_weights,
    probe_gap,
    sync_tolerance,
    trainer_log_probs,
)

Weights = dict[str, Tensor]
REPEATS = 7


def letters(prompt: str, response: str, **row: Any) -> float:
    """The share of letters in a response: something to learn."""
    return sum(character.isalpha() for character in response) / max(1, len(response))


def gap_on(worker: Any, ids: Tensor) -> tuple[float, float]:
    """Mean gap, and how unlikely the trainer finds these tokens on average; both in nats."""
    log_probs = trainer_log_probs(worker.engine, ids, worker.context.device)
    trainer = TrainerWeights(
        named_weights=lambda: iter(()), probe_ids=ids, log_probs=log_probs, aliases={}, vocabulary=()
    )
    return probe_gap(trainer, worker.generator), -float(log_probs.mean())


def probes(lab: wb.Workbench, worker: Any) -> dict[str, Tensor]:
    """By name: 24 tokens each."""
    batch = lab.actor.generate_sequences(lab.prompts.next(1), max_new_tokens=24, seed=1)
    table = cast(Any, batch.fetch(["prompt_ids", "response_ids"]))
    drawn = torch.cat([table["prompt_ids"].values[-12:], table["response_ids"].values])[:36]
    vocab_size = worker.engine.module.model.config.get_text_config().vocab_size
    random = torch.randint(0, vocab_size - 1, (24,), generator=torch.Generator().manual_seed(0))
    return {"likely": worker._probe_ids(), "random": random, "drawn": drawn}


def wrong(now: Weights, then: Weights, middle: int) -> dict[str, Weights]:
    """Weights with one thing wrong each. then: those before the training."""

    def layer(number: int) -> str:
        return f"model.layers.{number}."

    def swapped(name: str) -> str:
        one, other = layer(middle), layer(middle - 1)
        return name.replace(one, other) if one in name else name.replace(other, one)

    outputs = [layer(middle) + part for part in ("self_attn.o_proj.weight", "mlp.down_proj.weight")]
    return {
        "a layer left out": {name: weight.mul(0) if name in outputs else weight for name, weight in now.items()},
        "two layers swapped": {name: now[swapped(name)] for name in now},
        "keys of another layer": now | {
            layer(middle) + "self_attn.k_proj.weight": now[layer(middle - 1) + "self_attn.k_proj.weight"]
        },
        "all weights stale": then,
        "a layer stale": {name: (then if layer(middle) in name else now)[name] for name in now},
        "vocabulary stale": {name: (then if "embed" in name or "lm_head" in name else now)[name] for name in now},
    }  # fmt: skip


def seconds(act: Callable[[], Any], device: torch.device) -> float:
    """The median time of some repetitions."""
    taken = []
    for _ in range(REPEATS):
        _settled(device)
        start = time.perf_counter()
        act()
        _settled(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def costs(worker: Any) -> Iterator[str]:
    """What a sync, the probe and a plain copy take."""
    device, generator, engine = worker.context.device, worker.generator, worker.engine
    nbytes = generator.update_weights(engine.stored_weights(), engine.steps)
    sync_s = seconds(lambda: generator.update_weights(engine.stored_weights(), engine.steps), device)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    plain_s = seconds(lambda: target.copy_(source), device)
    ids = worker._probe_ids()
    trainer_s = seconds(lambda: trainer_log_probs(engine, ids, device), device)
    engine_s = seconds(lambda: generator.log_probs(ids.tolist()), device)
    rate, plain = nbytes / sync_s / 1e9, nbytes / plain_s / 1e9
    yield f"  sync {sync_s * 1e3:.1f} ms, {rate:.1f} GB/s; plain copy {plain:.1f} GB/s"
    trained = worker._trainer_weights()
    read = differing_weights(trained, generator)[0]
    bits_s = seconds(lambda: differing_weights(trained, generator), device)
    yield f"  probe: trainer {trainer_s * 1e3:.1f} ms, engine {engine_s * 1e3:.1f} ms"
    yield f"  bits of {read} weights compared in {bits_s * 1e3:.1f} ms"


def measure(model: str, dtype: str, steps: int, rate: float, device: Any, runs: Path) -> None:
    """Print everything for one model in one dtype."""
    with wb.open(
        "sync-gap", models={"actor": model, "reward": letters}, prompts="arithmetic", backend="inline", dtype=dtype,
        device=device, training=wb.Training(engine="torch", learning_rate=rate, minibatches=2),
        generation=wb.Generation(max_model_tokens=256, kv_cache_gib=0.2, check_sync=False), runs=runs,
    ) as lab:  # fmt: skip
        (host,) = cast(Any, lab.hosts.backend)._hosts.values()
        worker = host.workers["actor"]
        then = {name: weight.clone() for name, weight in worker.engine.named_weights()}
        grpo = wb.GRPO(lab, prompts=2, samples=4, sampling=wb.Sampling(max_new_tokens=12), reward=letters)
        found: dict[str, list[tuple[float, float]]] = {}
        for step in range(steps + 1):
            if step:
                grpo.run(1)
            for name, ids in probes(lab, worker).items():
                found.setdefault(name, []).append(gap_on(worker, ids))
        ids = worker._probe_ids()
        tolerance = sync_tolerance(
            dtype, worker.context.device, trainer_log_probs(worker.engine, ids, worker.context.device)
        )
        print(f"{model}, {dtype}, {worker.context.device.type}: tolerance {tolerance:.2g} nats", flush=True)
        for name, seen in found.items():
            gaps, nats = zip(*seen, strict=True)
            print(f"  {name:22} {' '.join(f'{gap:.2g}' for gap in gaps)}  (tokens of {statistics.mean(nats):.1f} nats)")
        now = {name: weight.clone() for name, weight in worker.engine.named_weights()}
        middle = sum(name.endswith("q_proj.weight") for name in now) // 2
        for what, weights in wrong(now, then, middle).items():
            worker.generator.update_weights(iter(weights.items()), 0)
            gap = gap_on(worker, ids)[0]
            print(f"  {what:22} {gap:.2g} {'found' if gap > tolerance else 'not found'}", flush=True)
        for line in costs(worker):
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "tiny-llama", "tiny-llama-tied", "tiny-qwen2"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--runs", default="runs")
    given = parser.parse_args()
    for model in given.models:
        for dtype in given.dtypes:
            measure(model, dtype, given.steps, given.rate, given.device, Path(given.runs))


if __name__ == "__main__":
    main()
