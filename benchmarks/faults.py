"""The fault matrix: a worker is killed, the kernel is killed, or a cell is interrupted, stage by stage.

    python benchmarks/faults.py                       # all of it; --stages and --faults choose

Each trial begins after iteration 1 of PPO on two ranks under Ray, with a checkpoint there. In iteration 2 the fault
comes while the stage is at work. Then what a user would do: the same cell again, `lab.recover()`, or `wb.attach` in a
new kernel; and the rest of iteration 2. Printed: how it ended, seconds from the fault until the workbench could be used
again, and the largest difference of iteration 2's metrics to a run without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.kernel.kernels import Kernel

PREPARE = """
import json, time
from pathlib import Path
import workbench as wb
from tests.cases import tiny_lab
def slow(prompt, response, **row):
    time.sleep(0.2)
    return float(len(response))
def algorithm(lab):
    return wb.PPO(lab, prompts=8, reward=slow, epochs=EPOCHS, sampling=wb.Sampling(max_new_tokens=100, ignore_eos=True))
EPOCHS, FOLDER = 10, Path("runs").resolve()
"""
OPEN = """
lab = tiny_lab("faults", FOLDER, placement=wb.Placement.colocate(devices=2), if_exists="replace")
ppo = algorithm(lab)
ppo.iterate()
one = lab.save(FOLDER / "one").folder
clean = ppo.iterate()
"""
STAGES = {
    "generate": "generate_sequences", "score": "compute_reward", "values": "compute_values",
    "update critic": "update_critic", "update actor": "update_actor", "transition": "", "save": "",
}  # fmt: skip
CELLS = {"transition": "lab.actor.sync_weights()", "save": "lab.save(FOLDER / f'more-{time.time()}')"}
FAULTS = ("kill worker", "kill kernel", "interrupt")
DELAY_S = {"generate": 0.15, "score": 0.1, "values": 0.01, "transition": 0.005, "save": 0.05}


class Matrix:
    """One workbench, and the kernel that drives it by now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kernel = self._new()
        self._kernel.run(OPEN)
        self.clean = json.loads(self._kernel.run("print(json.dumps(clean))"))
        self._one = self._kernel.run("print(one)").strip()

    def _new(self) -> Kernel:
        kernel = Kernel(self._folder)
        kernel.run(PREPARE)
        return kernel

    def trial(self, stage: str, fault: str) -> dict[str, object]:
        """One cell of the matrix."""
        kernel = self._kernel
        kernel.run(f"lab.recover({self._one!r})")
        if STAGES[stage]:
            kernel.run(f"while ppo.next_stage != {STAGES[stage]!r}:\n    ppo.step()")
        pid = int(kernel.run("print(lab.hosts.backend.processes[lab.actor.hosts[1]].pid)"))
        request = kernel.start(CELLS.get(stage, "ppo.step()"))
        time.sleep(DELAY_S.get(stage, 0.3))
        began = time.monotonic()
        if fault == "kill kernel":
            kernel.kill()
            kernel = self._kernel = self._new()
            began = time.monotonic()  # the new kernel is there
            kernel.run("lab = wb.attach('faults'); ppo = algorithm(lab)")
            outcome = "attached"
        else:
            kernel.interrupt() if fault == "interrupt" else os.kill(pid, signal.SIGKILL)
            error, _ = kernel.answer(request)
            outcome = error.split(":")[0] or "done before"
            if fault == "kill worker":
                if not error:  # it was over before: the next stage hears of it
                    error, _ = kernel.cell("lab.topology()")
                outcome = f"{error.split(':')[0]}, recovered"
                kernel.run(f"lab.recover({self._one!r})")
        again_s = time.monotonic() - began
        metrics = json.loads(kernel.run("print(json.dumps(ppo.iterate()))").splitlines()[-1])
        names = {name for name in {*metrics, *self.clean} if "sync_gap" not in name}  # of a sync that came earlier
        missing = [name for name in names if name not in metrics or name not in self.clean]
        gap = max(abs(metrics[name] - self.clean[name]) for name in names - {*missing})
        return {"stage": stage, "fault": fault, "outcome": outcome, "running_again_s": round(again_s, 1),
                "metrics_gap": gap if not missing else float("nan")}  # fmt: skip

    def close(self) -> None:
        """End all of it."""
        try:
            self._kernel.run("wb.stop('faults')")
        finally:
            self._kernel.kill()


def main() -> int:
    """Print the table; 1 where a difference is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=tuple(STAGES), default=tuple(STAGES))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        try:
            for stage in arguments.stages:
                for fault in arguments.faults:
                    rows.append(matrix.trial(stage, fault))
                    print(rows[-1], flush=True)
        finally:
            matrix.close()
    frame = pd.DataFrame(rows)
    print(frame.to_string(index=False))
    return int(not (frame["metrics_gap"] == 0).all())


if __name__ == "__main__":
    raise SystemExit(main())
