"""How vLLM starts: what is left out so that it starts sooner, and spans that say where its seconds go."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from workbench.support.home import home
from workbench.telemetry import span

# What vLLM's worker does while the engine starts: method -> kind and note of its span.
PHASES = {
    "load_model": ("read", "vLLM reads the weights"),
    "determine_available_memory": ("profile", "vLLM compiles and measures memory"),
    "compile_or_warm_up_model": ("capture", "vLLM warms up and records graphs"),
}


def keep_compiled() -> None:
    """Have vLLM keep what it compiles in the workbench's home: another start with the same model, dtype, settings and
    versions of vLLM and torch loads it. `VLLM_CACHE_ROOT` goes before."""
    os.environ.setdefault("VLLM_CACHE_ROOT", str(home() / "vllm"))


def graph_arguments(rows: int) -> dict[str, Any]:
    """Arguments of an engine on a GPU that decodes up to `rows` rows: graphs of decode steps alone, in few sizes.

    By default vLLM records each of 50 sizes twice, as a whole and in pieces for steps that also prefill, and the pieces
    once more to measure their memory. The pieces serve steps of few tokens (512 at most), which a step that prefills
    seldom is. FlashInfer's autotuning is for quantized layers and mixtures of experts.
    """
    return {
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": graph_sizes(rows)},
        "kernel_config": {"enable_flashinfer_autotune": False},
    }


def graph_sizes(rows: int) -> list[int]:
    """Numbers of rows for which a decode step is recorded; others are padded to the next one, by a quarter at most from
    16 rows on."""
    sizes, size = [1, 2, 4], 8
    while size < rows:
        sizes.append(size)
        size += max(8, size // 4 // 8 * 8)
    return [size for size in sizes if size < rows] + [rows]


@contextmanager
def phases_timed(on_cpu: bool) -> Iterator[None]:
    """A span for each of vLLM's `PHASES`."""
    module, name = ("cpu_worker", "CPUWorker") if on_cpu else ("gpu_worker", "Worker")
    worker = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), name)

    def timed(method: Callable[..., Any], kind: str, note: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with span(kind, note=note):
                return method(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for method, (kind, note) in PHASES.items():
            stack.enter_context(replaced(worker, method, timed(getattr(worker, method), kind, note)))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    before = inspect.getattr_static(owner, name, None) or getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
