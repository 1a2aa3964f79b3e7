"""What staleness costs and saves: reward against samples with and without corrections, and speed on two pools.

    python benchmarks/staleness.py [--staleness 0 1 4 16] [--iterations 24] [--seeds 0] [--model tiny-llama-tied]
    python benchmarks/staleness.py --speed [--model smollm2-135m] [--iterations 6]

The reward is the share of vowels in a response: each token bears on it, so that a model learns it within some tens of
iterations. Every arm sees the same prompts, with as many samples an iteration. none: the loss clips around the newest
weights, and takes old rollouts for their own. around behaviour: PPO's ratio and clip are against the weights that drew
the rollouts. truncated: decoupled PPO, with weights up to 2. second moment: M2PO, whose mask takes the place of a clip.

--speed: rollout workers on a pool of their own, at staleness 0, 1 and 2, and actor and engine on one device beside it;
on processes, with the seconds of generation and training and the longer of the two, which is the bound; with what
rollout workers spend on taking weights, and what the cost model predicts from the synchronous iterations. One
token of --tokens / 5 ends a response, so that lengths have a long tail; weights hardly change, so that it stays.
Last, responses pause after --pause.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from workbench.models import load_tokenizer

REWARD = "compute_reward/rewards/mean"
SIZE = "update_actor/correction/effective_sample_size"


def vowels(prompt: str, response: str, **row: Any) -> float:
    return sum(character in "aeiou" for character in response) / max(1, len(response))


def around_behaviour(batch: wb.Batch) -> wb.Batch:
    """The log-probabilities of those who drew the rollouts, in the place of the newest weights'."""
    return batch.drop("old_log_prob").join(batch.select("rollout_log_prob").rename(rollout_log_prob="old_log_prob"))


def clipped_around_behaviour(lab: wb.Workbench, **options: Any) -> wb.GRPO:
    grpo = wb.GRPO(lab, **options)
    grpo.insert(around_behaviour, after="compute_log_prob")
    return grpo


ARMS: dict[str, Callable[..., wb.GRPO]] = {
    "none": wb.GRPO,
    "around behaviour": clipped_around_behaviour,
    "truncated": lambda lab, **options: wb.GRPO(lab, correction=wb.Correction(), **options),
    "second moment": lambda lab, **options: wb.GRPO(
        lab, correction=wb.Correction(bound="second_moment"), clip=1.0, clip_high=1e9, **options
    ),
}


def open_lab(name: str, arguments: argparse.Namespace, seed: int, **options: Any) -> wb.Workbench:
    return wb.open(
        name,
        models={"actor": wb.Model(arguments.model, seed=seed), "reward": vowels},
        prompts="arithmetic",
        training=wb.Training(engine="torch", learning_rate=arguments.rate, minibatches=2, micro_batch_tokens=2048),
        generation=wb.Generation(engine="transformers", max_model_tokens=192),
        seed=seed,
        runs=tempfile.mkdtemp(),
        if_exists="replace",
        **options,
    )


def learn(arguments: argparse.Namespace) -> None:
    """Prints a line an arm: the mean reward of all iterations and of the last quarter, the responses until an iteration
    has a mean of a half, and the effective sample size of all iterations."""
    sampling = wb.Sampling(max_new_tokens=16)
    options: dict[str, Any] = {"prompts": 4, "samples": arguments.samples, "sampling": sampling}
    last = max(1, arguments.iterations // 4)
    print(f"{'staleness':>9}  {'correction':16} {'seed':>4} {'mean':>6} {'last':>6} {'to 0.5':>6} {'size':>5}")
    for seed in arguments.seeds:
        with open_lab("staleness", arguments, seed, backend="inline") as lab:
            start = lab.save(Path(tempfile.mkdtemp()) / "start", models=False).folder
            for staleness in arguments.staleness:
                for name in arguments.arms:
                    lab.recover(start)
                    frame = ARMS[name](lab, **options).run(arguments.iterations, staleness=staleness)
                    reward = frame[REWARD].to_numpy()
                    size = frame[SIZE].mean() if SIZE in frame else np.nan
                    first = 1 + int(np.argmax(reward >= 0.5))
                    half = 4 * arguments.samples * first if (reward >= 0.5).any() else "never"
                    print(
                        f"{staleness:>9}  {name:16} {seed:>4} {reward.mean():6.3f} {reward[-last:].mean():6.3f} "
                        f"{half:>6} {size:5.2f}",
                        flush=True,
                    )


def seconds_of(lab: wb.Workbench, stages: tuple[str, ...], iterations: int) -> float:
    """What these stages took on their ranks, an iteration."""
    spans = lab.spans()
    spans = spans[(spans["kind"] == "compute") & spans["stage"].isin(stages)]
    return float(spans["duration_s"].sum()) / iterations


def speed(arguments: argparse.Namespace) -> None:
    """Prints the seconds of an iteration on split pools at staleness 0, 1 and 2, and on one device."""
    split = wb.Placement.of({"train": (1, ["actor", "reward"]), "rollout": (1, ["rollout"])})
    one = wb.Placement.of({"shared": (1, ["actor", "reward"])})
    vocabulary = len(load_tokenizer(arguments.model))
    stops = tuple(range(0, vocabulary, max(1, arguments.tokens // 5)))  # lengths with a long tail
    sampling = wb.Sampling(max_new_tokens=arguments.tokens, stop_token_ids=stops)
    options: dict[str, Any] = {"prompts": 4, "samples": 4, "sampling": sampling}
    training = ("compute_log_prob", "compute_reward", "compute_advantages", "update_actor", "publish_weights")
    arms = [("one device", one, 0, None), *(("split", split, k, None) for k in (0, 1, 2))]
    predicted = float("nan")
    for name, placement, staleness, pause_after in (*arms, ("split", split, 2, arguments.pause)):
        with open_lab("staleness-speed", arguments, 0, placement=placement, devices=len(placement.pools)) as lab:
            grpo = wb.GRPO(lab, correction=wb.Correction(), **options)
            first = 2 + staleness  # these warm up, and fill the buffer
            frame = grpo.run(arguments.iterations + first, staleness=staleness, pause_after=pause_after)
            taken = frame.attrs["seconds"][first:]
            made = arguments.iterations + first
            generating = seconds_of(lab, ("generate_sequences", "receive_weights"), made + staleness)
            taking = seconds_of(lab, ("receive_weights",), made + staleness)
            busy = seconds_of(lab, training, made)
            if placement is split and not staleness:
                lab.calibrate()
                predicted = lab.predict(split, staleness=1).iteration_s
        pauses = "" if pause_after is None else f", pauses after {pause_after}"
        print(
            f"{name:10} staleness={staleness}{pauses}: {statistics.median(taken):6.2f} s an iteration "
            f"({min(taken):.2f} to {max(taken):.2f}); generation {generating:.2f} s, training {busy:.2f} s, "
            f"the longer {max(generating, busy):.2f} s; taking weights {taking:.2f} s"
            + (f"; predicted {predicted:.2f} s an iteration" if staleness else ""),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="tiny-llama-tied")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--samples", type=int, default=8, help="responses for each of 4 prompts")
    parser.add_argument("--tokens", type=int, default=160, help="--speed: most tokens of a response")
    parser.add_argument("--pause", type=int, default=24, help="--speed: tokens of a part")
    arguments = parser.parse_args()
    if arguments.speed:
        arguments.rate = 1e-9
    (speed if arguments.speed else learn)(arguments)


if __name__ == "__main__":
    main()
