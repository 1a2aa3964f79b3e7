"""Rows decoded by the core of a vLLM engine, without the layers above it.

`LLMEngine.step` makes a request output, a completion output and a dictionary with a `Logprob` object for each token of
each row. At 512 rows that takes as long as vLLM's scheduler, in the thread that launches the next step. The core's own
outputs have ids as lists and log-probabilities as arrays, which are read here.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.engines.generation.base import Decoding, Response
from workbench.engines.generation.endings import Endings
from workbench.errors import StageError
from workbench.settings.engines import Generation, Sampling

_numbers = itertools.count()
# Likeliest tokens that are asked for beyond top_k: vLLM leaves all that are as likely as the k-th.
TIES = 64


class VllmDecoding(Decoding):
    """Rows of an `LLMEngine`, which batches whatever is there. Rows that are open at the end are aborted.

    adapter: what vLLM is asked for so that it computes with one. working: what it computes under. The prefix cache
    starts empty: a result must not depend on earlier calls, and these may have had other weights. On a GPU vLLM
    launches a step before it returns the tokens of the one before, so this code costs time only where it takes longer
    than a step.
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
    ) -> None:
        super().__init__(settings, vocab_size, ends)
        self._engine, self._client = engine, engine.engine_core
        self._sampling, self._adapter, self._working = sampling, adapter, working
        self._running: dict[str, tuple[Response, Endings]] = {}
        self._stack = ExitStack()

    @property
    def open(self) -> int:  # type: ignore[override]
        return len(self._running)

    def __enter__(self) -> VllmDecoding:
        self._engine.reset_prefix_cache()
        self._stack.enter_context(_live_objects_uncollected())
        return self

    def __exit__(self, *error: object) -> None:
        with self._stack, self._working():
            self._client.abort_requests(list(self._running))
            _drain(self._client)

    def _add(self, row: int, prompt_ids: Sequence[int], seed: int, room: int, ends: Endings) -> None:
        params = sampling_params(self._sampling, self._ends.token_ids, seed, room, self._vocab_size)
        response = Response(row=row, ids=[], log_probs=[], ending="length", sets=[])
        self._running[_request(self._engine, prompt_ids, params, self._adapter)] = response, ends

    def step(self) -> list[Response]:
        ended, stopped = list[Response](), list[str]()
        with self._working():
            outputs = self._client.get_output().outputs
        for output in outputs:
            found = self._running.get(output.request_id)
            if found is None:  # of a decoding that an exception has ended
                continue
            response, ends = found
            new, ids = output.new_token_ids, response.ids
            ids += new
            self.tokens += len(new)
            if new:  # the sampled token stands before the likeliest ones, which are asked for to keep a mask
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
    """The tokens that could be drawn at each place: those of the likeliest that have a probability."""
    ids, kept = logprobs.logprob_token_ids[:, 1:], np.isfinite(logprobs.logprobs[:, 1:])
    if kept[:, -1].any() and ids.shape[1] < vocabulary:
        raise StageError(
            f"more than {ids.shape[1]} tokens could be drawn in one place",
            f"the mask is kept of top_k tokens and {TIES} that are as likely as the last of them",
            "sample with a smaller top_k or top_p, so that fewer tokens are as likely as the last one",
        )
    return [np.sort(row[here]).tolist() for row, here in zip(ids, kept, strict=True)]


def _request(engine: Any, token_ids: Sequence[int], params: Any, adapter: Any) -> str:
    """Queue a row; its request id."""
    from vllm.inputs.engine import tokens_input

    name = f"row-{next(_numbers)}"
    request = engine.input_processor.process_inputs(
        name, tokens_input(list(token_ids)), params, engine.get_supported_tasks(), lora_request=adapter
    )
    engine.engine_core.add_request(request)
    return name


def _drain(client: Any) -> None:
    """Wait for the step that was launched ahead for rows that have ended, before weights or prefix cache change."""
    core = client.engine_core
    while core.batch_queue:  # None where steps are not launched ahead
        core.step_fn()


def sampling_params(sampling: Sampling, end_ids: frozenset[int], seed: int, room: int, vocabulary: int) -> Any:
    """vLLM's parameters of a row that may have `room` tokens."""
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
        # in any case (v1/worker/gpu/sample/gumbel.py; a row without one is given a random one), and the fused sampler
        # that seeds rule out is ruled out by processed log-probabilities, too (sampler.py).
        # On a CPU torch's generator reads 32 bits of a seed: spread all bits of ours over them.
        seed=int(np.random.SeedSequence(int(seed) % 2**64).generate_state(1)[0]),
        max_tokens=room,
        # of the sampled token alone, or of all that could be drawn
        logprobs=min(sampling.top_k + TIES, vocabulary) if sampling.keeps_mask else 0,
        min_tokens=min(sampling.min_new_tokens, room),
        stop_token_ids=sorted(end_ids),
        ignore_eos=True,  # the ids above are all there are, in both engines
        detokenize=False,
    )


@contextmanager
def _live_objects_uncollected() -> Iterator[None]:
    """Exclude the objects that are alive now from garbage collection.

    Tokens and requests are many small objects that stay alive. They make Python collect its oldest generation again and
    again, and walk through all that a process with a trainer holds. New garbage is still collected.
    """
    if gc.get_freeze_count():  # the process has set objects aside for good
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
