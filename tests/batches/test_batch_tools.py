"""Rows and columns of a batch chosen, ordered, joined, balanced, and carried to another workbench in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches import files
from workbench.batches.columns import Ragged, Table, to_wire
from workbench.batches.location import Location, ShardId
from workbench.errors import BadInput, NotFound, UnknownColumn
from workbench.messages.calls import Call, HostInfo, Output
from workbench.messages.shards import Shard
from workbench.placement import Layout
from workbench.workers.host import Host
from workbench.workers.worker import Worker

MODELS: dict[str, Any] = {"actor": TINY, "critic": TINY, "reference": TINY, "reward": vowels}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    with tiny_lab("tools", tmp_path_factory.mktemp("runs"), backend="inline", models=MODELS) as lab:
        yield lab


def table_of(rows: int, start: int = 0) -> Table:
    """A column of each kind, every row different."""
    numbers = range(start, start + rows)
    return {
        "prompt_uid": torch.arange(start, start + rows) // 2,
        "rewards": torch.tensor([(7 * i) % 11 - 5.0 for i in numbers]),
        "prompt_ids": Ragged.of([[i] * (i % 3 + 1) for i in numbers], torch.int64),
        "values": Ragged.of([[i / 7] * (i % 4) for i in numbers], torch.bfloat16),
        "answer": [f"answer {i}" for i in numbers],
    }


def plain(batch: wb.Batch) -> dict[str, list[Any]]:
    return {name: as_lists(column) for name, column in batch.fetch().items()}


def as_lists(column: Any) -> list[Any]:
    if isinstance(column, Ragged):
        return [row.tolist() for row in column.rows()]
    return list(column) if isinstance(column, list) else list(column.tolist())


@pytest.fixture
def asked(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Every question to a host from here on: its method and arguments."""
    questions: list[tuple[str, tuple[Any, ...]]] = []
    ask = lab.hosts.backend.ask

    def listening(host: str, method: str, *args: Any, **kwargs: Any) -> Any:
        questions.append((method, args))
        return ask(host, method, *args, **kwargs)

    monkeypatch.setattr(lab.hosts.backend, "ask", listening)
    return questions


# --- rows and columns -------------------------------------------------------------------------------------------------


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "repeat", "filter", "shuffle", "split", "concat", "rename", "drop", "join"]),
        st.randoms(use_true_random=False),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 7), steps=steps)
def test_any_sequence_of_tools_is_the_same_on_plain_lists(lab: wb.Workbench, rows: int, steps: list[Any]) -> None:
    """Every tool beside its meaning in plain Python, in any order, each on what the last one gave."""
    batch = lab.put(table_of(rows))
    expected = {name: as_lists(column) for name, column in table_of(rows).items()}

    def rows_of(index: list[int], of: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [column[i] for i in index] for name, column in of.items()}

    for number, (step, random) in enumerate(steps):
        n = len(batch)
        some = sorted(random.sample(range(n), random.randint(1, n)))
        column = random.choice(list(expected))
        if step == "take":
            index = random.choices(range(n), k=random.randint(1, 8))
            mask = torch.tensor([i in some for i in range(n)])
            given, index = random.choice([(index, index), (mask, some), (slice(-2, None), list(range(n))[-2:])])
            batch, expected = batch.take(given), rows_of(index, expected)
        elif step == "repeat":
            batch, expected = batch.repeat(2), rows_of([i for i in range(n) for _ in range(2)], expected)
        elif step == "filter":
            batch, expected = batch.filter([i in some for i in range(n)]), rows_of(some, expected)
        elif step == "shuffle":
            order = batch.join(lab.put({"order": torch.arange(n)})).shuffle(number).fetch(["order"])["order"]
            batch, expected = batch.shuffle(number), rows_of(as_lists(order), expected)
        elif step == "split":
            parts, cuts = batch.split(len(some)), np.array_split(np.arange(n), len(some))
            which = random.randrange(len(parts))
            batch, expected = parts[which], rows_of(cuts[which].tolist(), expected)
        elif step == "concat":
            other = lab.put(table_of(3, start=50))
            more = {name: as_lists(column) for name, column in table_of(3, start=50).items()}
            if set(expected) == set(more):
                batch = wb.Batch.concat([batch, other, batch])
                expected = {name: values + more[name] + values for name, values in expected.items()}
            else:
                batch = wb.Batch.concat([batch, batch.take([n - 1])])
                expected = {name: [*values, values[-1]] for name, values in expected.items()}
        elif step == "rename":
            new = f"renamed{number}"
            batch = batch.rename(**{column: new})
            expected = {new if name == column else name: values for name, values in expected.items()}
        elif step == "drop" and len(expected) > 1:
            batch = batch.drop(column)
            del expected[column]
        elif step == "join":
            again = batch.select(column).rename(**{column: f"again{number}"})
            batch, expected = batch.join(again), {**expected, f"again{number}": expected[column]}
    assert plain(batch) == expected
    assert list(batch.columns) == list(expected)
    assert len(batch) == len(next(iter(expected.values())))


