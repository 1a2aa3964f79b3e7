"""A workbench over three machines, which are network namespaces of this one: the bits of one process, and on the cables
the bytes that `lab.transfers()` has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench as wb
from scripts import machines
from tests.cases import TINY, rollouts, tiny_lab, train_on, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged
from workbench.errors import BadInput

ROOT = Path(__file__).parents[2]
SPREAD = wb.Placement.of({"policy": (1, ["actor"]), "scorers": (1, ["critic", "reference"]), "judges": (1, ["reward"])})
SWAPPED = wb.Placement.of(
    {"policy": (1, ["reward"]), "scorers": (1, ["critic", "reference"]), "judges": (1, ["actor"])}
)
ROWS, TOKENS = 8, 300_000
SLOW_BITS_S = 2e8
# of Ray's own messages, and of headers: 52 bytes on a packet of at most 60,000, and those that only acknowledge
OVERHEAD = 1.02


def one_iteration(lab: wb.Workbench) -> dict[str, Any]:
    """What it gives, to the last bit."""
    metrics = train_on(lab, *rollouts(lab))
    return {
        "metrics": {name: float(value).hex() for name, value in metrics.items()},
        "weights": lab.actor.weights_checksum(),
    }


def wide_model(folder: Path) -> str:
    """Of 8 million weights: beside theirs and those of their optimizer, the bytes of Ray's own messages are few."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from workbench.models.resolve import tiny_folder

    config = AutoConfig.from_pretrained(tiny_folder(TINY))
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "head_dim": 128})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder(TINY)).save_pretrained(folder)
    return str(folder)


def crossed(cluster: machines.Cluster, lab: wb.Workbench, call: Any) -> dict[str, int]:
    """Bytes that a call sends from the actor's machine to the reward's: on either cable, and by `lab.transfers()`."""
    where = lab.topology().set_index("role")["machine"].to_dict()
    before, known = cluster.traffic(), len(lab.transfers())
    call()
    after, new = cluster.traffic(), lab.transfers().iloc[known:]
    sent, received = (after[where[role]][n] - before[where[role]][n] for n, role in enumerate(("actor", "reward")))
    return {"sent": sent, "received": received, "counted": int(new["moved_bytes"].sum())}


def on_machines(folder: str) -> dict[str, Any]:
    """What a process does that has joined the cluster: Ray allows one a process."""
    cluster = machines.Cluster.load(Path(folder))
    runs = cluster.folder / "runs"
    models = {"actor": wide_model(cluster.folder / "wide"), "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("one", runs, models=models, backend="inline", devices=1) as lab:
        one = one_iteration(lab)
    join = {"device": "cpu", "address": cluster.address}
    with tiny_lab("apart", runs, models=models, placement=SPREAD, **join) as lab:
        where = lab.topology().drop_duplicates("host").set_index("host")
        found: dict[str, Any] = {"one": one, "apart": one_iteration(lab), "machines": where["machine"].to_dict()}
        found["racks"] = where["rack"].to_dict()
        for machine in cluster.machines:
            cluster.shape(machine, rate=SLOW_BITS_S)
        found["shaped"] = lab.diff(SWAPPED).link_bytes_s  # sends a probe
        for machine in cluster.machines:
            cluster.shape(machine, rate=0.0)
        ids = Ragged(torch.full((ROWS * TOKENS,), 9), torch.full((ROWS,), TOKENS))
        batch = lab.put({"prompt_ids": ids, "response_ids": ids, "prompt": ["?"] * ROWS})
        found["batch"] = crossed(cluster, lab, lambda: lab.reward.compute_reward(batch))
        found["move"] = crossed(cluster, lab, lambda: lab.move(SWAPPED))
        found["open"] = lab.diff(SPREAD).link_bytes_s
    cut = wb.Placement.of({"policy": (2, ["actor"])}, layouts={"actor": wb.Layout(t=2)})
    gpus = {"device": "cuda", "address": cluster.address}  # Ray says that there are; it is refused before one is used
    with expect_error(BadInput, value="tensor groups of 2 GPUs, but machines have 1 of 1, 1 of 1, 1 of 1 free"):
        tiny_lab("cut", runs, models={"actor": TINY}, placement=cut, **gpus)
    return found


@pytest.fixture(scope="module")
def three() -> Iterator[machines.Cluster]:
    if reason := machines.allowed():
        pytest.skip(reason)
    with machines.cluster(3, cores=1, racks=["a", "a", "b"], gpus=1) as cluster:
        yield cluster


def run_there(cluster: machines.Cluster, *arguments: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, **cluster.variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=own, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_three_machines_give_the_bits_of_one_process_and_cables_carry_what_is_counted(three: machines.Cluster) -> None:
    done = run_there(three, "-m", "tests.integration.test_machines", str(three.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["apart"] == found["one"]
    assert sorted(found["machines"].values()) == ["m1", "m2", "m3"]
    racks = {"m1": "a", "m2": "a", "m3": "b"}
    assert found["racks"] == {host: racks[machine] for host, machine in found["machines"].items()}
    assert found["shaped"] <= SLOW_BITS_S / 8 < found["open"]
    for what in ("batch", "move"):
        counted = found[what].pop("counted")
        assert counted > 15e6
        for cable, measured in found[what].items():
            assert counted < measured < OVERHEAD * counted, (what, cable)


OTHER_CODE = """
import sys
from pathlib import Path
from scripts import machines
from tests.cases import TINY, tiny_lab
if __name__ == "__main__":
    cluster = machines.Cluster.load(Path(sys.argv[1]))
    tiny_lab("other", cluster.folder / "runs", models={"actor": TINY}, device="cpu", address=cluster.address, devices=1)
"""


def test_a_machine_with_other_code_is_refused_by_name(three: machines.Cluster, tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(OTHER_CODE)
    edited = tmp_path / "there" / "workbench"
    shutil.copytree(ROOT / "workbench", edited, ignore=shutil.ignore_patterns("__pycache__"))
    (edited / "placement/state.py").write_text("# edited there\n")
    there = [["nsenter", f"--target={machine.inside}", "--mount"] for machine in three.machines.values()]
    for enter in there:
        subprocess.run([*enter, "mount", "--bind", edited, ROOT / "workbench"], check=True)
    try:
        done = run_there(three, str(kernel), str(three.folder))
    finally:
        for enter in there:
            subprocess.run([*enter, "umount", ROOT / "workbench"], check=True)
    said = r"MissingDependency: machine m\d has other code than this process: workbench/placement/state.py differ"
    assert re.search(said, done.stderr), done.stderr


if __name__ == "__main__":
    print(json.dumps(on_machines(sys.argv[1])))
