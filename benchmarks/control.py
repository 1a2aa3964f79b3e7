"""What the controller adds to a stage, against the number of ranks and the number of rows.

    python benchmarks/control.py [--only real simulated planned moved] [--ranks 1 8 64] [--rows 100 1000 10000 100000]

Four tables:

real       a stage that writes one column, on hosts that load no model, in a loop that forgets its batches: what it
           costs a rank, beside Ray's own calls of the same hosts (one to each, one `get`). cpu: of this process, all
           its threads. wall: until the result, with the work of the hosts, which share this machine's cores.
simulated  the same stage on hosts that answer at once, in this process, without Ray: from the call to the handle of
           the batch, with the pickling of the calls, and telemetry and journal on the disk. Fails above 5 ms and
           100 us a rank. --profile: by function.
planned    the calls to 1, 64 and 1024 ranks for a batch whose columns five stages of other layouts made: no host is
           started. Bytes are those of all calls, pickled. Fails above 1 ms a rank and 1 us a row.
moved      rows (64 tokens, log-probabilities) that go from one pool of one rank to another, for an operation that does
           nothing: time from the call to its result, less the longest compute span.

In the first two, columns count what one stage does on all its ranks together: writes of telemetry and of the journal,
calls of Ray, objects that are new afterwards. connections: open ones.

Each figure is the median of several calls.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import cloudpickle
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import workbench as wb  # noqa: E402
from tests.light import describe  # noqa: E402
from workbench.backends import journal_file, registry  # noqa: E402
from workbench.backends.base import Pending, Progress  # noqa: E402
from workbench.backends.inline import InlineBackend  # noqa: E402
from workbench.batches.columns import Ragged  # noqa: E402
from workbench.batches.location import Column, Location, ShardId  # noqa: E402
from workbench.controller import Workbench  # noqa: E402
from workbench.messages.calls import Call, ColumnSummary, Output, Reply  # noqa: E402
from workbench.messages.shards import Shard  # noqa: E402
from workbench.placement import Layout  # noqa: E402
from workbench.session.journal import SessionJournal  # noqa: E402
from workbench.support.process_environment import ProcessEnvironment  # noqa: E402
from workbench.telemetry import Recorder  # noqa: E402
from workbench.telemetry.store import TelemetryStore  # noqa: E402
from workbench.workers.worker import Worker  # noqa: E402

TOKENS, PLANNED_RANKS, SIMULATED_RANKS = 64, (1, 64, 1024), (64, 256, 1024)
# A plan may cost so much a rank, and for the row numbers, which it has to write down, so much a row.
LIMIT_S, ROW_LIMIT_S = 1e-3, 1e-6
# A stage on hosts that answer at once may cost so much a rank, and so much in all. Medians are of so many stages.
STAGE_LIMIT_S, FIXED_LIMIT_S, STAGES = 1e-4, 5e-3, 20


def worker_class() -> type[Worker]:
    """A class of a function travels to the hosts whole: they import no benchmark."""

    class Idle(Worker):
        @wb.register("3D_PROTO", reads=("uid",), writes=("tokens", "log_prob"))
        def make(self, batch: Shard, *, tokens: int) -> Output:
            rows = len(batch)
            lengths = torch.full((rows,), tokens)
            values = torch.zeros(rows * tokens, dtype=torch.int64)
            return Output(columns={"tokens": Ragged(values, lengths), "log_prob": Ragged(values.float(), lengths)})

        @wb.register("3D_PROTO", reads=("uid",), writes=("mark",))
        def mark(self, batch: Shard) -> Output:
            return Output(columns={"mark": torch.zeros(len(batch))}, metrics={"rows": len(batch)})

        @wb.register("3D_PROTO", reads=("tokens", "log_prob"))
        def nothing(self, batch: Shard) -> Output:
            return Output()

        @wb.register("3D_ALL_MICRO_DP", reads=("prompt_uid", "c0", "c1", "c2", "c3", "c4"), samples=True)
        def plan(self, batch: Shard) -> Output:
            return Output()

    return Idle


def median_s(call: Callable[[], float], times: int) -> float:
    """The median of what the call says that it took, after one that is not counted."""
    call()
    return statistics.median(call() for _ in range(times))


def added_s(lab: Any, group: Any, batch: wb.Batch) -> float:
    """Wall time of a stage that does nothing, less its longest compute span."""
    began = time.perf_counter()
    run = group.nothing.submit(batch)
    run.result()
    wall = time.perf_counter() - began
    return wall - max(s.end_s - s.start_s for reply in run.replies for s in reply.spans if s.kind == "compute")


def stored(lab: Any, rows: int) -> wb.Batch:
    """A batch on the hosts of the actor."""
    return lab.actor.make(lab.put({"uid": torch.arange(rows)}), tokens=TOKENS)


def opened(ranks: int, runs: str, critic: int = 0) -> wb.Workbench:
    """A workbench of that many hosts."""
    model = wb.Model("tiny-llama-tied", worker=worker_class())
    pools = {"actor": (ranks, ["actor"])} | ({"critic": (critic, ["critic"])} if critic else {})
    return wb.open(
        "control-cost", models=dict.fromkeys(pools, model), placement=wb.Placement.of(pools),
        devices=ranks + critic, device="cpu", runs=runs, if_exists="replace",
    )  # fmt: skip


def by_rows(all_rows: list[int], runs: str) -> None:
    """Print the table `moved`."""
    print(f"moved     {'ranks':>8} {'rows':>9} {'added_ms':>10} {'us_a_row':>10} {'MB':>8}")
    with opened(1, runs, critic=1) as lab:
        for rows in all_rows:
            batch = stored(lab, rows)
            added = median_s(lambda batch=batch: added_s(lab, lab.critic, batch), 3)  # type: ignore[misc]
            size = sum(batch.columns[name].nbytes for name in ("tokens", "log_prob")) / 1e6
            line = f"{1:8d} {rows:9d} {1e3 * added:10.2f} {1e6 * added / rows:10.3f} {size:8.1f}"
            print(f"          {line}", flush=True)


def handle(lab: Workbench, rows: int) -> wb.Batch:
    """A batch as five stages leave it, each on another layout, half of them after a shuffle of the rows."""
    order = np.random.default_rng(0).permutation(rows)
    columns = {}
    for number, ranks in enumerate((1, 4, 6, 16, 64)):
        parts = np.array_split(np.arange(rows), ranks)
        shards = [ShardId(f"other-{rank}", f"stage{number}") for rank in range(ranks)]
        location = Location.of_parts(list(zip(shards, parts, strict=True)))
        column = Column(
            dtype="int64",
            row_shape=(),
            nbytes=8 * rows,
            owner="",
            location=location.take(order) if number % 2 else location,
        )
        columns[f"c{number}"] = column
    columns["prompt_uid"] = columns["c0"]
    return wb.Batch("simulated", columns, source=lab.runner.batches, counts=lab.runner.batches.shard_counts)


def plan_s(ranks: int, rows: int, runs: Path) -> tuple[float, int]:
    """Processor seconds to plan one stage on that many ranks, and the bytes of its calls, pickled. Starts no host."""
    layout = Layout(1, 8, ranks // 8, 1, 2) if ranks > 8 else Layout(d=ranks)
    placement = wb.Placement.colocate(ranks, layouts={"actor": layout})
    lab = Workbench(describe({"actor": worker_class()}, placement), runs)
    lab.hosts.backend = InlineBackend()  # never started
    batch = handle(lab, rows)

    def calls() -> list[Call]:
        return lab.runner.prepare(lab.actor, "plan", (batch,)).plan()

    def once() -> float:
        began = time.process_time()  # planning is this one thread: other work of the machine does not count
        calls()
        return time.process_time() - began

    return median_s(once, 3), sum(len(cloudpickle.dumps(call)) for call in calls())


def planned(all_rows: list[int], runs: str) -> bool:
    """Print the table `planned`; whether each rank stayed below the limit."""
    print(f"planned   {'ranks':>8} {'rows':>9} {'plan_ms':>10} {'ms_a_rank':>10} {'us_a_row':>10} {'MB_calls':>9}")
    within = True
    for ranks in PLANNED_RANKS:
        # with few rows, what is left is what a rank costs
        for rows in (rows for rows in all_rows if rows >= ranks // 2):
            seconds, size = plan_s(ranks, rows, Path(runs))
            within &= seconds < LIMIT_S * ranks + ROW_LIMIT_S * rows
            print(
                f"          {ranks:8d} {rows:9d} {1e3 * seconds:10.2f} {1e3 * seconds / ranks:10.3f} "
                f"{1e6 * seconds / rows:10.3f} {size / 1e6:9.3f}",
                flush=True,
            )
    return within


# --- a stage, by rank -----------------------------------------------------------------------------------------------


class Clock:
    """Seconds of one block: `wall_s`, and `cpu_s` of all threads of this process."""

    def __enter__(self) -> Clock:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s, self.cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def clocked(call: Callable[[], object], times: int = STAGES) -> tuple[float, float]:
    """The medians of wall and processor seconds, after two calls that are not counted."""
    clocks = []
    for _ in range(times + 2):
        with Clock() as clock:
            call()
        clocks.append(clock)
    return statistics.median(c.wall_s for c in clocks[2:]), statistics.median(c.cpu_s for c in clocks[2:])


def counted(targets: Sequence[tuple[Any, str, str]], call: Callable[[], object], times: int = 10) -> Counter[str]:
    """How often some functions are called each time, by label, and what is new afterwards. targets: owner, name of the
    function, label."""
    calls: Counter[str] = Counter()
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in targets]

    def counts(function: Any, label: str) -> Any:
        bound = function.__func__ if isinstance(function, classmethod) else function

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[label] += 1
            return bound(*args, **kwargs)

        return classmethod(counting) if isinstance(function, classmethod) else counting

    gc.collect()
    objects = len(gc.get_objects())
    for (owner, name, function), (_, _, label) in zip(before, targets, strict=True):
        setattr(owner, name, counts(function, label))
    try:
        for _ in range(times):
            call()
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
    gc.collect()
    found = Counter({label: round(calls[label] / times) for _, _, label in targets})
    found["objects"] = round((len(gc.get_objects()) - objects) / times)
    found["connections"] = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in open_files())
    return found


def open_files() -> list[str]:
    """The descriptors of this process that are open."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


