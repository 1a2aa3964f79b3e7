"""Terms against figures worked out by hand, bytes against the resharding planner, constants that are found again."""

from __future__ import annotations

import gc
import math
import random
import weakref
from dataclasses import fields, replace
from typing import Any

import pandas as pd
import pytest
from transformers import LlamaConfig

import workbench as wb
from benchmarks.mapping_products import TABLE, off
from tests.expected import expect_error
from workbench.errors import BadInput
from workbench.mapping import Constants, Hardware, Workload, search
from workbench.mapping.costs import CostModel, Sample, Terms, fit, received_bytes, spread
from workbench.mapping.hardware import PRESETS, TILES, ProductRates
from workbench.mapping.probe import fitted_rates
from workbench.mapping.workload import config_of, role_models
from workbench.placement import Layout
from workbench.placement.role_model import RoleModel, matrices
from workbench.resharding.strategies import plan_transition

A100 = PRESETS["a100-80g"]
WORK = Workload(rows=1024, prompt_tokens=1024, response_tokens=1024, updates=8, engine="workbench")


@pytest.fixture(scope="module")
def actor() -> RoleModel:
    models = role_models(dict.fromkeys(WORK.roles, "llama-7b"), WORK)
    return models["actor"]


@pytest.fixture(scope="module")
def tiny() -> RoleModel:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=512,
                         num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    return role_models(dict.fromkeys(WORK.roles, config), WORK)["actor"]


def product_elements(role: RoleModel) -> int:
    """Elements of the matrices that every token is multiplied with."""
    return sum(n * k * count for part in matrices(role, 1) for (n, k), count in part.items())


def test_a_model_has_the_sizes_that_costs_are_made_of(actor: RoleModel) -> None:
    assert product_elements(actor) == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert actor.elements == 6_738_415_616  # published: 6.7B
    assert actor.kv_bytes_per_token == 2 * 32 * 4096 * 2


def even(**changes: Any) -> Hardware:
    """The machines of A100s without tiles, at their peaks, so that terms can be worked out by hand."""
    return replace(A100, products=ProductRates(), inside_bytes_s=300e9, machine_bytes_s=25e9, **changes)


def test_a_model_computes_a_call_once_and_is_not_kept(actor: RoleModel) -> None:
    model = CostModel(even(), WORK)
    assert model.infer(actor, Layout(2, 4, 2)) is model.infer(actor, Layout(2, 4, 2))
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_terms_of_a_pass_and_of_training(actor: RoleModel) -> None:
    model, layout = CostModel(even(), WORK), Layout(2, 4, 2)
    micro, tokens = 256, 4096  # 512 rows of 2048 tokens a replica, two at a time
    infer = model.infer(actor, layout)
    layer = (4 * 4096**2 + 3 * 4096 * 11008) / 4
    products = 2 * tokens * 32 * layer / 312e12
    passed = 32 * tokens * 2 * (14 * 4096 + (2 * 8192 + 3 * 11008) / 4) / 2.039e12
    attention = 4 * 32 * 4096 / 4 * tokens * 1024 / 312e12
    head = tokens * 32000 * 4096 / 4 / 312e12  # of responses, which are half of the tokens
    whole = products + passed + attention
    assert infer.passes == pytest.approx(whole + head + (micro - 1) * (whole / 2 + head))
    reduce_s = min(2 * 3 / 4 * 4096 * 4096 * 2 / 300e9 + 6 * 4e-6, 2 * 4096 * 4096 * 2 / 300e9 + 4 * 4e-6)
    sent_s = 4096 * 4096 * 2 / 300e9 + 4e-6
    assert infer.links == pytest.approx((micro + 1) * (2 * 16 * reduce_s + sent_s))
    assert (infer.decoding, infer.calls) == (0, 16)  # ranks
    waits = CostModel(even(runs_ahead=False), WORK).infer(actor, layout)  # for the host
    assert waits.passes == pytest.approx(infer.passes + 16 * (micro + 1) * 7e-5)
    train = model.train(actor, layout)
    # forward, recomputed, backward: twice the products, 2.5 times the attention
    back = 2 * products + 2 * passed + 2.5 * attention
    first, slowest = 2 * whole + back + 4 * head, (2 * whole + back) / 2 + 4 * head
    own = actor.elements / 8
    assert train.passes == pytest.approx(8 * (first + (micro / 8 - 1) * slowest + 28 * own / 2.039e12))
    # the data ring spans both machines: 8 rings share one network
    summed = min(2 * 1 / 2 * 4 * own / (25e9 / 8) + 2 * 25e-6, 2 * 4 * own / (25e9 / 8) + 2 * 25e-6)
    links = (micro / 8 + 1) * (6 * 16 * reduce_s + 2 * sent_s) + summed
    assert train.links == pytest.approx(8 * links)
    assert train.calls == 16
    # a cluster's engine sums and scatters gradients, gathers bfloat16 weights, and steps its part of the optimizer
    cluster = CostModel(even(), replace(WORK, engine="cluster")).train(actor, layout, recomputed=False)
    first, slowest = whole + back + 6 * head, (whole + back) / 2 + 6 * head  # its head has all tokens
    assert cluster.passes == pytest.approx(8 * (first + (micro / 8 - 1) * slowest + 28 * own / 2 / 2.039e12))
    moved = 1 / 2 * (4 + 2) * own / (25e9 / 8) + 2 * 25e-6
    assert cluster.links == pytest.approx(8 * ((micro / 8 + 1) * (4 * 16 * reduce_s + 2 * sent_s) + moved))


