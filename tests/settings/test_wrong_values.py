"""Values that would make a wrong result without a word are refused, and the message names them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.cases import TINY, tiny_lab, vowels
from tests.expected import expect_error
from workbench.batches.columns import Ragged, ragged_in, rows_at
from workbench.errors import BadInput, StageError
from workbench.messages.calls import Output
from workbench.messages.shards import Shard
from workbench.models import load_tokenizer, resolve
from workbench.workers.roles.actor import ActorWorker
from workbench.workers.roles.critic import CriticWorker


class Measuring(ActorWorker):
    @wb.register("DP_PROTO", reads=("prompt_ids",), writes=("twice",))
    def measure(self, batch: Shard, *, metric: Any = 1.0) -> Output:
        return Output(columns={"twice": torch.zeros(len(batch))}, metrics={"found": metric})

    seen = torch.zeros(4)  # which it keeps

    @wb.register("DP_PROTO", reads=("prompt_ids",), writes=("seen",))
    def count(self, batch: Shard) -> Output:
        self.seen += 1
        return Output(columns={"seen": self.seen})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Workbench]:
    models = {"actor": wb.Model(TINY, worker=Measuring), "critic": TINY, "reference": TINY, "reward": vowels}
    with tiny_lab("values", tmp_path_factory.mktemp("runs"), backend="inline", models=models) as lab:
        yield lab


@pytest.fixture(scope="module")
def batch(lab: wb.Workbench) -> wb.Batch:
    return lab.reward.compute_reward(lab.actor.generate_sequences(lab.prompts.next(4), max_new_tokens=4))


def test_a_batch_of_another_tokenizer(lab: wb.Workbench, batch: wb.Batch, tmp_path: Path) -> None:
    folder = tmp_path / "other-tokenizer"
    shutil.copytree(resolve(TINY), folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["a token more"])
    tokenizer.save_pretrained(folder)
    path = batch.save(tmp_path / "rollouts")
    scores = batch.select("rewards").save(tmp_path / "scores")
    with tiny_lab("other-tokens", tmp_path, backend="inline", models={"actor": folder}) as other:
        with pytest.raises(BadInput, match=f"of '{TINY}'.*this workbench has those of '.*other-tokenizer'"):
            other.load(path)
        assert other.load(scores).rows == 4  # no tokens in it
    assert lab.load(path).rows == 4


def test_rewards_that_are_not_finite(lab: wb.Workbench, batch: wb.Batch) -> None:
    table = lab.critic.compute_values(lab.actor.compute_log_prob(batch)).fetch()
    table["rewards"] = torch.tensor([0.0, 1.0, float("nan"), 1.0])
    with pytest.raises(BadInput, match=r"column 'rewards' holds nan in row 2.*finite"):
        lab.compute_advantages(lab.put(table), estimator="reinforce_pp")


def test_lists_of_numbers_are_what_stages_read(lab: wb.Workbench, batch: wb.Batch) -> None:
    """A table through pandas and back: the same numbers, of the same dtypes, and the same advantages."""
    names = ["prompt_ids", "prompt_uid", "response_ids", "response_mask", "rewards", "valid"]
    table, given = batch.fetch(names), lab.put({name: batch.df([name])[name].tolist() for name in names})
    rows = lab.put({"prompt_ids": ragged_in(table, "prompt_ids").rows(), "rewards/right": [torch.tensor(1.0)] * 4})
    assert [str(column.dtype) for column in rows.columns.values()] == ["int64", "float32"]
    for name, column in given.fetch(names).items():
        pairs = [(column, table[name])]
        if isinstance(column, Ragged):
            pairs = [(getattr(column, part), getattr(table[name], part)) for part in ("values", "lengths")]
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    both = [
        lab.compute_advantages(lab.critic.compute_values(lab.actor.compute_log_prob(one))) for one in (batch, given)
    ]
    first, second = (ragged_in(one.fetch(["advantages"]), "advantages").values for one in both)
    assert torch.equal(first, second)
    asked = lab.put({"prompt_ids": [[1, 5], [1, 7, 2]], "prompt_uid": [0, 1]})
    assert lab.actor.generate_sequences(asked, max_new_tokens=2).rows == 2
    with expect_error(BadInput, value="'prompt_ids' is float32"):
        lab.actor.generate_sequences(lab.put({"prompt_ids": [[1.5], [2.0]], "prompt_uid": [0, 1]}))


def test_rewards_that_are_text(lab: wb.Workbench, batch: wb.Batch) -> None:
    table = lab.critic.compute_values(batch).fetch()
    table["rewards"] = ["good", "bad", "good", "bad"]
    with expect_error(BadInput, value="column 'rewards' is a list of str"):
        lab.compute_advantages(lab.put(table))


def test_a_batch_does_not_change_with_what_its_worker_keeps(lab: Any, batch: wb.Batch) -> None:
    first, second = (lab.actor.count(batch) for _ in range(2))
    assert [one.fetch(["seen"])["seen"].tolist() for one in (first, second)] == [[1.0] * 4, [2.0] * 4]


def test_a_metric_of_an_own_operation(lab: wb.Workbench, batch: wb.Batch) -> None:
    lab.actor.measure(batch, metric=2.5)
    assert lab.last_metrics["measure"]["found"] == 2.5
    with expect_error(StageError, value=r"actor\.measure.*metric 'found' is 'much', a str"):
        lab.actor.measure(batch, metric="much")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (lambda batch: batch.df(["rewards"]), r"put\(<DataFrame>\).*dict of columns.*tolist"),
        (lambda batch: {"a": torch.tensor(3.0)}, "column 'a' is a tensor without axes"),
        (lambda batch: {"a": torch.zeros(3).numpy()}, "column 'a' is a ndarray.*from_numpy"),
        (lambda batch: 7, r"put\(7\)"),
        (lambda batch: {0: [1.0]}, r"put\(\) of a column 0.*a text.*write '0'"),
    ],
)
def test_what_is_no_table(lab: wb.Workbench, batch: wb.Batch, table: Callable[[wb.Batch], Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        lab.put(table(batch))


NUMBERS: list[tuple[Callable[[Any, wb.Batch], Any], str]] = [
    (lambda lab, batch: lab.actor.generate_sequences(batch, max_new_tokens=500), "max_new_tokens=500.*=192"),
    (lambda lab, batch: lab.compute_advantages(batch, estimator="rloo", kl_coefficient=-1), "kl_coefficient=-1"),
    (lambda lab, batch: lab.compute_advantages(batch, estimator="rloo", gamma="1"), "gamma='1'.*a number"),
    (lambda lab, batch: lab.actor.generate_sequences(batch, samples=1.5), "samples=1.5.*whole number"),
    (lambda lab, batch: setattr(lab.store, "limit_bytes", "1GB"), "limit_bytes='1GB'.*whole number"),
]


def test_numbers(lab: wb.Workbench, batch: wb.Batch, subtests: pytest.Subtests) -> None:
    for call, message in NUMBERS:
        with subtests.test(call=call, message=message), pytest.raises(BadInput, match=message):
            call(lab, batch)


class Mute:
    def reset(self, prompt: str) -> None: ...


class Deaf:
    def step(self) -> tuple[str, float, bool]:
        return "", 0.0, True


class Demanding:
    def reset(self, goal: str) -> None: ...

    def step(self, response: str) -> tuple[str, float, bool]:
        return "", 0.0, True


CALLS: list[tuple[Callable[[Any, wb.Batch], Any], str]] = [
    (lambda lab, b: lab.actor.generate_sequences(b, environment=Mute), "environment Mute has no method step"),
    (
        lambda lab, b: lab.actor.generate_sequences(b, environment=Deaf),
        r"step\(self.*of environment Deaf: too many",
    ),
    (
        lambda lab, b: lab.actor.generate_sequences(b, environment=Demanding),
        r"environment Demanding raised TypeError.*missing.*'goal'; the row has prompt, answer",
    ),
    (lambda lab, b: wb.GRPO(lab).run(1, evaluate=abs), r"run\(evaluate=.*missing.*'x'.*without"),  # type: ignore[arg-type]
    (lambda lab, b: lab.decode("text"), r"token_ids='text'\. must be a list\."),
    (lambda lab, b: lab.lineage("batch3 v7"), "no batch 'batch3 v7' in the store"),
    (lambda lab, b: lab.compare(b, [1]), r"arms=\[1\].*names to algorithms"),
    (lambda lab, b: lab.compare(b.df(), {}), "batch=<DataFrame>"),
    (lambda lab, b: lab.report("x", {"a": "b"}), r"metrics=\{'a': 'b'\}.*names to numbers"),
    (lambda lab, b: lab.report("x", 3), "metrics=3.*names to numbers"),
    (lambda lab, b: wb.SFT(lab, [{"prompt": "a", "response": "b"}]), r"lab\.demonstrations\(source\)"),  # type: ignore[arg-type]
    (lambda lab, b: wb.DPO(lab, "pairs.jsonl"), r"lab\.pairs\(source\)"),  # type: ignore[arg-type]
    (
        lambda lab, b: wb.SFT(lab, lab.demonstrations([{"prompt": "a", "response": "b"}]), rows=4),
        "rows=4 of .*rows=1",
    ),
]


def test_calls(lab: wb.Workbench, batch: wb.Batch, subtests: pytest.Subtests) -> None:
    for call, message in CALLS:
        with subtests.test(call=call, message=message), pytest.raises(wb.errors.WorkbenchError, match=message):
            call(lab, batch)


def test_lineage_by_name(lab: wb.Workbench, batch: wb.Batch) -> None:
    assert lab.lineage(batch.id).equals(lab.lineage(batch))
    assert set(lab.lineage(batch)["stage"]) >= {"reward.compute_reward", "actor.generate_sequences", "prompts"}


SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: wb.Placement.of({"a": (["actor"], 1)}), r"'a': \(\['actor'\], 1\).*\(devices, roles\)"),  # type: ignore[dict-item]
    (lambda: wb.Placement.of({"a": (1, "actor")}), r"\(devices, roles\)"),
    (lambda: wb.Correction(low=0.5), r"low=0\.5 with bound='truncate'.*bound='mask'"),
    (lambda: wb.Correction(levl="token"), r"Correction\(levl='token'\).*level= \(the nearest\)"),  # type: ignore[call-arg]
    (lambda: wb.PPO(prompts=4), r"PPO\(\) without lab.*PPO\(lab="),  # type: ignore[call-arg]
    (lambda: wb.protocol("FIRST", collect=[0]), r"collect=\[0\].*must be a function"),  # type: ignore[arg-type]
]


def test_settings(subtests: pytest.Subtests) -> None:
    for make, message in SETTINGS:
        with subtests.test(make=make, message=message), pytest.raises(BadInput, match=message):
            make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": {"actor": wb.Model(TINY, worker=CriticWorker)}}, "class is for critic.*derive it from ActorWorker"),
        ({"models": {"actor": wb.Model(TINY, worker=dict)}}, "a class derived from ActorWorker"),
        ({"models": {"actor": TINY}, "training": {"engine": "torch"}}, r"training=.*wb\.Training\(engine='torch'\)"),
    ],
)
def test_openings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        wb.open("wrong", backend="inline", **options)


def test_positions_from_shared_memory_are_taken_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    positions = np.array([2, 0])
    positions.flags.writeable = False
    assert rows_at({"a": torch.arange(3)}, positions)["a"].tolist() == [2, 0]  # type: ignore[union-attr]
    assert not recwarn.list


META: list[tuple[Any, str]] = [
    ([1], r"meta=\[1\].*must be a dict"),
    ({1: 2}, "a key of meta=1.*must be a text"),
    ({"iteration": "x"}, r"put\(\): meta\['iteration'\]='x'.*whole number"),
    ({"iteration": -1}, r"meta\['iteration'\]=-1"),
    ({"temperature": float("nan")}, r"meta\['temperature'\]=nan"),
]


def test_meta_that_no_stage_can_read(lab: wb.Workbench, subtests: pytest.Subtests) -> None:
    for meta, message in META:
        with subtests.test(meta=meta, message=message):
            with pytest.raises(BadInput, match=message):
                lab.put({"x": torch.ones(2)}, meta=meta)
            assert lab.put({"x": torch.ones(2)}, meta={"note": None, "iteration": 2}).meta["note"] is None
