"""The search against walking through all mappings, and what it answers."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import workbench as wb
from tests.expected import expect_error
from tests.fuzz.damage import cases
from workbench.errors import BadInput
from workbench.mapping import Call, Constants, Hardware, Workload, predict, search, simulate
from workbench.mapping.costs import CostModel, Terms
from workbench.mapping.hardware import PRESETS
from workbench.mapping.options import options_of, undominated
from workbench.mapping.predict import transfers
from workbench.mapping.search import partitions_of
from workbench.mapping.workload import STAGES, config_of, role_models
from workbench.placement import Placement

ROLES = ("actor", "critic", "reference", "reward", "cost")
GIB = 2**30


def small(layers: int, hidden: int, heads: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, vocab_size=512,
                       num_attention_heads=heads, num_key_value_heads=heads)  # fmt: skip


def machine(memory_mib: float, devices_per_machine: int, flop_s: float = 1e12) -> Hardware:
    return Hardware(name="made up", devices_per_machine=devices_per_machine, memory_bytes=int(memory_mib * 2**20),
                    matrix_flop_s={"bfloat16": flop_s}, memory_bytes_s=1e10, inside_bytes_s=2e9, machine_bytes_s=5e8,
                    usable=1.0)  # fmt: skip


def small_work(tokens: int, engine: Literal["cluster", "workbench"], roles: Iterable[str]) -> Workload:
    """Of Safe-RLHF's roles. A cluster's engine chooses whether activations are recomputed."""
    training = wb.Training(engine="torch", micro_batch_tokens=64, activation_checkpointing=engine == "cluster")
    return Workload(algorithm="safe-rlhf", prompt_tokens=tokens, response_tokens=tokens, rows=16, updates=2,
                    training=training, engine=engine).with_roles(roles)  # fmt: skip


def every_layout(role: Any, devices: int, hardware: Hardware) -> Iterator[wb.Layout]:
    """(p, t, d) of a role, by trying all numbers."""
    for p, t, d in itertools.product(range(1, devices + 1), repeat=3):
        if p * t * d == devices and hardware.devices_per_machine % t == 0 and role.role.layers % p == 0:
            try:
                role.role.weights.check(p, t)
            except BadInput:
                continue
            yield wb.Layout(p, t, d)


def held_by_hand(config: LlamaConfig, role: str, layout: wb.Layout, engine: str) -> float:
    """Bytes that stay on the fuller of the first and the last stage's devices: 12 a trained weight (fp32, and two
    moments), on a cluster 6 (bfloat16, fp32 gradient) and 12 over the replicas; 2 a frozen one. Matrices and
    embeddings are cut t ways, norms are whole; the last stage has the final norm and the head, which is one row and a
    bias where a role scores."""
    p, t, h, v = layout.p, layout.t, config.hidden_size, config.vocab_size
    block = (4 * h * h + 3 * h * config.intermediate_size) // t + 2 * h
    embedding, head = v * h // t, v * h // t if role in ("actor", "reference") else h + 1
    blocks = config.num_hidden_layers // p * block
    most = max(blocks + embedding, blocks + h + head) if p > 1 else blocks + embedding + h + head
    trained = 12 if engine == "workbench" else 6 + 12 / layout.d
    return most * (trained if role in ("actor", "critic") else 2)


def walked(
    models: dict[str, Any], devices: int, hardware: Hardware, workload: Workload, constants: Constants,
    by_call: bool = False,
) -> float:  # fmt: skip
    """Seconds of the best mapping: every partition, every allocation, every combination of layouts; none is left out
    because another looks better."""
    placed = role_models(models, workload)
    options = options_of(placed, hardware, workload, constants, strategy="hybridflow", t_g=None, by_call=by_call)
    model, usable = CostModel(hardware, workload), hardware.usable_bytes
    generation = STAGES.index("generation")

    def tensor_ranks(role: str, layout: wb.Layout) -> Iterator[int]:
        """Of generation: what training's gather to; groups of whole replicas; by call, groups of any ranks."""
        for t_g in range(1, hardware.devices_per_machine + 1):
            apart = (
                layout.p * layout.t == 1 or by_call
            ) and layout.size % t_g + hardware.devices_per_machine % t_g == 0
            if layout.t % t_g == 0 or (
                apart and any(one.t == t_g for one in every_layout(options[role], t_g, hardware))
            ):
                yield t_g

    def copied(role: str, layout: wb.Layout, ranks: int) -> float:
        """Seconds until each rank has its part of the weights, cut `ranks` ways."""
        if layout.p * layout.t == 1:
            return 0.0
        part = placed[role].weights.nbytes / ranks
        return constants.seconds(Terms(links=part / hardware.link(layout.size) + part / hardware.load_bytes_s))

    def generated(role: str, layout: wb.Layout, t_g: int, lasting: Any) -> Any:
        """Seconds, for each of several sums of lasting bytes; infinite where no row fits."""
        cache, longest = (
            usable - lasting - math.ceil(placed[role].weights.nbytes / t_g),
            model.row_bytes(placed[role], t_g),
        )
        grown = (workload.prompt_tokens + workload.mean_response / 2) / (workload.prompt_tokens + max(workload.lengths))
        rows = math.ceil(workload.rows / (layout.size // t_g))
        count = sum(call.kind == "generate" for call in workload.of(role))
        moved = copied(role, layout, t_g)
        if layout.t % t_g == 0:
            moved = constants.seconds(model.transition(placed[role], layout.generating(t_g)))
        taken = {0.0: math.inf}
        waves = [math.ceil(8 * max(1.0, rows * longest * grown / n)) / 8 if n >= longest else 0.0 for n in cache]
        for wave in set(waves) - {0.0}:
            one = model.generate(placed[role], layout.size, t_g, wave)
            taken[wave] = count * constants.seconds(one) + moved
        return np.array([taken[wave] for wave in waves])

    def of_role(role: str, n: int) -> list[tuple[wb.Layout, int, tuple[int, int], list[float]]]:
        found, kinds = [], {call.kind for call in workload.of(role)}
        again = workload.training.activation_checkpointing
        modes = [False, True] if again and "train" in kinds else [again]  # activations kept, or recomputed
        every = [layout for layout in every_layout(options[role], n, hardware) if options[role]._held(layout, again)]
        others = every if by_call and {"infer", "train"} <= kinds else [None]
        for layout, mode, infer in itertools.product(every, modes, others):
            held = options[role]._held(layout, mode)
            seconds = [0.0] * len(STAGES)
            if infer not in (None, layout):
                seconds[STAGES.index("preparation")] += copied(role, layout, infer.p * infer.t)
                copy = placed[role].weights.nbytes // (infer.p * infer.t) + options[role]._forward_bytes(infer)
                held = held[0], max(held[1], copy)
            for call in workload.of(role):
                if call.kind == "infer":
                    seconds[STAGES.index(call.stage)] += constants.seconds(model.infer(placed[role], infer or layout))
                elif call.kind == "train":
                    seconds[STAGES.index(call.stage)] += constants.seconds(model.train(placed[role], layout, mode))
            ways = tensor_ranks(role, layout) if "generate" in kinds else [1]
            found += [(layout, t_g, held, seconds) for t_g in ways]
        return found

    def of_set(roles: Sequence[str], n: int) -> Any:
        """[ways, 3]: seconds of each combination of layouts that fits."""
        every = [of_role(role, n) for role in roles]
        if not all(every):
            return np.zeros((0, 3))
        picks = np.indices([len(one) for one in every]).reshape(len(roles), -1)
        lasting: Any = sum(np.array([way[2][0] for way in one])[pick] for one, pick in zip(every, picks, strict=True))
        passing = np.max(
            [np.array([w[2][1] for w in one])[pick] for one, pick in zip(every, picks, strict=True)], axis=0
        )
        seconds: Any = sum(np.array([way[3] for way in one])[pick] for one, pick in zip(every, picks, strict=True))
        seconds = seconds + [transfers(tuple(roles), n, options)[stage].seconds for stage in STAGES]
        for role, one, pick in zip(roles, every, picks, strict=True):
            if any(call.kind == "generate" for call in workload.of(role)):
                for k, (layout, t_g, _, _) in enumerate(one):
                    seconds[pick == k, generation] += generated(role, layout, t_g, lasting[pick == k])
        fits = (lasting + passing <= usable) & np.isfinite(seconds).all(axis=1)
        return np.unique(seconds[fits], axis=0)  # equal ones once

    known: dict[Any, Any] = {}
    best = math.inf
    for sets in partitions_of(tuple(placed)):
        for sizes in itertools.product(range(1, devices + 1), repeat=len(sets)):
            if sum(sizes) > devices:
                continue
            together = np.zeros((1, 3))
            for one in zip(sets, sizes, strict=True):
                ways = known[one] if one in known else known.setdefault(one, of_set(*one))
                together = np.maximum(together[:, None], ways[None]).reshape(-1, 3)
            best = min(best, together.sum(axis=1).min(initial=math.inf))
    return best


@settings(max_examples=cases(12, most=60))
@given(
    st.integers(1, 5), st.integers(1, 16), st.sampled_from([2, 4, 8]), st.floats(2, 60), st.integers(1, 4),
    st.sampled_from([4, 30]), st.sampled_from([1e9, 1e12]), st.sampled_from(["cluster", "workbench"]),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_optimum_is_that_of_walking_through_all(
    count: int, devices: int, per_machine: int, memory: float, layers: int, tokens: int, flop_s: float,
    engine: Literal["cluster", "workbench"], dice: Any,
) -> None:  # fmt: skip
    roles = ROLES[:count]
    models = {role: small(layers, dice.choice([32, 64]), 4) for role in roles}
    workload = small_work(tokens, engine, roles)
    constants = Constants(*(dice.choice([0.5, 1.0, 3.0]) * (1 if n < 3 else 1e-3) for n in range(4)))
    hardware = machine(memory, per_machine, flop_s)
    expected = walked(models, devices, hardware, workload, constants)
    if math.isinf(expected):
        with expect_error(BadInput, rule="no layout was found that fits"):
            search(models, devices=devices, hardware=hardware, workload=workload, constants=constants)
        return
    plans = search(models, devices=devices, hardware=hardware, workload=workload, constants=constants)
    assert plans.exact
    assert plans.best.iteration_s == pytest.approx(expected, rel=1e-9)
    assert sorted(plan.iteration_s for plan in plans) == [plan.iteration_s for plan in plans]
    for plan in plans:
        for role in (role for one in plan.sets for role in one.roles):
            by_hand = held_by_hand(models[role.role], role.role, role.layout, engine)
            # Adam counts its steps tensor by tensor; flat runs of weights are padded
            assert 0 <= role.lasting_bytes - by_hand <= 4 * (9 * layers + 4) + 2 * 4 * 18


@settings(max_examples=cases(4, most=15))
@given(
    st.integers(1, 2), st.integers(1, 8), st.floats(2, 60), st.sampled_from([1e9, 1e12]), st.sampled_from([0.01, 1, 30])
)
def test_the_optimum_with_a_layout_for_each_call(
    count: int, devices: int, memory: float, flop_s: float, moving: float
) -> None:
    models = {role: small(4, 64, 4) for role in ROLES[:count]}
    workload = small_work(30, "workbench", models)
    constants = Constants(links=moving, calls=1e-3)
    hardware = machine(memory, 8, flop_s)
    expected = walked(models, devices, hardware, workload, constants, by_call=True)
    if not math.isinf(expected):
        plans = search(models, devices=devices, hardware=hardware, workload=workload, constants=constants, by_call=True)
        assert plans.best.iteration_s == pytest.approx(expected, rel=1e-9)


@settings(max_examples=cases(10, most=60))
@given(
    st.integers(1, 4), st.integers(2, 24), st.floats(2, 60), st.sampled_from([1e9, 1e12]), st.booleans(),
    st.sampled_from([None, 0, 1]), st.integers(2, 4), st.randoms(use_true_random=False),
)  # fmt: skip
def test_bounds_leave_out_nothing_that_is_quicker(
    count: int, devices: int, memory: float, flop_s: float, by_call: bool, ahead: int | None, unit: int, dice: Any
) -> None:
    """Searches that coarse plans bound find the same best plan of each partition as those without (whose best is that
    of walking through all); the gap of rounded seconds holds, and coarse allocations are no better."""
    models = {role: small(4, dice.choice([32, 64]), 4) for role in ROLES[:count]}
    work = small_work(30, "workbench", models)
    asked: dict[str, Any] = {
        "devices": devices, "hardware": machine(memory, 8, flop_s), "constants": Constants(calls=1e-3),
        "workload": work if ahead is None else work.with_rollout(ahead), "by_call": by_call,
    }  # fmt: skip
    module = importlib.import_module("workbench.mapping.search")
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(module, "FEW_SIZES", devices)
        try:
            expected = search(models, **asked)
        except BadInput:
            return
        changed.setattr(module, "FEW_SIZES", 1)
        changed.setattr(module, "FINER", 2)
        bounded = search(models, **asked)
        assert bounded.exact and expected.exact
        assert [plan.iteration_s for plan in bounded] == pytest.approx([plan.iteration_s for plan in expected])
        changed.setattr(module, "MOST_EXACT", 0)
        rough = search(models, **asked)
        assert 0 < rough.gap <= 0.01 + 1e-6  # seconds are rounded down, so that none is hit
    least_s, found = expected.best.iteration_s * (1 - 1e-9), [rough]
    with contextlib.suppress(BadInput):
        found.append(search(models, **asked, granularity=unit))
    for plans in found:
        assert least_s <= plans.best.iteration_s <= expected.best.iteration_s * (1 + plans.gap) * (1 + 1e-7)


@pytest.mark.parametrize("ahead", [0, 1])
def test_generation_apart_has_the_split_that_trying_all_finds(ahead: int) -> None:
    """Every number of devices for rollout workers, every layout of the others; ahead, an iteration takes as long as
    generation or the rest."""
    models = {"actor": small(4, 64, 4), "reference": small(2, 64, 4)}
    hardware, count = machine(4096, 4), 6
    work = small_work(24, "workbench", models).with_rollout(ahead)
    found = search(models, devices=count, hardware=hardware, workload=work)
    tried: dict[float, Placement] = {}
    options = options_of(role_models(models, work), hardware, work, Constants(), strategy="hybridflow", t_g=None,
                         by_call=False)  # fmt: skip
    for actor, reference, rollout in itertools.product(range(1, count), range(count), range(1, count)):
        pools: dict[str, Any] = {"actor": (actor, ["actor"]), "rollout": (rollout, ["rollout"])}
        if reference:
            pools["reference"] = (reference, ["reference"])
        else:
            pools["actor"] = (actor, ["actor", "reference"])
        if actor + reference + rollout > count:
            continue
        for one in every_layout(options["actor"], actor, hardware):
            for other in every_layout(options["reference"], reference or actor, hardware):
                layouts = {"actor": (one.p, one.t, one.d), "reference": (other.p, other.t, other.d)}
                for t_g in (1, 2, 4):
                    if rollout % t_g == 0:
                        placed = Placement.of(pools, layouts)
                        plan = predict(placed, models, hardware=hardware, workload=work, t_g=t_g)
                        tried[plan.iteration_s] = placed
                        stages = plan.stage_s
                        rest = stages["preparation"] + stages["training"]
                        whole = max(stages["generation"], rest) if ahead else stages["generation"] + rest
                        assert plan.iteration_s == pytest.approx(whole)
                        assert simulate(plan).iteration_s <= whole * (1 + 1e-9)
    assert found.best.iteration_s == pytest.approx(min(tried)) and found.exact
    assert found.best.placement.pool_of("rollout").devices == tried[min(tried)].pool_of("rollout").devices
    assert len({plan.iteration_s for plan in found}) > 1


@pytest.mark.parametrize(("count", "partitions"), [(3, 5), (4, 15), (5, 52)])
def test_partitions_are_those_of_the_paper(count: int, partitions: int) -> None:
    found = partitions_of(ROLES[:count])
    assert len(found) == partitions
    assert len({frozenset(map(frozenset, sets)) for sets in found}) == partitions
    assert all(sorted(sum(sets, ())) == sorted(ROLES[:count]) for sets in found)


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=40))
def test_rows_that_none_beats(rows: list[tuple[int, ...]]) -> None:
    kept = undominated(np.array(rows, dtype=float).reshape(-1, 3))
    for n, row in enumerate(rows):
        beaten = [k for k, other in enumerate(rows) if k != n and all(a <= b for a, b in zip(other, row, strict=True))]
        first_of_equals = all(rows[k] != row or k > n for k in beaten)
        assert (n in kept) == (first_of_equals and all(rows[k] == row for k in beaten))


def four(size: str) -> dict[str, Any]:
    return dict.fromkeys(ROLES[:4], config_of(size))


def test_an_answer() -> None:
    plans = search(four("llama-7b"), devices=16)
    assert (plans.placements_considered, plans.granularity, plans.exact, len(plans)) == (15, 1, True, 15)
    best = plans.best
    assert best.placement.devices <= 16
    assert best.memory_bytes <= plans.hardware.usable_bytes
    assert best.iteration_s == pytest.approx(sum(best.stage_s.values()))
    assert best.throughput_tokens_per_s == pytest.approx(1024 * 2048 / best.iteration_s)
    assert 0 <= best.idle_share < 1
    assert "slower" in best.why and "slower than the best" in plans[1].why
    again = predict(best.placement, four("llama-7b"), hardware=plans.hardware, workload=plans.workload, t_g=best.t_g)
    assert again.stage_s == pytest.approx(best.stage_s)
    assert plans.frame()["iteration_s"].is_monotonic_increasing
    assert {"sets", "iteration_s", "throughput_tokens_per_s", "stage_s", "memory_bytes"} <= set(plans.to_dict()["best"])


@pytest.mark.thorough
def test_named_placements_and_calls_with_layouts_of_their_own() -> None:
    whole = search(four("llama-7b"), devices=16)
    named = {name: search(four("llama-7b"), devices=16, placement=name) for name in ("colocate", "split", "standalone")}
    assert [len(plans.best.sets) for plans in named.values()] == [1, 2, 4]
    assert [one.devices for one in named["split"].best.sets] == [8, 8]
    assert min(plans.best.iteration_s for plans in named.values()) >= whole.best.iteration_s
    # where weights move at what links can do, and tensor ranks are slow
    quick = replace(PRESETS["a100-80g"], load_bytes_s=300e9, inside_bytes_s=20e9)
    by_role, by_call = (search(four("llama-7b"), devices=8, by_call=each, hardware=quick) for each in (False, True))
    assert by_call.best.iteration_s <= by_role.best.iteration_s
    assert any(role.inference is not None for plan in by_call for one in plan.sets for role in one.roles)
    # where decoding is bound by memory, replicas of few rows are slow: groups of devices that training did not make
    slow = Hardware(**{**vars(by_role.hardware), "memory_bytes_s": 1e10})
    apart = [search(four("llama-7b"), devices=8, by_call=each, hardware=slow).best for each in (False, True)]
    actor = next(role for one in apart[1].sets for role in one.roles if role.role == "actor")
    assert apart[1].iteration_s < apart[0].iteration_s
    assert actor.own_t_g and (actor.layout.t % actor.own_t_g or actor.layout.p * actor.layout.t == 1)
    assert ("relayout" in {call.name for call in actor.calls}) == (actor.layout.p * actor.layout.t > 1)
    several = next(plan for plan in by_call if any(r.inference for one in plan.sets for r in one.roles))
    with expect_error(BadInput, rule="have several layouts, a placement has one"):
        assert several.placement
    coarse = search(four("llama-7b"), devices=16, granularity=4)
    assert not coarse.exact
    assert coarse.best.iteration_s >= whole.best.iteration_s


def test_plans_are_such_as_engines_take() -> None:
    sizes = {"actor": "llama-13b", "critic": "llama-7b", "reference": "llama-13b", "reward": "llama-7b"}
    zero = Workload(training=wb.Training(engine="deepspeed", zero_stage=1, rates={"embed_tokens": 0.1}))
    for plan in search(sizes, devices=16, workload=zero):
        for one in plan.sets:
            assert len({role.layout.t for role in one.roles if role.role in ("actor", "critic")}) <= 1
            assert all(role.layout.p == 1 for role in one.roles if role.role in ("actor", "critic"))
    # a critic of nine heads shares devices with an actor whose pairs of tensor ranks beat its replicas
    odd = LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=4, vocab_size=512,
                      num_attention_heads=9, num_key_value_heads=3)  # fmt: skip
    roomy = replace(PRESETS["a100-80g"], memory_bytes=4 * PRESETS["a100-80g"].memory_bytes)
    models = {"actor": "llama-7b", "critic": odd, "reference": "llama-7b", "reward": odd}
    plans = search(models, devices=2, hardware=roomy, workload=replace(zero, rows=1, updates=1))
    assert [one.devices for one in plans.best.sets] == [2]
    odd.vocab_size *= 1000  # a config that is changed is another model
    assert search(models, devices=2, hardware=roomy, workload=Workload()).best.memory_bytes > plans.best.memory_bytes
    # whole replicas generate in tensor groups: weights are there already
    groups = predict(Placement.colocate(16).restrict(ROLES[:4]), four("llama-7b"), hardware=PRESETS["a100-80g"],
                     workload=Workload(), t_g=2)  # fmt: skip
    assert groups.t_g == 2
    assert "transition" not in {call.name for role in groups.sets[0].roles for call in role.calls}
    assert search(four("llama-7b"), devices=129).best.devices == 129