def test_terms_of_generation(actor: RoleModel) -> None:
    model = CostModel(even(), WORK)
    rows, steps = 1024 // 8, 1024
    one = model.generate(actor, 16, 2, waves=1.0)
    read = rows * (1024 * 1024 + 1024**2 / 2) * actor.kv_bytes_per_token / 2 / 2.039e12
    weights = 2 * product_elements(actor) / 2 / 2.039e12  # 128 rows: reading them takes longer than multiplying
    step = weights + 32 * 7e-5  # and what the host starts
    assert read + steps * step < one.decoding < read + 1.2 * steps * step
    first = rows * 2 * 1024 * product_elements(actor) / 2 / 312e12
    assert first < one.passes < 1.3 * first
    two = model.generate(actor, 16, 2, waves=2.0)
    assert two.decoding - one.decoding == pytest.approx(step * steps, rel=0.05)
    # of unequal rows the longest ends it, and places are taken over as rows end
    several = CostModel(even(layer_start_s=1.0), replace(WORK, response_tokens=(256, 512, 1024)))
    started = [several.generate(actor, 16, 2, waves).decoding for waves in (1.0, 3.0)]
    assert started == pytest.approx([32 * 1024, 32 * 3 * 1792 / 3], rel=0.01)
    assert model.replica_rows(16, 2) == rows
    assert model.row_bytes(actor, 2) == actor.kv_bytes_per_token * 2048 / 2


def test_bytes_of_a_transition_are_those_of_the_planner(tiny: RoleModel) -> None:
    for sizes in [(1, 4, 2, 1, 2), (2, 2, 1, 1, 1), (4, 4, 1, 1, 2), (2, 4, 2, 1, 4), (1, 8, 1, 1, 8)]:
        for strategy in ["hybridflow", "v", "full"]:
            layout = Layout(*sizes)
            planned = plan_transition(tiny.weights, layout, strategy).figures().received.max()
            if strategy == "hybridflow" and (layout.p, layout.t) == (layout.p_g, layout.t_g):
                assert planned == 0
            assert received_bytes(tiny, layout, strategy) == planned


NAMES = [field.name for field in fields(Terms)]


def test_constants_are_found_again() -> None:
    dice = random.Random(3)
    true = Constants(*(dice.uniform(1, 4) for _ in NAMES))
    samples = []
    for _ in range(60):
        terms = Terms(*(dice.uniform(0, 1) for _ in NAMES))
        samples.append(Sample(terms, true.seconds(terms)))
    found = fit(samples, Constants(*[1.0] * len(NAMES)), pull=1e-12)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3)
    # what no sample has stays as it was
    few = fit([Sample(Terms(passes=2.0), 1.0)], Constants(passes=5.0, calls=7.0))
    assert few.passes == pytest.approx(0.5, rel=1e-2) and few.calls == 7.0
    with expect_error(BadInput, value="nothing was measured"):
        fit([])


