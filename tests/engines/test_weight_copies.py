"""Syncs of a vLLM engine by copies into its live parameters, against vLLM's own reload."""

from __future__ import annotations

import importlib.util
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engines import generation_cases as cases
from workbench.engines.generation.vllm_engine import VllmEngine
from workbench.engines.generation.weight_copies import WeightCopies, keeps_weights_as_loaded
from workbench.errors import SyncError
from workbench.models import resolve
from workbench.models.loading import load_causal_lm, load_config
from workbench.placement.memory import vllm_weight_bytes
from workbench.placement.role_model import RoleModel
from workbench.settings.engines import Generation, Sampling
from workbench.settings.training import Training

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.gpu]

SETTINGS = Generation(max_model_tokens=cases.MAX_MODEL_TOKENS, kv_cache_gib=0.1, gpu_memory_fraction=cases.GPU_FRACTION)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if ON_GPU else "cpu")


@pytest.fixture(scope="module")
def unpacked() -> Iterator[None]:
    """vLLM's CPU layers without their packed copies, as its GPU layers are: they multiply by the live parameters."""
    with pytest.MonkeyPatch.context() as patch:

        def not_packed(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = nn.functional.linear

        with warnings.catch_warnings(action="ignore"):
            from vllm.model_executor.layers import utils
        if not ON_GPU:
            patch.setattr(utils, "dispatch_cpu_unquantized_gemm", not_packed)
        mine = not dist.is_initialized()  # engines of other tests leave the group that they made
        if mine:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        if mine:
            dist.destroy_process_group()


@pytest.fixture(
    scope="module",
    params=[
        "tiny-llama-tied",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("tiny-llama", "tiny-qwen2")),
    ],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.thorough)])
def engine(name: str, request: pytest.FixtureRequest, unpacked: None) -> Iterator[Any]:
    engine = VllmEngine(resolve(name), SETTINGS, dtype=getattr(torch, request.param), device=DEVICE, threads=1)
    engine.update_weights(load_causal_lm(name, device=DEVICE).named_parameters(), 0)
    (norm,) = engine._engine.apply_model(lambda model: weakref.ref(model.model.norm))
    yield engine
    engine.close()
    assert norm() is None, "the weights of a closed engine are freed"


@torch.no_grad()
def trained(name: str, seed: int) -> nn.Module:
    """The model, in fp32, some steps on."""
    model, draws = load_causal_lm(name, dtype=torch.float32, device=DEVICE), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=draws).to(DEVICE))
    return model


def live(engine: Any) -> dict[str, Tensor]:
    (found,) = engine._engine.apply_model(lambda model: dict(model.named_parameters()))
    return dict(found)