def test_what_ran_fits() -> None:
    """Of the sizes and clusters that HybridFlow's authors ran, the hardest: halves of 48 devices, whose pipelines of
    70B have at most two stages of eight, as 3 and 6 do not divide 80 layers."""
    plans = search(four("llama-70b"), devices=96, placement="split", granularity=8, top=1)
    assert plans.best.memory_bytes <= plans.hardware.usable_bytes
    own = Workload(engine="workbench")
    with expect_error(BadInput, rule="no layout was found that fits") as refused:
        search(four("llama-70b"), devices=96, placement="split", granularity=8, workload=own)
    assert "with wb.mapping.Workload(engine='cluster')" in str(refused.value)  # what would fit is named


def fit(devices: int, **options: Any) -> bool:
    try:
        return bool(search(four("llama-13b"), devices=devices, **options))
    except BadInput:
        return False


@pytest.mark.parametrize("workload", [
    Workload(),
    Workload(engine="workbench", rows=64),
    Workload(training=wb.Training(micro_batch_tokens=100_000)),
    Workload(algorithm="ppo", response_tokens=30_000, training=wb.Training(engine="torch")),
], ids=["cluster", "workbench", "deepspeed", "long"])  # fmt: skip
def test_what_is_named_where_nothing_fits_would_fit(workload: Workload) -> None:
    with expect_error(BadInput, rule="no layout was found that fits", remedy="they fit") as refused:
        search(four("llama-13b"), devices=2, workload=workload)
    for told in refused.value.remedy.removeprefix("with ").removesuffix(" they fit").split(", or "):
        found = re.fullmatch(r"(?:wb\.mapping\.Workload(?P<changes>.*\)))?(?: on )?(?:(?P<count>\d+) devices)?", told)
        assert found is not None
        changed, count = eval(f"dict{found['changes'] or '()'}", {"wb": wb}), int(found["count"] or 2)
        assert fit(count, workload=replace(workload, **changed)), told
        assert count == 2 or not fit(count - 1, workload=replace(workload, **changed)), told


