"""Rows go straight from the ranks that made them to the ranks that need them: these rows, and nothing else."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.cases import TINY, hosts_of
from tests.light import together
from workbench.batches.columns import Ragged
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.placement import Layout
from workbench.stages.run import Run
from workbench.workers.worker import Worker

WIDTH = 3  # numbers a row of the column `state`


def workers() -> tuple[type, type]:
    """Classes of a function travel to the hosts whole: these import no test code."""

    class Producer(Worker):
        def make(self, batch: Shard, scale: int) -> Output:
            uids, lengths = batch.columns["uid"].tolist(), batch.columns["length"].tolist()  # type: ignore[union-attr]
            tokens = [torch.arange(length * scale) + uid for uid, length in zip(uids, lengths, strict=True)]
            state = torch.tensor(uids, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()
            return Output(columns={"tokens": Ragged.of(tokens, torch.int64), "state": state})

        @wb.register("3D_PROTO", reads=("uid", "length"), writes=("tokens", "state"))
        def make_3d(self, batch: Shard, *, scale: int = 1) -> Output:
            return self.make(batch, scale)

        @wb.register("DP_PROTO", reads=("uid", "length"), writes=("tokens", "state"))
        def make_dp(self, batch: Shard, *, scale: int = 1) -> Output:
            return self.make(batch, scale)

    class Consumer(Worker):
        def add(self, batch: Shard) -> Output:
            sums, state = torch.stack([row.sum() for row in batch.ragged("tokens").rows()]), batch.columns["state"]
            assert isinstance(state, torch.Tensor)
            return Output(columns={"sums": sums, "twice": state * 2})

        @wb.register("3D_PROTO", reads=("tokens", "state"), writes=("sums", "twice"))
        def add_3d(self, batch: Shard) -> Output:
            return self.add(batch)

        @wb.register("DP_PROTO", reads=("tokens", "state"), writes=("sums", "twice"))
        def add_dp(self, batch: Shard) -> Output:
            return self.add(batch)

    return Producer, Consumer


def put(lab: wb.Workbench, lengths: np.ndarray) -> wb.Batch:
    return lab.put({"uid": torch.arange(len(lengths)), "length": torch.from_numpy(lengths)})


def parts(layout: Layout, rows: int, protocol: str) -> list[tuple[int, list[int]]]:
    """For each part of the rows, in order: the rank whose output counts, and the rows; said without the product."""
    replicas = layout.d if protocol == "3d" else layout.d * layout.p * layout.t
    cut = [part.tolist() for part in np.array_split(range(rows), replicas)]
    if protocol == "dp":
        return list(enumerate(cut))
    return [(k * layout.p * layout.t + (layout.p - 1) * layout.t, part) for k, part in enumerate(cut)]


def expected_bytes(
    lengths: np.ndarray, order: np.ndarray, producer: tuple[Layout, str], consumer: tuple[Layout, str]
) -> dict[tuple[str, str], int]:
    """Bytes from each rank to each, row by row: int64 tokens, one int64 length, and the float32 numbers of `state`."""
    maker = {row: rank for rank, rows in parts(producer[0], len(lengths), producer[1]) for row in rows}
    layout, protocol = consumer
    copies = layout.p * layout.t if protocol == "3d" else 1
    moved: Counter[tuple[str, str]] = Counter()
    for number, (_, rows) in enumerate(parts(layout, len(order), protocol)):
        for rank in range(number * copies, (number + 1) * copies):
            for row in rows:
                made = int(order[row])
                moved[f"a-{maker[made]}", f"b-{rank}"] += 8 * int(lengths[made]) + 8 + 4 * WIDTH
    return dict(moved)


def moved_bytes(lab: wb.Workbench, run: Run) -> dict[tuple[str, str], int]:
    frame = lab.transfers()
    rows = frame[frame["run"] == run.number].to_dict("records")
    assert len({(row["source"], row["destination"]) for row in rows}) == len(rows)  # one row a movement
    assert {row["columns"] for row in rows} == {"tokens, state"}
    assert {row["stage"] for row in rows} == {run.stage}
    assert {row["batch"].split()[0] for row in rows} == {"batch1"} or len(lab.transfers()) > len(rows)
    assert all(row["duration_s"] >= 0 for row in rows)
    return {(row["source"], row["destination"]): row["moved_bytes"] for row in rows}


def placement(a: Layout, b: Layout) -> wb.Placement:
    return wb.Placement.of({"a": (a.size, ["actor"]), "b": (b.size, ["critic"])}, layouts={"actor": a, "critic": b})


sizes = st.integers(1, 3)
layouts = st.builds(Layout, sizes, sizes, sizes)
protocols = st.sampled_from(["3d", "dp"])


@settings(max_examples=25)
@given(layouts, protocols, layouts, protocols, st.data())
def test_any_two_layouts(
    tmp_path_factory: pytest.TempPathFactory, a: Layout, makes: str, b: Layout, adds: str, data: st.DataObject
) -> None:
    least = max(len(parts(a, 1, makes)), len(parts(b, 1, adds)))
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=least, max_size=least + 20)))
    index = st.integers(0, len(lengths) - 1)
    order = np.array(data.draw(st.lists(index, min_size=least, max_size=least + 10)))  # rows left out, and twice
    producer, consumer = workers()
    with together({"actor": producer, "critic": consumer}, placement(a, b), tmp_path_factory.mktemp("runs")) as lab:
        made = getattr(lab.actor, f"make_{makes}")(put(lab, lengths)).take(order)
        run = getattr(lab.critic, f"add_{adds}").submit(made)
        table = run.result().fetch(["sums", "twice", "tokens"])
        assert moved_bytes(lab, run) == expected_bytes(lengths, order, (a, makes), (b, adds))
        sums = [int(n * uid + n * (n - 1) // 2) for uid, n in zip(order, lengths[order], strict=True)]
        assert table["sums"].tolist() == sums
        assert table["twice"].tolist() == [[2.0 * uid] * WIDTH for uid in order]
        assert [row.tolist() for row in table["tokens"].rows()] == [
            list(range(uid, uid + n)) for uid, n in zip(order, lengths[order], strict=True)
        ]
        # ranks whose output does not count keep none of it
        held = {name: host.describe()["shards"] for name, host in hosts_of(lab).items()}
        counted = {f"a-{rank}" for rank, _ in parts(a, 1, makes)} | {f"b-{rank}" for rank, _ in parts(b, 1, adds)}
        assert {name for name, shards in held.items() if shards} == counted | {"a-0"}


# --- the same on Ray: 6 hosts feed 4 --------------------------------------------------------------------------------

A, B = Layout(1, 2, 3), Layout(2, 1, 2)


@pytest.fixture(scope="module")
def ten_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    producer, consumer = workers()
    with wb.open(
        "ten",
        models={"actor": wb.Model(TINY, worker=producer), "critic": wb.Model(TINY, worker=consumer)},
        placement=placement(A, B),
        devices=10,
        device="cpu",
        runs=tmp_path_factory.mktemp("runs"),
    ) as lab:
        yield lab


def message_bytes(run: Run) -> int:
    return sum(len(cloudpickle.dumps(message)) for message in (*run.calls, *run.replies))


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The bytes that this process has resident, sampled every few milliseconds, the first before anything ran."""
    gc.collect()  # what other tests left would hide what grows
    process, stop = psutil.Process(), threading.Event()
    seen = [process.memory_info().rss]

    def sample() -> None:
        while not stop.wait(0.005):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.thorough