def test_columns_that_swap_names_and_come_from_shards_of_other_names(lab: wb.Workbench) -> None:
    """A rename must be undone where the shards are asked, also when rows of both names lie end to end."""
    one = lab.put({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])})
    swapped = one.rename(a="b", b="a")
    assert plain(swapped) == {"b": [1, 2], "a": [3, 4]}
    assert plain(wb.Batch.concat([one, swapped])) == {"a": [1, 2, 3, 4], "b": [3, 4, 1, 2]}


def test_a_stage_reads_renamed_and_concatenated_columns(lab: wb.Workbench) -> None:
    """The hosts undo a rename as the notebook does, and copies of a row are known as copies across a concatenation."""
    prompts = lab.prompts.next(2)
    rollouts = lab.actor.generate_sequences(prompts.repeat(2), seed=3, max_new_tokens=6)
    renamed = rollouts.rename(response_ids="kept_ids", prompt_ids="asked_ids")
    back = renamed.rename(kept_ids="response_ids", asked_ids="prompt_ids")
    scores = lab.reward.compute_reward(rollouts).fetch(["rewards"])["rewards"]
    assert as_lists(lab.reward.compute_reward(back).fetch(["rewards"])["rewards"]) == as_lists(scores)
    values = lab.critic.compute_values(back).fetch(["values"])["values"]
    assert as_lists(values) == as_lists(lab.critic.compute_values(rollouts).fetch(["values"])["values"])
    # the rewards of one stage under a name of their own beside those of another: what a baseline is made of
    both = lab.reward.compute_reward(rollouts).join(
        lab.reward.compute_reward(rollouts.take([3, 2, 1, 0])).select("rewards").rename(rewards="baseline_rewards")
    )
    assert as_lists(both.fetch()["baseline_rewards"]) == as_lists(scores)[::-1]
    # copies: rows 0 to 1, then the same again
    twice = wb.Batch.concat([prompts, prompts])
    again = lab.actor.generate_sequences(twice, seed=3, max_new_tokens=6).fetch(["response_ids"])["response_ids"]
    expected = as_lists(rollouts.fetch(["response_ids"])["response_ids"])
    assert as_lists(again) == [expected[i] for i in (0, 2, 1, 3)]


class Reader(Worker):
    """Gives back what it was handed."""

    def read(self, batch: Shard) -> Output:
        return Output(value=batch.columns)


def test_a_host_pulls_renamed_columns_from_another() -> None:
    """Between two hosts of their own: the name in the shard is asked for, the name of today is handed to the worker."""
    hosts: dict[str, Host] = {}

    def neighbour(host: str, method: str, *args: Any) -> Any:
        return getattr(hosts[host], method)(*args)

    for rank in range(2):
        info = HostInfo(lab="", pool="p", rank=rank, world_size=2, device="cpu", threads=1, log_path=None)
        hosts[info.name] = Host(info, neighbour)
        hosts[info.name].build(
            "reader", Reader, wb.Model(TINY), layout=Layout(d=2), seed=0, tokenizer_name=TINY, folder=".",
            max_model_tokens=64,
        )  # fmt: skip
        hosts[info.name].put(
            "k", to_wire({"old": torch.arange(3) + 10 * rank, "ids": Ragged.of([[rank]] * 3, torch.int64)})
        )
    rows = [(ShardId("p-0", "k"), np.array([0, 2, 4])), (ShardId("p-1", "k"), np.array([1, 3, 5]))]
    location = Location.of_parts(rows)
    call = Call(
        run=1, stage="read", role="reader", method="read", rows=np.array([4, 1, 0]),
        pulls=tuple(
            (names, tuple(place.pulls(np.array([4, 1, 0]))))
            for names, place in ((("new", "newer"), location.stored_as("old")), (("ids",), location))
        ),
    )  # fmt: skip
    reply = hosts["p-1"].execute(call)
    assert reply.failure is None
    assert {name: as_lists(column) for name, column in reply.value.items()} == {
        "new": [2, 10, 0], "newer": [2, 10, 0], "ids": [[0], [1], [0]],
    }  # fmt: skip
    assert hosts["p-0"].lengths("k", "ids", np.array([2, 0])).tolist() == [1, 1]


