"""How vLLM starts: arguments with which it starts quickly, spans that show where its start-up time goes, and protection
of the process in which it runs beside a trainer.

vLLM expects a process of its own: it changes the environment, the random generators, the default process group and
torch's thread setting.

Also low-rank adapters in a running vLLM engine: the engine computes the sum W x + B A x, as the trainer does.

If the adapter were added to weights in bfloat16, most of a small change would be lost: it is less than half of the last
place of the weight. The adapter is given in memory, by vLLM's own classes; no file is written.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import random
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engines.generation.base import keeps_state
from workbench.errors import BadInput
from workbench.models.loading import load_config, rope_of
from workbench.models.lora import LoRA
from workbench.models.resolve import quiet_transformers
from workbench.placement.memory import STEP_TOKENS
from workbench.settings.engines import Generation
from workbench.support.files import home
from workbench.support.machine import own_gpu_bytes
from workbench.support.process_environment import with_variables
from workbench.support.replaced import replaced
from workbench.telemetry import span

NUMBER = 1  # vLLM's number of the one adapter
OF_PEFT = "base_model.model."  # what peft writes before the names of layers


def takes_adapter(config: Any, lora: LoRA) -> bool:
    """Return whether vLLM can hold such an adapter beside a model of this configuration."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    found = [ModelRegistry.models[name] for name in config.architectures or () if name in ModelRegistry.models]
    return bool(found) and lora.rank <= max(get_args(MaxLoRARanks)) and supports_lora(found[0].load_model_cls())


def start_arguments(lora: LoRA) -> dict[str, Any]:
    """Return arguments of an engine that holds one adapter, with room for the next rank for which vLLM has kernels."""
    from vllm.config.lora import MaxLoRARanks

    room = min(rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank)
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": room}


@contextmanager
def experts_left() -> Iterator[None]:
    """Inside the block, vLLM builds experts without room for an adapter: with it they are slower, and need Triton.
    `give_adapter` refuses an adapter of experts."""
    from vllm.lora import model_manager
    from vllm.model_executor.layers.fused_moe import layer

    supported, described = model_manager.is_supported_lora_module, layer.FusedMoEConfig

    def chosen(name: str, module: Any, names: list[str]) -> bool:
        return supported(name, module, names) and not isinstance(module, model_manager.MoERunner)

    with (
        replaced(model_manager, "is_supported_lora_module", chosen),
        replaced(layer, "FusedMoEConfig", lambda **fields: described(**fields | {"is_lora_enabled": False})),
    ):
        yield


