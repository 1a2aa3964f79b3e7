"""A real vLLM engine in the process of the tests, beside a default process group that is not its own."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import tempfile
import threading
from collections import deque
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engines import generation_cases as cases
from tests.expected import expect_error
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.engines.generation.vllm_start import private_sockets
from workbench.errors import BadInput
from workbench.models import load_tokenizer, resolve
from workbench.models.loading import load_causal_lm
from workbench.placement.memory import vllm_weight_bytes
from workbench.placement.role_model import RoleModel
from workbench.settings.engines import Generation, Sampling
from workbench.settings.training import Training
from workbench.telemetry import Recorder

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("compares fp32 engines on the CPU", allow_module_level=True)
pytestmark = pytest.mark.slow

SETTINGS = Generation(max_model_tokens=cases.MAX_MODEL_TOKENS, kv_cache_gib=0.1)
CPU = torch.device("cpu")


def process_state():
    # DeepSpeed leaves PYTORCH_NVML_... where it is imported, whoever does it
    own = ("VLLM_", "TORCHINDUCTOR_CACHE", "PYTORCH_NVML_BASED_CUDA_CHECK")
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return (
        quiet,
        torch.get_num_threads(),
        torch.set_num_threads,
        torch.get_default_dtype(),
        torch.get_rng_state().tolist(),
        gc.get_freeze_count(),
        str(np.random.get_state()),  # noqa: NPY002
        random.getstate(),
    )


@pytest.fixture(scope="module")
def default_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["tiny-llama-tied", pytest.param("tiny-llama", marks=pytest.mark.thorough)])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load_tokenizer(name)


@pytest.fixture
def model(name):
    return load_causal_lm(name)


@pytest.fixture(scope="module")
def shared_engine(name, default_group):
    """Made on a thread that is not the main one, as in a concurrency group of a Ray actor."""
    gc.unfreeze()  # the engine leaves nothing frozen
    before, made = process_state(), []
    start = threading.Thread(
        target=lambda: made.append(VllmEngine(resolve(name), SETTINGS, dtype=torch.float32, device=CPU, threads=1))
    )
    start.start()
    start.join()
    assert process_state() == before
    yield made[0]
    made[0].close()
    total = torch.ones(3)
    dist.all_reduce(total)  # the default group lives on, and the next parameter's engine is the second in this process
    assert total.tolist() == [1.0, 1.0, 1.0]


@pytest.fixture
def engine(shared_engine, model):
    shared_engine.update_weights(model.named_parameters(), 0)
    return shared_engine


@pytest.mark.parametrize(
    ("sampling", "value"),
    [
        (Sampling(logit_bias=dict.fromkeys(range(2, 1027), -1.0)), "logit_bias of 1,025 tokens"),
        (Sampling(min_new_tokens=1, stop_token_ids=tuple(range(2, 131))), "min_new_tokens with stop_token_ids of 1"),
    ],
)
def test_more_tokens_than_a_gpus_sampler_takes_are_refused_before_a_step(engine, sampling, value, monkeypatch):
    monkeypatch.setattr(engine, "_vocab_size", 2000)
    monkeypatch.setattr(engine, "_on_cpu", False)
    with expect_error(BadInput, value=value, rule="on a GPU, vLLM takes at most", remedy="transformers"):
        engine.generate(cases.PROMPTS, sampling, cases.SEEDS)


@pytest.mark.parametrize("case", cases.EVERY)
def test_what_every_engine_does_and_the_process_around_it(case, engine, model, tokenizer):
    before = process_state()
    case(engine, model, tokenizer)
    assert process_state() == before


def test_more_prompt_tokens_than_one_pass_takes(engine):
    """Over 2048 tokens of prompts in one call: each row still draws what it draws alone."""
    rows = [[3 + (i + j) % 90 for j in range(50)] for i in range(80)]
    sampling = Sampling(max_new_tokens=3)
    together = engine.generate(rows, sampling, list(range(80)), lambda *_: None)
    for row in (0, 40, 79):
        alone = engine.generate([rows[row]], sampling, [row], lambda *_: None)
        assert alone.response_ids[0] == together.response_ids[row]


def test_samples_of_a_prompt_compute_its_blocks_once(engine, monkeypatch):
    """Four samples of a prompt of 40 tokens, whose first block has 32: and each draws what it draws alone."""
    prompt, sampling, passes = [1 + i % 90 for i in range(40)], Sampling(max_new_tokens=4), list[int]()
    execute = engine._engine.model_executor.execute_model

    def counted(scheduled, **arguments):
        passes.append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled, **arguments)

    monkeypatch.setattr(engine._engine.model_executor, "execute_model", counted)
    together = engine.generate([prompt] * 4, sampling, [0, 1, 2, 3])
    assert passes[0] == 40 + 3 * 8
    for row in range(4):
        assert engine.generate([prompt], sampling, [row]).response_ids == together.response_ids[row : row + 1]


def test_a_step_that_was_launched_ahead_belongs_to_nobody(engine, monkeypatch):
    """As on a GPU: tokens come a call after their step was launched, and one is under way where a call is left."""
    sampling = Sampling(max_new_tokens=6)
    expected = engine.generate(cases.PROMPTS, sampling, cases.SEEDS)
    core = engine._engine.engine_core.engine_core
    monkeypatch.setattr(core, "batch_queue", deque(maxlen=2))
    monkeypatch.setattr(core, "batch_queue_size", 2)
    monkeypatch.setattr(core, "step_fn", core.step_with_batch_queue)
    assert engine.generate(cases.PROMPTS, sampling, cases.SEEDS) == expected
    assert not core.batch_queue
    ahead = list[int]()

    def leave(done, total, tokens):
        if core.batch_queue:
            ahead.append(len(core.batch_queue))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(cases.PROMPTS, sampling, cases.SEEDS, leave)
    assert ahead == [1]
    assert not core.batch_queue
    assert engine._engine.reset_prefix_cache()  # refused while a row holds blocks
    assert engine.generate(cases.PROMPTS, sampling, cases.SEEDS) == expected


def test_a_step_that_broke_off_before_its_tokens_were_drawn(engine, monkeypatch):
    sampling, executor = Sampling(max_new_tokens=6), engine._engine.model_executor
    expected = engine.generate(cases.PROMPTS, sampling, cases.SEEDS)
    with monkeypatch.context() as broken:
        broken.setattr(executor, "sample_tokens", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(cases.PROMPTS, sampling, cases.SEEDS)
        with pytest.raises(KeyboardInterrupt):
            engine.log_probs(cases.PROMPTS[2])
    assert engine._engine.reset_prefix_cache()  # refused while a row holds blocks: what older weights cached would stay
    assert engine.log_probs(cases.PROMPTS[2]).isfinite().all()
    assert engine.generate(cases.PROMPTS, sampling, cases.SEEDS) == expected


@torch.no_grad()
def perturb(model):
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))


def gap(engine, model):
    ids = cases.PROMPTS[2]
    return (engine.log_probs(ids) - cases.scored(model, ids)).abs().max().item()


def test_new_weights_arrive_whole(engine, model):
    assert gap(engine, model) < 1e-4
    perturb(model)
    assert gap(engine, model) > 0.05
    taken = engine.update_weights(model.named_parameters(), 5)
    assert gap(engine, model) < 1e-4
    assert engine._copies is None  # layers are packed, and have to be packed again
    assert (taken, engine.weights_version) == (sum(p.nbytes for p in model.parameters()), 5)
    perturb(model)
    engine.update_weights(model.state_dict().items(), 6)  # names the tied head as well
    assert gap(engine, model) < 1e-4


@pytest.mark.parametrize("arrived", [0, 2, 5])
def test_a_sync_that_breaks_off_is_mended_by_the_next(engine, model, arrived):
    """After `arrived` weights, which end before, in the middle of, and after layers that vLLM fuses from several."""

    def weights():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if number == arrived:
                raise ConnectionError("a rank went away")
            yield name, weight

    perturb(model)
    with pytest.raises(ConnectionError, match="a rank went away"):
        engine.update_weights(weights(), 7)
    assert engine.weights_version == -1
    perturb(model)
    engine.update_weights(model.named_parameters(), 8)
    assert gap(engine, model) < 1e-4
    with pytest.raises((KeyError, ValueError)):
        engine.update_weights([*list(model.named_parameters())[:3], ("model.nobody.weight", torch.ones(1))], 9)
    engine.update_weights(model.named_parameters(), 10)
    assert gap(engine, model) < 1e-4
    assert engine.weights_version == 10


def test_syncs_do_not_gather_memory(engine, model):
    def resident_bytes():
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for version in range(5):
        engine.update_weights(model.named_parameters(), version)
    before = resident_bytes()
    for version in range(40):
        engine.update_weights(model.named_parameters(), version)
    weights = sum(p.nbytes for p in model.parameters())
    assert resident_bytes() - before < 10 * weights  # 40 kept copies would be 40 times as much


def test_prefixes_are_kept_for_later_turns_alone(engine, model):
    """Of the rows of one decoding; a call after it, and after a sync, has none of them."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    cache = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
    prompt, sampling = [1, *range(40, 90)], Sampling(max_new_tokens=4, temperature=0)

    def hits():
        stats = cache.make_prefix_cache_stats()
        return stats.queries, stats.hits

    before = cache.log_stats, cache.prefix_cache_stats
    cache.log_stats, cache.prefix_cache_stats = True, PrefixCacheStats()
    try:
        with engine.decoding(sampling) as decoding:
            decoding.add(0, prompt, 0, 4)
            (first,) = [response for _ in range(4) for response in decoding.step()]
            assert hits()[1] == 0
            decoding.add(1, [*prompt, *first.ids], 1, 4)
            (second,) = [response for _ in range(4) for response in decoding.step()]
            block = engine._engine.vllm_config.cache_config.block_size
            assert hits() == (len(prompt) + 4, len(prompt) // block * block)
        afresh = engine.generate([[*prompt, *first.ids]], sampling, [1])
        assert (afresh.response_ids, afresh.log_probs) == ([second.ids], [pytest.approx(second.log_probs, abs=1e-4)])
        perturb(model)
        engine.update_weights(model.named_parameters(), 1)
        engine.generate([prompt], sampling, [0])
        assert hits()[1] == 0
    finally:
        cache.log_stats, cache.prefix_cache_stats = before


def test_a_response_goes_on_with_its_cache_recomputed_or_kept(engine, name, model):
    """Where the weights did not change both are the same; else what is kept was read by the older weights."""
    prompt, sampling = [1, *range(40, 90)], Sampling(max_new_tokens=12, temperature=0)
    whole = engine.generate([prompt], sampling, [0])

    def gone_on(keep_cache, changes):
        """The response, and how far its log-probabilities after the pause are from those of the weights of then."""
        newest = load_causal_lm(name)
        engine.update_weights(newest.named_parameters(), 0)
        begun = engine.generate([prompt], sampling, [0], pause_after=5)
        assert begun.response_ids == [whole.response_ids[0][:5]] and begun.endings == ["length"]
        if changes:
            perturb(newest)
            engine.update_weights(newest.named_parameters(), 1)
            engine.log_probs(prompt)  # as the probe after a sync
        rest = engine.generate([prompt], sampling, [0], begun=begun.response_ids, keep_cache=keep_cache)
        expected = cases.scored(newest, prompt + rest.response_ids[0])[len(prompt) + 4 :]
        return rest.response_ids, (torch.tensor(rest.log_probs[0]) - expected).abs().max().item()

    for keep_cache in (False, True):
        ids, off = gone_on(keep_cache, changes=False)
        assert ids == whole.response_ids and off < 1e-4
    assert gone_on(keep_cache=False, changes=True)[1] < 1e-4
    assert gone_on(keep_cache=True, changes=True)[1] > 1e-2


def test_on_a_cpu_it_stays_and_says_so(engine):
    expected, recorder = engine.generate([[1, 40]], Sampling(max_new_tokens=4), [0]), Recorder()
    memory = engine.memory_bytes()
    with recorder.bind(stage="compute_log_prob"):
        assert engine.sleep() == engine.sleep() == 0
    assert [(span.kind, span.bytes, span.note) for span in recorder.drain()[0]] == [
        ("offload", 0, "vLLM stays: it sleeps on GPUs only")
    ]
    assert (engine.lacks_weights, engine.weights_version, engine.memory_bytes()) == (False, 0, memory)
    assert engine.generate([[1, 40]], Sampling(max_new_tokens=4), [0]) == expected


def test_memory(engine, model):
    """Weights as the estimate of a placement counts them; of the cache, at most a block less."""
    memory = engine.memory_bytes()
    role = RoleModel(
        config=model.config, head="lm", dtype="float32", training=Training(), trained=True, generation=SETTINGS
    )
    assert memory["weights"] == vllm_weight_bytes(role, 0, on_cpu=True)
    assert 0.09 * 2**30 < memory["kv_cache"] <= 0.1 * 2**30


@pytest.mark.parametrize("folder", ["", "as long as that of a batch system's job may be, " * 2])
def test_sockets_lie_where_only_this_user_can_enter_and_are_removed(shared_engine, tmp_path, monkeypatch, folder):
    from vllm.distributed.device_communicators import shm_broadcast

    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    with private_sockets():
        queue = shm_broadcast.MessageQueue(1, 1)
        places = [Path(address.removeprefix("ipc://")) for address in (
            queue.handle.local_subscribe_addr, queue.handle.local_notify_addr)]  # fmt: skip
        assert all(place.is_socket() for place in places)
        assert {place.parent.stat().st_mode & 0o777 for place in places} == {0o700}
    assert not any(place.parent.exists() for place in places)


def test_one_engine_a_process(engine, name):
    with expect_error(BadInput, value="second vLLM engine"):
        VllmEngine(resolve(name), SETTINGS, dtype=torch.float32, device=CPU)
    assert engine.generate([[1, 40]], Sampling(max_new_tokens=2), [0]).response_ids