def test_a_long_row_is_named_where_it_takes_the_room() -> None:
    with expect_error(BadInput, rule="2,001,024 tokens takes at least", remedy="use shorter rows"):
        search(four("llama-7b"), devices=16, workload=Workload(response_tokens=2_000_000))


def test_a_placement_that_does_not_fit_says_so() -> None:
    best = search(four("llama-7b"), devices=16, granularity=8).best
    small, room = predict(Placement.split(4), four("llama-7b")), predict(best.placement, four("llama-7b"), t_g=best.t_g)
    assert (small.fits, room.fits) == (False, True)
    for text in (repr(small), small.why, small._repr_html_()):
        assert "not fit" in text
    assert "not fit" not in repr(room) + room.why + room._repr_html_()
    assert not replace(best, hardware=replace(best.hardware, memory_bytes=best.memory_bytes)).fits


def test_functions_are_not_placed_and_cost_nothing() -> None:
    models = {**four("llama-7b"), "reward": None}
    best = search(models, devices=8, granularity=4).best
    assert not any(call.name == "compute_reward" for one in best.sets for role in one.roles for call in role.calls)
    with expect_error(BadInput, rule="role"):
        predict(best.placement, {**models, "aktor": None})
    assert "reward" in best.placement.roles
    assert predict(best.placement, models, t_g=best.t_g).iteration_s == pytest.approx(best.iteration_s)


