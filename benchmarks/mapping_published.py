"""The cost model beside what HybridFlow's authors measured (arXiv:2409.19256, figures 9 to 15, read off the plots).

    python benchmarks/mapping_published.py [--fit]

Constants are fitted on 7B alone: iterations of PPO, ReMax and Safe-RLHF, generation by its tensor size, transitions.
Everything about 13B is predicted. --fit: fit them anew and print them; else the defaults of `Constants`, which are such
a fit, are held against the measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd

from workbench.mapping import Constants, Workload, search
from workbench.mapping.calibration import Sample, fit
from workbench.mapping.costs import CostModel
from workbench.mapping.hardware import PRESETS
from workbench.mapping.plan import Plan
from workbench.mapping.search import BadInput
from workbench.mapping.shapes import Shape, role_models
from workbench.placement import Layout

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
A100 = PRESETS["a100-80g"]


def workload(algorithm: str) -> Workload:
    """As the paper runs it: prompts and responses of 1024 tokens, 1024 rows, 8 updates; its engine gives the actor's
    log-probabilities with the responses."""
    return Workload(algorithm=algorithm, prompt_tokens=1024, response_tokens=1024, rows=1024, updates=8).without(
        ["compute_log_prob"]
    )


def plan(size: str, algorithm: str, gpus: int, constants: Constants, placement: Any = "auto") -> Plan:
    """The best plan for models of one size."""
    work = workload(algorithm)
    roles = [role for role in work.roles if role != "cost_critic"]
    models = dict.fromkeys(roles, f"llama-{size}")
    # halves of machines are what is parted: finer, and the tables take many times as long
    step = {8: 1, 16: 2}.get(gpus, 4)
    return search(models, devices=gpus, hardware=A100, workload=work, placement=placement, constants=constants, top=1,
                  granularity=step).best  # fmt: skip


def parts(size: str) -> tuple[CostModel, Shape]:
    """The cost model, and an actor."""
    work = workload("ppo")
    models = role_models(dict.fromkeys(work.roles, f"llama-{size}"), work)
    return CostModel(A100, work), Shape(models["actor"])


def details(size: str) -> Iterator[tuple[str, Any, float]]:
    """(what, its terms, published seconds) of generation and transitions."""
    model, actor = parts(size)
    if size == "7b":
        for t_g, (generated, moved) in GENERATION.items():
            yield f"generation, t_g={t_g}", model.generate(actor, 16, t_g, waves=1), generated
            if moved:
                layout = Layout(1, 8, 2, 1, t_g)
                yield f"transition, t_g={t_g}", model.transition(actor, layout), moved
    for (one, t_g), measured in TRANSITION.items():
        for gpus, seconds in measured.items() if one == size else ():
            yield f"transition, {gpus} GPUs", model.transition(actor, Layout(1, 8, gpus // 8, 1, t_g)), seconds


def fitted(constants: Constants) -> Constants:
    """Fitted on 7B; the plans are those that are best under the constants, so both are found in turns."""
    steady = [Sample(terms, seconds, name) for name, terms, seconds in details("7b")]
    for _ in range(6):
        samples = list(steady)
        for (size, algorithm), measured in THROUGHPUT.items():
            for gpus, tokens in measured.items() if size == "7b" else ():
                best = plan(size, algorithm, gpus, constants)
                samples += 2 * [Sample(best.terms(), best.workload.tokens / tokens, f"{algorithm}, {gpus}")]
        constants = fit(samples, Constants(), pull=0.02)
        print(constants, flush=True)
    return constants


def error(predicted: float, published: float) -> float:
    """In per cent of what was published."""
    return 100 * (predicted / published - 1)


def main() -> None:
    constants = fitted(Constants()) if "--fit" in sys.argv else Constants()
    print(constants)
    rows = []
    for (size, algorithm), measured in THROUGHPUT.items():
        for gpus, tokens in measured.items():
            found = plan(size, algorithm, gpus, constants)
            rows.append({"model": size, "algorithm": algorithm, "GPUs": gpus, "published": tokens,
                         "predicted": round(found.throughput_tokens_per_s), "error_%":
                         round(error(found.throughput_tokens_per_s, tokens), 1), "plan": repr(found)})  # fmt: skip
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    placed = []
    for gpus, figures in PLACEMENTS.items():
        for name, tokens in zip(NAMED, figures, strict=True):
            try:
                found = plan("13b", "ppo", gpus, constants, name)
                predicted = found.throughput_tokens_per_s
            except BadInput:
                predicted = float("nan")
            placed.append({"GPUs": gpus, "placement": name, "published": tokens, "predicted": round(predicted, 0),
                           "error_%": round(error(predicted, tokens), 1)})  # fmt: skip
    placements = pd.DataFrame(placed)
    print(placements.to_string(index=False))
    more = [{"what": f"{size} {what}", "published_s": seconds, "predicted_s": round(constants.seconds(terms), 1)}
            for size in ("7b", "13b") for what, terms, seconds in details(size)]  # fmt: skip
    print(pd.DataFrame(more).to_string(index=False))
    unseen = pd.concat([table[table["model"] != "7b"]["error_%"], placements["error_%"]]).dropna()
    seen = table[table["model"] == "7b"]["error_%"]
    ranks = {
        gpus: round(float(group["published"].rank().corr(group["predicted"].rank())), 2)
        for gpus, group in placements.dropna().groupby("GPUs")
    }
    print(f"mean absolute error: {seen.abs().mean():.1f} % on the 7B that constants were fitted to, "
          f"{unseen.abs().mean():.1f} % on {len(unseen)} figures of 13B that were not")  # fmt: skip
    print("rank correlation of the placements, by GPUs:", ranks)
    for source in ("published", "predicted"):
        best = placements.dropna().loc[placements.dropna().groupby("GPUs")[source].idxmax()]
        print(f"best placement, {source}:", dict(zip(best["GPUs"], best["placement"], strict=True)))


if __name__ == "__main__":
    main()
