"""One table of a machine with a GPU: opening, decoding, scoring, updates, syncs, memory, an iteration beside TRL.

    python benchmarks/gpu.py [--parts opening decode stages memory iteration] [--peers FOLDER] [--dtype bfloat16]

Needs no more than a Python with this project's packages on its path, and TRL in a folder of its own for the last part.
On a GPU the model has 1.39 billion random parameters, 64 prompts x 8 responses of exactly 512 tokens; on a CPU it is
SmolLM2-135M with 4 x 4 responses of at most 64 tokens. Each part runs in a process of its own; its rows are printed as
soon as they are there. Shares of the peak are useful work (2 operations a parameter and token in a forward pass, 6 in
an update, those of the head for response tokens alone) over seconds, beside a large matrix product in the same
process; an H100's bfloat16 peak by its data sheet is 990 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import iteration  # noqa: E402
from benchmarks.iteration import Case  # noqa: E402

Row = tuple[str, str]
PRODUCT = 8192  # rows and columns of the matrices whose product is timed; an eighth of it on a CPU


def opening(case: Case) -> Iterator[Row]:
    """Default settings on Ray: from `wb.open` to the first generated batch, with the head to start, then without."""
    import workbench as wb

    os.environ["WORKBENCH_KEEP_RAY"] = "1"
    small = dict.fromkeys(("actor", "critic", "reference", "reward"), "smollm2-135m")
    large = {"actor": _folder(case.model), "reward": _digits}
    for models, what in ((small, "four 135M roles"), (large, case.model)):
        for time_of in ("first", "second"):
            began = time.perf_counter()
            lab = wb.open("opening-benchmark", models=models, prompts="arithmetic", runs=tempfile.mkdtemp())
            opened_s = time.perf_counter() - began
            lab.actor.generate_sequences(lab.prompts.next(16), max_new_tokens=16)
            total_s = time.perf_counter() - began
            lab.close()
            yield (
                f"opening, {what}, {time_of} time",
                f"{total_s:.1f} s to the first batch, {opened_s:.1f} s of it wb.open",
            )


def decode(case: Case) -> Iterator[Row]:
    """The engine beside vLLM's own `LLM.generate`."""
    from benchmarks import decode as decoding

    device = "cuda" if _on_gpu() else "cpu"
    asked = decoding.default_case(device, model=case.model, rows=case.rows, tokens=case.tokens, dtype=case.dtype)
    found = decoding.measure(asked)
    for line in decoding.table(asked, found).splitlines():
        yield "decode", line.strip()


def stages(case: Case) -> Iterator[Row]:
    """GRPO's stages in one process: rates, shares of the peak, the sync, and the allocator beside the estimate."""
    import torch

    import workbench as wb
    from benchmarks.memory import against_estimate

    device, dtype = torch.device("cuda" if _on_gpu() else "cpu"), getattr(torch, case.dtype)
    peak = product_rate(device, dtype)
    yield f"matrix product, {case.dtype}", f"{peak / 1e12:.2f} TFLOP/s"
    copied = copy_rate(device)
    yield "copy on the device", f"{copied / 1e9:.0f} GB/s"
    lab = _open(wb, case, {"actor": _folder(case.model), "reward": _digits})
    sampling = wb.Sampling(max_new_tokens=case.tokens, ignore_eos=case.forced)
    algorithm = wb.GRPO(lab, prompts=case.prompts, samples=case.samples, sampling=sampling)
    for _ in range(case.iterations + 1):
        algorithm.iterate()
    batch = next(made for made in algorithm.made.values() if hasattr(made, "columns"))
    scored: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        lab.actor.compute_log_prob(batch)
        scored.append(time.perf_counter() - began)
    table = batch.fetch()
    responses = int(table["response_ids"].lengths.sum())
    tokens = responses + int(table["prompt_ids"].lengths.sum())
    forward = forward_operations(_folder(case.model), tokens, responses)
    spans = lab.spans()
    # the first iteration warms up
    updated = spans.query("kind == 'compute' and stage == 'update_actor'")["duration_s"].tolist()[1:]
    drawn = spans.query("kind == 'generate'")["duration_s"].tolist()[1:]
    synced = spans.query("kind == 'weight_sync'").iloc[1:]
    for what, seconds, work in (
        ("compute_log_prob", min(scored), forward),
        ("update_actor", statistics.median(updated), 3 * forward),
    ):
        rate = work / seconds
        speed = f"{seconds:.2f} s, {tokens / seconds:,.0f} tokens/s"
        yield what, f"{speed}, {rate / 1e12:.2f} TFLOP/s, {rate / peak:.0%} of the product"
    yield (
        "generate_sequences",
        f"{statistics.median(drawn):.2f} s, {responses / statistics.median(drawn):,.0f} tokens/s",
    )
    if len(synced):
        seconds, moved = synced["duration_s"].median(), synced["bytes"].median()
        yield "weight sync", f"{seconds:.3f} s, {moved / 1e9:.2f} GB, {moved / seconds / 1e9:.1f} GB/s"
    if _on_gpu():
        rows: Any = against_estimate(lab).itertuples()  # whose fields pandas' stubs do not know
        for row in rows:
            yield (
                f"estimate over measured, {row.role}",
                f"lasting {row.lasting_ratio:.2f}, peak {row.peak_ratio:.2f} of {row.peak_bytes / 2**30:.1f} GiB",
            )
    lab.close()


