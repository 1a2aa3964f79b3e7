"""What keeps vLLM from disturbing the process in which it runs beside a trainer.

vLLM expects a process of its own: it changes the environment, the random generators, the default process group and
torch's thread setting.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import random
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from workbench.models.quiet import quiet_transformers

LONGEST_FOLDER = 54  # bytes of its path: a socket of `private_sockets` adds 49, and may have 103


@contextmanager
def process_kept(device: torch.device) -> Iterator[None]:
    """Put back what importing and starting vLLM changes in the process around it."""
    environment, python_state = dict(os.environ), random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  (vLLM seeds the global generator, users may draw from it)
    set_num_threads, default_dtype = torch.set_num_threads, torch.get_default_dtype()
    log_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            quiet_transformers(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(log_level)
        # On CPU it swaps torch.set_num_threads for a function that refuses.
        torch.set_num_threads = set_num_threads
        torch.set_default_dtype(default_dtype)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        # LD_PRELOAD, RANK, LOCAL_WORLD_SIZE and more would reach child processes. vLLM's own it reads later.
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if not name.startswith("VLLM_")})
        # It freezes the garbage collector's heap: cycles in a trainer that is given up later would never be freed.
        gc.unfreeze()


@contextmanager
def private_shared_memory(on_cpu: bool) -> Iterator[None]:
    """On CPU: no two pools of a machine meet in one shared-memory segment, and memory stays bound to no NUMA node."""
    if not on_cpu:
        yield
        return
    import vllm._custom_ops  # noqa: F401  (loads the operators of torch.ops._C)
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    # vLLM names a segment by the ranks of its tensor group alone: [0-1] in every pool on the machine.
    token = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(token, src=0)
    name = _CPUSHMDistributed.make_group_name
    private_name = staticmethod(lambda communicator: f"{token[0]}-{name(communicator).replace('/', '')}")
    with (
        replaced(_CPUSHMDistributed, "make_group_name", private_name),
        replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None),
    ):
        yield


@contextmanager
def private_sockets() -> Iterator[None]:
    """The sockets through which the ranks of a tensor group meet lie in a folder that only this user can enter. It is
    removed once the engine has started, as all ranks are connected then: vLLM would never do so. It is in /tmp where
    the path of a socket would be too long."""
    from vllm.distributed.device_communicators import shm_broadcast

    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    with (
        tempfile.TemporaryDirectory(prefix="wb-", dir=None if short else "/tmp") as folder,
        replaced(shm_broadcast, "get_open_zmq_ipc_path", lambda: f"ipc://{folder}/{uuid.uuid4()}"),
    ):
        yield


@contextmanager
def default_group_spared() -> Iterator[None]:
    """vLLM's shutdown without its last step, `destroy_process_group()` of the default group, which is the trainer's."""
    from vllm.distributed import parallel_state

    def forget_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    with replaced(parallel_state, "destroy_distributed_environment", forget_world):
        yield


@contextmanager
def exact_products(needed: bool) -> Iterator[None]:
    """Kernels that Triton compiles meanwhile multiply fp32 by fp32, not rounded to TF32's 10 bits.

    FlashAttention and FlashInfer take no fp32 (their `supported_dtypes`), so that vLLM computes attention in Triton,
    whose `tl.dot` defaults to TF32 on NVIDIA: the one place where vLLM does, as its matrix products keep to
    VLLM_FLOAT32_MATMUL_PRECISION, "highest". On an H100 that was a mean gap of 0.004 nats on random tokens. The name
    is part of the key of Triton's own cache.
    """
    before = os.environ.get("TRITON_F32_DEFAULT")
    if needed:
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    try:
        yield
    finally:
        if needed and before is None:
            del os.environ["TRITON_F32_DEFAULT"]
        elif needed and before is not None:
            os.environ["TRITON_F32_DEFAULT"] = before


@contextmanager
def computing_threads(count: int | None) -> Iterator[None]:
    """Compute with `count` threads, then with as many as before.

    Asking torch first also gives the calling thread, which need not be the main one, the process's setting: OpenMP
    keeps one for each thread.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = inspect.getattr_static(owner, name, None) or getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