def test_a_table_is_any_mapping_and_another_form_is_told_how_to_become_one(lab: wb.Workbench) -> None:
    assert lab.put(MappingProxyType({"a": torch.arange(2)})).rows == 2
    for table, remedy in ((pd.DataFrame({"a": [1.0]}), "tolist"), ({"a": np.arange(2)}, "from_numpy"), (3, "put")):
        with expect_error(BadInput, value="put", remedy=remedy):
            lab.put(table)


def test_nothing_is_asked_of_hosts_by_index_arithmetic(lab: wb.Workbench, asked: list[Any]) -> None:
    one, two = lab.put(table_of(6)), lab.put(table_of(5, start=6))
    asked.clear()
    batch = wb.Batch.concat([one, two]).shuffle(1).filter(np.arange(11) > 3).repeat(2).split(3)[1]
    batch = batch.select("rewards", "values").join(batch.select("answer").rename(answer="solution")).drop("values")
    assert [method for method, _ in asked if method != "release"] == []
    assert set(batch.columns) == {"rewards", "solution"}


def test_what_needs_values_brings_only_its_column(lab: wb.Workbench, asked: list[Any]) -> None:
    batch = lab.put(table_of(7))
    asked.clear()
    good = batch.filter(lambda rows: rows.rewards > 0, columns=["rewards"])
    lengths = batch.lengths("values")
    batch.balance(ranks=2)
    assert [args[1] for method, args in asked if method == "fetch"] == [("rewards",)]
    assert [args[1] for method, args in asked if method == "lengths"] == ["values", "prompt_ids"]
    expected = as_lists(table_of(7)["rewards"])
    assert as_lists(good.fetch()["rewards"]) == [reward for reward in expected if reward > 0]
    assert lengths.tolist() == [i % 4 for i in range(7)]
    assert batch.rename(values="kept").take([5, 2]).lengths("kept").tolist() == [1, 2]


def test_a_batch_that_is_being_made_is_waited_for(lab: wb.Workbench) -> None:
    run = lab.actor.generate_sequences.submit(lab.prompts.next(4), max_new_tokens=4)
    pending = run.batch
    assert pending is not None
    chosen = pending.select("response_ids", "prompt_ids").filter([True, False, True, True]).balance(ranks=3)
    assert len(chosen) == 3
    assert set(map(tuple, as_lists(chosen.fetch()["prompt_ids"]))) < set(
        map(tuple, as_lists(pending.fetch()["prompt_ids"]))
    )


# --- balance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "ranks", "minibatches"), [(64, 4, 1), (64, 4, 2), (62, 4, 2)])
def test_ranks_of_a_minibatch_get_equal_tokens(lab: wb.Workbench, rows: int, ranks: int, minibatches: int) -> None:
    """As an update's own protocol deals the rows out; no minibatch gets another row than before."""
    random = np.random.default_rng(5)
    prompts, responses = random.integers(5, 30, rows), random.lognormal(4, 0.8, rows).astype(int) + 1
    batch = lab.put(
        {
            "row": torch.arange(rows),
            "prompt_ids": Ragged.of([[1] * n for n in prompts], torch.int64),
            "response_ids": Ragged.of([[2] * n for n in responses], torch.int64),
        }
    )
    order = np.array(as_lists(batch.balance(ranks, minibatches).fetch(["row"])["row"]))

    def worst(order: np.ndarray) -> float:
        layout = Layout(d=ranks)
        cut = np.split(np.arange(rows), minibatches)
        dealt = wb.PROTOCOLS["3D_PROTO"].deal(layout, cut, "here")
        tokens = np.array([[(prompts + responses)[order[chunk]].sum() for chunk in chunks] for chunks in dealt])
        return float((tokens.max(axis=0) / tokens.mean(axis=0)).max())

    assert sorted(order) == list(range(rows))
    for before, after in zip(np.split(np.arange(rows), minibatches), np.split(order, minibatches), strict=True):
        assert set(before) == set(after)
    assert worst(np.arange(rows)) > 1.2
    assert worst(order) < 1.06


# --- files ------------------------------------------------------------------------------------------------------------


