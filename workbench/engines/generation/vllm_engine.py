"""Generation with vLLM, inside the process that trains.

Rows are decoded by the core of a vLLM engine, without the layers above it.

`LLMEngine.step` makes a request output, a completion output and a dictionary with a `Logprob` object for each token of
each row. At 512 rows that takes as long as vLLM's scheduler, in the thread that launches the next step. The core's own
outputs have ids as lists and log-probabilities as arrays; this module reads those.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from workbench.engines.generation.base import (
    Decoding,
    Endings,
    GenerationEngine,
    Response,
    check_model,
    end_token_ids,
)
from workbench.engines.generation.vllm_start import (
    OF_PEFT,
    computing_threads,
    default_group_spared,
    exact_products,
    give_adapter,
    held_adapter,
    process_kept,
    start_engine,
    stream_kept,
    takes_adapter,
)
from workbench.engines.generation.weight_copies import WeightCopies, bit_sum, keeps_weights_as_loaded
from workbench.errors import BadInput, StageError
from workbench.models.file_weights import FileWeights
from workbench.models.loading import load_config
from workbench.models.lora import LoRA
from workbench.models.tokenizers import load_tokenizer
from workbench.settings.engines import Generation, Sampling
from workbench.support.replaced import replaced
from workbench.support.seeds import turn_seed
from workbench.telemetry import span

_numbers = itertools.count()
# Likeliest tokens requested beyond top_k: vLLM keeps all tokens that are as likely as the k-th.
TIES = 64


class VllmDecoding(Decoding):
    """Rows of an `LLMEngine`, which batches all rows that it has. Rows that are open at the end are aborted.

    adapter: vLLM's request for computing with an adapter. working: makes the context in which vLLM computes. The prefix
    cache starts empty unless it is kept: a result must not depend on earlier calls, which may have had other weights.
    On a GPU vLLM launches a step before it returns the tokens of the one before, so this code costs time only if it
    takes longer than a step.
    """

    def __init__(
        self,
        engine: Any,
        sampling: Sampling,
        ends: Endings,
        settings: Generation,
        vocab_size: int,
        *,
        adapter: Any,
        working: Callable[[], AbstractContextManager[None]],
        keep_cache: bool,
    ) -> None:
        super().__init__(settings, vocab_size, ends)
        self._engine, self._client = engine, engine.engine_core
        self._sampling, self._adapter, self._working, self._keep_cache = sampling, adapter, working, keep_cache
        self._running: dict[str, tuple[Response, Endings]] = {}
        self._stack = ExitStack()

    @property
    def open(self) -> int:  # type: ignore[override]
        return len(self._running)

    def __enter__(self) -> VllmDecoding:
        if not self._keep_cache and not self._engine.reset_prefix_cache():
            with self._working():
                _abort(self._engine)  # nothing cached with other weights may stay
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("vLLM still computes rows of an earlier call")
        self._stack.enter_context(_live_objects_uncollected())
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack, self._working():
            _abort(self._engine)

    def _add(self, response: Response, prompt_ids: Sequence[int], seed: int, room: int, ends: Endings) -> None:
        from vllm.inputs.engine import tokens_input

        begun, name = response.ids, f"row-{next(_numbers)}"
        least = max(0, self._sampling.min_new_tokens - len(begun))
        sampling = replace(self._sampling, min_new_tokens=least) if begun else self._sampling
        params = sampling_params(sampling, self._ends.token_ids, turn_seed(seed, len(begun)), room, self._vocab_size)
        request = self._engine.input_processor.process_inputs(
            name, tokens_input([*prompt_ids, *begun]), params, self._engine.get_supported_tasks(),
            lora_request=self._adapter,
        )  # fmt: skip
        self._client.add_request(request)
        self._running[name] = response, ends

    def step(self) -> list[Response]:
        ended, stopped = list[Response](), list[str]()
        with self._working():
            outputs = self._client.get_output().outputs
        for output in outputs:
            found = self._running.get(output.request_id)
            if found is None:  # a row of a decoding that an exception has ended
                continue
            response, ends = found
            new, ids = output.new_token_ids, response.ids
            ids += new
            self.tokens += len(new)
            if new:  # the sampled token comes before the likeliest ones, which are requested to keep a mask
                response.log_probs.extend(output.new_logprobs.logprobs[:, 0].tolist())
                if self._sampling.keeps_mask:
                    response.sets.extend(_sets(output.new_logprobs, self._vocab_size))
            if output.finished or ends.strings:
                ending = ends.of(ids, len(ids))
                if ending and not output.finished:
                    stopped.append(output.request_id)
                if ending or output.finished:
                    del self._running[output.request_id]
                    ended.append(replace(response, ending=ending or "length"))
        self._client.abort_requests(stopped)
        return ended


def _sets(logprobs: Any, vocabulary: int) -> list[list[int]]:
    """Return the tokens that could be drawn at each position: the likeliest ones with a probability above 0."""
    ids, kept = logprobs.logprob_token_ids[:, 1:], np.isfinite(logprobs.logprobs[:, 1:])
    if kept[:, -1].any() and ids.shape[1] < vocabulary:
        raise StageError(
            f"more than {ids.shape[1]} tokens could be sampled at one position",
            f"the mask has room for top_k tokens and {TIES} more that are as likely as the last of them",
            "sample with a smaller top_k or top_p, so that fewer tokens are as likely as the last one",
        )
    return [np.sort(row[here]).tolist() for row, here in zip(ids, kept, strict=True)]


def _abort(engine: Any) -> None:
    """Remove all rows from vLLM, such as those of a call that broke off."""
    core = engine.engine_core.engine_core
    # state of a step that broke off before its tokens were drawn: vLLM would refuse every later step
    engine.model_executor.driver_worker.worker.model_runner.execute_model_state = None
    engine.engine_core.abort_requests(list(core.scheduler.requests))
    # finish the step that was launched ahead for ended rows, before weights or prefix cache change
    while core.batch_queue:  # None if steps are not launched ahead
        core.step_fn()


def _check_limits(sampling: Sampling, end_ids: frozenset[int]) -> None:
    """Raise `BadInput` for more tokens than vLLM's sampler on a GPU takes: it would raise in the middle of a step."""
    from vllm.v1.worker.gpu.sample.logit_bias import MAX_NUM_LOGIT_BIAS_TOKENS, MAX_NUM_STOP_TOKEN_IDS

    ends = len(end_ids) if sampling.min_new_tokens else 0
    for what, count, most in (
        ("logit_bias", len(sampling.logit_bias or ()), MAX_NUM_LOGIT_BIAS_TOKENS),
        ("min_new_tokens with stop_token_ids", ends, MAX_NUM_STOP_TOKEN_IDS),
    ):
        if count > most:
            raise BadInput(
                f"Sampling.{what} of {count:,} tokens",
                f"on a GPU, vLLM takes at most {most:,}",
                "name fewer tokens, or use Generation(engine='transformers')",
            )