def test_activations_are_recomputed_only_where_they_do_not_fit() -> None:
    for tokens, recomputed in ((1024, False), (15 * 1024, True)):  # a row is never cut: long ones keep more
        work = Workload(response_tokens=tokens, rows=64)
        best = search(four("llama-13b"), devices=16, granularity=8, placement="colocate", top=1, workload=work).best
        actor = next(role for role in best.sets[0].roles if role.role == "actor")
        assert actor.recomputed == recomputed
        told = predict(best.placement, four("llama-13b"), hardware=best.hardware, workload=work, t_g=best.t_g)
        assert told.stage_s == pytest.approx(best.stage_s)


def test_models_that_are_not_called_take_memory() -> None:
    models = {**four("llama-7b"), "critic": config_of("llama-13b")}
    grpo = Workload(algorithm="grpo")
    with expect_error(BadInput, value="a model for critic"):
        search(models, devices=8, workload=grpo)
    without = search({**models, "critic": None}, devices=16, workload=grpo).best
    placed = search(models, devices=16, workload=grpo, uncalled=True)
    critic = next(role for one in placed.best.sets for role in one.roles if role.role == "critic")
    assert critic.lasting_bytes * critic.layout.p * critic.layout.t > 12e9 * 12
    assert placed.best.iteration_s >= without.iteration_s
    assert placed.best.memory_bytes <= placed.hardware.usable_bytes


