"""Times the training half of a PPO iteration on two pools, line by line and inside `overlap()`, in one run.

    python benchmarks/overlap.py [--model smollm2-135m] [--rows 16] [--repeats 3]

Actor and reference on one pool, critic on the other, each one process with the same number of threads both ways; the
same rollouts, and the roles go back to the same weights before every repeat. Prints seconds of both ways, their ratio,
and how much of the shorter update lay beside the longer one.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time

import workbench as wb


def lines(lab: wb.Workbench, batch: wb.Batch) -> None:
    """What comes after the rollouts: two passes and an update on the one pool, one and an update on the other."""
    batch = lab.actor.compute_log_prob(batch)
    batch = lab.reference.compute_ref_log_prob(batch)
    batch = lab.critic.compute_values(batch)
    batch = lab.reward.compute_reward(batch)
    batch = lab.compute_advantages(batch, kl_coefficient=0.05)
    lab.critic.update_critic(batch)
    lab.actor.update_actor(batch)


def beside(lab: wb.Workbench) -> float:
    """The share of the shorter of the newest two updates that lay beside the other."""
    spans = lab.spans()
    spans = spans[spans["kind"] == "compute"]
    ends = [spans[spans["stage"] == stage].iloc[-1] for stage in ("update_actor", "update_critic")]
    common = min(float(s["end_s"]) for s in ends) - max(float(s["start_s"]) for s in ends)
    return max(0.0, common) / min(float(s["duration_s"]) for s in ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    def digits(prompt: str, response: str, **row: object) -> float:
        return sum(character.isdigit() for character in response) / max(1, len(response))

    model = arguments.model
    lab = wb.open(
        "overlap-benchmark",
        models={"actor": model, "critic": model, "reference": model, "reward": digits},
        placement=wb.Placement.of({"policy": (1, ["actor", "reference"]), "scorers": (1, ["critic", "reward"])}),
        devices=2,
        prompts="arithmetic",
        training=wb.Training(engine="torch", learning_rate=1e-6),
        generation=wb.Generation(engine="transformers", max_model_tokens=256),
        if_exists="replace",
        runs=tempfile.mkdtemp(),
    )
    with lab:
        batch = lab.actor.generate_sequences(lab.prompts.next(arguments.rows), max_new_tokens=32)
        seconds: dict[str, list[float]] = {"line by line": [], "overlap": []}
        shares = []
        with lab.kept("actor", "critic") as go_back:
            for repeat in range(arguments.repeats + 1):  # the first warms up
                for way, taken in seconds.items():
                    go_back()
                    began = time.perf_counter()
                    with lab.overlap() if way == "overlap" else contextlib.nullcontext():
                        lines(lab, batch)
                    if repeat:
                        taken.append(time.perf_counter() - began)
                shares.append(beside(lab))
    for way, taken in seconds.items():
        print(f"{way:14} {statistics.median(taken):7.2f} s (of {len(taken)}: {min(taken):.2f} to {max(taken):.2f})")
    ratio = statistics.median(seconds["line by line"]) / statistics.median(seconds["overlap"])
    print(f"line by line / overlap: {ratio:.2f}")
    print(f"beside each other: {statistics.median(shares[1:]):.0%} of the shorter update")


if __name__ == "__main__":
    main()