def test_the_error_to_expect_is_that_of_placements_left_out() -> None:
    true = Constants(passes=2.0, decoding=3.0, links=1.5, calls=0.1)
    kinds = {"a": Terms(passes=1.0, calls=1), "b": Terms(decoding=2.0, calls=1), "c": Terms(links=1.0, passes=0.5)}

    def samples(slower: dict[str, float]) -> dict[tuple[str, int, str], Sample]:
        return {(place, 1, call): Sample(terms, factor * true.seconds(terms))
                for place, factor in slower.items() for call, terms in kinds.items()}  # fmt: skip

    calls_s, between_s = sum(map(true.seconds, kinds.values())), {("one", 1): 2.0, ("two", 1): 2.0}
    assert spread(samples({"one": 1.0, "two": 1.0}), between_s, true) == pytest.approx(0, abs=1e-3)
    assert spread(samples({"one": 1.0}), between_s, true) == pytest.approx(0, abs=1e-3)  # of one, its single calls
    # a placement that takes 1.5 times as long as the other: each is predicted from the other
    off = math.log((calls_s + 2) / (1.5 * calls_s + 2)), math.log((1.5 * calls_s + 2) / (calls_s + 2))
    expected = pytest.approx(math.hypot(*off) / math.sqrt(2), rel=0.02)
    assert spread(samples({"one": 1.0, "two": 1.5}), between_s, true) == expected
    # and one in which as long again nothing ran
    off = math.log((calls_s + 2) / (2 * calls_s + 4)), math.log((2 * calls_s + 4) / (calls_s + 2))
    apart = {("one", 1): 2.0, ("two", 1): calls_s + 4}
    expected = pytest.approx(math.hypot(*off) / math.sqrt(2), rel=0.02)
    assert spread(samples({"one": 1.0, "two": 1.0}), apart, true) == expected
    assert spread(samples({"one": 1.0, "two": 1.0}), {("two", 1): 2.0}, true) == pytest.approx(0, abs=1e-3)


def test_links_inside_and_between_machines() -> None:
    assert (A100.link(8), A100.hop(8), A100.hops(8)) == (200e9, 4e-6, 7 * 4e-6)
    assert A100.link(2, 8) == 22.5e9 / 8  # eight rings leave each machine
    assert A100.link(16) == 22.5e9  # one does
    assert A100.hops(16) == pytest.approx(25e-6 + 14 * 4e-6)  # one hop leaves a machine
    assert A100.hops(4, 8) == pytest.approx(3 * 25e-6)
    model = CostModel(A100, WORK)
    ring, tree = 2 * 127 / 128 * 1e9 / 22.5e9 + 2 * A100.hops(128), 2 * 1e9 / 22.5e9 + 14 * 25e-6
    assert model._all_reduce(1e9, 128, 1) == pytest.approx(min(ring, tree))
    assert model._all_reduce(1.0, 128, 1) == pytest.approx(14 * 25e-6)  # few bytes go by the tree
    assert not math.isclose(A100.flop_s("bfloat16"), A100.flop_s("float32"))
    with expect_error(BadInput, rule="rates are known for"):
        A100.flop_s("float8")
    with expect_error(BadInput, value="cores=0", rule="at least 1"):
        replace(A100, cores=0)


def test_presets_have_the_sizes_of_their_names() -> None:
    for name, billions in (("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-70b", 68.98)):
        models = role_models(dict.fromkeys(WORK.roles, config_of(name)), WORK)
        assert models["reference"].elements / 1e9 == pytest.approx(billions, abs=0.02)


def product_s(rates: ProductRates, m: int, n: int, k: int, memory_bytes_s: float = 1e15) -> float:
    return rates.seconds(m, n, k, flop_s=1e12, memory_bytes_s=memory_bytes_s, item_bytes=2)


def test_a_device_without_tiles_is_at_its_peak_or_reads() -> None:
    rates = ProductRates()
    assert product_s(rates, 1000, 100, 10) == pytest.approx(2e6 / 1e12)
    assert product_s(rates, 10, 20, 30, 1e6) == pytest.approx(2 * (300 + 600 + 200) / 1e6)
    assert product_s(ProductRates(share=0.5, launch_s=3.0), 1000, 100, 10) == pytest.approx(3 + 4e6 / 1e12)


