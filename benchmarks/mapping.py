"""The cost model beside published measurements, with whole model sizes and whole cluster sizes left out of its fit.

    python benchmarks/mapping.py [--fit]

1. HybridFlow's iterations, generation and transitions on A100s (arXiv:2409.19256, figures 9 to 15, read off the plots).
   The four constants are fitted to all figures but those of one model size, then of one cluster size, which are then
   predicted by a search.
2. Megatron-LM's training of models from 1.7 to 1008 billion weights on 32 to 3072 A100s (Narayanan et al. 2021,
   arXiv:2104.04473, table 1), in the layouts that it names: nothing of it is fitted.

--fit: also fit the constants to all of 1 and print them; the defaults of `Constants` are such a fit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pandas as pd
from transformers import LlamaConfig

from workbench.errors import BadInput
from workbench.mapping import Constants, Workload, search
from workbench.mapping.costs import CostModel, Sample, Terms, fit
from workbench.mapping.hardware import PRESETS
from workbench.mapping.plan import Plan
from workbench.mapping.workload import STAGES, role_models
from workbench.placement import Layout
from workbench.settings.training import Training

GPUS = (8, 16, 32, 64, 128)
THROUGHPUT = {  # tokens a second
    ("7b", "ppo"): dict(zip(GPUS, (5660, 10910, 18230, 25860, 37480), strict=True)),
    ("7b", "remax"): dict(zip(GPUS, (4380, 9030, 15530, 22960, 31330), strict=True)),
    ("7b", "safe-rlhf"): dict(zip(GPUS, (5430, 10400, 17340, 24570, 35580), strict=True)),
    ("13b", "ppo"): {16: 6270, 32: 10050, 64: 16650, 128: 25620},
}
PLACEMENTS = {  # of 13B, PPO
    16: (6350, 5330, 3740), 24: (7370, 6690, 5330), 32: (10090, 8280, 7370), 64: (16670, 14630, 13040),
    96: (19270, 20410, 17910), 128: (24150, 25620, 25960),
}  # fmt: skip
NAMED = ("colocate", "split", "standalone")
GENERATION = {8: (86.3, 0.0), 4: (44.2, 1.1), 2: (34.2, 2.6), 1: (31.6, 3.7)}  # 7B, 16 GPUs, 1-8-2: s by t_g
TRANSITION = {("7b", 2): {8: 2.7, 32: 2.7, 128: 3.8}, ("13b", 4): {16: 2.9, 64: 3.1}}  # s, by (model, t_g) and GPUs
MEGATRON = (  # billions of weights, heads, hidden, layers, t, p, GPUs, batch, TFLOP/s a GPU
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137), (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142), (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138), (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148), (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163), (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)  # fmt: skip
PRIOR, PULL = Constants(passes=1.0, decoding=1.5, links=1.0, calls=0.02), 0.1
A100 = PRESETS["a100-80g"]
CLOSE = 0.05  # figures that differ by less are no pair whose order is asked


@dataclass(frozen=True)
class Figure:
    """A published throughput. placement: "auto" where the system chose it."""

    size: str
    algorithm: str
    gpus: int
    placement: Any
    tokens_per_s: float


def figures() -> list[Figure]:
    found = [Figure(size, algorithm, gpus, "auto", tokens)
             for (size, algorithm), measured in THROUGHPUT.items() for gpus, tokens in measured.items()]  # fmt: skip
    for gpus, measured in PLACEMENTS.items():
        found += [Figure("13b", "ppo", gpus, n, tokens) for n, tokens in zip(NAMED, measured, strict=True)]
    return found


def workload(algorithm: str) -> Workload:
    """As the paper runs it: prompts and responses of 1024 tokens, 1024 rows, 8 updates; its engine gives the actor's
    log-probabilities with the responses."""
    return Workload(algorithm=algorithm, prompt_tokens=1024, response_tokens=1024, rows=1024, updates=8).without(
        ["compute_log_prob"]
    )


def plan(size: str, algorithm: str, gpus: int, constants: Constants, placement: Any = "auto") -> Plan | None:
    """The best plan for models of one size; None where none fits."""
    work = workload(algorithm)
    roles = [role for role in work.roles if role != "cost_critic"]
    models = dict.fromkeys(roles, f"llama-{size}")
    step = {8: 1, 16: 2}.get(gpus, 4)  # halves of machines are what is parted
    try:
        return search(models, devices=gpus, hardware=A100, workload=work, placement=placement, constants=constants,
                      top=1, granularity=step).best  # fmt: skip
    except BadInput as error:
        print(f"{placement} of {size} on {gpus}: {error.value}; {error.remedy}")
        return None


def details() -> Iterator[tuple[str, int, str, Terms, float]]:
    """(size, GPUs, what, its terms, published seconds) of generation and transitions."""
    work = workload("ppo")
    for size in ("7b", "13b"):
        models = role_models(dict.fromkeys(work.roles, f"llama-{size}"), work)
        model, actor = CostModel(A100, work), models["actor"]
        for t_g, (generated, moved) in GENERATION.items() if size == "7b" else ():
            yield size, 16, f"generation, t_g={t_g}", model.generate(actor, 16, t_g, waves=1.0), generated
            if moved:
                yield size, 16, f"transition, t_g={t_g}", model.transition(actor, Layout(1, 8, 2, 1, t_g)), moved
        for (one, t_g), measured in TRANSITION.items():
            for gpus, seconds in measured.items() if one == size else ():
                terms = model.transition(actor, Layout(1, 8, gpus // 8, 1, t_g))
                yield size, gpus, f"transition, {gpus} GPUs", terms, seconds


def terms(plan: Plan) -> Terms:
    """The terms of an iteration's time: those of the slowest set of each stage."""
    found = Terms()
    for stage in STAGES:
        one = plan.slowest(stage)
        calls = [call for role in one.roles for call in role.calls if call.stage == stage]
        found = sum((call.terms for call in calls), found + one.transfers[stage].terms)
    return found