def give_adapter(runner: Any, tensors: Mapping[str, Tensor], lora: LoRA, dtype: torch.dtype) -> Any:
    """Replace the engine's adapter; return vLLM's request with which a row is computed with it. tensors: whole, by
    peft's names; B is already scaled by alpha / rank. Raises `BadInput` for a layer that vLLM computes without it."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    manager = _manager(runner)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        NUMBER,
        dict(tensors),
        PEFTHelper(r=lora.rank, lora_alpha=lora.rank, target_modules=[]),  # scaled already
        device="cpu",
        dtype=dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    adapted = {part for name in manager.modules for part in manager.packed_modules.get(name) or [name]}
    there = {name for name, _ in manager.model.named_modules()}  # without a part for images
    if left := sorted(name for name in adapter.loras.keys() & there if name not in adapted):
        taken = sorted({name.rpartition(".")[2] for name in adapter.loras.keys() & adapted})
        raise BadInput(
            f"{lora} of layer {left[0].rpartition('.')[2]!r} with Generation(engine='vllm')",
            "vLLM computes this layer without adapter",
            f"name other layers: LoRA(targets={tuple(taken)!r})",
        )
    manager.remove_adapter(NUMBER)
    manager.add_adapter(adapter)
    manager.activate_adapter(NUMBER)
    return LoRARequest(lora_name="adapter", lora_int_id=NUMBER, lora_path="in memory")


def held_adapter(runner: Any, lora: LoRA) -> Iterator[tuple[str, Tensor]]:
    """Yield the live weights of an uncut engine's adapter with which it computes, by peft's names; B scaled."""
    manager = _manager(runner)
    slot = manager.lora_index_to_id.index(NUMBER)
    for name, module in manager.modules.items():
        if not isinstance(module.lora_a_stacked, tuple):  # the head has no adapter
            continue
        for i, part in enumerate(manager.packed_modules.get(name) or [name]):
            a, b = module.lora_a_stacked[i][slot, 0], module.lora_b_stacked[i][slot, 0]
            yield f"{OF_PEFT}{part}.lora_A.weight", a[: lora.rank]
            yield f"{OF_PEFT}{part}.lora_B.weight", b[:, : lora.rank]


def _manager(runner: Any) -> Any:
    return runner.lora_manager._adapter_manager  # noqa: SLF001 (vLLM's public calls read adapters from files)


GIB = 2**30
# The share of a GPU for a model whose weights are unknown from its configuration, and so the room that it leaves.
UNKNOWN_MODEL_SHARE = 0.4
# Methods of vLLM's worker during the engine's start -> kind and note of their spans.
PHASES = {
    "load_model": ("read", "vLLM reads the weights"),
    "determine_available_memory": ("profile", "vLLM compiles and measures memory"),
    "compile_or_warm_up_model": ("capture", "vLLM warms up and records graphs"),
}

LONGEST_FOLDER = 54  # bytes of its path: a socket of `private_sockets` adds 49, and at most 103 are allowed


def graph_arguments(rows: int) -> dict[str, Any]:
    """Return arguments of a GPU engine that decodes up to `rows` rows: graphs of decode steps only, in few sizes.

    By default vLLM records each of 50 sizes twice, as a whole and in pieces for steps that also prefill, and the pieces
    once more to measure their memory. The pieces serve steps of few tokens (at most 512), which steps with prefill
    rarely are. FlashInfer's autotuning is for quantized layers and mixtures of experts. A tensor group sums by NCCL:
    the other ways number the GPUs of a group, but a host sees only its own.
    """
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": graph_sizes(rows)}
    return {
        "compilation_config": {**graphs, "pass_config": {"fuse_allreduce_rms": False}},
        "kernel_config": {"enable_flashinfer_autotune": False},
        "disable_custom_all_reduce": True,
    }


def graph_sizes(rows: int) -> list[int]:
    """Return the numbers of rows for which decode steps are recorded; other numbers are padded to the next one, from 16
    rows on by at most a quarter."""
    sizes, size = [1, 2, 4], 8
    while size < rows:
        sizes.append(size)
        size += max(8, size // 4 // 8 * 8)
    return [size for size in sizes if size < rows] + [rows]


@contextmanager
def phases_timed(on_cpu: bool) -> Iterator[None]:
    """Record a span for each of vLLM's `PHASES`."""
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


