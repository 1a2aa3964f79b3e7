"""Terms against figures worked out by hand, bytes against the resharding planner, constants that are found again."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from transformers import LlamaConfig

import workbench as wb
from workbench.errors import BadInput
from workbench.mapping import Constants, Workload
from workbench.mapping.calibration import NAMES, Sample, fit
from workbench.mapping.costs import CostModel, Terms, received_bytes
from workbench.mapping.hardware import PRESETS
from workbench.mapping.shapes import Shape, config_of, role_models
from workbench.placement import Layout
from workbench.resharding.strategies import plan_transition

A100 = PRESETS["a100-80g"]
WORK = Workload(rows=1024, prompt_tokens=1024, response_tokens=1024, updates=8)


@pytest.fixture(scope="module")
def actor() -> Shape:
    models = role_models(dict.fromkeys(WORK.roles, "llama-7b"), WORK)
    return Shape(models["actor"])


@pytest.fixture(scope="module")
def tiny() -> Shape:
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=512,
                         num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    return Shape(role_models(dict.fromkeys(WORK.roles, config), WORK)["actor"])


def test_a_shape_counts_what_the_model_has(actor: Shape) -> None:
    layer = 4 * 4096**2 + 3 * 4096 * 11008
    assert actor.product_elements == 32 * layer + 32000 * 4096
    assert actor.elements == 6_738_415_616  # published: 6.7B
    assert actor.kv_bytes_per_token == 2 * 32 * 4096 * 2
    assert actor.forward_flop(1, 0) == 2 * actor.product_elements
    assert actor.forward_flop(10, 5) - actor.forward_flop(10, 0) == 4 * 32 * 4096 * 50


def test_terms_of_a_pass_and_of_training(actor: Shape) -> None:
    model, layout = CostModel(A100, WORK), Layout(2, 4, 2)
    tokens = 512 * 2048
    infer = model.infer(actor, layout)
    micro = tokens / 4096
    flop = actor.forward_flop(tokens, 1024)
    assert infer.inference == pytest.approx(flop / (8 * 312e12) * (micro + 1) / micro)
    assert infer.passes == 16 * (micro + 1)
    reduce_s = 2 * 3 / 4 * 4096 * 4096 * 2 / 300e9 + 6 * 8e-6
    sent_s = 4096 * 4096 * 2 / 300e9 + 8e-6
    assert infer.tensor == pytest.approx((micro + 1) * (2 * 16 * reduce_s + sent_s))
    train = model.train(actor, layout)
    each = micro / 8
    assert train.training == pytest.approx(4 * flop / (8 * 312e12) * (each + 1) / each)  # activations recomputed
    own = actor.elements / 8
    assert train.memory == pytest.approx(8 * 28 * own / 2.039e12)
    # the data ring spans both machines: 8 rings share one network
    assert train.data == pytest.approx(8 * (2 * 1 / 2 * 4 * own / (25e9 / 8) + 2 * 25e-6))
    assert (train.updates, train.calls) == (8, 1)


def test_terms_of_generation(actor: Shape) -> None:
    model = CostModel(A100, WORK)
    one = model.generate(actor, 16, 2, waves=1)
    rows = 1024 // 8
    read = rows * (1024 * 1024 + 1024**2 / 2) * actor.kv_bytes_per_token
    assert one.memory == pytest.approx((1024 * actor.nbytes + read) / (2 * 2.039e12))
    assert one.steps == 32 * 1024
    two = model.generate(actor, 16, 2, waves=2)
    assert two.steps == 2 * one.steps
    assert two.memory - one.memory == pytest.approx(1024 * actor.nbytes / (2 * 2.039e12))
    # of unequal rows the longest ends it, and places are taken over as rows end
    several = CostModel(A100, replace(WORK, response_tokens=(256, 512, 1024)))
    assert several.generate(actor, 16, 2, waves=1).steps == 32 * 1024
    assert several.generate(actor, 16, 2, waves=3).steps == pytest.approx(32 * 3 * 1792 / 3)
    assert model.replica_rows(16, 2) == rows
    assert model.row_bytes(actor, 2) == actor.kv_bytes_per_token * 2048 / 2


@pytest.mark.parametrize("strategy", ["hybridflow", "v", "full"])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 1, 2), (2, 2, 1, 1, 1), (4, 4, 1, 1, 2), (2, 4, 2, 1, 4), (1, 8, 1, 1, 8)])
def test_bytes_of_a_transition_are_those_of_the_planner(tiny: Shape, strategy: str, sizes: tuple[int, ...]) -> None:
    layout = Layout(*sizes)
    planned = plan_transition(tiny.role.weights, layout, strategy).figures().received.max()
    if strategy == "hybridflow" and (layout.p, layout.t) == (layout.p_g, layout.t_g):
        assert planned == 0
    assert received_bytes(tiny, layout, strategy) == planned


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
    # what no sample has stays as it was; peaks are kept where they are peaks
    few = fit([Sample(Terms(training=2.0), 1.0)], Constants(training=5.0, steps=7.0))
    assert (few.training, few.steps) == (1.0, 7.0)
    assert fit([Sample(Terms(training=2.0), 1.0)], peaks=False).training == pytest.approx(0.5, rel=1e-2)
    with pytest.raises(BadInput, match="nothing was measured"):
        fit([])


def test_links_inside_and_between_machines() -> None:
    assert A100.link(8) == (300e9, 8e-6)
    assert A100.link(2, 8) == (25e9 / 8, 25e-6)  # eight rings leave each machine
    assert A100.link(16) == (25e9, 25e-6)  # one does
    assert not math.isclose(A100.flop_s("bfloat16"), A100.flop_s("float32"))
    with pytest.raises(BadInput, match="rates are known for"):
        A100.flop_s("float8")


def test_presets_have_the_sizes_of_their_names() -> None:
    for name, billions in (("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-70b", 68.98)):
        models = role_models(dict.fromkeys(WORK.roles, config_of(name)), WORK)
        assert Shape(models["reference"]).elements / 1e9 == pytest.approx(billions, abs=0.01)


def test_this_machine_is_measured() -> None:
    found = wb.mapping.Hardware.this_machine(devices=2)
    assert found.devices_per_machine == 2
    assert found.flop_s("float32") > 1e8
    assert found.memory_bytes_s > 1e8
