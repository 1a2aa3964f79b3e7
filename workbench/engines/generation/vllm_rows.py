"""Rows decoded by the core of a vLLM engine, without the layers above it.

`LLMEngine.step` makes a request output, a completion output and a dictionary with a `Logprob` object for each token of
each row. At 512 rows that takes as long as vLLM's scheduler, in the thread that launches the next step. The core's own
outputs have ids as lists and log-probabilities as arrays, which are read here.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from workbench.engines.generation.base import Ending, Progress, Rollout
from workbench.engines.generation.endings import Endings
from workbench.settings.engines import Sampling

_numbers = itertools.count()


def decode(
    engine: Any, prompt_ids: Sequence[Sequence[int]], params: Sequence[Any], ends: Endings, progress: Progress | None,
    adapter: Any = None,
) -> Rollout:  # fmt: skip
    """A response to each prompt by an `LLMEngine`; params: vLLM's `SamplingParams` of each row. adapter: what vLLM is
    asked for so that it computes with one.

    `progress` is called after each step, on all ranks of a tensor group after the same ones. Where it raises, all rows
    are aborted. On a GPU vLLM launches a step before it returns the tokens of the one before, so this code costs time
    only where it takes longer than a step.
    """
    client, total, made = engine.engine_core, len(prompt_ids), 0
    responses: list[list[int]] = [[] for _ in range(total)]
    log_probs: list[list[float]] = [[] for _ in range(total)]
    endings: list[Ending] = ["length"] * total
    running: dict[str, int] = {}
    with _live_objects_uncollected():
        try:
            for row, ids in enumerate(prompt_ids):
                running[_add(engine, ids, params[row], adapter)] = row
            while running:
                stopped = []
                for output in client.get_output().outputs:
                    if output.request_id not in running:  # of a call that an exception has ended
                        continue
                    row, new = running[output.request_id], output.new_token_ids
                    response = responses[row]
                    response += new
                    made += len(new)
                    if new:  # the sampled token stands before the likeliest ones, of which none are asked for
                        log_probs[row] += output.new_logprobs.logprobs[:, 0].tolist()
                    if output.finished or ends.strings:
                        ending = ends.of(response, len(response))
                        endings[row] = ending or "length"
                        if ending and not output.finished:
                            stopped.append(output.request_id)
                        if ending or output.finished:
                            del running[output.request_id]
                client.abort_requests(stopped)
                if progress is not None:
                    progress(total - len(running), total, made)
        except BaseException:
            client.abort_requests(list(running))
            raise
        finally:
            _drain(client)
    return Rollout(response_ids=responses, log_probs=log_probs, endings=endings)


def _add(engine: Any, token_ids: Sequence[int], params: Any, adapter: Any) -> str:
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


def sampling_params(sampling: Sampling, end_ids: frozenset[int], seed: int, room: int) -> Any:
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
        logprobs=0,  # of the sampled token alone
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
