"""Whether algorithms learn: a real model, a rule for the reward, several seeds; curves are saved.

    python benchmarks/learning.py ALGORITHM [--seeds 0 1 2] [--iterations 16] [--rows 64] [--save FOLDER]
    python benchmarks/learning.py distill --teacher FOLDER

grpo, ppo, ma_ppo and GRPO's variants (GRPO below): the reward is 1 for a right answer to an arithmetic problem. Held
out: problems that training never sees, before and after. hpt: the same, with the right answers as demonstrations.
own_loss: GRPO with its loss and its estimator written by hand, as in a cell. distill: the reverse KL to the teacher in
a folder, such as one that another run has saved; no reward has a part in it. safe_rlhf: the cost is the share of
letters in a response, and the reward grows with it, ever more slowly; the mean cost starts above its limit, and has to
come down to it and stay while the multiplier moves.

Writes curves.csv (a row an iteration) and result.json into runs/learning/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from benchmarks.curves import Curve, each_seed, new_folder  # noqa: E402
from workbench.data.sources import read_rows  # noqa: E402
from workbench.launch.doctor import bf16_is_fast  # noqa: E402
from workbench.support.machine import read_gpus  # noqa: E402

MAX_NEW_TOKENS = 16
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"estimator": "dr_grpo", "aggregation": "fixed-length"},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo", "aggregation": "token-mean"},
    "sapo": {"loss": "sapo"},
    "batch_std": {"estimator": "grpo_batch_std"},
    "kl_cov": {"loss": wb.KLCov(), "aggregation": "token-mean", "epochs": 2},
    "clip_cov": {"loss": wb.ClipCov(), "aggregation": "token-mean"},
    "vcpo": {
        "estimator": "off_policy_baseline", "clip": 1.0, "clip_high": 1e9,
        "correction": wb.Correction(level="sequence", high=8.0, reference_size=1.0),
    },
}  # fmt: skip
COST_LIMIT = 0.45
# a critic that starts at 0 has to learn faster than the policy
RATES = {"actor": 1e-5, "critic": 3e-5, "cost_critic": 3e-5}
# A multiplier integrates what is left of the cost's distance from its limit: for the two to settle, the policy has to
# follow within few iterations. Adam goes on for some ten steps in a direction that is no longer right.
MINIBATCHES = {"safe_rlhf": 8}
TRAINING = ROOT / "datasets" / "arithmetic" / "train.jsonl"
HELD_OUT = "arithmetic/test"
SHOWN = {
    "reward": "compute_reward/rewards/mean",
    "distill_loss": "update_distill/loss",
    "response_tokens": "generate_sequences/response_tokens/mean",
    "rollout_gap": "/rollout_gap/mean",
    "grad_norm": "/grad_norm",
}


def right(prompt: str, response: str, answer: str, **row: Any) -> float:
    """1 for the right number."""
    return wb.verifiers.arithmetic(prompt, response, answer)


def as_demonstrated(prompt: str, response: str, demonstration: str, **row: Any) -> float:
    """1 for the number of the demonstration."""
    return wb.verifiers.arithmetic(prompt, response, demonstration)


def letters(prompt: str, response: str, **row: Any) -> float:
    """The share of letters among the characters of a response: each token bears on it, from the first step on."""
    return sum(character.isalpha() for character in response) / max(1, len(response))


def wordiness(prompt: str, response: str, **row: Any) -> float:
    """Grows with the same share x, with diminishing returns: 1 - (1 - x)^2.

    Its slope is 2 (1 - x): each multiplier has its own best share, and where all responses have one of 0.45 the best
    multiplier is 1.1. Were it a line, as the cost is, no share between none and all would ever be the best.
    """
    return 1 - (1 - letters(prompt, response)) ** 2


def own_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """GRPO's, as a user writes it."""
    ratio = (log_prob - old_log_prob).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def own_estimator(rewards: Tensor, group: Tensor) -> Tensor:
    """The distance from the group's mean, in its deviations."""
    advantages = torch.zeros_like(rewards)
    for number in group.unique():
        rows = group == number
        advantages[rows] = (rewards[rows] - rewards[rows].mean()) / (rewards[rows].std() + 1e-6)
    return advantages


def open_lab(arguments: argparse.Namespace, seed: int, folder: Path) -> wb.Workbench:
    """The roles that the algorithm needs, in this process."""

    def trained(role: str) -> wb.Model:
        minibatches, rate = MINIBATCHES.get(arguments.algorithm, 2), RATES[role] * arguments.rate
        training = wb.Training(engine="torch", learning_rate=rate, minibatches=minibatches, micro_batch_tokens=4096)
        return wb.Model(arguments.model, training=training, seed=seed)

    models: dict[str, Any] = {"actor": trained("actor"), "reward": right}
    if arguments.algorithm == "distill":
        models |= {"teacher": arguments.teacher}
    if arguments.algorithm in ("ppo", "ma_ppo", "safe_rlhf"):
        models |= {"critic": trained("critic"), "reference": arguments.model}
    if arguments.algorithm == "safe_rlhf":
        models |= {"reward": wordiness, "cost": letters, "cost_critic": trained("cost_critic")}
    return wb.open(
        f"learning-{arguments.algorithm}",
        models=models,
        prompts="arithmetic",
        generation=wb.Generation(engine=arguments.generation, max_model_tokens=128, max_rows=max(128, arguments.rows)),
        dtype="bfloat16" if bf16_is_fast(read_gpus()) else "float32",
        backend="inline",
        seed=seed,
        if_exists="replace",
        runs=folder,
    )