def test_waiting_within_a_stage_may_be_counted() -> None:
    calls = (Call("generate", "actor", "generate"), Call("judge", "reference", "infer", ("generate",)),
             Call("score", "reward", "infer", ("judge",)), Call("update", "actor", "train", ("score",)))  # fmt: skip
    work = Workload(algorithm="mine", calls=calls)
    models = dict.fromkeys(("actor", "reference", "reward"), "llama-7b")
    free, waiting = (search(models, devices=24, workload=work, dependencies=each) for each in (False, True))
    assert free.exact
    assert waiting.best.iteration_s >= free.best.iteration_s * (1 - 1e-9)
    for plan in waiting:
        assert plan.iteration_s == pytest.approx(simulate(plan, barriers=True).iteration_s)
        apart = len({pool for pool, one in zip(plan.pools, plan.sets, strict=True) for role in one.names
                     if role != "actor"}) == 2  # fmt: skip
        alone = max(one.seconds("preparation") for one in plan.sets)
        assert plan.stage_s["preparation"] == pytest.approx(
            sum(one.seconds("preparation") for one in plan.sets if set(one.names) & {"reference", "reward"})
            if apart else alone
        )  # fmt: skip
    assert waiting.exact == (waiting.best.iteration_s <= free.best.iteration_s * (1 + 1e-9))