def sampling_params(sampling: Sampling, end_ids: frozenset[int], seed: int, room: int, vocabulary: int) -> Any:
    """Return vLLM's parameters for a row that may have `room` tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias) if sampling.logit_bias else None,
        # A row's own stream costs nothing on a GPU: there a seed is a key of the counter-based noise that vLLM computes
        # anyway (v1/worker/gpu/sample/gumbel.py; a row without a seed gets a random one), and the fused sampler, which
        # seeds rule out, is also ruled out by processed log-probabilities (sampler.py).
        # On a CPU torch's generator reads 32 bits of a seed: spread all bits of our seed over them.
        seed=int(np.random.SeedSequence(int(seed) % 2**64).generate_state(1)[0]),
        max_tokens=room,
        # of the sampled token alone, or of all tokens that could be drawn
        logprobs=min(sampling.top_k + TIES, vocabulary) if sampling.keeps_mask else 0,
        min_tokens=min(sampling.min_new_tokens, room),
        stop_token_ids=sorted(end_ids),
        ignore_eos=True,  # the ids above are complete, in both engines
        detokenize=False,
    )


@contextmanager
def _live_objects_uncollected() -> Iterator[None]:
    """Exclude the objects that are alive now from garbage collection.

    Tokens and requests are many small objects that stay alive. They make Python collect its oldest generation
    repeatedly, and walk through all objects of a process with a trainer. New garbage is still collected.
    """
    if gc.get_freeze_count():  # the process has frozen objects permanently
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class VllmEngine(GenerationEngine):
    """One SPMD rank of a vLLM engine over the process's default group; consecutive ranks form a tensor group.

    Every rank of a tensor group must make the same calls with the same arguments. A process without a default group
    gets one of world size 1. A process has one engine at a time: `close()` it before making another.

    model_path: folder with config, weights and tokenizer. dtype: of weights and cache. settings.tensor_parallel_size:
    ranks of a tensor group; it must divide the ranks of the default group. threads: computing threads on a CPU host
    while the engine works (None: the process's). sleeps: whether `sleep` will be called, for which vLLM allocates
    weights and cache in separate pools. cache_bytes: of the key-value cache on a GPU; None: the memory that vLLM finds
    free of `settings.gpu_memory_fraction`. lora: the trainer's adapter settings; the engine then holds the adapter
    beside the model. Raises `BadInput` for a model, an adapter or a size that vLLM refuses.
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
        lora: LoRA | None = None,
    ) -> None:
        from transformers import GenerationConfig

        config = load_config(model_path)
        check_model(config, settings)
        self._settings, self._threads, self._on_cpu = settings, threads, device.type == "cpu"
        self._vocab_size = int(config.get_text_config().vocab_size)
        self._tokenizer = load_tokenizer(model_path)
        has_own = (Path(model_path) / "generation_config.json").exists()
        ends = GenerationConfig.from_pretrained(model_path) if has_own else config.get_text_config()
        self._end_ids = end_token_ids(ends, self._tokenizer)
        self.weights_version = 0
        # idle: not used since it last slept, or on a CPU since it started
        self._sleeps, self._asleep, self._idle = sleeps, set[str](), not sleeps
        self._exact = dtype == torch.float32 and device.type == "cuda"
        self._lora, self.takes_adapter = lora, lora is not None
        self._adapter: Any = None  # the request sent with rows, once there is an adapter
        starting = span("start", note="starting vLLM")
        with starting, computing_threads(threads), process_kept(device), exact_products(self._exact):
            if lora is not None and not takes_adapter(config, lora):
                raise BadInput(
                    f"{lora} with Generation(engine='vllm')",
                    f"vLLM cannot apply it to a {' or '.join(config.architectures or ('model',))}; merged into the "
                    "weights, a small change would be lost by rounding",
                    "use Generation(engine='transformers'), or train the whole model",
                )
            self._engine: Any = start_engine(
                Path(model_path), settings, dtype, device, sleeps=sleeps, cache_bytes=cache_bytes, lora=self._lora
            )
        # level 1 copies the weights to host memory: no sync brings those beside an adapter again, or attention's slopes
        self._sleep_level = 1 if lora is not None or self._engine.apply_model(_has_slopes)[0] else 2
        self._dtype, self._folder = dtype, Path(model_path)
        self._copies: WeightCopies | None = None
        self._may_copy = (
            self._lora is None
            and settings.tensor_parallel_size == 1
            and self._engine.apply_model(keeps_weights_as_loaded)[0]
        )

    def _decoding(self, sampling: Sampling, ends: Endings, keep_cache: bool) -> AbstractContextManager[Decoding]:
        if not self._on_cpu:
            _check_limits(sampling, ends.token_ids)
        self._wake("kv_cache")
        return VllmDecoding(
            self._engine,
            sampling,
            ends,
            self._settings,
            self._vocab_size,
            adapter=self._adapter,
            working=self._working,
            keep_cache=keep_cache,
        )

    def _log_probs(self, token_ids: Sequence[int]) -> Tensor:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        self._wake("kv_cache")
        # with a seed: otherwise vLLM draws one from numpy's global generator
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=0, detokenize=False)
        with self._working():  # requests with prompt_logprobs do not read the prefix cache
            try:
                self._engine.add_request("0", tokens_input(list(token_ids)), params, lora_request=self._adapter)
                outputs: list[Any] = []
                while not outputs or not outputs[-1].finished:
                    outputs += self._engine.step()
            finally:
                _abort(self._engine)
        entries = outputs[-1].prompt_logprobs[1:]  # an entry may also hold the likeliest token
        return torch.tensor([entry[token].logprob for token, entry in zip(token_ids[1:], entries, strict=True)])

    @cached_property
    def _file_weights(self) -> FileWeights:
        made = FileWeights(load_config(self._folder))
        made.add_constants(self._folder)
        return made

    @torch.no_grad()
    def update_weights(
        self, named_weights: Iterable[tuple[str, Tensor]], version: int, *, partial: bool = False
    ) -> int:
        taken = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for name, weight in named_weights:
                taken += weight.numel() * self._dtype.itemsize
                own = name.removeprefix(OF_PEFT)
                part = {own: weight.detach()}
                if self._lora is None or self._file_weights.is_part:
                    part = self._file_weights.of(part)
                yield from ((name.replace(own, key), tensor) for key, tensor in part.items())

        self.weights_version = -1  # until every weight is there
        self._wake("weights")
        with self._working():
            if self._lora is not None:
                self._adapter = give_adapter(self._runner, dict(counted()), self._lora, self._dtype)
            elif self._copies is None:
                self._load_again(counted(), partial)
            else:
                self._copies.run(counted(), partial)
                if not self._on_cpu:  # the span of a sync must end when the copies have ended
                    torch.cuda.current_stream().synchronize()
        self.weights_version = version
        return taken

    def _load_again(self, weights: Iterator[tuple[str, Tensor]], partial: bool) -> None:
        """Load weights by vLLM's own reload; the first reload also looks for a faster way, see `WeightCopies`. partial:
        layers that do not come stay unchanged, packed copies included."""
        shapes, sums = dict[str, torch.Size](), dict[str, Tensor]()
        given, logger = list[str](), logging.getLogger("vllm.model_executor.model_loader.reload")
        level = logger.level
        self._may_copy &= not self._file_weights.converts  # copies go by transformers' names

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                given.append(name)
                if self._may_copy:
                    shapes[name], sums[name] = weight.shape, bit_sum(weight.to(self._dtype))
                yield name, weight

        try:
            logger.setLevel(logging.ERROR if partial else level)  # it warns of every unchanged layer
            self._reload(noted())
        except BaseException:
            # vLLM keeps the weights of unfinished layers, and would add them to the next reload's.
            self._reload(iter(()))
            raise
        finally:
            logger.setLevel(level)
        if any("embed" in name or "wte" in name for name in given):  # GPT-2 calls them wte
            self._engine.apply_model(_refresh_tied_head)
        if self._may_copy:
            self._may_copy = False
            (copies,) = self._engine.apply_model(lambda model: WeightCopies.recorded(model, shapes))
            # use the copies if vLLM has put the weights where they would
            if copies is not None and copies.holds(sums):
                self._copies = copies

    def _reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        with _experts_packed_again() if self._on_cpu else nullcontext():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})

    @property
    def _runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    def live_weights(self) -> dict[str, Tensor]:
        return self._copies.live() if self._copies and not self.lacks_weights else {}

    def readable_weights(self) -> Mapping[str, Tensor]:
        if self._settings.tensor_parallel_size > 1:
            return {}
        if self._lora is not None:
            return {} if self._adapter is None else dict(held_adapter(self._runner, self._lora))
        (weights,) = self._engine.apply_model(_readable)
        return {**cast(Mapping[str, Tensor], weights), **(self._copies.places() if self._copies else {})}

    def memory_bytes(self) -> dict[str, int]:
        kv_caches = self._runner.kv_caches
        caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in kv_caches}
        held = {"weights": sum(self._engine.apply_model(_weight_bytes)), "kv_cache": sum(caches.values())}
        return {use: 0 if use in self._asleep else n for use, n in held.items()}

    @property
    def lacks_weights(self) -> bool:
        return "weights" in self._asleep

    def sleep(self) -> int:
        """See the base class. vLLM cannot sleep on a CPU: then a span says so."""
        if self._idle:
            return 0
        self._idle = True
        if not self._sleeps:
            with span("offload", note="vLLM stays: " + ("it sleeps on GPUs only" if self._on_cpu else "sleeps=False")):
                return 0
        freed = sum(self.memory_bytes().values())
        with span("offload", bytes=freed, note="generation weights, generation kv_cache, freed"):
            self._engine.sleep(level=self._sleep_level)
        self._asleep, self.weights_version = {"weights", "kv_cache"}, -1
        return freed

    def _wake(self, part: str) -> None:
        """Allocate a freed part again."""
        self._idle = False
        if part in self._asleep:
            with span("load", note=f"room for generation {part}"):
                self._engine.wake_up([part])
            self._asleep.discard(part)

    def close(self) -> None:
        if self._engine is not None:
            from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release
            from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

            core, asleep = self._engine.engine_core.engine_core, bool(self._asleep)
            self._engine = self._copies = None
            LAYERWISE_INFO.clear()  # its leftovers of a reload hold layers and their weights
            try:
                if asleep:  # all pools: after the error below, awake ones would not be released
                    CuMemAllocator.instance.sleep(())
                with default_group_spared(), replaced(CuMemAllocator, "release_pools", lambda self: None):
                    core.shutdown()
            finally:
                del core
                gc.collect()
                if CuMemAllocator.instance is not None:  # a pool may end only after its last tensor
                    CuMemAllocator.instance.release_pools()
                if asleep:  # vLLM unmaps it again, and allocates nothing until the error has been reported
                    with suppress(RuntimeError):
                        unmap_and_release((0, 0, 0, 0))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The context in which vLLM computes."""
        # On CPU the few functions that vLLM compiles cost seconds of compiling, and a compiler, to save a millisecond.
        eager = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        # The sampler draws from torch's global generator even when every row has a generator of its own.
        with (
            eager, stream_kept(self._on_cpu), torch.random.fork_rng(devices=[]),
            computing_threads(self._threads), exact_products(self._exact),
        ):  # fmt: skip
            yield


@contextmanager
def _experts_packed_again() -> Iterator[None]:
    """On a CPU vLLM packs experts only where they have no kernel yet, which after a reload they have."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    prepare = UnquantizedFusedMoEMethod.process_weights_after_loading

    def prepare_anew(method: Any, layer: nn.Module) -> None:
        method.moe_kernel = None
        prepare(method, layer)

    with replaced(UnquantizedFusedMoEMethod, prepare.__name__, prepare_anew):
        yield


