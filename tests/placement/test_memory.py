"""The estimate of a role's memory against live engines, to the byte; activations within their bound."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from benchmarks.memory import Case
from benchmarks.memory import measured as measured_passes
from tests.cases import rollouts, tiny_lab, train_on
from tests.engines.training_ranks import replicas, run_ranks
from tests.expected import expect_error
from tests.placement.memory_ranks import ADAPTER, CONFIG, all_measured, config_of
from workbench.backends.hosts import Hosts
from workbench.engines.training.torch_engine import TorchEngine
from workbench.errors import BadInput
from workbench.launch import opening
from workbench.models.heads import TokenLogProbs
from workbench.placement import Layout, Placement
from workbench.placement.estimate import check_fit, estimate_memory
from workbench.placement.memory import rank_memory
from workbench.placement.role_model import RoleModel
from workbench.settings.engines import Generation
from workbench.settings.training import Training

F32, BF16 = torch.float32, torch.bfloat16
LAYOUTS: dict[int, list[tuple[Any, ...]]] = {
    2: [
        *((kind, dtype, Layout(d=2)) for kind in ("torch", "zero1", "zero2", "zero3") for dtype in (F32, BF16)),
        ("zero0", BF16, Layout(d=2)),
        ("frozen", BF16, Layout(d=2)),
        *(("zero" + stage, BF16, Layout(d=2), "lm", True) for stage in "13"),
        ("torch", BF16, Layout(d=2), "lm", True),
        ("torch", F32, Layout(1, 2, 1)),
        ("torch", BF16, Layout(2, 1, 1), "scalar"),
        ("frozen", BF16, Layout(1, 2, 1)),
    ],
    # an odd number of elements, so that ZeRO pads
    4: [
        *(("zero" + stage, F32, Layout(d=4), "scalar") for stage in "123"),
        ("zero1", BF16, Layout(d=4), "scalar"),
        ("torch", F32, Layout(2, 2, 1)),
    ],
}


def role_of(kind: str, dtype: torch.dtype, head: Any = "lm", adapter: bool = False, **more: Any) -> RoleModel:
    engine: dict[str, Any] = {"engine": "deepspeed", "zero_stage": int(kind[-1])} if "zero" in kind else {}
    return RoleModel(
        config=config_of(tied=head == "lm"),
        head=head,
        dtype=str(dtype).removeprefix("torch."),
        training=Training(**({"engine": "torch"} | engine), micro_batch_tokens=more.pop("tokens", 512)),
        trained=kind != "frozen",
        adapter=ADAPTER if adapter else None,
        **more,
    )


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_engines_hold_what_is_estimated_to_the_byte(world_size: int) -> None:
    cases = LAYOUTS[world_size]
    roles = [role_of(kind, dtype, *more) for kind, dtype, _, *more in cases]
    for rank, measured in enumerate(run_ranks(all_measured, world_size, cases)):
        for role, case, moments in zip(roles, cases, measured, strict=True):
            found = rank_memory(role, case[2], rank)
            after = moments.get("after", moments["made"])
            lasting = {
                "parameters": found.parameters, "gradients": found.kept_gradients, "optimizer": found.optimizer,
            }  # fmt: skip
            assert after == lasting, (case, rank)
            if "update" in moments:
                assert moments["update"]["gradients"] == found.kept_gradients + found.gradients, (case, rank)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_activations_are_bounded_and_not_by_far(dtype: torch.dtype, recomputed: bool) -> None:
    """What autograd keeps of a forward pass, storages counted once, but for the weights."""
    from transformers import LlamaForCausalLM

    settings = Training(engine="torch", micro_batch_tokens=512, activation_checkpointing=recomputed)
    module = TokenLogProbs(LlamaForCausalLM(config_of()).eval(), micro_batch_tokens=512)
    engine = TorchEngine(module, settings, replicas(), device=torch.device("cpu"), dtype=dtype)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    lengths = (64,) * 8
    ids = torch.randint(1, CONFIG["vocab_size"], (512,))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        log_probs, _ = engine.forward(input_ids=ids, lengths=lengths, positions=torch.arange(511), targets=ids[1:])
    role = RoleModel(
        config=config_of(), head="lm", dtype=str(dtype).removeprefix("torch."), training=settings, trained=True
    )
    bound = rank_memory(role, Layout(), 0).activations
    logits = 512 * CONFIG["vocab_size"] * 4 * 4  # those of the backward pass, not seen here
    seen = sum(kept.values())
    assert seen > 100_000
    assert seen + logits / 4 < bound
    if not recomputed:
        assert bound - logits < 2.5 * seen
    assert len(log_probs) == 511


PASSES: list[dict[str, Any]] = [
    {"role": "actor", "engine": "torch", "dtype": "bfloat16"},
    {"role": "actor", "engine": "torch", "dtype": "float32", "recomputed": True},
    {"role": "actor", "engine": "zero1", "dtype": "bfloat16"},
    {"role": "actor", "engine": "zero2", "dtype": "float32"},
    {"role": "actor", "engine": "zero3", "dtype": "float16"},
    {"role": "critic", "engine": "zero3", "dtype": "float32"},
    {"role": "reference", "engine": "frozen", "dtype": "bfloat16"},
]


@pytest.mark.slow
@pytest.mark.thorough
def test_the_peak_of_a_pass_is_what_the_allocator_says() -> None:
    """Two micro-batches of a step, so that the gradients of one are there while the other runs."""
    cases = [Case(size="tiny", tokens=1024, **case) for case in PASSES]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # engines and the profiler change their process
        rows = list(pool.map(measured_passes, cases))
    assert [row for row in rows if not row.within] == []


def test_longer_rows_and_bigger_micro_batches_need_more() -> None:
    def activations(**more: Any) -> int:
        return rank_memory(role_of("torch", F32, **more), Layout(), 0).activations

    assert activations(tokens=1024) > 1.3 * activations(tokens=512)
    # a single longer row goes alone
    long = Generation(engine="vllm", max_model_tokens=1024)
    assert activations(tokens=512, generation=long) == activations(tokens=1024)


def test_colocated_roles_share_a_device() -> None:
    """The peak is what lasts of all, and what passes of the one that needs most."""
    generation = Generation(engine="vllm", kv_cache_gib=0.5, max_model_tokens=64)
    models = {
        "actor": role_of("torch", F32, generation=generation),
        "critic": role_of("torch", F32, head="scalar"),
        "reward": None,
    }
    estimate = estimate_memory(Placement.of({"a": (1, tuple(models))}), models)
    one = {tenant.role: tenant.memory for tenant in estimate.tenants}
    elements = 195_328
    assert one["actor"].parameters == elements * 4
    assert one["actor"].optimizer == elements * 8 + 28 * 4  # and an fp32 count of steps for each tensor
    assert one["actor"].generation_kv_cache == 2**29
    lasting = sum(memory.parameters + memory.optimizer for memory in one.values())
    lasting += one["actor"].generation_weights + 2**29
    assert estimate.lasting(0) == lasting
    assert estimate.peak(0) == lasting + max(memory.gradients + memory.activations for memory in one.values())
    # a cache of a CPU is taken as it is written to
    assert estimate.least_bytes(0) == lasting - 2**29 + max(memory.gradients for memory in one.values())
    alone = estimate_memory(Placement.standalone(actor=1, critic=1, reward=1), models)
    assert [alone.peak(n) for n in (0, 1)] == [m.lasting + m.passing for m in (one["actor"], one["critic"])]
    frame: Any = alone.frame().set_index("role")
    assert frame.loc["critic", ["pool", "device", "rank"]].tolist() == ["critic", "cpu:1", 0]
    assert alone.by_device()["peak_bytes"].tolist() == [alone.peak(0), alone.peak(1)]
    assert "critic, parameters" in alone._repr_html_()


def test_what_cannot_fit_is_refused_with_figures_and_a_remedy() -> None:
    models: dict[str, RoleModel | None] = {"actor": role_of("torch", F32), "reference": role_of("frozen", F32)}
    estimate = estimate_memory(Placement.standalone(actor=1, reference=1), models)
    certain, peak = estimate.least_bytes(0, 1), estimate.peak(0) + estimate.peak(1)
    assert estimate.least_bytes(1) == 0, "weights that are only read may be mapped from the file, and shared"
    with expect_error(
        BadInput, value=r"needs 3\.1 MB on this machine: .*actor optimizer 1\.6 MB", rule=r"2\.1 MB too little"
    ):
        check_fit(estimate, has_bytes=1_000_000, models=models)
    with expect_error(BadInput, remedy="use an adapter"):
        check_fit(estimate, has_bytes=certain - 1, models=models)
    doubt = check_fit(estimate, has_bytes=peak - 1, models=models)
    assert "may run out of memory" in doubt
    assert "use a smaller Training.micro_batch_tokens" in doubt
    assert check_fit(estimate, has_bytes=peak, models=models) == ""
    gpus = estimate_memory(Placement.standalone(actor=1, reference=1), models, device="cuda", device_bytes=10**9)
    with expect_error(BadInput, value="on cuda:0"):
        check_fit(gpus, has_bytes=3_000_000, models=models)
    assert check_fit(gpus, has_bytes=max(gpus.peak(0), gpus.peak(1)), models=models) == "", "each device by itself"


def test_opening_refuses_what_cannot_fit_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: 2_000_000)
    with monkeypatch.context() as nothing_starts:
        nothing_starts.setattr(Hosts, "start", lambda *_: pytest.fail("started"))
        for backend in ("ray", "inline"):
            with expect_error(BadInput, value="needs .* on this machine", rule=r"it has 2\.0 MB"):
                tiny_lab("large", tmp_path, backend=backend)
    monkeypatch.setattr(opening, "available_bytes", lambda: 20_000_000)
    with pytest.warns(UserWarning, match=r"may run out of memory"):
        tiny_lab("large", tmp_path, backend="inline").close()


def test_a_live_workbench_holds_what_it_is_estimated_to(tmp_path: Path) -> None:
    models = {"actor": "tiny-qwen2", "critic": "tiny-qwen2", "reference": "tiny-qwen2", "reward": "tiny-qwen2"}
    with tiny_lab("live", tmp_path, backend="inline", models=models, dtype="bfloat16") as lab:
        table, meta = rollouts(lab, 4)
        batch = lab.put(table, meta=meta)
        train_on(lab, table, meta)
        estimated: Any = lab.estimate().frame().set_index("role")
        live: Any = lab.topology().set_index("role")
        for use in ("parameters", "optimizer", "generation_weights", "generation_kv_cache"):
            column = f"{use}_bytes"
            assert live[column].to_dict() == estimated[column].to_dict(), use
        assert (live["gradients_bytes"] == 0).all()
        assert live.loc["actor", ["host", "device", "replica", "stage", "tensor_rank"]].tolist() == [
            "shared-0", "cpu:0", 0, 0, 0,
        ]  # fmt: skip
        picture = lab.memory()._repr_html_()
        assert f"critic, optimizer: {live.loc['critic', 'optimizer_bytes']:,} bytes" in picture
        assert f"batch, batches: {live['host_batch_bytes'].iloc[0]:,} bytes" in picture
        assert len(batch) == 4
        change = lab.diff(lab.placement)
        assert (change.total_bytes, change.seconds, change.fits) == (0, 0.0, True)
        with expect_error(BadInput, rule="this workbench has"):
            lab.diff(wb.Placement.split(64))