def test_how_sure_the_best_is() -> None:
    plans = search(four("llama-7b"), devices=16, granularity=4)
    assert (plans.chance, plans.advice) == (None, "")
    gap = math.log(plans[1].iteration_s / plans.best.iteration_s)
    normal = NormalDist()
    for error in (0.5 * gap, gap, 10 * gap):
        told = replace(plans, error=error)
        assert told.chance == pytest.approx(normal.cdf(gap / (error * math.sqrt(2))))
        assert told.advice in repr(told) and told.advice in told._repr_html_()
        assert ("Run one iteration" in told.advice) == (told.chance is not None and told.chance < 0.95)
    sure = replace(plans, error=gap / 10)
    assert sure.chance == pytest.approx(1.0) and "Run one iteration" not in sure.advice
    assert replace(plans, plans=plans.plans[:1], error=0.1).chance is None
    odd = replace(plans, error=0.1, findings=Constants(links=9.0).findings)
    assert "A finding: links=9 is outside 0.7 to 2.5: time of collectives" in odd.advice and not Constants().findings


def test_long_rows_weigh_more_than_their_mean() -> None:
    assert Workload(prompt_tokens=10, response_tokens=30).mean_context == 20
    assert Workload(prompt_tokens=10, response_tokens=(10, 50)).mean_context == (20**2 + 60**2) / 160