def fitted(known: Sequence[Figure], plans: dict[Figure, Plan]) -> Constants:
    """Constants fitted to some figures, in the plans given, and to transitions of their model and cluster sizes. The
    published seconds of generation are not among them: on one and two GPUs they are less than keys and values take to
    be read at the data sheet's bandwidth, so that they cannot be of this workload, and iterations say otherwise."""
    sizes, clusters = {one.size for one in known}, {one.gpus for one in known}
    samples = [Sample(terms, seconds, what) for size, gpus, what, terms, seconds in details()
               if size in sizes and gpus in clusters and "transition" in what]  # fmt: skip
    samples += [Sample(terms(plans[one]), plans[one].workload.tokens / one.tokens_per_s, str(one)) for one in known]
    return fit(samples, PRIOR, pull=PULL)


def predicted(asked: Sequence[Figure], constants: Constants) -> dict[Figure, Plan]:
    """The best plans that fit, by figure."""
    found = {one: plan(one.size, one.algorithm, one.gpus, constants, one.placement) for one in asked}
    return {one: best for one, best in found.items() if best is not None}


def table(plans: dict[Figure, Plan], left_out: str) -> pd.DataFrame:
    rows = []
    for one, best in plans.items():
        rate = best.throughput_tokens_per_s
        rows.append({"left out": left_out, "model": one.size, "algorithm": one.algorithm, "GPUs": one.gpus,
                     "placement": one.placement, "published": one.tokens_per_s, "predicted": round(rate),
                     "error_%": round(100 * (rate / one.tokens_per_s - 1), 1)})  # fmt: skip
    return pd.DataFrame(rows)