def start_engine(
    model_path: Path, settings: Generation, dtype: torch.dtype, device: torch.device, *,
    sleeps: bool, cache_bytes: int | None, lora: LoRA | None = None,
) -> Any:  # fmt: skip
    """Build the engine (a collective call of the default group). lora: the settings of an adapter that it will get."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # run the engine's core in this process, not in a child
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # several processes share the cores
        VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # max_model_len below is one more than the model may have
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",  # it returns no log-probabilities of the distribution that it samples
        VLLM_ALLREDUCE_USE_SYMM_MEM="0",  # see `graph_arguments`
        VLLM_ALLREDUCE_USE_FLASHINFER="0",
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_RANK=str(device.index or 0) if device.type == "cuda" else str(dist.get_rank()),
    )
    # vLLM's compiled code: another start with the same model, dtype, settings and versions of vLLM and torch loads it
    os.environ.setdefault("VLLM_CACHE_ROOT", str(home() / "vllm"))
    with span("import", note="importing vLLM"):
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        from vllm import EngineArgs, LLMEngine
        from vllm.config import CompilationMode
        from vllm.distributed import parallel_state
        from vllm.usage.usage_lib import UsageContext

    if parallel_state.model_parallel_is_initialized():
        raise BadInput("a second vLLM engine", "a process can have only one at a time", "close() the first one")
    on_cpu = device.type == "cpu"
    rows, longest = settings.rows_at_once(on_gpu=not on_cpu), settings.max_model_tokens + 1
    overrides: dict[str, Any] = {"head_dtype": "float32"} if settings.head_dtype == "float32" else {}
    config = load_config(model_path, settings.max_model_tokens)
    rope = rope_of(config)
    if rope.get("rope_type") == "longrope":  # vLLM would choose the factors by max_model_len, and read no own scale
        scale = ROPE_INIT_FUNCTIONS["longrope"](config.get_text_config())[1]
        overrides["rope_parameters"] = {"short_mscale": scale, "long_mscale": scale} | rope
    arguments = EngineArgs(
        model=str(model_path),
        dtype=cast(Any, str(dtype).removeprefix("torch.")),
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        # One more than prompt and response may have: to score a full sequence, vLLM needs room for a token after it.
        max_model_len=longest,
        max_num_seqs=rows,
        # If a prompt is prefilled in parts, samples are drawn and taken back, which a CPU's generator cannot do.
        enable_chunked_prefill=False if on_cpu else None,
        enable_prefix_caching=False if on_cpu and keeps_state(config) else None,  # it would need prefill in parts
        # On a GPU vLLM warms up with this many tokens, divided over the rows: more than the rows can hold would be read
        # past the end of their block tables.
        max_num_batched_tokens=max(2048 if on_cpu else min(STEP_TOKENS, rows * longest), longest),
        # Samples of a prompt share its full blocks, computed once. vLLM's own block on a CPU has 128 tokens, more than
        # most prompts; its kernels need multiples of 32.
        block_size=32 if on_cpu else None,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * GIB) if on_cpu else cache_bytes,
        gpu_memory_utilization=UNKNOWN_MODEL_SHARE if on_cpu else _gpu_share(settings, cache_bytes),
        logprobs_mode="processed_logprobs",
        hf_overrides=overrides,
        max_logprobs=-1,  # a sampling mask asks for as many as its top_k
        enforce_eager=on_cpu,
        enable_sleep_mode=sleeps,
        skip_tokenizer_init=True,
        language_model_only=True,  # also of models that take images, such as Gemma 3 and Qwen3.5
        generation_config="vllm",  # nothing from the checkpoint's generation_config.json
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
        **({} if on_cpu else graph_arguments(rows)),
        **({} if lora is None else start_arguments(lora)),
    )
    with (
        stream_kept(on_cpu), private_shared_memory(on_cpu), private_sockets(), phases_timed(on_cpu),
        transformers_kept(), experts_left(),
    ):  # fmt: skip
        try:
            if not on_cpu and arguments.create_model_config().using_transformers_backend():
                # `transformers_kept` leaves it uncompiled: vLLM then needs its own kernels, such as that of norms
                cast(Any, arguments.compilation_config).mode = CompilationMode.NONE
            engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        except Exception as error:
            with default_group_spared():
                parallel_state.cleanup_dist_env_and_memory()
            # also of the last four classes, where it does not support a family on this device, or its configuration
            if isinstance(error, ValueError | NotImplementedError | ImportError | AttributeError | KeyError):
                other = "" if keeps_state(config) else ", or use Generation(engine='transformers')"
                if "failed to be inspected" in str(error):  # vLLM could not import its class
                    other = f", install torchvision in the build of torch, which families with images need{other}"
                raise BadInput(
                    f"vLLM rejects {model_path.name!r} with {settings}",
                    str(error).strip() if isinstance(error, ValueError) else repr(error),
                    f"change the model or the setting that vLLM names{other}",
                ) from error
            raise
    # vLLM shuts down itself and the default group when it is garbage collected; only `close` may do that, carefully.
    cast(Any, engine.engine_core)._finalizer.detach()
    return engine


def _gpu_share(settings: Generation, cache_bytes: int | None) -> float:
    """Return the share of the whole GPU that vLLM requires to be free, and fills if no cache size is given."""
    whole = torch.cuda.get_device_properties(0).total_memory
    if cache_bytes is None:
        return (settings.gpu_memory_fraction or UNKNOWN_MODEL_SHARE) * own_gpu_bytes() / whole
    return max(0.01, cache_bytes / whole)


@contextmanager
def process_kept(device: torch.device) -> Iterator[None]:
    """Restore what importing and starting vLLM changes in the process around it."""
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
        # On CPU vLLM replaces torch.set_num_threads by a function that refuses.
        torch.set_num_threads = set_num_threads
        torch.set_default_dtype(default_dtype)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)
        # LD_PRELOAD, RANK, LOCAL_WORLD_SIZE and more would reach child processes. vLLM reads its own variables later.
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if not name.startswith("VLLM_")})
        # vLLM freezes the garbage collector's heap: cycles in a trainer that is dropped later would never be freed.
        gc.unfreeze()


def stream_kept(on_cpu: bool) -> AbstractContextManager[Any]:
    """Have vLLM, once it is imported, compute on the thread's CUDA stream, for which the trainer's streams wait.

    Where no stream has been set since its import, vLLM makes one for a tensor group, or for experts beside shared ones,
    and remembers it: it would read each step's tokens when that stream is idle, while the step runs on another.
    """
    return nullcontext() if on_cpu else torch.cuda.stream(torch.cuda.current_stream())


@contextmanager
def private_shared_memory(on_cpu: bool) -> Iterator[None]:
    """On CPU, keep two pools of a machine out of the same shared-memory segment, and memory unbound to NUMA nodes."""
    if not on_cpu:
        yield
        return
    import vllm._custom_ops  # noqa: F401  (loads the operators of torch.ops._C)
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.triton_utils import dispatcher

    # vLLM looks into all modules for its kernels. Numba's library, llvmlite, gives a function for its `__dict__`.
    cast(Any, dispatcher).vars = lambda value: value.__dict__ if isinstance(value.__dict__, Mapping) else {}
    flatten_rotary()
    # vLLM names a segment only by the ranks of its tensor group: [0-1] in every pool on the machine.
    token = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(token, src=0)
    name = _CPUSHMDistributed.make_group_name
    private_name = staticmethod(lambda communicator: f"{token[0]}-{name(communicator).replace('/', '')}")
    with (
        replaced(_CPUSHMDistributed, "make_group_name", private_name),
        replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None),
    ):
        yield


@functools.cache
def flatten_rotary() -> None:
    """Give vLLM's CPU kernel for rotary embeddings [tokens, heads x numbers]: from [tokens, heads, numbers], which some
    families pass (LFM2), it makes wrong numbers. It writes in place."""
    from vllm import _custom_ops

    rotate = _custom_ops.rotary_embedding

    def flat(positions: Tensor, query: Tensor, key: Tensor | None, *more: Any) -> None:
        flat_key = None if key is None else key.view(*positions.shape, -1)
        rotate(positions, query.view(*positions.shape, -1), flat_key, *more)

    _custom_ops.rotary_embedding = flat


@contextmanager
def transformers_kept() -> Iterator[None]:
    """Keep transformers as the trainer needs it. vLLM has config classes of its own for some families, and registers
    them in place of transformers'. Where it has no model of its own, it computes with transformers' class, and would
    make that class compile itself, so that no trainer could use it."""
    from transformers import CONFIG_MAPPING
    from vllm.model_executor.models.transformers.base import Base

    with (
        replaced(CONFIG_MAPPING, "_extra_content", dict(CONFIG_MAPPING._extra_content)),  # noqa: SLF001
        replaced(Base, "_decorate_cls_for_torch_compile", lambda *classes, **more: None),
    ):
        yield


@contextmanager
def private_sockets() -> Iterator[None]:
    """Put the sockets by which the ranks of a tensor group connect into a folder that only this user can enter. The
    folder is removed once the engine has started, when all ranks are connected: vLLM would never remove it. It is in
    /tmp if the path of a socket would be too long elsewhere."""
    from vllm.distributed.device_communicators import shm_broadcast

    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    with (
        tempfile.TemporaryDirectory(prefix="wb-", dir=None if short else "/tmp") as folder,
        replaced(shm_broadcast, "get_open_zmq_ipc_path", lambda: f"ipc://{folder}/{uuid.uuid4()}"),
    ):
        yield


@contextmanager
def default_group_spared() -> Iterator[None]:
    """Skip the last step of vLLM's shutdown, `destroy_process_group()` of the default group, which is the trainer's."""
    from vllm.distributed import parallel_state

    def forget_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    with replaced(parallel_state, "destroy_distributed_environment", forget_world):
        yield


def exact_products(needed: bool) -> AbstractContextManager[None]:
    """Have Triton kernels compiled in the block multiply fp32 by fp32, not rounded to TF32's 10 bits.

    FlashAttention and FlashInfer take no fp32 (their `supported_dtypes`), so vLLM computes attention in Triton, whose
    `tl.dot` defaults to TF32 on NVIDIA. This is vLLM's only use of TF32, as its matrix products follow
    VLLM_FLOAT32_MATMUL_PRECISION, "highest". On an H100 it made a mean gap of 0.004 nats on random tokens. The
    variable's name is part of the key of Triton's own cache.
    """
    return with_variables({"TRITON_F32_DEFAULT": "ieee"} if needed else {})


@contextmanager
def computing_threads(count: int | None) -> Iterator[None]:
    """Compute with `count` threads inside the block, then with as many as before.

    Reading torch's number first also gives the calling thread, which need not be the main one, the process's setting:
    OpenMP keeps one for each thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