def test_each_rank_pulls_the_bytes_of_its_rows(ten_hosts: Any) -> None:
    lab = ten_hosts
    lengths = np.random.default_rng(0).integers(0, 50, 31)
    run = lab.critic.add_3d.submit(lab.actor.make_3d(put(lab, lengths)))
    table = run.result().fetch(["sums"])
    assert table["sums"].tolist() == [int(n * uid + n * (n - 1) // 2) for uid, n in enumerate(lengths)]
    moved = moved_bytes(lab, run)
    assert moved == expected_bytes(lengths, np.arange(31), (A, "3d"), (B, "3d"))
    # the middle third is needed by both replicas of the consumer; the outer ones by one each
    pulled_by = {source: sorted(to for who, to in moved if who == source) for source, _ in moved}
    assert pulled_by == {"a-0": ["b-0", "b-1"], "a-2": ["b-0", "b-1", "b-2", "b-3"], "a-4": ["b-2", "b-3"]}


@pytest.mark.slow
@pytest.mark.thorough
def test_a_gigabyte_passes_the_kernel_by(ten_hosts: Any) -> None:
    lab = ten_hosts
    lengths = np.random.default_rng(1).integers(5_000, 15_500, 12_500)
    batch = put(lab, lengths)
    with watched_memory() as seen:
        making = lab.actor.make_3d.submit(batch)
        made = making.result()
        run = lab.critic.add_3d.submit(made)
        added = run.result()
    assert made.columns["tokens"].nbytes > 1e9
    assert sum(moved_bytes(lab, run).values()) > 2e9  # two pipeline stages of each replica need the same rows
    assert max(seen) - seen[0] < 100e6
    assert message_bytes(making) + message_bytes(run) < 1e6
    sums = added.fetch(["sums"])["sums"].numpy()
    np.testing.assert_array_equal(sums, lengths * np.arange(12_500) + lengths * (lengths - 1) // 2)