# what one stage may do once, whatever the number of ranks
WRITES = ((TelemetryStore, "_write", "telemetry"), (journal_file, "append", "journal"))
COUNTS = ("telemetry", "journal", "objects", "connections")


def stage_of(lab: Any, group: Any, batch: wb.Batch) -> Callable[[], object]:
    """A stage as a loop calls it, which forgets its batches: hosts are told to release what earlier ones have made."""
    lab.store.limit_batches, lab.runner.batches.looping = 3, True

    def stage() -> None:
        assert group.mark(batch).columns["mark"].nbytes

    return stage


def real(all_ranks: Sequence[int], runs: str) -> None:
    """Print the table `real`."""
    import ray

    names = ("cpu_ms", "ray_cpu_ms", "wall_ms", "ray_wall_ms", "ray.wait", "ray.get", "environ", *COUNTS)
    print(f"real      {'ranks':>6} " + " ".join(f"{name:>12}" for name in names) + "   (ms: a rank)")
    for ranks in all_ranks:
        with opened(ranks, runs) as lab:
            backend: Any = lab.hosts.backend
            actors, driver = backend._actors.values(), lab.ownership.controller

            def bare(actors: Any = actors, driver: str = driver) -> None:
                ray.get([actor.compute.remote(driver, "status") for actor in actors])

            stage = stage_of(lab, lab.actor, stored(lab, 4 * ranks))
            times = [clocked(one) for one in (stage, bare, stage, bare)]
            (wall, cpu), (ray_wall, ray_cpu) = (min(times[n], times[n + 2], key=lambda t: t[1]) for n in (0, 1))
            calls = counted(
                [(ray, "wait", "ray.wait"), (ray, "get", "ray.get"), (ProcessEnvironment, "here", "environ"), *WRITES],
                stage,
            )
        figures = [f"{1e3 * s / ranks:12.3f}" for s in (cpu, ray_cpu, wall, ray_wall)]
        print(f"          {ranks:6d} " + " ".join([*figures, *(f"{calls[n]:12d}" for n in names[4:])]), flush=True)