ODD: Table = {
    "flags": torch.tensor([True, False, True]),
    "pairs": torch.tensor([[0.1, -0.0], [float("nan"), float("inf")], [5e-324, 1e308]], dtype=torch.float64),
    "half": Ragged.of([[0.1, 3.0], [], [float("-inf")]], torch.bfloat16),
    "none": Ragged.of([[], [], []], torch.int64),
    "small": torch.tensor([-128, 0, 127], dtype=torch.int8),
    "text": ["", "zwei\nZeilen, „ü“ \U0001f600", "x" * 1000],
    "objects": [None, {"a": [1, 2.5, True, None], "b": {"c": "d"}}, [10**30, 0.1]],
    "odd/name.values": torch.arange(3),
}


def same_bits(one: Table, two: Table) -> None:
    assert list(one) == list(two)
    for name, column in one.items():
        other = two[name]
        if isinstance(column, list):
            assert repr(column) == repr(other), name
            continue
        pairs = [(column, other)]
        if isinstance(column, Ragged):
            assert isinstance(other, Ragged)
            pairs = [(column.values, other.values), (column.lengths, other.lengths)]
        for a, b in pairs:
            assert isinstance(a, torch.Tensor)
            assert isinstance(b, torch.Tensor)
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            if a.dtype == torch.bfloat16:  # numpy has none
                a, b = a.view(torch.int16), b.view(torch.int16)
            assert a.numpy().tobytes() == b.numpy().tobytes(), name


@pytest.mark.parametrize("chunk_bytes", [1, 100, 2**26])
def test_what_is_loaded_is_what_was_saved_to_the_bit(
    lab: wb.Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk_bytes)
    meta = {"temperature": 0.1, "iteration": 3, "note": None}
    path = lab.put(ODD, meta=meta).save(tmp_path / "odd.safetensors")
    loaded = lab.load(path)
    same_bits(ODD, loaded.fetch())
    assert dict(loaded.meta) == meta
    assert [path.name for path in tmp_path.iterdir()] == ["odd.safetensors"]
    tensors = load_file(path)  # by the format's own library, which refuses holes and overlaps
    assert tensors["pairs.values"].nan_to_num(7.0).tolist() == torch.as_tensor(ODD["pairs"]).nan_to_num(7.0).tolist()
    assert tensors["half.lengths"].tolist() == [2, 0, 1]


def test_rollouts_go_on_in_another_workbench(lab: wb.Workbench, tmp_path: Path) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(4), temperature=0.7, max_new_tokens=6)
    batch = batch.take([2, 0, 3, 1, 2]).rename(prompt="question")
    path = batch.save(tmp_path / "rollouts.safetensors")
    with tiny_lab("elsewhere", tmp_path, backend="inline", models={"actor": TINY}) as other:
        loaded = other.load(path)
        same_bits(batch.fetch(), loaded.fetch())
        assert loaded.meta["temperature"] == 0.7
        scored = other.actor.compute_log_prob(loaded)
        assert as_lists(scored.fetch()["old_log_prob"]) == as_lists(
            lab.actor.compute_log_prob(batch).fetch()["old_log_prob"]
        )


