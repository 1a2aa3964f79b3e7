"""One table of a machine with a GPU: opening, decoding, scoring, updates, syncs, memory, an iteration beside TRL.

    python benchmarks/gpu.py [--parts opening decode training sync turns iteration] [--peers FOLDER] [--dtype bfloat16]

Needs no more than a Python with this project's packages on its path, and TRL in a folder of its own for the last part.
On a GPU the model has 1.39 billion random parameters, 64 prompts x 8 responses of exactly 512 tokens; on a CPU it is
SmolLM2-135M with 4 x 4 responses of at most 64 tokens. Each part runs in a process of its own and prints as soon as it
has something; the programs of the same names say what they measure, and take more options.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import iteration
from benchmarks.iteration import Case

PROMPT_TOKENS = 45  # of the arithmetic problems, as the chat template writes them


def opening(case: Case) -> Iterator[str]:
    """From `wb.open` to the first generated batch, on Ray: with the head to start, then with it running."""
    from benchmarks.opening import rounds_of

    device = "cuda" if on_gpu() else "cpu"
    for which, model in (("ray", "smollm2-135m"), ("actor", case.model)):
        for found, again in zip(rounds_of(which, model, device), ("", ", Ray running"), strict=True):
            roles = "four roles" if which == "ray" else "one role"
            yield f"{roles} of {model}{again}: {found['batch_s']:.1f} s, {found['open_s']:.1f} s of it wb.open"


def decode(case: Case) -> Iterator[str]:
    """The engine beside vLLM's own `LLM.generate`."""
    from benchmarks import decode as program

    device = "cuda" if on_gpu() else "cpu"
    asked = program.default_case(
        device, model=case.model, rows=case.rows, tokens=case.tokens, dtype=case.dtype, repeats=1
    )
    yield program.table(asked, program.measure(asked))


def training(case: Case) -> Iterator[str]:
    """Scoring and an update beside plain transformers, as shares of the peak."""
    from benchmarks import training as program

    found = program.measure(
        case.model, prompts=case.prompts, samples=case.samples, prompt_tokens=PROMPT_TOKENS,
        response_tokens=case.tokens, dtype=case.dtype, engine="deepspeed" if on_gpu() else "torch",
        micro_batch_tokens=16384 if on_gpu() else 2048,
    )  # fmt: skip
    hopper = on_gpu() and case.dtype == "bfloat16"
    yield program.table_of(found, program.H100_BF16 if hopper else None)


def sync(case: Case) -> Iterator[str]:
    """Weight syncs of a GRPO run, beside a copy on the device; on a GPU the allocator beside the estimate."""
    import workbench as wb
    from benchmarks.memory import against_estimate

    copied = copy_rate()
    lab = opened(case, {"actor": case.model, "reward": reward})
    algorithm = wb.GRPO(lab, prompts=case.prompts, samples=case.samples, sampling=sampling(case))
    for _ in range(3):
        algorithm.iterate()
    # the first allocates; those without bytes are comparisons on a probe
    synced = lab.spans().query("kind == 'weight_sync' and moved_bytes > 0").iloc[1:]
    seconds, moved = synced["duration_s"].median(), synced["moved_bytes"].median()
    yield f"{moved / 1e9:.2f} GB in {seconds:.3f} s: {moved / seconds / 1e9:.1f} GB/s"
    yield f"a copy on the device: {copied / 1e9:.0f} GB/s"
    if on_gpu():
        yield f"estimate over measured\n{against_estimate(lab).to_string(index=False)}"
    lab.close()


