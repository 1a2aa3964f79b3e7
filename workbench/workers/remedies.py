"""What a host can say about an error that it knows the cause of: out of memory, what is where, and which knob helps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from workbench.display.html import bytes_text
from workbench.errors.plain_text import said
from workbench.messages.calls import Call
from workbench.support.machine import available_bytes

if TYPE_CHECKING:
    from workbench.workers.host import Host

NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")
MOST_SHOWN = 6


def remedy_for(error: BaseException, host: Host, call: Call) -> str:
    """What would help against an error of a stage; empty where that is not known."""
    if not is_out_of_memory(error):
        return ""
    try:
        return f"{_held(host)}; use {', or '.join(_knobs(host, call))}"
    except Exception:  # what is asked for help must not hide what it is asked about
        return ""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that no memory was left: a GPU's, or this machine's."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in said(error) for text in NO_MEMORY):
            return True
        error = error.__cause__
    return False


def _held(host: Host) -> str:
    """The bytes of a host's device, the largest first, in words."""
    items = [(n, f"{role} {use}") for role, w in host.workers.items() for use, n in w.memory_bytes().items() if n]
    on_gpu = host.info.device.startswith("cuda")
    if not on_gpu and host.shard_bytes:
        items.append((host.shard_bytes, "batches"))
    shown = ", ".join(f"{what} {bytes_text(n)}" for n, what in sorted(items, reverse=True)[:MOST_SHOWN]) or "no model"
    if on_gpu:
        free, total = torch.cuda.mem_get_info(0)
        room = f"{bytes_text(int(total))} in all, {bytes_text(int(free))} free"
    else:
        room = f"{bytes_text(available_bytes())} left on the machine"
    return f"{host.info.name} ({host.info.device}) holds {shown}; {room}"


def _knobs(host: Host, call: Call) -> Iterator[str]:
    """What makes a stage need less, the nearest first."""
    worker = host.workers[call.role]
    operation: Any = getattr(getattr(worker, call.method, None), "__operation__", None)
    training, generation = worker.spec.training, worker.spec.generation
    on_gpu = host.info.device.startswith("cuda")
    if operation is not None and operation.generates and generation is not None:
        fraction = generation.gpu_memory_fraction
        share = f"gpu_memory_fraction (now {'automatic' if fraction is None else f'{fraction:g}'})"
        cache = share if on_gpu else f"kv_cache_gib (now {generation.kv_cache_gib:g})"
        if generation.engine == "vllm":
            yield f"a smaller Generation.{cache}"
        yield f"a smaller Generation.max_rows (now {generation.rows_at_once(on_gpu=on_gpu)})"
    elif worker.spec.name is not None and training is not None:
        tokens = worker.describe().get("micro_batch_tokens") or training.micro_batch_tokens
        yield "a smaller Training.micro_batch_tokens" + (f" (now {tokens:,})" if tokens else "")
        if operation is not None and operation.updates and not training.activation_checkpointing:
            yield "Training(activation_checkpointing=True)"
    elif call.rows is not None:
        yield "fewer rows"
    if on_gpu and not host.info.share_memory and sum(w.uses_device for w in host.workers.values()) > 1:
        yield "wb.open(share_memory=True), with which roles take turns"
    yield f"more devices: lab.{call.role}.move(pool, devices), lab.resize(pool, devices)"
