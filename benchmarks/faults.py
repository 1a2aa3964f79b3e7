"""Random faults: processes that are killed or stopped, interrupts, take-overs, while an iteration, a save or a move is
under way; afterwards the iteration has to be that of a run without faults.

    python benchmarks/faults.py --trials 250 --state faults.jsonl
    python benchmarks/faults.py --pools --trials 100 --state pools.jsonl
    python benchmarks/faults.py --machines --trials 30 --state machines.jsonl

Each trial begins after iteration 1 of PPO on a tiny model under Ray. The fault comes at a random moment. Then what a
user would do: the same cell again, `lab.recover()`, or `wb.attach` in another kernel; and the rest of iteration 2, and
iteration 3. Right: the calls ended as documented, and all metrics, optimizer steps and sums of the weights' bits of
both iterations are those of the run without faults, none filtered; and no process is left of another placement.
--pools: rollout workers in a pool of their own generate two iterations ahead, in parts of 5 tokens; they, or the
trainer, are killed. After the death of the trainer all is as without faults. After that of a rollout worker nothing may
go back: each prompt is trained on once, all tokens that had been drawn before are in its response, and there are
as many optimizer steps as without.
--machines: on three machines that are network namespaces of this one (`scripts/machines.py`), of which two have hosts;
one of these loses its power, or its network for good or for 2 s, stands still for 2 s, has a slow cable, or one that
loses packets. The last four may cost time alone. Recovery goes to the machines that are left.

Results are added to --state; a later call goes on from there. Needs a C compiler. The exit code is 1 where a trial was
not right.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import machines
from tests.crash_points.cases import ALGORITHM, OTHERS, REST, same
from tests.crash_points.processes import LOST, Kernel, Kernels

OPEN = """
lab = tiny_lab("faults", Path("runs"), if_exists="replace")
ppo = algorithm(lab)
ppo.iterate()
out = str(lab.save("one-OPENED").folder)
"""
ROLES = ["actor", "critic", "reference", "reward"]
CELLS = {
    "iterate": "ppo.iterate()",
    "save": "lab.save('more-NUMBER')",
    "move": f"lab.move(wb.Placement.of({{'poolNUMBER': (1, {ROLES})}}))",
}
FAULTS = ("kill kernel", "kill host", "stop host", "interrupt", "take over")


AHEAD = (
    ALGORITHM
    + """
POOLS = wb.Placement.of({"train": (1, ["actor", "critic", "reference", "reward"]), "rollout": (1, ["rollout"])})
def responses(*batches):
    found = [batch.fetch(["prompt_uid", "response_ids"]) for batch in batches]
    return {int(uid): row.tolist() for table in found
            for uid, row in zip(table["prompt_uid"], table["response_ids"].rows())}
def waiting(lab):
    return responses(*(one.made.get("begun", one.rollouts) for one in lab.buffer.waiting if "begun" in one.made
                       or one.whole))
def ahead(lab, ppo, last, trained):
    while ppo.iteration < last or ppo.under_way:
        ppo.run(1, staleness=2, pause_after=5)
        trained.append(responses(ppo.made["generate_sequences"]))
    return state(lab, ppo)