def turns(case: Case) -> Iterator[str]:
    """PPO with four models that take turns in the memory of one GPU."""
    import workbench as wb

    if not on_gpu():
        yield "nothing moves on a CPU: it has only host memory"
        return
    models = dict.fromkeys(("actor", "critic", "reference", "reward"), case.model)
    lab = opened(case, models, share_memory=True)
    ppo = wb.PPO(lab, prompts=case.prompts, sampling=sampling(case))
    seconds = []
    for _ in range(2):
        began_s = time.time()
        ppo.iterate()
        seconds.append(time.time() - began_s)
    yield f"PPO, four models: {seconds[-1]:.1f} s per iteration of {case.prompts} responses"
    spans = lab.spans().query("start_s >= @began_s")  # the first iteration makes host memory page-locked
    for kind in ("offload", "load"):
        moved = spans.query("kind == @kind and moved_bytes > 1e9")
        rate = moved["moved_bytes"].sum() / moved["duration_s"].sum() / 1e9 if len(moved) else float("nan")
        yield f"{kind}: {moved['moved_bytes'].sum() / 1e9:.0f} GB at {rate:.1f} GB/s"
    lab.close()


PARTS: dict[str, Callable[[Case], Iterator[str]]] = {
    "opening": opening,
    "decode": decode,
    "training": training,
    "sync": sync,
    "turns": turns,
}


def whole(case: Case, peers: str) -> Iterator[str]:
    """An iteration here and one of TRL, one after the other."""
    if not (Path(peers) / "trl").exists():
        yield f"not measured: no TRL in {peers}"
        return
    seconds = {}
    for side in ("workbench", "trl"):
        result = iteration.alone(side, case, peers)
        seconds[side] = median(result["seconds"])
        yield iteration.told(side, case, result)
    yield f"TRL's seconds over the workbench's: {seconds['trl'] / seconds['workbench']:.2f}"


def opened(case: Case, models: dict[str, Any], **options: Any) -> Any:
    """An inline workbench for a case. models: role to a name, or a function."""
    import workbench as wb
    from benchmarks.models import folder

    return wb.open(
        "gpu-benchmark",
        models={role: str(folder(model)) if isinstance(model, str) else model for role, model in models.items()},
        prompts="arithmetic",
        training=wb.Training(engine="deepspeed" if on_gpu() else "torch"),
        generation=wb.Generation(engine="vllm", max_model_tokens=case.tokens + 192, kv_cache_gib=0.25),
        dtype=case.dtype,
        backend="inline",
        runs=tempfile.mkdtemp(),
        **options,
    )


def sampling(case: Case) -> Any:
    """How responses of a case are drawn."""
    import workbench as wb

    return wb.Sampling(max_new_tokens=case.tokens, ignore_eos=case.forced)


def reward(prompt: str, response: str, **row: Any) -> float:
    """The share of digits."""
    return iteration.digits(response)


def copy_rate() -> float:
    """Bytes a second that a copy within the device's memory moves."""
    import torch

    source = torch.zeros(2**30 if on_gpu() else 2**28, dtype=torch.uint8, device="cuda" if on_gpu() else "cpu")
    target, seconds = torch.empty_like(source), []
    for _ in range(6):
        began = time.perf_counter()
        target.copy_(source)
        if on_gpu():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return source.nbytes / min(seconds)


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(part: str, case: Case) -> bool:
    """Print a part as it comes from a process of its own; whether it ended well."""
    command = [sys.executable, __file__, "--only", part, "--case", json.dumps(asdict(case))]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('"'):  # engines print too
                print(json.loads(line), flush=True)
        if process.wait():
            errors.seek(0)
            print(f"failed:\n{errors.read()[-3000:]}")
    return process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=(*PARTS, "iteration"), default=[*PARTS, "iteration"])
    parser.add_argument("--peers", default=iteration.PEERS, help="folder with TRL (default: .peers)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        for text in PARTS[arguments.only](Case(**json.loads(arguments.case))):
            print(json.dumps(text), flush=True)
        return
    case = iteration.GPU if on_gpu() else iteration.CPU
    if arguments.dtype:
        case = replace(case, dtype=arguments.dtype)
    print(f"{case.model}, {case.prompts} x {case.samples} responses of {case.tokens} tokens, {case.dtype}")
    well = True
    for part in arguments.parts:
        print(f"\n{part}", flush=True)
        if part == "iteration":
            for text in whole(case, arguments.peers):
                print(text, flush=True)
        else:
            well = run(part, case) and well
    sys.exit(not well)


if __name__ == "__main__":
    main()