class Answered(Pending):
    """An answer that is there."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self.value


class Simulated(InlineBackend):
    """Hosts that answer at once what hosts of `mark` answer. spent_s: what that took. asked: other calls."""

    name = "simulated"

    def __init__(self) -> None:
        super().__init__()
        self.recorder, self.asked, self.spent_s = Recorder(), 0, 0.0

    def execute(self, hosts: Sequence[str], calls: Sequence[Call], progress: Progress) -> Iterator[Pending]:
        for rank, call in enumerate(calls):
            began = time.thread_time()
            reply = self.reply(call, rank)
            self.spent_s += time.thread_time() - began
            call.parts()  # as they are sent
            yield Answered(reply)

    def ask(self, host: str, method: str, *args: Any, **kwargs: Any) -> Pending:
        self.asked += 1
        return Answered(None)

    def reply(self, call: Call, rank: int) -> Reply:
        """With a span of each kind that a stage leaves, and what it pulled."""
        now, rows = time.time(), 0 if call.rows is None else len(call.rows)
        with self.recorder.bind(stage=call.stage, run=call.run, role=call.role, pool="main", rank=rank, device="cpu"):
            for kind in ("queue", "transfer", "compute"):
                self.recorder.add(kind, now, now)
            for names, pulls in call.pulls:
                for pull in pulls:
                    self.recorder.add_transfer(
                        pull.shard.host, "", now, now, bytes=8 * rows, batch=call.batch, columns=",".join(names)
                    )
        spans, transfers, syncs = self.recorder.drain()
        return Reply(
            rank=rank, columns={"mark": ColumnSummary(dtype="float32", row_shape=(), nbytes=4 * rows)}, metrics={},
            meta={}, value=None, spans=spans, transfers=transfers, syncs=syncs,
        )  # fmt: skip


@contextmanager
def simulated_lab(ranks: int, runs: str) -> Iterator[Workbench]:
    """A workbench of hosts that answer at once, with a journal."""
    description = describe({"actor": worker_class()}, wb.Placement.of({"main": (ranks, ["actor"])}))
    lab = Workbench(description, Path(runs) / f"simulated-{ranks}")
    lab.hosts.backend = Simulated()
    record = registry.Record(
        id=description.id, name=lab.name, digests=description.digests, run_folder=runs, address=None, hosts={}
    )
    registry.write(record, description)
    try:
        lab.ownership.take()
        journal = SessionJournal(lab.runner, lab.position, lab.checkpoints, lab.prompts)
        journal.rewrite()
        lab.ownership.journal = journal
        yield lab
    finally:
        registry.forget(description.id)


def stage_on_all(lab: Workbench) -> Callable[[], object]:
    """A stage on rows that lie on all hosts of the actor."""
    ranks = len(lab.actor.hosts)
    rows = np.arange(4 * ranks)
    shards = [ShardId(host, "rows") for host in lab.actor.hosts]
    location = Location.of_parts(list(zip(shards, np.array_split(rows, ranks), strict=True)))
    column = Column(dtype="int64", row_shape=(), nbytes=8 * len(rows), owner="", location=location)
    batch = wb.Batch("rows", {"uid": column}, source=lab.runner.batches, counts=lab.runner.batches.shard_counts)
    return stage_of(lab, lab.actor, batch)


def simulated(runs: str, *, profile: bool) -> bool:
    """Print the table `simulated`; whether each rank stayed below the limit."""
    print(f"simulated {'ranks':>6} {'us_a_rank':>12} " + " ".join(f"{name:>12}" for name in (*COUNTS, "asked")))
    within = True
    for ranks in SIMULATED_RANKS:
        with simulated_lab(ranks, runs) as lab:
            stage, backend = stage_on_all(lab), cast("Simulated", lab.hosts.backend)

            def own_s(stage: Callable[[], object] = stage, backend: Simulated = backend) -> float:
                spent = backend.spent_s
                with Clock() as clock:
                    stage()
                return clock.cpu_s - (backend.spent_s - spent)

            seconds = median_s(own_s, STAGES)
            within &= seconds < STAGE_LIMIT_S * ranks + FIXED_LIMIT_S
            asked, calls = backend.asked, counted(WRITES, stage)
            calls["asked"] = round((backend.asked - asked) / 10)
            columns = " ".join(f"{calls[name]:12d}" for name in (*COUNTS, "asked"))
            print(f"          {ranks:6d} {1e6 * seconds / ranks:12.1f} {columns}", flush=True)
            if profile and ranks == max(SIMULATED_RANKS):
                with cProfile.Profile(time.thread_time) as profiled:
                    for _ in range(STAGES):
                        stage()
                pstats.Stats(profiled).sort_stats("tottime").print_stats(30)
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ["simulated", "real", "planned", "moved"]
    parser.add_argument("--only", nargs="*", choices=tables, default=tables)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--rows", type=int, nargs="*", default=[10**n for n in range(2, 7)])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    within = True
    with tempfile.TemporaryDirectory() as runs:
        os.environ.setdefault("WORKBENCH_HOME", runs)
        if "simulated" in options.only:
            within &= simulated(runs, profile=options.profile)
        if "real" in options.only:
            real(options.ranks, runs)
        if "planned" in options.only:
            within &= planned(options.rows, runs)
        if "moved" in options.only:
            by_rows(options.rows, runs)
    if not within:
        print("a limit was exceeded: see the docstring")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
