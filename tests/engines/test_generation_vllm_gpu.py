"""vLLM on a GPU: each step is launched before the tokens of the one before are read, and it frees the device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines import generation_cases as cases
from tests.engines.test_generation_families import saved
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.errors import BadInput
from workbench.models import load_tokenizer, resolve
from workbench.models.loading import load_causal_lm
from workbench.settings.engines import Generation, Sampling

if importlib.util.find_spec("vllm") is None or not torch.cuda.is_available():
    pytest.skip("needs vllm and a CUDA device", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NAME = "tiny-llama-tied"


# first: a process holds one engine at a time, and that of the other tests lives until the last of them
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama-tied"])
def test_sleep_frees_the_device_until_the_next_sync(name: str) -> None:
    device, model = torch.device("cuda"), load_causal_lm(name)
    settings = Generation(max_model_tokens=cases.MAX_MODEL_TOKENS, gpu_memory_fraction=cases.GPU_FRACTION)
    engine = VllmEngine(resolve(name), settings, dtype=torch.float32, device=device, sleeps=True)
    try:
        greedy = Sampling(max_new_tokens=8, temperature=0)
        expected, held = engine.generate(cases.PROMPTS, greedy, cases.SEEDS), engine.memory_bytes()
        for version in (1, 2):
            free = torch.cuda.mem_get_info()[0]
            assert engine.sleep() == sum(held.values())
            assert engine.sleep() == 0
            assert torch.cuda.mem_get_info()[0] - free > 0.9 * sum(held.values())
            assert (engine.memory_bytes(), engine.weights_version) == ({"weights": 0, "kv_cache": 0}, -1)
            with pytest.raises(BadInput, match="sleeps"):
                engine.generate(cases.PROMPTS, greedy, cases.SEEDS)
            engine.update_weights(model.named_parameters(), version)
            assert engine.memory_bytes() == {"weights": held["weights"], "kv_cache": 0}  # room for the trainer's still
            assert engine.generate(cases.PROMPTS, greedy, cases.SEEDS).response_ids == expected.response_ids
            assert engine.memory_bytes() == held
    finally:
        engine.sleep()  # closed asleep, it leaves the device to the next one
        engine.close()


def test_a_family_that_vllm_runs_by_transformers_class_is_not_compiled(tmp_path: Path) -> None:
    from vllm.config import CompilationMode

    folder = saved(tmp_path / "starcoder2", "starcoder2", sliding_window=8)
    settings = Generation(max_model_tokens=64, gpu_memory_fraction=cases.GPU_FRACTION)
    engine = VllmEngine(folder, settings, dtype=torch.bfloat16, device=torch.device("cuda"))
    try:
        config = engine._engine.vllm_config.compilation_config
        assert config.mode == CompilationMode.NONE
        assert "all" in config.custom_ops
        assert config.cudagraph_mode.has_full_cudagraphs()
        ids = [1, *range(40, 60)]
        expected = cases.scored(load_causal_lm(folder), ids)
        assert (engine.log_probs(ids) - expected).abs().mean() < 0.05
    finally:
        engine.close()


ASKING_FOR_A_STREAM = f"""
import torch
from workbench.engines.generation import vllm_engine, vllm_start
from workbench.models import resolve
from workbench.settings.engines import Generation

kept = vllm_start.transformers_kept

def asking():
    from vllm.utils.torch_utils import current_stream
    current_stream()
    return kept()

vllm_start.transformers_kept = asking
settings = Generation(max_model_tokens=64, gpu_memory_fraction={cases.GPU_FRACTION})
engine = vllm_engine.VllmEngine(resolve("{NAME}"), settings, dtype=torch.bfloat16, device=torch.device("cuda"))
same = engine._runner.main_stream == torch.cuda.current_stream()
engine.close()
assert same
"""


def test_steps_run_on_the_stream_for_which_vllm_waits() -> None:
    """Also where vLLM asks for a stream while it starts, as the communicator of a tensor group does. In a process of
    its own: the first engine of a process imports vLLM, which from then on sees which streams are set."""
    done = subprocess.run([sys.executable, "-c", ASKING_FOR_A_STREAM], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]


@pytest.fixture(scope="module")
def engine():
    settings = Generation(max_model_tokens=cases.MAX_MODEL_TOKENS, gpu_memory_fraction=cases.GPU_FRACTION)
    made = VllmEngine(resolve(NAME), settings, dtype=torch.float32, device=torch.device("cuda"))
    yield made
    made.close()


def core(engine):
    return engine._engine.engine_core.engine_core


def test_steps_are_launched_ahead_and_graphs_cover_every_row(engine):
    config = engine._engine.vllm_config
    assert config.scheduler_config.async_scheduling
    assert core(engine).batch_queue_size == 2
    assert config.scheduler_config.max_num_seqs == 512
    assert max(config.compilation_config.cudagraph_capture_sizes) >= 512
    assert config.scheduler_config.max_num_batched_tokens >= 8192


@pytest.mark.parametrize(
    "case",
    [
        cases.rows_have_their_own_streams, cases.endings_are_named, cases.eos_ends_responses_and_is_kept,
        cases.stop_strings_end_responses, cases.responses_are_cut_at_the_longest_sequence, cases.progress_is_reported,
        cases.a_raising_progress_leaves_the_engine_usable,
    ],
)  # fmt: skip
def test_what_every_engine_does_leaves_nothing_in_flight(case, engine):
    case(engine, load_causal_lm(NAME), load_tokenizer(NAME))
    assert not core(engine).batch_queue
    assert engine._engine.reset_prefix_cache()


def test_log_probs_are_of_the_tokens_drawn(engine):
    """Within what attention in TF32 may differ, far less than one position's from the next one's."""
    model = load_causal_lm(NAME)
    rollout = engine.generate(cases.PROMPTS, Sampling(max_new_tokens=12), cases.SEEDS)
    for prompt, response, log_probs in zip(cases.PROMPTS, rollout.response_ids, rollout.log_probs, strict=True):
        expected = cases.scored(model, prompt + response)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=0.02, rtol=0)


def test_a_full_batch(engine):
    """More rows than are decoded at once: all come, and a row is drawn as it is alone."""
    prompts, sampling = [[1, 30 + row % 200, 40] for row in range(700)], Sampling(max_new_tokens=16, ignore_eos=True)
    rollout = engine.generate(prompts, sampling, range(700))
    assert [len(ids) for ids in rollout.response_ids] == [16] * 700
    alone = [engine.generate([prompts[row]], sampling, [row]).response_ids[0] for row in range(0, 700, 70)]
    assert sum(rollout.response_ids[row] == ids for row, ids in zip(range(0, 700, 70), alone, strict=True)) >= 9