def make(name: str, lab: wb.Workbench, rows: int) -> Any:
    sampling = wb.Sampling(max_new_tokens=MAX_NEW_TOKENS)
    options = {**GRPO, "own_loss": {"loss": own_loss, "estimator": own_estimator}}
    if name in options:
        return wb.GRPO(lab, prompts=rows // 8, samples=8, sampling=sampling, **options[name])
    if name == "hpt":
        solved = [{"prompt": row["prompt"], "response": row["answer"]} for row in read_rows(TRAINING)]
        demonstrations = lab.demonstrations(solved)
        return wb.HPT(lab, demonstrations, prompts=rows // 8, samples=8, sampling=sampling, reward=as_demonstrated)
    if name == "distill":
        return wb.Distill(lab, prompts=rows, sampling=sampling)
    if name in ("ppo", "ma_ppo"):
        return wb.PPO(
            lab, prompts=rows, sampling=sampling, kl_coefficient=0.01, macro_tokens=3 if name == "ma_ppo" else 1
        )
    return wb.SafeRLHF(lab, prompts=rows, sampling=sampling, kl_coefficient=0.01, limit=COST_LIMIT, multiplier_rate=0.2)


def learn(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[Curve, dict[str, Any]]:
    """One seed: the curve, and what came of it."""
    with open_lab(arguments, seed, folder) as lab:
        algorithm = make(arguments.algorithm, lab, arguments.rows)
        sampling = wb.Sampling(max_new_tokens=MAX_NEW_TOKENS)

        def held_out() -> dict[str, float]:
            frame = lab.evaluate(HELD_OUT, samples=1, sampling=sampling, n=arguments.held_out)
            return {str(name): float(value) for name, value in frame.iloc[0].items() if isinstance(value, int | float)}

        before, curve = held_out(), Curve(seed, arguments.iterations, (*SHOWN, "cost", "multiplier"))
        for iteration in range(1, arguments.iterations + 1):
            metrics = algorithm.iterate()
            found = ((shown, [v for k, v in metrics.items() if k.endswith(ending)]) for shown, ending in SHOWN.items())
            told = {shown: values[0] for shown, values in found if values}
            if arguments.algorithm == "safe_rlhf":
                told |= {"cost": metrics["compute_cost/costs/mean"], "multiplier": algorithm.multiplier}
            curve.tell(iteration, "training", told)
        if arguments.save is not None:
            lab.actor.save_model(arguments.save)
        return curve, {"seed": seed, "before": before, "after": held_out()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=(*GRPO, "ppo", "ma_ppo", "safe_rlhf", "own_loss", "hpt", "distill"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="responses per iteration")
    parser.add_argument("--rate", type=float, default=1.0, help="factor for all learning rates")
    parser.add_argument("--held-out", type=int, default=200, help="number of evaluation problems")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--generation", default="vllm", choices=("vllm", "transformers"))
    parser.add_argument("--teacher", help="a model folder, for distill")
    parser.add_argument("--save", type=Path, help="a folder for the actor of the last seed")
    arguments = parser.parse_args()
    if (arguments.algorithm == "distill") != (arguments.teacher is not None):
        parser.error("--teacher FOLDER is for distill, which needs it")
    folder = new_folder(Path("runs"), f"learning/{arguments.algorithm}")
    for curve, result in each_seed(arguments, folder, learn):
        seed, frame = result["seed"], pd.DataFrame(curve.rows)
        fifth, third = len(frame) // 5 + 1, len(frame) // 3 + 1
        print(f"seed {seed}, {frame['s'].iloc[-1]:.0f} s:")
        print(f"  held-out reward {result['before']['reward_mean']:.3f} -> {result['after']['reward_mean']:.3f}")
        if arguments.algorithm == "distill":
            first, last = (part["distill_loss"].mean() for part in (frame.head(fifth), frame.tail(fifth)))
            print(f"  reverse KL to the teacher {first:.3f} -> {last:.3f} (fifths)")
        else:
            rewards = frame["reward"]
            print(f"  training reward {rewards.head(fifth).mean():.3f} -> {rewards.tail(fifth).mean():.3f} (fifths)")
        if "cost" in frame:
            costs, multipliers = frame["cost"], frame["multiplier"]
            print(f"  mean cost {costs.iloc[0]:.3f} at first, {costs.tail(third).mean():.3f} over the last third")
            print(f"  limit {COST_LIMIT}; multiplier from {multipliers.min():.3f} to {multipliers.max():.3f}")
    print(f"curves: {folder / 'curves.csv'}")


if __name__ == "__main__":
    main()