def memory(case: Case) -> Iterator[Row]:
    """PPO with four models that take turns in the device's memory: an iteration, and the rate of offload and load."""
    import workbench as wb

    if not _on_gpu():
        yield "share_memory", "nothing moves on a CPU: its memory and the host's are one"
        return
    model = _folder(case.model)
    lab = _open(wb, case, dict.fromkeys(("actor", "critic", "reference", "reward"), model), share_memory=True)
    sampling = wb.Sampling(max_new_tokens=case.tokens, ignore_eos=case.forced)
    ppo = wb.PPO(lab, prompts=case.prompts, sampling=sampling)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        ppo.iterate()
        seconds.append(time.perf_counter() - began)
    yield "PPO, four models in turns", f"{seconds[-1]:.1f} s an iteration of {case.prompts} responses"
    spans = lab.spans()
    for kind in ("offload", "load"):
        moved = spans.query("kind == @kind and bytes > 1e9")
        rate = moved["bytes"].sum() / moved["duration_s"].sum() / 1e9 if len(moved) else float("nan")
        yield kind, f"{rate:.1f} GB/s over {moved['bytes'].sum() / 1e9:.0f} GB"
    lab.close()


def whole(case: Case, peers: str) -> Iterator[Row]:
    """An iteration beside TRL's, one after the other."""
    median = {}
    for side in ("workbench", "trl"):
        if side == "trl" and not (Path(peers) / "trl").exists():
            yield "trl", f"not measured: no TRL in {peers}"
            return
        result = iteration.alone(side, case, peers)
        median[side] = statistics.median(result["seconds"])
        yield "iteration", iteration.told(side, case, result)
    yield "iteration, TRL over workbench", f"{median['trl'] / median['workbench']:.2f} times"


def product_rate(device: Any, dtype: Any) -> float:
    """Operations a second of a large square matrix product, the best of five."""
    import torch

    n = PRODUCT if device.type == "cuda" else PRODUCT // 8
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / _best(lambda: left @ right, device)


def copy_rate(device: Any) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    import torch

    source = torch.zeros(2**30 if device.type == "cuda" else 2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], Any], device: Any) -> float:
    import torch

    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def forward_operations(folder: str, tokens: int, responses: int) -> float:
    """Operations of the matrix products of a forward pass, attention's own left out: 2 a parameter and token, where the
    output head sees response tokens alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight.numel()
    embeddings = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    layers = sum(parameter.numel() for parameter in model.parameters()) - head - embeddings
    return 2.0 * (layers * tokens + head * responses)


def _open(wb: Any, case: Case, models: dict[str, Any], **options: Any) -> Any:
    return wb.open(
        "gpu-benchmark",
        models=models,
        prompts="arithmetic",
        training=wb.Training(engine="deepspeed" if _on_gpu() else "torch"),
        generation=wb.Generation(
            engine="vllm", max_model_tokens=case.tokens + 192, kv_cache_gib=0.25, gpu_memory_fraction=None
        ),
        dtype=case.dtype,
        backend="inline",
        runs=tempfile.mkdtemp(),
        **options,
    )


def _folder(name: str) -> str:
    from benchmarks.models import folder

    return str(folder(name))


def _digits(prompt: str, response: str, **row: Any) -> float:
    return iteration.digits(response)


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


PARTS: dict[str, Callable[[Case], Iterator[Row]]] = {
    "opening": opening,
    "decode": decode,
    "stages": stages,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "iteration"), default=[*PARTS, "iteration"])
    parser.add_argument("--peers", default=iteration.PEERS, help="folder with TRL (default: .peers)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--alone", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        case = Case(**json.loads(arguments.case))
        for row in PARTS[arguments.alone](case):
            print(json.dumps(row), flush=True)
        return
    case = iteration.GPU if _on_gpu() else iteration.CPU
    if arguments.dtype:
        case = replace(case, dtype=arguments.dtype)
    print(f"{case.model}, {case.prompts} x {case.samples} responses of {case.tokens} tokens, {case.dtype}")
    failed = False
    for part in arguments.parts:
        if part == "iteration":
            for row in whole(case, arguments.peers):
                _show(row)
            continue
        command = [sys.executable, __file__, "--alone", part, "--case", json.dumps(asdict(case))]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('["'):
                    _show(json.loads(line))
            if process.wait():
                failed = True
                errors.seek(0)
                print(f"{part} failed:\n{errors.read()[-3000:]}")
    sys.exit(failed)


def _show(row: Row) -> None:
    print(f"{row[0]:38} {row[1]}", flush=True)


if __name__ == "__main__":
    main()
