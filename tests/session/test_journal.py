"""What a stage leaves in the journal, and what a later kernel reads there."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.cases import TINY, stored, tiny_lab, vowels
from workbench.backends import journal_file, registry
from workbench.batches.store import Weights
from workbench.errors import NotDriving
from workbench.session import journal as journal_module
from workbench.session.journal import KeptBatch, SessionJournal, read_journal


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[wb.Workbench]:
    """An inline workbench that writes a journal, as those on Ray do."""
    with tiny_lab(
        "journal", tmp_path, backend="inline", models={"actor": TINY, "critic": TINY, "reward": vowels}
    ) as lab:
        description = lab.description
        record = registry.Record(
            id=description.id, name=lab.name, digests=description.digests, run_folder=str(lab.run_folder), address=None,
            hosts={},
        )  # fmt: skip
        registry.write(record, description)
        lab.ownership.take()
        journal = SessionJournal(lab.runner, lab.position, lab.checkpoints, lab.prompts)
        journal.rewrite()
        lab.ownership.journal = journal
        yield lab
        lab.ownership.take()  # whatever a test has made of it: only who drives it ends it
        lab.ownership.drives = True
        registry.forget(description.id)


def entries(lab: wb.Workbench) -> int:
    return len(list(registry.journal(lab.description.id)))


def test_a_stage_appends_when_it_is_sent_and_when_it_has_ended(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    before = entries(lab)
    batch = lab.actor.compute_log_prob(batch)
    sent, over = list(registry.journal(lab.description.id))[before:]
    number = lab.runner.counters.run
    assert list(sent["sent"]) == [number]
    assert over["over"] == [number]
    assert list(over["batches"]) == [batch.id]
    assert len(over["locations"]) == 1  # the other columns are where they were


def test_the_entries_together_say_what_there_is(lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = lab.actor.compute_log_prob(lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4))
    lab.release("batch1 v1")
    lab.actor.compute_log_prob(batch, temperature=0.5)
    found = read_journal(lab.description.id)
    assert list(found.batches) == list(lab.store)
    assert (found.counters["run"], found.counters["iteration"]) == (lab.runner.counters.run, 1)
    assert found.open_runs == {}
    monkeypatch.setattr(journal_module, "SLACK", -1000)
    lab.actor.compute_log_prob(batch, temperature=0.7)
    assert entries(lab) == 1
    compact = read_journal(lab.description.id)
    assert list(compact.batches) == [*found.batches, next(reversed(list(lab.store)))]
    assert (compact.counters["run"], compact.open_runs) == (lab.runner.counters.run, {})


class Changed:
    """A class whose `__new__` takes another argument now than when its object was pickled."""

    def __new__(cls, added: int = 0) -> Changed:
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[int, int]:
        return 1, 2


@pytest.mark.parametrize("value", [b"cno_such_module\nThing\n.", pickle.dumps(Changed(), protocol=4)])
def test_a_value_that_cannot_be_read_hides_no_other(lab: wb.Workbench, value: bytes) -> None:
    lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    more = {section: {"gone v1": value} for section in ("batches", "locations", "sent")}
    registry.append_to_journal(lab.description.id, {**more, "controller": lab.ownership.controller})
    with pytest.warns(UserWarning, match=r"'gone v1' of the journal cannot be read") as warned:
        found = read_journal(lab.description.id)
    assert len(warned) == 3
    assert list(found.batches) == list(lab.store)
    assert len(found.locations) == 2
    (row,) = (row for row in wb.ls() if row["id"] == lab.description.id and row["address"] != "inline")
    assert row["iteration"] == 1  # and no warning: of a journal, `wb ls` reads a text


def test_ls_reads_a_journal_of_anything(lab: wb.Workbench) -> None:
    for counters in ("{", "[]", 3, None):
        registry.start_journal(lab.description.id, {"counters": counters})
        rows = [row for row in wb.ls() if row["id"] == lab.description.id and row["address"] != "inline"]
        assert [row["iteration"] for row in rows] == [None]


@pytest.mark.parametrize("function", ["append_to_journal", "start_journal"])
def test_what_could_not_be_written_is_written_with_the_next_entry(
    lab: wb.Workbench, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """The disk was full for one entry, of a stage that had ended."""
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    if function == "start_journal":
        monkeypatch.setattr(journal_module, "SLACK", -1000)
    write, calls = getattr(registry, function), itertools.count(1)

    def fails_once(*given: Any) -> None:
        if next(calls) == 2:
            monkeypatch.setattr(journal_module, "SLACK", 200)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given)

    monkeypatch.setattr(registry, function, fails_once)
    with pytest.warns(UserWarning, match="No space left"):
        batch = lab.actor.compute_log_prob(batch)
    batch = lab.actor.compute_log_prob(batch, temperature=0.7)
    found = read_journal(lab.description.id)
    assert list(found.batches) == list(lab.store)
    newest = found.batches[batch.id]
    assert isinstance(newest, KeptBatch)
    assert {number for _, number in newest.columns.values()} <= set(found.locations)
    assert (found.counters["run"], found.open_runs) == (lab.runner.counters.run, {})
    before = entries(lab)
    lab.actor.compute_log_prob(batch, temperature=0.5)
    assert entries(lab) == before + 2  # entries are small again


def test_a_slow_kernel_that_appends_after_a_takeover_overrides_nothing(lab: wb.Workbench) -> None:
    batch = lab.actor.generate_sequences(lab.prompts.next(2), max_new_tokens=4)
    new = lab.ownership
    file = registry.get("journal").folder / registry.JOURNAL
    earlier = list(registry.journal(lab.description.id))
    new.controller = "new"  # as another kernel has it
    new.take()
    later = SessionJournal(lab.runner, lab.position, lab.checkpoints, lab.prompts)
    later.rewrite()
    new.journal = later
    right = read_journal(lab.description.id)
    for entry in earlier[1:]:
        journal_file.append(file, entry)  # the old kernel checked before, and appends now
    late = read_journal(lab.description.id)
    assert late.counters == right.counters
    assert {number: str(location) for number, location in late.locations.items()} == {
        number: str(location) for number, location in right.locations.items()
    }
    batch = lab.actor.compute_log_prob(batch)  # the new one notices, and writes all again
    assert {entry["controller"] for entry in registry.journal(lab.description.id)} == {"new"}
    assert list(read_journal(lab.description.id).batches) == list(lab.store)


def test_a_kernel_that_is_taken_over_from_while_it_writes_writes_nothing(lab: wb.Workbench) -> None:
    """It had asked who drives; then the next one wrote its journal."""
    journal = lab.ownership.journal
    assert journal is not None
    registry.own(lab.description.id, "another")
    registry.start_journal(lab.description.id, {"whole": True, "controller": "another"})
    lab.runner.counters.batch += 1
    journal.append()
    assert entries(lab) == 1
    assert not lab.ownership.drives


def kept(lab: wb.Workbench) -> dict[str, Any]:
    """Updates that a later kernel would not make again: by role, what they gave."""
    return {run.role: run.result for run in read_journal(lab.description.id).open_runs.values() if run.result}


def test_an_update_is_open_until_its_caller_has_its_metrics(lab: wb.Workbench) -> None:
    batch = lab.put(stored())
    with lab.overlap():
        lab.critic.update_critic(batch)
        lab.actor.update_actor(batch)
        assert set(kept(lab)) == {"critic", "actor"}
    assert kept(lab) == {}
    run = lab.critic.update_critic.submit(batch)
    assert kept(lab) == {"critic": run.future.result()}
    lab.critic.compute_values(batch)
    assert set(kept(lab)) == {"critic"}

    async def cell() -> Any:
        return await run

    asyncio.run(cell())
    assert read_journal(lab.description.id).open_runs == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_one_entry_has_the_end_of_a_stage_and_the_position_with_its_result(lab: wb.Workbench, overlap: bool) -> None:
    """An update called by hand, beside those of an algorithm."""
    algorithm = wb.GRPO(lab, prompts=2, samples=2, kl_coefficient=0.0, sampling=wb.Sampling(max_new_tokens=4))
    by_hand = lab.critic.update_critic.submit(lab.put(stored()))
    before = entries(lab)
    with lab.overlap() if overlap else nullcontext():
        algorithm.iterate()
    assert set(kept(lab)) == {"critic"}
    numbers = {record.run: record.stage for record in lab.run_log.records()}
    made: dict[str, Any] = {}
    for entry in list(registry.journal(lab.description.id))[before:]:
        made = json.loads(entry["position"])["algorithm"]["made"] if "position" in entry else made
        for number in entry.get("over", ()):
            if not overlap:
                assert numbers[number] in made
    by_hand.result()
    assert kept(lab) == {}


def test_the_metrics_of_an_update_that_was_not_made_again_are_kept_too(lab: wb.Workbench) -> None:
    batch = lab.put(stored())
    metrics = lab.critic.update_critic.submit(batch).future.result()
    interrupted = lab.runner.interrupted
    (run,) = read_journal(lab.description.id).open_runs.values()
    interrupted.take_over(run)  # as in a later kernel
    again = lab.critic.update_critic.submit(batch)
    assert again.from_store and again.future.result() == metrics
    assert kept(lab) == {"critic": metrics}
    lab.runner.counters.weights["critic"] = Weights.fresh(0)  # `recover`, or the end of a comparison
    interrupted.forget()
    assert read_journal(lab.description.id).open_runs == {}


def test_a_kernel_that_was_taken_over_from_appends_nothing(lab: wb.Workbench) -> None:
    batch = lab.prompts.next(2)
    before = entries(lab)
    registry.own(lab.description.id, "another")
    assert lab.ownership.drives  # until it asks
    with pytest.raises(NotDriving):
        lab.actor.generate_sequences(batch, max_new_tokens=4)
    assert not lab.ownership.drives
    lab.ownership.record()
    assert entries(lab) == before