"""
)
OPEN_AHEAD = """
lab = tiny_lab("faults", Path("runs"), if_exists="replace", placement=POOLS, devices=2)
ppo, trained = algorithm(lab), []
ahead(lab, ppo, 1, trained)
out = str(lab.save("one-OPENED").folder)
"""
HOSTS = {"kill rollout worker": "rollout-0", "kill trainer": "train-0"}


class Faults:
    """One workbench, and the kernel that drives it."""

    code, opening = ALGORITHM, OPEN

    def __init__(self, folder: Path) -> None:
        self._kernels, self._number, self._opened = Kernels(folder), 0, 0

    def begin(self) -> None:
        """Open it, and note what a run without faults gives, and how long the cells take."""
        self._open()
        self._second, self._third = self._driver.run(REST.format(2)), self._driver.run(REST.format(3))
        self._took_s = {}
        for name, text in CELLS.items():
            self._back()
            began = time.monotonic()
            self._driver.run(text.replace("NUMBER", "0"))
            self._took_s[name] = time.monotonic() - began
        self._back()

    def _open(self) -> None:
        self._opened += 1
        self._driver = self._kernels.start(self.code)
        self._one = self._driver.run(self.opening.replace("OPENED", str(self._opened)))

    def _back(self) -> None:
        self._driver.run(f"lab.recover({self._one!r})")

    def trial(self, cell: str, fault: str, part: float) -> dict[str, Any]:
        """One fault, after that part of the time that the cell takes."""
        row: dict[str, Any] = {"cell": cell, "fault": fault, "part": round(part, 3)}
        began = time.monotonic()
        try:
            row["outcome"] = self._outcome(cell, fault, part * self._took_s[cell])
            self._back()
            assert not (others := self._driver.run(OTHERS)), f"hosts that no placement has: {others}"
            row |= {"right": True, "seconds": round(time.monotonic() - began, 1)}
        except (AssertionError, TimeoutError) as error:
            row |= {"right": False, "seconds": round(time.monotonic() - began, 1), "error": str(error)[:2000]}
            self._driver.kill()
            self._open()
        return row

    def _outcome(self, cell: str, fault: str, after_s: float) -> str:
        self._number += 1
        outcome = self._fault(CELLS[cell].replace("NUMBER", str(self._number)), fault, after_s)
        same(self._driver.run(REST.format(2)), self._second)
        same(self._driver.run(REST.format(3)), self._third)
        return outcome

    def _fault(self, text: str, fault: str, after_s: float) -> str:
        driver = self._driver
        pid = driver.run("out = lab.hosts.backend.processes[lab.actor.hosts[0]].pid")
        other = self._kernels.start(ALGORITHM)  # there before the fault comes
        driver.begin(text)
        time.sleep(after_s)
        if fault == "kill kernel":
            driver.kill()
            self._attach(other, "wb.attach('faults')")
            return "attached"
        if fault == "take over":
            self._attach(other, "wb.attach('faults', take_over=True)")
            error, _ = driver.answer()
            assert error.startswith(("NotDriving", "NotFound", "HostDied")) or not error, error
            driver.kill()
            return f"first: {error.split(':')[0] or 'done before'}"
        other.kill()
        with contextlib.suppress(ProcessLookupError):  # a move has ended it
            if fault == "kill host":
                os.kill(pid, signal.SIGKILL)
            elif fault == "stop host":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(1.0)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(driver.process.pid, signal.SIGINT)
        error, _ = driver.answer()
        kind = error.split(":")[0]
        allowed = {
            "kill host": ("HostDied", "StageError", ""),
            "stop host": ("",),
            "interrupt": ("StageInterrupted", ""),
        }
        assert error != LOST and kind in allowed[fault], error
        if fault == "kill host":
            self._back()
        return kind or "done before"

    def _attach(self, kernel: Kernel, how: str) -> None:
        """Another kernel goes on; where the fault cost a pool, from the checkpoint, as the message says."""
        self._driver = kernel
        self._driver.run(f"lab = {how}\nppo = algorithm(lab)")
        error, _ = self._driver.try_to("lab.actor.weights_checksum()")
        assert not error or error.startswith("HostDied"), error
        if error:
            self._back()

    def close(self) -> None:
        """End all of it."""
        try:
            self._kernels.start(ALGORITHM).run("wb.stop('faults')")
        finally:
            self._kernels.close()


class FaultsOfPools(Faults):
    """One workbench with rollout workers in a pool of their own, which generate ahead."""

    code, opening, cell = AHEAD, OPEN_AHEAD, "ahead"

    def begin(self) -> None:
        """Open it, and note what a run without faults gives."""
        self._open()
        began = time.monotonic()
        self._second = self._driver.run(self._rest(2))
        self._took_s = {self.cell: time.monotonic() - began}
        self._third = self._driver.run(self._rest(3))
        self._back()

    @staticmethod
    def _rest(last: int) -> str:
        return f"out = ahead(lab, ppo, {last}, trained)"

    def _outcome(self, cell: str, fault: str, after_s: float) -> str:
        driver, host = self._driver, HOSTS[fault]
        pid = driver.run(f"""
