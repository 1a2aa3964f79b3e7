"""Measure the rates of this machine's devices, in about a second: products by shape, memory, attention, starts."""

from __future__ import annotations

import math
import socket
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np

from workbench.mapping.hardware import Hardware, ProductRates
from workbench.support.machine import computing_threads, cores, total_bytes

LAYER_OPERATIONS = 30  # operations of a decoder layer in torch
Timed = Sequence[tuple[tuple[int, int, int], float]]  # (m, n, k) of a product, and its seconds


def this_machine(devices: int | None = None) -> Hardware:
    """Measure this machine: its GPUs if it has any, else its cores, divided among slots as among hosts. devices: the
    number of slots of a CPU machine; None: as many as cores. A process measures each division once. Latencies and a
    GPU's links are not measured: `lab.calibrate` fits their cost."""
    import torch

    gpus = torch.cuda.device_count()
    count = gpus or devices or cores()
    found = _measured(0 if gpus else computing_threads(count))
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else total_bytes() // count
    torch.cuda.empty_cache()  # free the measurement's memory for hosts
    return replace(found, devices_per_machine=count, memory_bytes=int(memory))


@lru_cache
def _measured(threads: int) -> Hardware:
    """Measure one device. threads: of a slot of a CPU machine; 0: measure the first GPU."""
    import torch

    gpu = threads == 0
    device, before = torch.device("cpu" if threads else "cuda"), torch.get_num_threads()
    ones = partial(torch.ones, device=device)
    try:
        torch.set_num_threads(threads or before)
        n, times, rates = 8192 if gpu else 1024, list[tuple[tuple[int, int, int], float]](), dict[str, float]()
        for dtype in (torch.float32, torch.bfloat16):
            a = ones(n, n, dtype=dtype)
            rates[str(dtype).removeprefix("torch.")] = 2 * n**3 / _timed(partial(torch.mm, a, a), device)
        dtype = torch.bfloat16 if gpu else torch.float32  # the dtype for training on such devices
        weights = ones(n, n, dtype=dtype)
        for rows in (8, 16, 64, 256, n):
            times.append(((rows, n, n), _timed(partial(torch.mm, ones(rows, n, dtype=dtype), weights), device)))
        source, target = (ones(2**28 if gpu else 2**24) for _ in range(2))
        copied = 2 * source.nbytes / _timed(partial(target.copy_, source), device)
        q = ones(1, 16, 2048 if gpu else 512, 64, dtype=dtype)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, q, q, q, is_causal=True)
        attended = 2 * q.numel() * q.shape[2] / _timed(attend, device)
        small = ones(8, 8)  # so small that only the start of an operation takes time
        start_s = _timed(lambda: [small @ small for _ in range(100)], device) / 100
    finally:
        torch.set_num_threads(before)
    name, item = str(dtype).removeprefix("torch."), dtype.itemsize
    units = torch.cuda.get_device_properties(0).multi_processor_count if gpu else 1
    begun = ProductRates(units=units, tiles=gpu, launch_s=start_s, attention_share=attended / rates[name])
    products = fitted_rates(times, begun, flop_s=rates[name], memory_bytes_s=copied, item_bytes=item)
    # processes of a CPU machine exchange bytes at the speed of sockets; a GPU's fabric is not measured here
    link = copied / 4 if gpu else _sent_bytes_s()
    return Hardware(name="this machine", devices_per_machine=1, memory_bytes=1, matrix_flop_s=rates, products=products,
                    memory_bytes_s=copied, inside_bytes_s=link, machine_bytes_s=link,
                    load_bytes_s=copied / 4, inside_latency_s=5e-6 if gpu else 1e-4, between_latency_s=1e-4,
                    runs_ahead=gpu, layer_start_s=LAYER_OPERATIONS * start_s, cores=None if gpu else cores()
                    )  # fmt: skip


def fitted_rates(
    times: Timed, start: ProductRates, *, flop_s: float, memory_bytes_s: float, item_bytes: int
) -> ProductRates:
    """Fit share, edge and memory_share by a grid search: least squares of log(predicted / timed)."""

    def off(rates: ProductRates) -> float:
        told = (rates.seconds(*shape, flop_s=flop_s, memory_bytes_s=memory_bytes_s, item_bytes=item_bytes) / seconds
                for shape, seconds in times)  # fmt: skip
        return sum(math.log(one) ** 2 for one in told)

    tried = product(np.linspace(0.6, 1.2, 25), np.geomspace(1, 100, 24), np.linspace(0.2, 1, 9))
    return min(
        (replace(start, share=float(share), edge=float(edge), memory_share=float(memory))
         for share, edge, memory in tried), key=off,
    )  # fmt: skip


def _sent_bytes_s() -> float:
    """Return the bytes per second through a local socket, into newly allocated memory, as in a collective."""
    sent = bytes(2**26)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other, ThreadPoolExecutor(1) as pool:

            def over() -> None:
                sending = pool.submit(one.sendall, sent)
                other.recv(len(sent), socket.MSG_WAITALL)
                sending.result()

            return len(sent) / _timed(over)


def _timed(call: Callable[[], Any], device: Any = None) -> float:
    """Return the seconds of a call: the fastest of several."""
    import torch

    def finished() -> None:
        call()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize()

    return min(timeit.repeat(finished, number=1))
