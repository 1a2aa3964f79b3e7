"""Automatic sizes on a GPU: what a placement leaves to vLLM's cache and to micro-batches, on devices of any size."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Qwen2Config

from benchmarks.memory import SIZES
from tests.expected import expect_error
from tests.placement.memory_ranks import ADAPTER
from workbench.errors import BadInput
from workbench.placement import Layout, Placement
from workbench.placement.estimate import (
    MOST_TOKENS,
    MemoryEstimate,
    Room,
    _items,
    check_fit,
    device_numbers,
    estimate_memory,
    fitting_tokens,
    rooms,
    usable_bytes,
)
from workbench.placement.memory import rank_memory, row_bytes, useful_cache_bytes
from workbench.placement.role_model import RoleModel, head_of
from workbench.settings.engines import Generation
from workbench.settings.training import Training

GIB = 2**30
ROLES = ("actor", "critic", "reference", "reward")


def model(role: str, size: str = "1.4b", **changes: Any) -> RoleModel:
    hidden, layers, heads, key_heads, inner, vocabulary = SIZES[size]
    config = Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads,
        intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    training, generation = changes.pop("training", {}), changes.pop("generation", {})
    return RoleModel(
        config=config, head=head_of(role), dtype=changes.pop("dtype", "bfloat16"), training=Training(**training),
        trained=role in ("actor", "critic"), automatic_tokens=8192,
        generation=Generation(**{"max_rows": 512, "max_model_tokens": 640} | generation) if role == "actor" else None,
        **changes,
    )  # fmt: skip


def estimated(gib: float, roles: tuple[str, ...] = ROLES, take_turns: bool = False, **changes: Any) -> MemoryEstimate:
    placement = Placement.colocate(1).restrict(roles)
    models = {role: model(role, **changes) for role in roles}
    return estimate_memory(placement, models, device="cuda", device_bytes=int(gib * GIB), take_turns=take_turns)


def check(estimate: MemoryEstimate, roles: tuple[str, ...] = ROLES, **changes: Any) -> str:
    assert estimate.device_bytes is not None
    models = {role: model(role, **changes) for role in roles}
    return check_fit(estimate, has_bytes=estimate.device_bytes, models=models)


def test_four_models_of_a_billion_take_turns_on_one_gpu_of_80_gb() -> None:
    side_by_side, turns = estimated(79), estimated(79, take_turns=True)
    assert check(turns) == ""
    assert turns.peak(0) <= usable_bytes(79 * GIB)
    held = {tenant.role: tenant.memory for tenant in turns.tenants}
    assert turns.peak(0) == max(memory.turn_peak for memory in held.values())
    assert max(memory.turn_peak for memory in held.values()) < max(
        memory.lasting + memory.passing for memory in held.values()
    )
    # what waits in host memory meanwhile is what all hold, but for vLLM's part, which is freed
    assert sum(m.parameters + m.optimizer + m.kept_gradients for m in held.values()) > 50e9
    # all rows of a rollout have room at the same time, and micro-batches are as large as they get
    assert held["actor"].generation_kv_cache == useful_cache_bytes(model("actor"))
    assert held["critic"].activations > 2 * rank_memory(model("critic"), Layout(), 0, cache_bytes=0).activations
    # side by side there is no room for anything but small passes
    side = {tenant.role: tenant.memory for tenant in side_by_side.tenants}
    assert side["critic"].activations < held["critic"].activations / 2
    with expect_error(BadInput, value="no key-value cache|needs .* on cuda:0"):
        check(estimated(48))


@pytest.mark.parametrize("gib", [15, 16, 24, 40, 80, 141])
@pytest.mark.parametrize("take_turns", [False, True])
def test_what_is_chosen_fits(gib: int, take_turns: bool) -> None:
    """GRPO on SmolLM2-135M, on any card."""
    roles = ("actor", "reference")
    estimate = estimated(gib, roles, take_turns, size="135m")
    assert check(estimate, roles, size="135m") == ""
    assert estimate.peak(0) <= usable_bytes(gib * GIB)
    actor = model("actor", "135m")
    cache = next(t.memory.generation_kv_cache for t in estimate.tenants if t.role == "actor")
    assert row_bytes(actor) <= cache <= useful_cache_bytes(actor)


def test_a_refusal_names_all_that_counts() -> None:
    """Weights of a frozen model are read from a file; a GPU has no use for the mapping."""
    estimate = estimated(24)
    items = _items(estimate, [0], certain=True)
    held = {tenant.role: tenant.memory for tenant in estimate.tenants}
    assert (held["reference"].parameters, "reference", "parameters") in items and held["reference"].may_be_mapped > 0
    lasting = sum(n for n, _, use in items if use != "gradients")
    assert lasting == sum(memory.least_bytes(on_cpu=False) - memory.kept_gradients for memory in held.values())


def test_the_host_takes_what_the_estimate_says() -> None:
    """The controller knows what the placement holds, the host how large its device is."""
    placement = Placement.of({"train": (2, ["actor", "reference"]), "score": (1, ["critic"])})
    models: dict[str, RoleModel | None] = {role: model(role) for role in ("actor", "reference", "critic")}
    found = rooms(placement, models, device_numbers(placement), take_turns=False)
    estimate = estimate_memory(placement, models, device="cuda", device_bytes=79 * GIB)
    for tenant in estimate.tenants:
        assert tenant.memory.generation_kv_cache == (
            found["actor"].cache_bytes(79 * GIB) if tenant.role == "actor" else 0
        )
    assert found["critic"].cache_bytes(79 * GIB) == 0
    assert found["actor"].lasting == found["reference"].lasting
    for role in ("actor", "critic"):
        some, left = models[role], found[role].pass_bytes(79 * GIB)
        assert some is not None
        tokens = fitting_tokens(some, Layout(d=1), 0, left)
        assert tokens % 512 == 0
        assert 8192 < tokens <= MOST_TOKENS


def test_a_smaller_device_has_smaller_sizes_and_an_adapter_larger_ones() -> None:
    def tokens(gib: int, **changes: Any) -> int:
        actor = model("actor", **changes)
        placement = Placement.colocate(1).restrict(["actor"])
        room = rooms(placement, {"actor": actor}, device_numbers(placement), take_turns=False)["actor"]
        return fitting_tokens(actor, Layout(), 0, room.pass_bytes(gib * GIB))

    assert 512 <= tokens(32) < tokens(40) < tokens(80) <= MOST_TOKENS
    assert tokens(32) < tokens(32, adapter=ADAPTER)
    assert tokens(40) < tokens(40, training={"activation_checkpointing": True})


def test_a_fraction_is_taken_at_its_word_and_refused_where_it_cannot_work() -> None:
    roles = ("actor", "reference")
    given: dict[str, Any] = {"generation": {"gpu_memory_fraction": 0.25}}
    estimate = estimated(79, roles, **given)
    (actor,) = (tenant.memory for tenant in estimate.tenants if tenant.role == "actor")
    assert actor.generation_weights + actor.generation_kv_cache == int(0.25 * 79 * GIB)
    small: dict[str, Any] = {"generation": {"gpu_memory_fraction": 0.03}}
    with expect_error(BadInput, value=r"gpu_memory_fraction=0.03: 2\.\d GB of cuda:0", rule="needs .* for weights"):
        check(estimated(79, roles, **small), roles, **small)
    large: dict[str, Any] = {"generation": {"gpu_memory_fraction": 0.8}}
    with expect_error(
        BadInput, value="on cuda:0: actor generation kv cache ", rule=" too little", remedy="gpu_memory_fraction"
    ):
        check(estimated(79, roles, **large), roles, **large)


def test_a_micro_batch_that_cannot_work_is_refused() -> None:
    roles = ("actor",)
    large: dict[str, Any] = {"training": {"micro_batch_tokens": 65_536}}
    with expect_error(
        BadInput, value=r"micro_batch_tokens=65,536 for actor: a pass needs \d+ GB", remedy="leave it out"
    ):
        check(estimated(79, roles, **large), roles, **large)
    small: dict[str, Any] = {"training": {"micro_batch_tokens": 8192}}
    assert check(estimated(79, roles, **small), roles, **small) == ""


def test_half_of_what_is_left_is_computed_in_where_both_want_all() -> None:
    room = Room(lasting=10 * GIB, generating=10 * GIB, passing=30 * GIB, useful_cache=100 * GIB)
    left = usable_bytes(40 * GIB) - 10 * GIB
    assert room.cache_bytes(40 * GIB) == left // 2
    assert room.pass_bytes(40 * GIB) == left - left // 2
    assert room.cache_bytes(400 * GIB) == 100 * GIB
    assert room.cache_bytes(10 * GIB) == 0
