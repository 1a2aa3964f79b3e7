"""Predicted and measured iterations of a live workbench under several placements and layouts on this machine.

    python benchmarks/mapping_measured.py [--model smollm2-135m] [--rows 8] [--tokens 24]

The workbench is calibrated under the first three placements; the others are predicted before they are run.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace

import pandas as pd

import workbench as wb
from workbench.errors import BadInput
from workbench.session.predicting import Calibration

ROLES = ("actor", "critic", "reference", "reward")
TRAINED = ("actor", "critic", "reference")
PLACEMENTS = {
    "one device": wb.Placement.colocate(1),
    "two replicas": wb.Placement.colocate(2),
    "split": wb.Placement.split(2),
    "two tensor ranks": wb.Placement.colocate(2, dict.fromkeys(TRAINED, (1, 2, 1))),
    "three tensor ranks": wb.Placement.colocate(3, dict.fromkeys(TRAINED, (1, 3, 1))),
    "two stages": wb.Placement.colocate(2, dict.fromkeys(TRAINED, (2, 1, 1))),
    "critic apart": wb.Placement.of({"policy": (1, ["actor", "reference", "reward"]), "critic": (1, ["critic"])}),
    "actor apart": wb.Placement.of({"actor": (1, ["actor", "reward"]), "rest": (1, ["critic", "reference"])}),
    "policy on two": wb.Placement.of({"policy": (2, ["actor", "reference"]), "scorers": (1, ["critic", "reward"])}),
    "three pools": wb.Placement.of(
        {"actor": (1, ["actor"]), "critic": (1, ["critic"]), "scorers": (1, ["reference", "reward"])}
    ),
}
CALIBRATED = 3  # under the first of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="tiny-llama-tied")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()

    def digits(prompt: str, response: str, **row: object) -> float:
        return sum(character.isdigit() for character in response) / max(1, len(response))

    model = arguments.model
    lab = wb.open(
        "mapping-benchmark",
        models={"actor": model, "critic": model, "reference": model, "reward": digits},
        placement=next(iter(PLACEMENTS.values())).restrict(ROLES),
        devices=3,
        prompts="arithmetic",
        training=wb.Training(engine="torch", learning_rate=1e-6, minibatches=2),
        generation=wb.Generation(engine="transformers", max_model_tokens=256),
        if_exists="replace",
        runs=tempfile.mkdtemp(),
    )
    sampling = wb.Sampling(max_new_tokens=arguments.tokens, ignore_eos=True)
    rows, calls, known = [], [], Calibration()

    with lab:
        ppo = wb.PPO(lab, prompts=arguments.rows, sampling=sampling)
        n = -1
        for name, placement in PLACEMENTS.items():
            wanted = placement.restrict(ROLES)
            try:
                lab.diff(wanted)
            except BadInput as error:
                print(f"not {name}: {error.value}")
                continue
            n += 1
            if n >= CALIBRATED:
                lab._predictor.calibration = known
            before = lab.predict(wanted).iteration_s if n >= CALIBRATED else float("nan")
            if wanted != lab.placement:
                lab.move(wanted)
            if n >= CALIBRATED:  # what is asked is what was known before
                lab._predictor.calibration = replace(known, samples=dict(known.samples), measured=dict(known.measured))
            ppo.run(1)
            taken = []
            for _ in range(arguments.repeats):
                ppo.run(1)
                lab.calibrate()
                taken.append(lab.predict().measured["iteration"][1])
            assert lab.calibration is not None
            if n < CALIBRATED:
                known = lab.calibration
            else:
                lab.calibration.constants = known.constants
                frame = lab.predict().frame()
                calls.append(frame[frame["call"] != "iteration"].assign(placement=name))
            rows.append({"placement": name, "predicted_s": before, "measured_s": min(taken),
                         "error_%": round(100 * (before / min(taken) - 1), 1)})  # fmt: skip
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    print(table.round(3).to_string(index=False))
    each = pd.concat(calls)
    print("by call, mean absolute error in % (of what was not calibrated):")
    print((100 * each["error"].abs()).groupby(each["call"]).mean().round(1).to_string())
    unseen = table.dropna()
    print(f"iterations: mean absolute error {unseen['error_%'].abs().mean():.1f} % over {len(unseen)} placements; "
          f"rank correlation {unseen['predicted_s'].rank().corr(unseen['measured_s'].rank()):.2f}")  # fmt: skip
    best = {name: str(unseen.sort_values(name)["placement"].iloc[0]) for name in ("predicted_s", "measured_s")}
    print(f"best: predicted {best['predicted_s']!r}, measured {best['measured_s']!r}")


if __name__ == "__main__":
    main()
