"""Times wb.open and the first generated batch, each case in a new process, and prints where the seconds went.

    python benchmarks/opening.py [--cases tiny-inline tiny-ray ray inline actor] [--rounds 3] [--device cuda]
        [--model smollm2-135m]

tiny-*: four roles on a tiny model, torch and transformers. ray, inline: four models of --model's size (actor, critic,
reference, a scored reward), DeepSpeed and vLLM. actor: on Ray too, the actor alone, and a function for the reward. A
case on Ray is opened twice: first without a Ray head, then with it running. Seconds count from `wb.open` (workbench
imported, no engine) to what generate_sequences returns.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CASES = ("tiny-inline", "tiny-ray", "inline", "ray", "actor")


def length(prompt: str, response: str, **row: Any) -> float:
    return float(len(response))


def opened(case: str, model: str, device: str | None) -> dict[str, Any]:
    """Seconds until the workbench is open, and until it has generated its first batch; CPU seconds of this process."""
    import workbench as wb
    from benchmarks.models import folder

    tiny = case.startswith("tiny")
    path = "tiny-llama-tied" if tiny else str(folder(model))
    models: dict[str, Any] = {"actor": path, "reward": length}
    if case != "actor":
        models |= {"critic": path, "reference": path, "reward": length if tiny else path}
    begun = time.perf_counter()
    lab = wb.open(
        "opening",
        models=models,
        prompts="arithmetic",
        training=wb.Training(engine="torch" if tiny else "deepspeed"),
        generation=wb.Generation(engine="transformers" if tiny else "vllm", max_model_tokens=256, kv_cache_gib=0.25),
        backend="inline" if case.endswith("inline") else "ray",
        placement=wb.Placement.colocate(devices=1),
        device=device,  # type: ignore[arg-type]
        runs=tempfile.mkdtemp(),
    )
    open_s = time.perf_counter() - begun
    lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=8)
    batch_s = time.perf_counter() - begun
    where = lab.opening().to_string()
    lab.close()
    return {"open_s": open_s, "batch_s": batch_s, "where": where}


def alone(case: str, model: str, device: str | None, keep: bool) -> dict[str, Any]:
    """`opened` in a process of its own. keep: whether the Ray head stays for the next."""
    command = [sys.executable, __file__, "--only", case, "--model", model]
    command += ["--device", device] if device else []
    environment = {**os.environ, **({"WORKBENCH_KEEP_RAY": "1"} if keep else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds_of(case: str, model: str, device: str | None) -> list[dict[str, Any]]:
    """One opening; on Ray two, the second with the head running."""
    if case.endswith("inline"):
        return [alone(case, model, device, keep=False)]
    return [alone(case, model, device, keep=True), alone(case, model, device, keep=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(opened(options.only, options.model, options.device)))
        return
    for case in options.cases:
        rounds = [rounds_of(case, options.model, options.device) for _ in range(options.rounds)]
        for name, results in zip(("", " again, Ray running"), zip(*rounds, strict=True), strict=False):
            open_s, batch_s = (statistics.median(r[key] for r in results) for key in ("open_s", "batch_s"))
            print(f"{case + name:32} open {open_s:6.1f} s   first batch {batch_s:6.1f} s")
            print(results[-1]["where"])


if __name__ == "__main__":
    main()