def test_waves_and_edges_of_tiles() -> None:
    rates = ProductRates(units=10, tiles=True)
    full = product_s(rates, 256 * 10, 128, 64)
    assert full == pytest.approx(2 * 2560 * 128 * 64 / 1e12)  # ten tiles: one whole wave
    assert product_s(rates, 256 * 10 + 1, 128, 64) > 1.04 * full  # the quickest tile needs another wave
    for m, n in ((1, 1), (65, 200), (1000, 700), (4096, 11008)):
        by_hand = min(
            math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / 10) * 10 * rows * columns
            for rows, columns in TILES
        )
        assert product_s(rates, m, n, 64) == pytest.approx(2 * by_hand * 64 / 1e12)
        assert product_s(rates, m, n, 64) >= 2 * m * n * 64 / 1e12  # never quicker than its operations


def test_the_presets_are_close_to_kernels_that_were_timed() -> None:
    table = pd.read_csv(TABLE)
    assert set(table["device"]) == {"a100-80g", "h100"} and len(table) > 200
    for device, most in (("a100-80g", 0.08), ("h100", 0.11)):
        part = table[(table["device"] == device) & (table["model"] != "Llama-2-7b-hf")]  # fitted to that one
        assert off(part, PRESETS[device]).abs().mean() < most


def test_this_machine_is_measured() -> None:
    found = wb.mapping.Hardware.this_machine(devices=2)
    assert found.devices_per_machine == 2
    assert found.flop_s("float32") > 1e8
    assert found.memory_bytes_s > 1e8


def test_a_probe_of_a_dozen_products_tells_the_others_nearly_as_well_as_the_presets() -> None:
    table = pd.read_csv(TABLE)
    for device, most in (("a100-80g", 0.1), ("h100", 0.1)):
        part, known = table[table["device"] == device], PRESETS[device]
        asked = part[part["model"] == "Llama-2-70b-hf"].sort_values("n").groupby("m").tail(1)  # the largest of each m
        times = [((m, n, k), seconds) for m, n, k, seconds in asked[["m", "n", "k", "seconds"]].itertuples(index=False)]
        found = fitted_rates(times, replace(known.products, share=1.0, edge=0.0, memory_share=1.0),
                             flop_s=known.flop_s("bfloat16"), memory_bytes_s=known.memory_bytes_s,
                             item_bytes=2)  # fmt: skip
        rest = part[part["model"] != "Llama-2-70b-hf"]
        assert off(rest, replace(known, products=found)).abs().mean() < most


def test_syncs_are_priced_by_what_they_send() -> None:
    models = dict.fromkeys(("actor", "reference", "reward"), "llama-7b")
    whole = Workload(algorithm="grpo").with_rollout(1)
    plans = [search(models, devices=16, workload=replace(whole, sync_share=share)).best for share in (1.0, 0.01)]
    syncs = [[call.seconds for one in plan.sets for role in one.roles for call in role.calls if call.name == "sync"]
             for plan in plans]  # fmt: skip
    assert 0 < syncs[1][0] < syncs[0][0]
    assert "weight syncs send 1.00% of the weights' bytes" in plans[1].why
    with expect_error(BadInput, value="sync_share=2", rule="0 to 1"):
        Workload(sync_share=2)


def test_roles_that_take_turns_need_the_room_of_the_largest_and_the_time_of_moving() -> None:
    models = dict.fromkeys(("actor", "critic", "reference", "reward"), "llama-7b")
    best = search(models, devices=8, workload=Workload(take_turns=True), placement="colocate").best.sets[0]
    for role in best.roles:
        assert role.lasting_bytes == 0
        moved = {call.stage: call.seconds for call in role.calls if call.name == "load"}
        weights = role_models(models, WORK)[role.role].elements * 2 / (role.layout.p * role.layout.t)
        assert moved["preparation"] == pytest.approx(Constants().links * 2 * weights / A100.host_bytes_s)
    assert best.memory_bytes == max(max(role.passing_bytes, role.generation_bytes) for role in best.roles)
    with pytest.raises(BadInput, match=r"with wb\.mapping\.Workload\(take_turns=True\), or 4 dev"):
        search(models, devices=2)
    assert search(models, devices=2, workload=Workload(take_turns=True)).best.iteration_s > 0
