"""This user's Ray head: one for all processes, joined and left without harm to others. Real heads, no GPU."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow]

JOIN = """
import json, sys
from workbench.backends.cluster import connect, running_head, stop_idle_head
ray = connect()
print(json.dumps([running_head()["pid"], ray.get_runtime_context().gcs_address]), flush=True)
sys.stdin.readline()
stop_idle_head()
"""


def run(script: str, home: Path, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "WORKBENCH_KEEP"))}
    return subprocess.Popen(
        [sys.executable, "-c", script], env={**kept, "WORKBENCH_HOME": str(home), **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> list[object]:
    assert process.stdout is not None
    value: list[object] = json.loads(process.stdout.readline())
    return value


def test_two_processes_that_start_at_once_share_a_head_and_the_last_one_stops_it(tmp_path: Path) -> None:
    with run(JOIN, tmp_path) as one, run(JOIN, tmp_path) as two:
        first, second = answer(one), answer(two)
        assert first == second
        (head,) = {int(str(first[0])), int(str(second[0]))}
        assert (tmp_path / "ray_token").stat().st_mode & 0o077 == 0
        one.communicate("\n", timeout=60)
        assert psutil.pid_exists(head)  # the other is joined to it: Ray would end that one
        two.communicate("\n", timeout=60)
        assert not psutil.pid_exists(head)
    assert (one.returncode, two.returncode) == (0, 0)


def test_processes_of_ray_start_without_parsing_a_grammar() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import sys, ray; print('rfc3987_syntax' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == "False"  # 1.5 s in each of them: see pyproject.toml on jsonschema


# A process that is joined to a cluster of somebody else, once through address= and once by its own ray.init()
ELSEWHERE = """
import json, sys, ray
from workbench.errors import BadInput
from workbench.backends.cluster import connect, joined_address, stop_head
address, mine = sys.argv[1], sys.argv[2] == "mine"
if mine:
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # that head listens on the loopback alone
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    connect()
else:
    connect(address)
    try:
        connect()
    except BadInput as error:
        refused = str(error)
try:
    connect("10.1.2.3:6379")
except BadInput as error:
    other = str(error)
connect(address)
stop_head()
print(json.dumps([None if mine else refused, other, joined_address(ray), ray.is_initialized(), len(ray.nodes())]))
"""


@pytest.mark.parametrize("how", ["address", "mine"])
@pytest.mark.thorough
def test_another_cluster_is_refused_and_the_one_that_is_joined_stays(tmp_path: Path, how: str) -> None:
    with run(JOIN, tmp_path / "theirs") as owner:
        _, address = answer(owner)
        token = str(tmp_path / "theirs" / "ray_token")
        script = ELSEWHERE.replace("sys.argv[1]", repr(address)).replace("sys.argv[2]", repr(how))
        with run(script, tmp_path / "own", RAY_AUTH_TOKEN_PATH=token, RAY_AUTH_MODE="token") as guest:
            refused, other, joined, initialized, nodes = answer(guest)
        assert joined == address
        assert (initialized, nodes) == (True, 1)
        assert f"joined to the Ray cluster at {address}" in str(other)
        if how == "address":
            assert "address=None" in str(refused)
            assert "restart the kernel" in str(refused)
        owner.communicate("\n", timeout=60)


# A cluster of two machines with two cores each, as far as Ray can tell; what a workbench of two pools of two has on it
MACHINES = """
import json, os
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
import psutil
import ray
from ray.cluster_utils import Cluster

for attempt in range(3):  # Ray gives a node 30 s, which a busy machine can exceed
    try:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        cluster.add_node(num_cpus=2)
        break
    except Exception:
        if attempt == 2:
            raise
import workbench as wb

def length(prompt, response, **row):
    return float(len(response))

def nodes(lab):
    table = ray.util.placement_group_table().values()
    groups = [entry for entry in table if entry["name"].startswith(lab.description.id) and entry["state"] == "CREATED"]
    return {entry["name"].split("/")[2].split(".")[0]: sorted(entry["bundles_to_node_id"].values()) for entry in groups}