def test_a_column_is_fetched_in_pieces(
    lab: wb.Workbench, tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the writer nor the reader ever holds more than about a chunk of a long batch."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 8_000)
    batch = lab.put({"wide": torch.arange(100 * 100).reshape(100, 100), "narrow": torch.arange(100)})
    asked.clear()
    path = batch.save(tmp_path / "wide")
    assert [(args[1], len(args[2])) for method, args in asked if method == "fetch"] == [
        *[(("wide",), 10)] * 10,
        (("narrow",), 100),
    ]
    asked.clear()
    lab.load(path)
    groups = [args[1] for method, args in asked if method == "put"]
    assert len(groups) >= 10
    assert max(array.nbytes for group in groups for _, array in group.values()) <= 8_000


def test_a_save_that_fails_leaves_what_was_there(lab: wb.Workbench, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    lab.put({"a": torch.arange(2)}).save(path)
    before = path.read_bytes()
    with expect_error(BadInput, value=r"column 'b', row 1 holds \(2, 3\)", remedy=r"batch.drop\('b'\)"):
        lab.put({"a": torch.arange(2), "b": [1, (2, 3)]}).save(path)
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


# --- what is refused --------------------------------------------------------------------------------------------------


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda b: b.filter([True, False]), r"filter of shape \[2\].*one True or False a row, 6"),
    (lambda b: b.filter([1, 0, 1, 0, 1, 0]), "dtype int64"),
    (lambda b: b.filter([False] * 6), "none of .*at least one row"),
    (lambda b: b.filter(lambda rows: rows.rewards > 0), "without columns"),
    (lambda b: b.filter(lambda rows: rows.rewards, columns=["rewards"]), "dtype float64"),
    (lambda b: b.take([True, False]), r"rows \[True, False\].*one truth value per row"),
    (lambda b: b.take(slice(6, 9)), "none of .*at least one row"),
    (lambda b: b.take(torch.zeros(6, dtype=torch.bool)), "none of .*at least one row"),
    (lambda b: b.take([6]), "must be one or more row numbers"),
    (lambda b: b.fetch("rewards"), r"must be a list.*write columns=\['rewards'\]"),
    (lambda b: b.split(0), "n=0"),
    (lambda b: b.split(7), r"split\(7\) of 6 rows"),
    (lambda b: b.lengths("rewards"), "not token sequences"),
    (lambda b: b.shuffle(-1), "seed=-1"),
    (lambda b: b.balance(0), "ranks=0"),
    (lambda b: b.balance(2, minibatches=4), "6 rows in 4 minibatches"),
    (lambda b: b.balance(4, minibatches=2), "use at least 8 rows"),
    (lambda b: b.select(), "at least one column"),
    (lambda b: b.rename(rewards="values"), "two columns 'values'"),
    (lambda b: b.join(b.select("rewards", "answer")), r"both batches have 'rewards', 'answer'.*rename"),
    (lambda b: b.join(b.take([0]).rename(rewards="other")), "equally many rows"),
    (lambda b: b.join(7), "must be a Batch"),
    (lambda b: wb.Batch.concat([]), "at least one"),
    (lambda b: wb.Batch.concat([b, b.drop("rewards", "values")]), "batch 1 .*lacks 'rewards', 'values'"),
    (lambda b: wb.Batch.concat([b.drop("answer"), b]), "batch 0 .*lacks 'answer'"),
    (
        lambda b: wb.Batch.concat([b.select("rewards"), b.select("values").rename(values="rewards")]),
        r"'rewards' is bfloat16 \[rows, \*\] in batch 1 and float32 \[rows\] in batch 0",
    ),
    (lambda b: b.save("/no/such/folder/file"), "a folder that does not exist"),
    (lambda b: b.save(Path.cwd()), "is a folder"),
]


def test_what_cannot_be_done_says_why(lab: wb.Workbench, subtests: pytest.Subtests) -> None:
    for use, message in REFUSED:
        with subtests.test(use=use, message=message), pytest.raises(BadInput, match=message):
            use(lab.put(table_of(6)))


def test_columns_that_are_not_there(lab: wb.Workbench) -> None:
    batch = lab.put(table_of(2))
    for use in (batch.select, batch.drop, batch.lengths):
        with expect_error(UnknownColumn, value="'reward'"):
            use("reward")
    with expect_error(UnknownColumn, value="rename reads column 'reward'"):
        batch.rename(reward="score")
    for name, said in (("temperature", "sampled"), ("teacher_temperature", "scored by a teacher")):
        with pytest.raises(BadInput, match=rf"rows {said} at temperatures 0.5, 1.0.*lab.buffer.clear\(\)"):
            wb.Batch.concat([lab.put(table_of(1), meta={name: t}) for t in (0.5, 1.0)])


def test_files_that_hold_no_batch(lab: wb.Workbench, tmp_path: Path) -> None:
    path = lab.put(table_of(4)).save(tmp_path / "good")
    cases = {
        "cut": path.read_bytes()[:-5],
        "text": b"a,b\n1,2\n" * 10,
        "empty": b"",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput, match=f"{name}' is not a complete safetensors file.*batch.save"):
            lab.load(tmp_path / name)
    with expect_error(BadInput, value="no file"):
        lab.load(tmp_path / "nowhere")


def test_batches_of_two_workbenches_stay_apart(lab: wb.Workbench, tmp_path: Path) -> None:
    with tiny_lab("apart", tmp_path, backend="inline", models={"actor": TINY}) as other:
        mine, theirs = lab.put(table_of(2)), other.put(table_of(2))
        for use in (lambda: mine.join(theirs), lambda: wb.Batch.concat([mine, theirs])):
            with expect_error(BadInput, value="two workbenches", remedy="lab.load"):
                use()
        path = theirs.save(tmp_path / "theirs")
    for closed in (lambda: theirs.lengths("values"), lambda: other.load(path), lambda: theirs.save(path)):
        with expect_error(NotFound, value="is closed"):
            closed()