def test_copies_give_what_a_reload_gives(engine: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, from fp32 masters, into the same memory."""
    assert engine._copies is not None
    model, reloads = trained(name, 1), []
    reload = engine._reload

    def counted(weights: Any) -> None:
        reloads.append(1)
        reload(weights)

    monkeypatch.setattr(engine, "_reload", counted)
    addresses = {key: tensor.data_ptr() for key, tensor in live(engine).items()}
    taken = engine.update_weights(model.named_parameters(), 1)
    assert taken == sum(p.numel() for p in model.parameters()) * engine._dtype.itemsize
    copied = {key: tensor.clone() for key, tensor in live(engine).items()}
    assert not reloads
    engine.update_weights(trained(name, 2).named_parameters(), 2)
    assert not all(torch.equal(copied[key], tensor) for key, tensor in live(engine).items())
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_copies", None)
        engine.update_weights(model.named_parameters(), 3)
    assert reloads == [1]
    assert {key: tensor.data_ptr() for key, tensor in live(engine).items()} == addresses
    for key, tensor in live(engine).items():
        assert torch.equal(copied[key], tensor), key


def test_every_weight_can_be_read_where_it_lies(engine: Any, name: str) -> None:
    model = trained(name, 3)
    engine.update_weights(model.named_parameters(), 1)
    held = engine.readable_weights()
    for key, weight in model.named_parameters(remove_duplicate=False):
        assert torch.equal(held[key][: len(weight)], weight.to(engine._dtype)), key


def test_the_engine_computes_with_them(engine: Any, name: str) -> None:
    prompt, greedy = list(range(40, 58)), Sampling(max_new_tokens=4, temperature=0)
    limit = 1e-4 if engine._dtype == torch.float32 and not ON_GPU else 0.05
    for version in (1, 2):
        model = trained(name, 3 + version)
        engine.generate([prompt], greedy, [0])
        engine.update_weights(model.named_parameters(), version)
        ids = prompt + engine.generate([prompt], greedy, [0]).response_ids[0]
        expected = cases.scored(model.cpu(), ids)
        assert (engine.log_probs(ids) - expected).abs().mean() < limit


@pytest.mark.skipif(ON_GPU, reason="nothing is packed there")
def test_weights_that_are_not_packed_are_counted_once(engine: Any, name: str) -> None:
    dtype = str(engine._dtype).removeprefix("torch.")
    role = RoleModel(
        config=load_config(name), head="lm", dtype=dtype, training=Training(), trained=True, generation=SETTINGS
    )
    assert engine.memory_bytes()["weights"] == vllm_weight_bytes(role, 0, on_cpu=False)


def test_other_weights_than_before_are_refused(engine: Any, name: str) -> None:
    model = trained(name, 6)
    whole = list(model.named_parameters())
    for given, message in (
        (whole[:-1], "1 weights did not arrive"),
        ([*whole, ("model.nobody.weight", torch.ones(1, device=DEVICE))], "'model.nobody.weight' of shape"),
        ([(whole[0][0], whole[0][1][:-1]), *whole[1:]], "each sync must send weights of the same names and shapes"),
    ):
        with pytest.raises(SyncError, match=message):
            engine.update_weights(given, 7)
        assert engine.weights_version == -1
    assert engine.update_weights(whole, 8) > 0
    assert engine.weights_version == 8


class Loading(nn.Module):
    """A model with a loader of its own."""

    def __init__(self, load: Any) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.arange(12.0).view(6, 2))
        self.load = load

    def load_weights(self, weights: Any) -> None:
        self.load(self, dict(weights))


def fuse(model: Any, weights: dict[str, Tensor]) -> None:
    model.both.data[:4].copy_(weights["a"])
    model.both.data[4:].fill_(0)
    model.both.data[4:].copy_(weights["b"].t())


SHAPES = {"a": torch.Size([4, 2]), "b": torch.Size([2, 2])}


def test_what_loaders_ask_for_is_recorded_and_not_done(unpacked: None) -> None:
    model = Loading(fuse)
    before = model.both.detach().clone()
    copies = WeightCopies.recorded(model, SHAPES)
    assert copies is not None
    assert torch.equal(model.both, before)
    a, b = torch.rand(4, 2), torch.rand(2, 4)[:, ::2]  # not contiguous
    copies.run([("b", b), ("a", a)])
    assert torch.equal(model.both, torch.cat([a, b.t()]))
    assert list(copies.places()) == ["a"]
    sums = {"a": a, "b": b}
    assert copies.holds({key: tensor.contiguous().view(torch.int32).sum() for key, tensor in sums.items()})
    with torch.no_grad():
        model.both[0, 0] += 1
    assert not copies.holds({key: tensor.contiguous().view(torch.int32).sum() for key, tensor in sums.items()})


def test_a_weight_of_another_shape_than_its_parameter(unpacked: None) -> None:
    """As convolutions have it."""
    copies = WeightCopies.recorded(
        Loading(lambda model, weights: model.both.data.copy_(weights["a"].squeeze(1))), {"a": torch.Size([6, 1, 2])}
    )
    assert copies is not None
    copies.run([("a", torch.ones(6, 1, 2))])
    (place,) = copies.places().values()
    assert torch.equal(place, torch.ones(6, 2))


def fuse_half(model: Any, weights: dict[str, Tensor]) -> None:
    model.both.data[:4].copy_(weights["a"])


def scale(model: Any, weights: dict[str, Tensor]) -> None:
    model.both.data[:4].copy_(weights["a"] * 2)
    model.both.data[4:].copy_(weights["b"])


def after_copies(model: Any, weights: dict[str, Tensor]) -> None:
    fuse(model, weights)
    model.both.data.neg_()


def by_value(model: Any, weights: dict[str, Tensor]) -> None:
    fuse(model, weights)
    model.both.data[0, 0] = float(weights["a"].sum())


def spread(model: Any, weights: dict[str, Tensor]) -> None:
    model.both.data[:4].copy_(weights["a"])
    model.both.data[4:].copy_(weights["b"][0])  # one row to both


@pytest.mark.parametrize("load", [fuse_half, scale, after_copies, by_value, spread])
def test_loaders_that_do_more_than_copy_are_left_alone(load: Any, unpacked: None) -> None:
    model = Loading(load)
    before = model.both.detach().clone()
    assert WeightCopies.recorded(model, SHAPES) is None
    assert torch.equal(model.both, before)


def test_layers_that_are_made_ready_after_loading_are_known(unpacked: None) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    assert keeps_weights_as_loaded(nn.Sequential(nn.LayerNorm(4)))
    unknown = nn.Sequential(nn.LayerNorm(4), nn.Conv1d(1, 1, 4))
    assert not keeps_weights_as_loaded(unknown)
    norm: Any = nn.LayerNorm(4)
    norm.quant_method = UnquantizedEmbeddingMethod()
    assert keeps_weights_as_loaded(norm)
    norm.cpu_linear = lambda x, weight, bias: x
    assert not keeps_weights_as_loaded(norm)
    del norm.cpu_linear
    norm.quant_method = object()
    assert not keeps_weights_as_loaded(norm)
    latent: Any = nn.Module()
    latent.kv_b_proj = nn.LayerNorm(4)
    assert not keeps_weights_as_loaded(latent)