def _refresh_tied_head(model: nn.Module) -> None:
    """Pack the head's new weights again if it shares them with the embeddings.

    On CPU vLLM multiplies by a packed copy of each weight, made after loading. A reload packs only the layers whose
    weights were loaded by name; the shared tensor is loaded under the embeddings' name, and the head would keep the
    packed copy of the old one. On a GPU nothing is packed and this does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for head in layers:
        tied = any(other is not head and other.weight is head.weight for other in layers)
        if isinstance(head, ParallelLMHead) and tied:
            head.quant_method.process_weights_after_loading(head)


def _has_slopes(model: nn.Module) -> bool:
    """Return whether attention is biased by distances (ALiBi): its slopes are tensors, but no buffers."""
    return any(getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None for layer in model.modules())


def _readable(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that vLLM holds under transformers' names, without packed ones (their tensors are empty)."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named if parameter.numel()}


def _weight_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's weights. Packed copies, which torch does not see, are as big as their sources. A
    layer's function holds its copy in a closure; without packing, as for bf16 on some processors, it has none."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    plain = sum(parameter.nbytes for parameter in model.parameters())
    packed = [layer for layer in model.modules() if getattr(getattr(layer, "cpu_linear", None), "__closure__", None)]
    sources = [get_layerwise_info(layer).restore_metadata[0] for layer in packed]  # a layer that wraps another has none
    return plain + sum(source["weight"].nbytes for source in sources if "weight" in source)