pid = next(p.pid for name, p in lab.hosts.backend.processes.items() if name.startswith({host!r}))
before, trained = waiting(lab), []
out = pid
""")
        driver.begin(self._rest(2))
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        error, _ = driver.answer()
        kind = error.split(":")[0]
        assert error != LOST and kind in ("HostDied", "StageError", "UpstreamError", ""), error
        if host == "train-0":
            self._back()
            same(driver.run(self._rest(2)), self._second)
            same(driver.run(self._rest(3)), self._third)
            return kind or "done before"
        assert driver.run("out = lab.recover()") is None
        second, third = driver.run(self._rest(2)), driver.run(self._rest(3))
        for found, clean in ((second, self._second), (third, self._third)):
            assert (found[0], found[2]) == (clean[0], clean[2]), f"{found[0]}, {found[2]} in place of {clean[2]}"
        before, trained, waiting = driver.run("out = before, trained, waiting(lab)")
        known: dict[int, list[int]] = dict(waiting)
        for drawn_there in trained:
            twice = known.keys() & drawn_there.keys()
            assert not twice, f"prompts {sorted(twice)} were trained on twice, after {error}"
            known |= drawn_there
        lost = {uid: ids for uid, ids in before.items() if known.get(uid, [])[: len(ids)] != ids}
        assert not lost, f"tokens were lost: {lost}"
        assert sorted(known) == [*range(min(known), max(known) + 1)], f"prompts {sorted(known)}"
        return kind or "done before"


APART = {"policy": (1, ["actor", "reference"]), "scorers": (1, ["critic", "reward"])}
OPEN_APART = """
apart = dict(placement=wb.Placement.of(APART), device="cpu", address="ADDRESS")
lab = tiny_lab("faults", Path("runs"), if_exists="replace", **apart)
ppo = algorithm(lab)
ppo.iterate()
out = str(lab.save("one-OPENED").folder)
"""
PASSING_S = 2.0
PASSING = ("gap", "stand still", "slow cable", "lossy cable")  # after which all goes on
BREAKING = ("power", "network")


class FaultsOfMachines(FaultsOfPools):
    """One workbench on two of three machines. Outcomes say when the death was said, and how long recovery took."""

    code, cell = ALGORITHM, "iterate"

    def __init__(self, folder: Path, cluster: machines.Cluster) -> None:
        super().__init__(folder)
        self._cluster = cluster
        self.opening = OPEN_APART.replace("APART", str(APART), 1).replace("ADDRESS", cluster.address)

    @staticmethod
    def _rest(last: int) -> str:
        return REST.format(last)

    def _outcome(self, cell: str, fault: str, after_s: float) -> str:
        name, pool = fault.split(" of ")
        hit = self._driver.run(
            f"out = next(p.machine for n, p in lab.hosts.backend.processes.items() if n.startswith({pool!r}))"
        )
        try:
            return self._survived(hit, name, after_s)
        finally:
            self._repair(hit, name)

    def _survived(self, machine: str, name: str, after_s: float) -> str:
        driver = self._driver
        driver.begin(REST.format(2))
        time.sleep(after_s)
        began = time.monotonic()
        self._hit(machine, name)
        error, _ = driver.answer(300)
        said_s = time.monotonic() - began
        kind = error.split(":")[0]
        assert error != LOST and kind in (("",) if name in PASSING else ("HostDied", "StageError", "")), error
        recovery_s = 0.0
        if name in BREAKING:
            if not error:  # it had ended before: the next stage finds it
                error, _ = driver.try_to(REST.format(3))
                said_s = time.monotonic() - began
            assert error.startswith(("HostDied", "StageError")), f"a machine is gone, but the error is: {error}"
            began = time.monotonic()
            self._back()
            recovery_s = time.monotonic() - began
        same(driver.run(REST.format(2)), self._second)
        same(driver.run(REST.format(3)), self._third)
        return f"{kind or 'done'}, said in {said_s:.1f} s" + (
            f", recovered in {recovery_s:.1f} s" if recovery_s else ""
        )

    def _hit(self, machine: str, fault: str) -> None:
        cluster = self._cluster
        if fault == "power":
            cluster.kill(machine)
        elif fault == "network":
            cluster.shape(machine, cut=True)
        elif fault == "gap":
            cluster.shape(machine, cut=True)
            time.sleep(PASSING_S)
            cluster.shape(machine, cut=False)
        elif fault == "stand still":
            cluster.signal(machine, signal.SIGSTOP)
            time.sleep(PASSING_S)
            cluster.signal(machine, signal.SIGCONT)
        else:
            cluster.shape(machine, **({"rate": 5e6, "delay_s": 0.05} if fault == "slow cable" else {"loss": 0.05}))

    def _repair(self, machine: str, fault: str) -> None:
        """The machine as it was at first, in the cluster again: a Ray node that has been given up ends."""
        self._cluster.shape(machine, cut=False, rate=0.0, delay_s=0.0, loss=0.0)
        if fault in BREAKING:
            self._cluster.start_again(machine)


def drawn(trials: int, pools: bool, apart: bool) -> Iterator[tuple[str, str, float]]:
    """What the trials are: the same for every call."""
    dice = random.Random(8)
    for number in range(trials):
        if apart:
            yield "iterate", f"{(BREAKING + PASSING)[number % 6]} of {dice.choice(list(APART))}", dice.random()
        elif pools:
            yield "ahead", list(HOSTS)[number % 2], dice.random()
        else:
            yield dice.choices(list(CELLS), [5, 2, 3])[0], dice.choice(FAULTS), dice.random()


def main() -> int:
    """Print the table; 1 where a trial was not right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="total number of trials, with those in --state")
    parser.add_argument("--state", type=Path, default=Path("runs/faults.jsonl"), help="results, one line per trial")
    parser.add_argument("--pools", action="store_true", help="kill rollout workers, and the trainer beside them")
    parser.add_argument("--machines", action="store_true", help="break machines, cables and network")
    parser.add_argument("--minutes", type=float, default=None, help="stop after this time; a later call continues")
    arguments = parser.parse_args()
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.state.read_text().splitlines()] if arguments.state.exists() else []
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        folder, state = (
            opened.enter_context(tempfile.TemporaryDirectory()),
            opened.enter_context(arguments.state.open("a")),
        )
        faults: Faults
        if arguments.machines:
            cluster = opened.enter_context(machines.cluster(3, cores=1))
            os.environ |= cluster.variables
            faults = FaultsOfMachines(Path(folder), cluster)
        else:
            faults = (FaultsOfPools if arguments.pools else Faults)(Path(folder))
        try:
            faults.begin()
            for cell, fault, part in list(drawn(arguments.trials, arguments.pools, arguments.machines))[len(rows) :]:
                if arguments.minutes is not None and time.monotonic() - began > 60 * arguments.minutes:
                    break
                rows.append(faults.trial(cell, fault, part))
                state.write(json.dumps(rows[-1]) + "\n")
                state.flush()
                print(rows[-1], flush=True)
        finally:
            faults.close()
    frame = pd.DataFrame(rows)
    table = frame.groupby(["cell", "fault"]).agg(
        trials=("right", "size"), right=("right", "sum"), median_s=("seconds", "median"), longest_s=("seconds", "max")
    )
    print(table.to_string())
    print(f"{len(frame)} faults, {int((~frame['right']).sum())} wrong")
    return int(not frame["right"].all())


if __name__ == "__main__":
    raise SystemExit(main())