def test_a_simulation_keeps_to_the_plan() -> None:
    for plan in search(four("llama-13b"), devices=32, granularity=8):
        barred = simulate(plan, barriers=True)
        assert barred.iteration_s == pytest.approx(plan.iteration_s)
        assert simulate(plan).iteration_s <= plan.iteration_s * (1 + 1e-9)
        frame = barred.frame()
        for _, lane in frame.sort_values("start_s").groupby("device"):
            ends = lane["end_s"].to_numpy()
            assert (lane["start_s"].to_numpy()[1:] >= ends[:-1] - 1e-9).all()  # one call at a time
    assert "<svg" in barred._repr_html_()


NOT_ASKED: list[tuple[dict[str, Any], str]] = [
    ({"models": {"actor": "llama-7b"}}, "no model for reference, critic, reward"),
    ({"models": {**dict.fromkeys(ROLES, "llama-7b")}}, "a model for cost"),
    ({"hardware": "a100"}, "hardware 'a100'"),
    ({"workload": "dqn"}, "'dqn'"),
    ({"placement": "together"}, "placement='together'"),
    ({"devices": 0}, "devices=0"),
    ({"devices": 1}, "no layout was found that fits"),
    ({"granularity": 64}, "granularity=64"),
    ({"top": 0}, "top=0"),
    ({"t_g": "2"}, "t_g='2'"),
    ({"t_g": 3}, "t_g=3"),
    ({"models": ["actor"]}, "models=['actor']"),
    ({"models": {**dict.fromkeys(ROLES[:4], "llama-7b"), "actor": 5}}, "model 5"),
    ({"models": {**dict.fromkeys(ROLES[:4], "llama-7b"), "judge": "llama-7b"}}, "'judge'"),
    ({"workload": 5}, "workload=5"),
    ({"placement": "split", "devices": 16, "granularity": 16}, "2 sets of 16+ devices"),
]