@ray.remote
class Bare:
    def pid(self):
        return os.getpid()

def listens(pid):
    return sorted(c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN")

with wb.open(
    "machines", models={"actor": "tiny-llama", "critic": "tiny-llama", "reward": length}, prompts="arithmetic",
    placement=wb.Placement.of({"a": (1, ["reward"]), "b": (2, ["actor"]), "c": (1, ["critic"])}), device="cpu",
    training=wb.Training(engine="torch", learning_rate=1e-3), generation=wb.Generation(engine="transformers"),
    address=cluster.address, runs=os.environ["WORKBENCH_HOME"],
) as lab:
    apart = nodes(lab)
    before = lab.actor.weight_digests()[0]
    wb.PPO(lab, prompts=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=2)).iterate()
    trained = lab.actor.weight_digests()[0]
    bare, address = Bare.remote(), ray.util.get_node_ip_address()
    everywhere = listens(ray.get(bare.pid.remote()))  # Ray's own, in any process that it starts
    ours = {name: listens(process.pid) for name, process in lab.hosts.backend.processes.items()}
    named = all(set(ips) <= {"127.0.0.1", address, *everywhere} and all(ips.count(ip) == 1 for ip in everywhere)
                for ips in ours.values()) and address in ours["b-0"] and address not in ours["a-0"]
    lab.move(wb.Placement.of({"c": (1, ["critic", "reward"]), "d": (2, ["actor"])}))
    print(json.dumps([apart, nodes(lab), trained != before, lab.actor.weight_digests() == [trained] * 2,
                      named or [everywhere, ours]]), flush=True)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.thorough
def test_pools_lie_on_one_machine_where_they_can_and_meet_at_its_address(tmp_path: Path) -> None:
    """Stores and gloo listen at the address by which Ray knows the machine, and a pool of one rank on the loopback."""
    with run(MACHINES, tmp_path) as process:
        apart, moved, trained, same, named = answer(process)
    assert isinstance(apart, dict)
    assert isinstance(moved, dict)
    assert len(set(apart["b"])) == 1  # where filling machine after machine would cut it
    assert apart["a"] == apart["c"] != apart["b"][:1]
    assert len(set(moved["d"])) == 1
    assert (trained, same) == (True, True)
    assert named is True
    assert process.returncode == 0


# The start of a head that goes on beside its process, and what is left of it when nobody has joined it
AHEAD = """
import json, sys, time
from workbench.backends import cluster
cluster.start_ahead()
after_s = float(sys.argv[1])
while after_s < 0 and cluster.running_head() is None:
    time.sleep(0.1)
time.sleep(max(after_s, 0))
begun = time.monotonic()
cluster.stop_idle_head()
print(json.dumps([cluster.running_head() is None, time.monotonic() - begun]), flush=True)
"""


def processes_of(home: Path) -> list[str]:
    """What still runs with that home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("WORKBENCH_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


@pytest.mark.parametrize(
    "after_s", [2.0, *(pytest.param(after_s, marks=pytest.mark.thorough) for after_s in (0.0, -1.0))]
)
def test_a_head_that_nobody_joined_is_ended_at_any_time_of_its_start(tmp_path: Path, after_s: float) -> None:
    with run(AHEAD.replace("sys.argv[1]", repr(after_s)), tmp_path) as process:
        gone, _ = answer(process)
        process.communicate(timeout=60)
    assert gone
    deadline = time.monotonic() + 30  # what Ray's processes take to end with their parent
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(tmp_path) == []


@pytest.mark.thorough
def test_a_head_that_was_started_ahead_is_the_one_that_is_joined(tmp_path: Path) -> None:
    ahead = "from workbench.backends.cluster import start_ahead; start_ahead(); start_ahead()\n"
    with run(ahead + JOIN, tmp_path) as one, run(JOIN, tmp_path) as two:
        assert answer(one) == answer(two)
        two.communicate("\n", timeout=60)
        one.communicate("\n", timeout=60)
    assert (one.returncode, two.returncode) == (0, 0)
