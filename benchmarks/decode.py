"""Times decoding: this project's vLLM engine beside vLLM's own `LLM.generate`, same model, rows and lengths.

    python benchmarks/decode.py [--model qwen2-1.4b] [--rows 512] [--tokens 512] [--dtype bfloat16] [--device cuda]

On a GPU the defaults are those above; on a CPU SmolLM2-135M, 16 rows, 64 tokens, float32, and vLLM without compiling,
as the engine runs it. Prompts have 64 tokens and 8 samples each (on a CPU 4); no response ends before its last token.
Each side runs in a process of its own, vLLM with its own defaults (scheduler and output in two processes); one call
warms up, prefix caches start empty. vLLM is timed without and with seeds, and with seeds and log-probabilities, which
is what the engine draws with. Prints medians; the ratio is to vLLM without seeds.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS = 64
SIDES = ("vllm", "workbench")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is decoded. memory: share of a GPU for weights and cache."""

    model: str
    rows: int
    tokens: int
    dtype: str
    device: str
    repeats: int = 3
    memory: float = 0.4

    def prompts(self) -> list[list[int]]:
        """Token ids, samples of one prompt side by side."""
        samples = 4 if self.device == "cpu" else 8
        return [[10 + (97 * (row // samples) + 13 * j) % 230 for j in range(PROMPT_TOKENS)] for row in range(self.rows)]


def default_case(device: str, **given: Any) -> Case:
    """The case of a device, "cpu" or "cuda", with what is given in its place."""
    chosen: dict[str, Any] = {"model": "smollm2-135m", "rows": 16, "tokens": 64, "dtype": "float32"}
    if device != "cpu":
        chosen = {"model": "qwen2-1.4b", "rows": 512, "tokens": 512, "dtype": "bfloat16"}
    return Case(device=device, **chosen | {name: value for name, value in given.items() if value is not None})


def measure(case: Case) -> dict[str, list[float]]:
    """Seconds of each repeat, by what was timed; each side in a process of its own."""
    found: dict[str, list[float]] = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--side", side, "--case", json.dumps(asdict(case))]
        # not from the project's folder: its datasets/ would stand before the library of that name
        environment = {**os.environ, "PYTHONPATH": search_path()}
        if importlib.util.find_spec("flashinfer") is None:  # by default vLLM's own sampler asks for it on a GPU
            environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        done = subprocess.run(
            command, cwd=tempfile.gettempdir(), env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def search_path() -> str:
    """Where a process of its own finds the project, and whatever this one was told to find."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def table(case: Case, found: dict[str, list[float]]) -> str:
    """A line for each thing that was timed."""
    lines = [f"{case.model}, {case.rows} rows x {case.tokens} tokens, {case.dtype}, {case.device}"]
    lines.append(f"{'':38} {'seconds':>8} {'tokens/s':>9} {'ms a step':>10} {'ratio':>6}")
    plain = statistics.median(found["vLLM"])
    for name, times in found.items():
        seconds = statistics.median(times)
        rate, step = case.rows * case.tokens / seconds, 1e3 * seconds / case.tokens
        lines.append(f"{name:38} {seconds:8.2f} {rate:9,.0f} {step:10.2f} {plain / seconds:6.2f}")
    return "\n".join(lines)


def times(run: Callable[[], int], case: Case) -> list[float]:
    """Seconds of each repeat after one that warms up; `run` says how many tokens it has made."""
    found = []
    for _ in range(case.repeats + 1):
        begun = time.perf_counter()
        made = run()
        found.append(time.perf_counter() - begun)
        assert made == case.rows * case.tokens, made
    return found[1:]


def workbench(case: Case) -> dict[str, list[float]]:
    """The engine as an actor has it: each row with a seed, log-probabilities kept, progress said at each step."""
    import torch

    from benchmarks.models import folder
    from workbench.engines.generation.vllm_engine import VllmEngine
    from workbench.settings.engines import Generation, Sampling

    on_gpu = case.device != "cpu"
    settings = Generation(
        max_model_tokens=PROMPT_TOKENS + case.tokens,
        gpu_memory_fraction=case.memory,
        max_rows=case.rows if case.rows > Generation().rows_at_once(on_gpu=on_gpu) else None,
    )
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    engine = VllmEngine(
        folder(case.model), settings, dtype=getattr(torch, case.dtype), device=device, threads=torch.get_num_threads()
    )
    prompts, sampling = case.prompts(), Sampling(max_new_tokens=case.tokens, ignore_eos=True)

    def run() -> int:
        return sum(map(len, engine.generate(prompts, sampling, range(case.rows), lambda *_: None).response_ids))

    found = {"workbench, seeds and log-probabilities": times(run, case)}
    engine.close()
    return found


def vllm(case: Case) -> dict[str, list[float]]:
    """`LLM.generate` three ways."""
    from vllm import LLM, SamplingParams

    from benchmarks.models import folder

    on_gpu = case.device != "cpu"
    llm = LLM(
        model=str(folder(case.model)),
        dtype=cast(Any, case.dtype),
        max_model_len=PROMPT_TOKENS + case.tokens + 1,
        gpu_memory_utilization=case.memory,
        kv_cache_memory_bytes=None if on_gpu else 2**30,
        enforce_eager=not on_gpu,
        # a CPU's random generators cannot take back what a prompt in parts has drawn
        enable_chunked_prefill=None if on_gpu else False,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        **({"max_num_seqs": case.rows} if case.rows > 256 else {}),
    )
    prompts: Any = [{"prompt_token_ids": ids} for ids in case.prompts()]

    def run(seeds: bool, log_probs: bool) -> int:
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=case.tokens,
                ignore_eos=True,
                detokenize=False,
                seed=row if seeds else None,
                logprobs=0 if log_probs else None,
            )
            for row in range(case.rows)
        ]
        llm.reset_prefix_cache()
        return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))

    return {
        "vLLM": times(lambda: run(False, False), case),
        "vLLM, seeds": times(lambda: run(True, False), case),
        "vLLM, seeds and log-probabilities": times(lambda: run(True, True), case),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name that wb.open takes, or qwen2-1.4b")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--memory", type=float, help="share of a GPU for weights and cache (default: 0.4)")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    side, said, device = given.pop("side"), given.pop("case"), given.pop("device")
    if side:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        case = Case(**json.loads(said))
        print(json.dumps((vllm if side == "vllm" else workbench)(case)))
        return
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    case = default_case(device, **given)
    print(table(case, measure(case)))


if __name__ == "__main__":
    main()
