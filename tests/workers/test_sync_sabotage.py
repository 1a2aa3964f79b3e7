"""A sync that does not give a vLLM engine the trainer's weights is an error, which names what it can read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.engines.generation import vllm_engine
from workbench.errors import StageError, SyncError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.slow, pytest.mark.gpu]

Weights = dict[str, Tensor]


def left_out(now: Weights, then: Weights) -> Weights:
    """A layer adds nothing to what it is given."""
    parts = ("layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight")
    return {name: weight * (not name.endswith(parts)) for name, weight in now.items()}


def swapped(now: Weights, then: Weights) -> Weights:
    """Two layers have each other's weights."""
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {name: now[re.sub(r"layers\.[01]\.", lambda found: other[found[0]], name)] for name in now}


def wrong_attention(now: Weights, then: Weights) -> Weights:
    """One layer attends as another does."""
    parts = [name for name in now if "layers.1.self_attn" in name]
    return now | {name: now[name.replace("layers.1.", "layers.0.")] for name in parts}


def stale_layer(now: Weights, then: Weights) -> Weights:
    return {name: (then if "layers.1." in name else now)[name] for name in now}


def stale(now: Weights, then: Weights) -> Weights:
    """The model as it was before the update: what a sync without the adapter brings."""
    return then


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    options: dict[str, Any] = {"models": {"actor": TINY, "reward": vowels}, "training": {"learning_rate": 1e-2}}
    options |= {"generation": "vllm", "prompts": "arithmetic", "dtype": request.param}
    with tiny_lab("wrong", tmp_path_factory.mktemp("runs"), backend="inline", **options) as lab:
        actor = worker(lab)
        actor.then = {name: weight.clone() for name, weight in actor.engine.named_weights()}
        wb.GRPO(lab, prompts=4, samples=4, epochs=2, reward=vowels, sampling=wb.Sampling(max_new_tokens=8)).run(1)
        yield lab


def worker(lab: wb.Workbench) -> Any:
    (host,) = cast(Any, lab.hosts.backend)._hosts.values()
    return host.workers["actor"]


@pytest.mark.parametrize("wrong", [left_out, swapped, wrong_attention, stale_layer, stale])
def test_wrong_weights(
    lab: wb.Workbench, wrong: Callable[[Weights, Weights], Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = worker(lab)
    now = {name: weight.clone() for name, weight in actor.engine.named_weights()}
    brought = wrong(now, actor.then)
    give = actor.generator.update_weights
    actor.generator.weights_version = -1
    with monkeypatch.context() as patch:
        patch.setattr(actor.generator, "update_weights", lambda weights, version: give(iter(brought.items()), version))
        with expect_error(StageError, value="engine and trainer differ by") as raised:
            lab.actor.sync_weights()
    odd = [
        name for name in now if not torch.equal(now[name], brought[name]) and name in actor.generator.readable_weights()
    ]
    assert isinstance(raised.value, SyncError)
    assert (odd[0] if odd else "equal the trainer's: another weight differs") in str(raised.value)
    last = lab.syncs().iloc[-1]
    assert last["verdict"] == ("checksum differs" if odd else "failed")
    assert all(name in last["culprit"] for name in odd)
    assert odd or not ON_GPU
    assert actor.generator.weights_version == -1
    (mended,) = lab.actor.sync_weights()
    assert mended["sync_gap/mean"] < (1e-4 if lab.actor.spec.dtype == "float32" and not ON_GPU else 0.05)


def multiply_by_a_copy(model: nn.Module) -> None:
    (head,) = [layer for layer in model.modules() if type(layer).__name__ == "ParallelLMHead"]
    copy = cast(Tensor, head.weight).detach().clone()
    cast(Any, head).cpu_linear = lambda x, weight, bias: nn.functional.linear(x, copy, bias)


@pytest.mark.skipif(ON_GPU, reason="no head is packed there")
def test_a_stale_output_head(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's reload leaves behind where embeddings are tied: the copy of the head that it multiplies by. Here it
    has one on every processor and in every dtype."""
    actor = worker(lab)
    actor.generator.update_weights(iter(actor.then.items()), 0)
    actor.generator._engine.apply_model(multiply_by_a_copy)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "_refresh_tied_head", lambda model: None)
        with expect_error(SyncError, value="engine and trainer differ by"):
            lab.actor.sync_weights()
    lab.actor.sync_weights()