def test_what_cannot_be_asked(subtests: pytest.Subtests) -> None:
    for changes, message in NOT_ASKED:
        with subtests.test(changes=changes, message=message):
            asked = {"models": dict.fromkeys(ROLES[:4], "llama-7b"), "devices": 8, **changes}
            with pytest.raises(BadInput) as error:
                search(asked.pop("models"), **asked)
            assert message in str(error.value)


def test_a_workload_is_checked_when_it_is_made() -> None:
    for wrong in (1.5, [], [0], [8, "9"]):
        with expect_error(BadInput, value="response_tokens"):
            Workload(response_tokens=wrong)  # type: ignore[arg-type]
    assert Workload(response_tokens=np.int64(5)).lengths == (5,)  # type: ignore[arg-type]
    for call in (wb.mapping.Call("a", "actor", "infer", ("b",)), wb.mapping.Call("a", "actor", "sample")):  # type: ignore[arg-type]
        with expect_error(BadInput, value="Call 'a'"):
            Workload(calls=(call,))


def test_more_waves_never_take_less_time() -> None:
    work = Workload(prompt_tokens=256, response_tokens=256, rows=4096)
    for flop_s in (1e12, 312e12):  # bound by products, and by memory
        hardware = machine(80 * 1024, 8)
        hardware = Hardware(**{**vars(hardware), "matrix_flop_s": {"bfloat16": flop_s}, "memory_bytes_s": 2e12})
        actor = role_models(dict.fromkeys(work.roles, "llama-7b"), work)["actor"]
        model, constants = CostModel(hardware, work), Constants()
        taken = [constants.seconds(model.generate(actor, 8, 1, waves / 8)) for waves in range(8, 400)]
        assert taken == sorted(taken)