def ordered(frame: pd.DataFrame) -> tuple[int, int]:
    """(pairs of placements of one question in the published order, all pairs that differ by more than 5 %)."""
    right = every = 0
    for _, group in frame[frame["placement"] != "auto"].groupby(["model", "GPUs"]):
        for (_, a), (_, b) in combinations(group.iterrows(), 2):
            if abs(a["published"] / b["published"] - 1) > CLOSE:
                every += 1
                right += (a["published"] < b["published"]) == (a["predicted"] < b["predicted"])
    return right, every


def cross_validated() -> pd.DataFrame:
    every = figures()
    plans = predicted(every, Constants())
    if "--fit" in sys.argv:
        constants = Constants()
        for _ in range(2):  # the plans are those that are best under the constants, so both are found in turns
            constants = fitted(list(plans), plans)
            plans = predicted(every, constants)
        print("fitted to all:", constants, *constants.findings, sep="\n  ")
    found = []
    for axis in ("size", "gpus"):
        for value in dict.fromkeys(getattr(one, axis) for one in plans):
            rest = [one for one in plans if getattr(one, axis) != value]
            constants = fitted(rest, plans)
            asked = [one for one in every if getattr(one, axis) == value]
            print(f"without {axis} {value}: {constants}", *constants.findings, sep="\n  ", flush=True)
            found.append(table(predicted(asked, constants), f"{axis} {value}"))
            print(found[-1].drop(columns="left out").to_string(index=False), flush=True)
    return pd.concat(found)


def megatron() -> pd.DataFrame:
    """Seconds of an update, by the formula of operations that the table's rates are told in (its equation 3)."""
    rows = []
    # eight network cards of 200 Gbit/s a machine
    hardware = replace(A100, machine_bytes_s=8 * A100.machine_bytes_s)
    for billions, heads, hidden, count, t, p, gpus, batch, rate in MEGATRON:
        work = Workload(prompt_tokens=1024, response_tokens=1024, rows=batch, updates=1, training=Training(
            engine="torch", micro_batch_tokens=2048, activation_checkpointing=True))  # fmt: skip
        # its MLP is two matrices of 4 h: a gated one of 8/3 h has as many elements
        config = LlamaConfig(hidden_size=hidden, intermediate_size=8 * hidden // 3 // 64 * 64, vocab_size=51200,
                             num_hidden_layers=count, num_attention_heads=heads, num_key_value_heads=heads)  # fmt: skip
        actor = role_models(dict.fromkeys(work.roles, config), work)["actor"]
        terms = CostModel(hardware, work).train(actor, Layout(p, t, gpus // (p * t)))
        flop = 96 * batch * 2048 * count * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * count * hidden))
        published, kernels = flop / (gpus * rate * 1e12), terms.passes + terms.links
        rows.append({"billions": billions, "GPUs": gpus, "published_s": round(published, 2),
                     "kernels_s": round(kernels, 2), "error_%": round(100 * (kernels / published - 1), 1)})  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    trained = megatron()
    print("training of Megatron-LM's models, constants of 1: nothing is fitted to it")
    print(trained.to_string(index=False))
    print(f"mean absolute error {trained['error_%'].abs().mean():.1f} %", flush=True)
    print("details, by the default constants", Constants())
    more = [(size, gpus, what, seconds, round(Constants().seconds(terms), 1))
            for size, gpus, what, terms, seconds in details()]  # fmt: skip
    columns = ["model", "GPUs", "what", "published_s", "predicted_s"]
    print(pd.DataFrame(more, columns=columns).to_string(index=False), flush=True)
    found = cross_validated()
    print("mean absolute error of the figures left out, in %:")
    print(found.groupby("left out", sort=False)["error_%"].agg(lambda one: one.abs().mean()).round(1).to_string())
    for axis in ("size", "gpus"):
        part = found[found["left out"].str.startswith(axis)]
        right, every = ordered(part)
        mean = part["error_%"].abs().mean()
        print(f"each {axis} left out: mean absolute error {mean:.1f} % over {len(part)} figures; "
              f"order right in {right} of {every} pairs of placements that differ by more than 5 %")  # fmt: skip


if __name__ == "__main__":
    main()
